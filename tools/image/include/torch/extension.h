// Stands in front of torch's own <torch/extension.h> while DeepSpeed's CPU ops are compiled (portable-cxx.sh).
// Torch's brings in its whole C++ front end, which is half of the time that an op takes to compile; the ops use tensors,
// the registration of operators and the bindings to Python.
#pragma once
#include <torch/types.h>
#include <torch/library.h>
#include <torch/csrc/utils/pybind.h>
