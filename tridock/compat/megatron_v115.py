"""Adapts Megatron-LM v1.1.5 itself, beyond the names that it imports. Its folder must be on ``sys.path``."""

import functools
import importlib
import importlib.util
import sys
import warnings
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention


def adapt(device_type: str) -> list[str]:
    """Patches Megatron's modules before it runs; returns a line for each change that users may notice."""
    adapted = [*_absent_six(), *_numpy_helpers()]
    training: Any = importlib.import_module("megatron.training")
    training.get_optimizer = _zeroing_as_asked(training)
    training.get_model = _partitioned_as_built(training)
    _world_without_a_pipeline()
    _one_random_tracker()
    # Its models call state_dict() with positional arguments, once per layer and checkpoint.
    warnings.filterwarnings("ignore", message="Positional args are being deprecated", category=FutureWarning)
    dist: Any = torch.distributed
    if not hasattr(dist, "dist_backend"):  # two names of torch 1.0, by which its own data parallelism recognizes Gloo
        dist.dist_backend, dist._backend = SimpleNamespace(GLOO="gloo"), dist.get_backend()
        adapted.append("torch.distributed.dist_backend: gone since torch 1.1")
    adapted.append("megatron.fused_kernels: off; upstream's do not compile since torch 1.11")
    _fused_attention()
    adapted.append("attention: torch's scaled_dot_product_attention, which keeps no scores")
    if device_type == "cuda":
        time_by_events()
        exchange_sizes_once()
        clip_on_the_device()
        adapted.append("megatron.timers: events in the stream; upstream's wait for the GPU at each start and stop")
    else:
        random: Any = importlib.import_module("megatron.mpu.random")
        random._set_cuda_rng_state = lambda state, *_: torch.set_rng_state(state)
        initialize = training.initialize_megatron
        training.initialize_megatron = lambda *given, **named: initialize(*given, **named, allow_no_cuda=True)
        training.build_train_valid_test_data_iterators = _without_drawing(training)
        training.report_memory = lambda _: None  # it counts a GPU's
        _nothing_to_free()
    return adapted


def _zeroing_as_asked(training: Any) -> Any:
    """Upstream calls ``zero_grad(set_grads_to_None=True)``, which only its fp16 optimizer understands, not in fp32."""
    make = training.get_optimizer

    def get_optimizer(model: Any) -> Any:
        optimizer = make(model)
        if isinstance(optimizer, torch.optim.Optimizer) and not training.get_args().deepspeed:
            zero = optimizer.zero_grad
            optimizer.zero_grad = lambda **_: zero()  # type: ignore[method-assign]
        return optimizer

    return get_optimizer


def _partitioned_as_built(training: Any) -> Any:
    """Builds a model of ZeRO 3 in ``deepspeed.zero.Init``, as upstream's Megatron-LM-v1.1.5-ZeRO3 does: DeepSpeed
    partitions the weights of each module once it is built, so no rank ever holds the model.

    The table of positions is drawn after that: it is gathered for it, and partitioned again.
    """
    build, mpu = training.get_model, training.mpu
    zero: Any = importlib.import_module("deepspeed").zero
    gpt2: Any = importlib.import_module("megatron.model.gpt2_model")
    normal = gpt2.init_method_normal

    def get_model(provider: Any) -> Any:
        args = training.get_args()
        if not args.deepspeed or args.zero_stage < 3:
            return build(provider)
        with zero.Init(
            data_parallel_group=mpu.get_data_parallel_group(), config_dict_or_path=args.deepspeed_config, mpu=mpu
        ):
            model = provider()
        if mpu.get_data_parallel_rank() == 0:
            rank, count = mpu.get_model_parallel_rank(), sum(weight.ds_numel for weight in model.parameters())
            print(f" > number of parameters on model parallel rank {rank}: {count}", flush=True)
        return model

    def init_method_normal(sigma: float) -> Any:
        draw = normal(sigma)

        def drawn(weight: Any) -> Any:
            with zero.GatheredParameters(weight, modifier_rank=0):
                return draw(weight)

        return drawn

    gpt2.init_method_normal = init_method_normal
    return get_model


