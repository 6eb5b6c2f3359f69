// What torch's CPU build lacks to run autograd on fake tensors of a CUDA device: one device, whose streams do nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <new>

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);
const c10::Stream STREAM(c10::Stream::DEFAULT, DEVICE);

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
    c10::Device getDevice() const override { return DEVICE; }
    c10::Stream getStream(c10::Device) const noexcept override { return STREAM; }
    c10::Stream getDefaultStream(c10::Device) const override { return STREAM; }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return STREAM; }
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
};

struct Hooks final : at::CUDAHooksInterface {
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const { return true; }  // newer than some versions of torch
    bool isAvailable() const { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

extern "C" void pretend(bool on) {
    static const Guard guard;
    static const c10::impl::DeviceGuardImplInterface* guard_before = nullptr;
    static char hooks_before[sizeof(Hooks)];
    // The hooks are made once: ours, which have no fields either, take their place in memory.
    void* hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
    auto& registered = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
    if (on) {
        std::memcpy(hooks_before, hooks, sizeof(Hooks));
        new (hooks) Hooks();
        guard_before = registered.exchange(&guard);
    } else {
        std::memcpy(hooks, hooks_before, sizeof(Hooks));
        registered.store(guard_before);
    }
}
