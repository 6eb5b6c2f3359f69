"""TransformerEngine's user buffers, by which tensor parallel ranks exchange parts of a matrix beside its products."""

import inspect
from typing import Any, Final

import torch
import torch.distributed as dist

from tridock.engines.megatron_core import overlap
from tridock.errors import Problem, RequestError
from tridock.experiment.schema import Experiment

_BOOTSTRAP: Final = "nccl"
"""What exchanges the buffers' handles, as in Megatron; TransformerEngine's own default, MPI, needs mpirun."""


def begin(experiment: Experiment, local_ranks: int) -> bool:
    """Makes the buffers if every rank can use them; returns whether. A collective, after the layout's groups.

    Raises :class:`RequestError` on every rank if the experiment asks for them and a rank cannot use them.
    """
    asked = bool(experiment.parallel.tp_comm_overlap)
    if not overlap.is_possible(experiment, local_ranks):
        if asked:  # as `tridock plan` says where it knows the nodes
            problems = list(overlap.node_problems(experiment, local_ranks))
            raise RequestError(problems or list(overlap.problems(experiment)))
        return False
    if lacking := _first(_lacks(experiment)):
        if asked:
            raise RequestError(Problem(overlap.FIELD, lacking, "true", "leave it out, or set it to false"))
        _note(f"tp_comm_overlap is off: {lacking}")
        return False
    failure = ""
    try:
        _make(experiment)
    except RuntimeError as error:  # of its library, or of CUDA: a container may lack what the GPU has
        if asked:
            raise
        failure = f"cannot start user buffers ({(str(error).strip() or repr(error)).splitlines()[0]})"
    if not asked and (failed := _first(failure)):
        _note(f"tp_comm_overlap is off: {failed}")
        return False
    _note(f"tp_comm_overlap is on; {overlap.FIELD}: false turns it off")
    return True


def _first(text: str) -> str:
    """Returns the first rank that has a text, and its text; empty if none has. A collective."""
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, text)
    return next((f"rank {rank} {text}" for rank, text in enumerate(found) if text), "")


def _note(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"note: {text}", flush=True)


def _lacks(experiment: Experiment) -> str:
    """Returns what this rank's GPU or TransformerEngine lacks, as `lacks …`; empty if nothing."""
    import transformer_engine_torch as kernels
    from transformer_engine.pytorch.module.base import initialize_ub

    if "bootstrap_backend" not in inspect.signature(initialize_ub).parameters:
        return "lacks TransformerEngine 1.9 or newer"
    if kernels.ubuf_built_with_mpi():
        return "lacks a TransformerEngine whose user buffers start without MPI (NVTE_UB_WITH_MPI)"
    if not kernels.device_supports_multicast() and not overlap.uses_ipc(experiment):
        return "lacks CUDA multicast"
    return ""


def _make(experiment: Experiment) -> None:
    from transformer_engine.pytorch.module import base

    base.destroy_ub()  # of an earlier model of this process
    options: dict[str, Any] = {"bootstrap_backend": _BOOTSTRAP, "dtype": torch.bfloat16}
    is_fp8 = experiment.model.fp8 is not None
    if "quantization_modes" in inspect.signature(base.initialize_ub).parameters:  # since 2.7
        modes = base.UserBufferQuantizationMode
        options["quantization_modes"] = [modes.FP8 if is_fp8 else modes.NONE]
    else:
        options["use_fp8"] = is_fp8
    shape, size = list(overlap.buffer_shape(experiment)), experiment.parallel.tensor_model_parallel_size
    base.initialize_ub(shape, size, **options)