def _fused_attention() -> None:
    """Computes attention under a causal mask with torch's fused kernels.

    They compute the softmax in fp32, where upstream does so in fp16. Its layer scaling cancels out. Any other mask, and
    text generation, are upstream's own.
    """
    transformer: Any = importlib.import_module("megatron.model.transformer")
    layer = transformer.ParallelSelfAttention
    upstream = layer.forward

    @functools.wraps(upstream)
    def forward(
        self: Any, hidden_states: Any, attention_mask: Any, layer_past: Any = None, get_key_value: bool = False
    ) -> Any:
        if layer_past is not None or get_key_value or transformer.get_args().reset_attention_mask:
            return upstream(self, hidden_states, attention_mask, layer_past, get_key_value)
        mixed, _ = self.query_key_value(hidden_states)
        version = transformer.get_checkpoint_version()
        if version in (0, 1.0):  # older checkpoints have another order of columns
            mixed = self._transpose_last_dim(mixed, 3, version == 0)
        # [sequence, batch, heads * 3 * head size] -> three of [batch, heads, sequence, head size]
        sequence, batch, _ = mixed.shape
        heads, size = self.num_attention_heads_per_partition, self.hidden_size_per_attention_head
        query, key, value = mixed.view(sequence, batch, heads, 3, size).permute(3, 1, 2, 0, 4)
        dropout = self.attention_dropout.p if self.training else 0.0
        with transformer.mpu.get_cuda_rng_tracker().fork():
            context = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.dense(context.permute(2, 0, 1, 3).reshape(sequence, batch, heads * size))

    layer.forward = forward


def time_by_events() -> None:
    """Measures upstream's phases between two events in the GPU's stream, which are read where a line is logged.

    Its own timers wait for the GPU whenever they start and stop, a dozen times a micro-batch.
    """
    variables: Any = importlib.import_module("megatron.global_vars")
    timer: Any = variables._Timer

    class EventTimer(timer):
        started_: bool

        def __init__(self, name: str) -> None:
            super().__init__(name)
            self._began: Any = None
            self._pairs: deque[tuple[Any, Any]] = deque()

        def start(self) -> None:
            assert not self.started_, "timer has already been started"
            self._began, self.started_ = _event(), True

        def stop(self) -> None:
            assert self.started_, "timer is not started"
            self._pairs.append((self._began, _event()))
            self.started_ = False
            while self._pairs and self._pairs[0][1].query():  # reached: read without waiting
                self._read()

        def reset(self) -> None:
            super().reset()
            self._pairs.clear()

        def elapsed(self, reset: bool = True) -> float:
            running = self.started_
            if running:
                self.stop()
            while self._pairs:
                self._pairs[0][1].synchronize()
                self._read()
            seconds: float = super().elapsed(reset)
            if running:
                self.start()
            return seconds

        def _read(self) -> None:
            began, ended = self._pairs.popleft()
            self.elapsed_ += began.elapsed_time(ended) / 1000

    variables._Timer = EventTimer


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def exchange_sizes_once() -> None:
    """Keeps the shape of a micro-batch, which upstream sends to the GPU and reads back at every one; all are alike."""
    data: Any = importlib.import_module("megatron.mpu.data")
    build = data._build_key_size_numel_dictionaries
    known: dict[tuple[str, ...], Any] = {}

    def sizes(keys: list[str], given: Any) -> Any:
        if tuple(keys) not in known:
            known[tuple(keys)] = build(keys, given)
        return known[tuple(keys)]

    data._build_key_size_numel_dictionaries = sizes


def clip_on_the_device() -> None:
    """Clips gradients without a read: upstream's own data parallelism reads each weight's norm on the host."""
    mpu: Any = importlib.import_module("megatron.mpu")
    fp16: Any = importlib.import_module("megatron.fp16.fp16")
    upstream = mpu.clip_grad_norm

    def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        found = [it for it in parameters if it.grad is not None]
        if norm_type != 2 or not found:
            return upstream(found, max_norm, norm_type)
        first = mpu.get_model_parallel_rank() == 0  # which counts the weights that all ranks hold
        counted = [it.grad for it in found if it.model_parallel or first]
        zero = torch.zeros((), dtype=torch.float64, device=found[0].grad.device)
        square = torch.stack([zero, *torch._foreach_norm(counted)]).square().sum()
        torch.distributed.all_reduce(square, group=mpu.get_model_parallel_group())
        norm = square.sqrt()
        torch._foreach_mul_([it.grad for it in found], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    mpu.clip_grad_norm = fp16.clip_grad_norm = clip_grad_norm


def _without_drawing(training: Any) -> Any:
    """Keeps data loaders, which draw their seeds from the CPU's generator, from changing dropout.

    On a CPU that generator is also dropout's. A resumed run restores its state before it makes its loaders, and would
    continue with other numbers.
    """
    build = training.build_train_valid_test_data_iterators

    def build_undrawn(provider: Any) -> Any:
        state = torch.get_rng_state()
        iterators = build(provider)
        torch.set_rng_state(state)
        return iterators

    return build_undrawn


def _world_without_a_pipeline() -> None:
    """DeepSpeed writes the pipeline's size into every checkpoint; upstream has no answer without a pipeline."""
    mpu: Any = importlib.import_module("megatron.mpu")
    groups: Any = importlib.import_module("megatron.mpu.initialize")
    for name, alone in (("get_pipe_parallel_world_size", 1), ("get_pipe_parallel_rank", 0)):
        asked = getattr(groups, name)
        setattr(mpu, name, lambda asked=asked, alone=alone: alone if groups._PIPE_PARALLEL_GROUP is None else asked())


def _one_random_tracker() -> None:
    """Makes the layers use DeepSpeed's random tracker too, once its activation checkpointing is on.

    Upstream replaces the tracker in ``mpu`` only; the layers would use Megatron's, which was never seeded.
    """
    initialize: Any = importlib.import_module("megatron.initialize")
    layers: Any = importlib.import_module("megatron.mpu.layers")
    set_up = initialize.setup_deepspeed_random_and_activation_checkpointing

    def set_up_everywhere(args: Any) -> None:
        set_up(args)
        layers.get_cuda_rng_tracker = initialize.mpu.get_cuda_rng_tracker

    initialize.setup_deepspeed_random_and_activation_checkpointing = set_up_everywhere


def _nothing_to_free() -> None:
    """Keeps DeepSpeed from emptying the GPU's copy of what it stores in host memory: on a CPU both are one tensor."""
    checkpointing: Any = importlib.import_module("deepspeed.runtime.activation_checkpointing.checkpointing")

    def keep(given: Any, stored: Any) -> list[Any]:
        for tensor, copy in zip(given, stored, strict=False):
            if checkpointing.is_activation_to_checkpoint(tensor):
                tensor.saved_data = copy.data
        return list(given)

    checkpointing.get_cpu_activations_for_backward = keep


def _absent_six() -> list[str]:
    """Replaces a package that its tokenizers import; training only needs the size of the vocabulary."""
    if importlib.util.find_spec("six") is not None:
        return []
    six: Any = ModuleType("six", "Stand-in by tridock.compat.")
    six.PY2, six.PY3 = False, True
    sys.modules["six"] = six
    return ["six: not installed, and not needed to train"]


def _numpy_helpers() -> list[str]:
    """Replaces the C++ helpers, which upstream compiles with make on the first run: images may have no compiler."""
    helpers: Any = ModuleType("megatron.data.helpers", "Stand-in by tridock.compat: what GPT-2's data set calls.")
    helpers.build_sample_idx = build_sample_idx
    sys.modules["megatron.data.helpers"] = helpers
    utils: Any = importlib.import_module("megatron.data.dataset_utils")
    utils.compile_helper = lambda: None
    return ["megatron.data.helpers: the index of samples is made by numpy, not by compiled code"]


def build_sample_idx(
    sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int, num_epochs: int, tokens_per_epoch: int
) -> np.ndarray:
    """Where each sample begins: the place in ``doc_idx`` and the offset in that document.

    Sample ``i`` begins at token ``i * seq_length`` of the documents in order: it holds one token more than
    ``seq_length``, which is also the first of the next.
    """
    lengths = sizes[doc_idx].astype(np.int64)
    ends = np.cumsum(lengths)
    samples = (num_epochs * int(tokens_per_epoch) - 1) // seq_length
    first = np.arange(samples + 1, dtype=np.int64) * seq_length
    documents = np.searchsorted(ends, first, side="right")
    index = np.stack([documents, first - (ends - lengths)[documents]], axis=1)
    index[0] = 0  # as upstream, also where the first document is empty
    return index.astype(np.int32)
