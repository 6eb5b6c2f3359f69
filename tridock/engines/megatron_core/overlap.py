"""``tp_comm_overlap``: tensor parallel ranks exchange parts of a matrix while they compute others. Pure.

TransformerEngine's user buffers do it: kernels that write to the memory of the other GPUs of a node, by CUDA multicast.
The requirements are those of its sources (2.10): ``initialize_ub`` and ``common/comm_gemm_overlap``.
"""

from collections.abc import Iterator
from typing import Final

from tridock.engines.megatron_core.transformer_engine import TE, WORKSPACE_BYTES
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.shape import FORMAT_BYTES, OVERLAP, LayoutShape, Term, tokens_of

FIELD: Final = "parallel.tp_comm_overlap"
WITHOUT_MULTICAST: Final = "UB_SKIPMC"
"""TransformerEngine's variable: 1 lets the ranks use CUDA IPC instead of multicast."""
_SIZES: Final = (2, 4, 8, 16, 32)
"""Ranks for which its reduce-scatter has a kernel; others would silently sum nothing."""
_WIDTH: Final = 32
"""A product is reduce-scattered in 4 parts, by 16 bytes; the rest of another width would be left out."""
_GATHERED: Final = 8
"""Buffers of what is gathered, in fp8 if the layers are."""
_SCATTERED: Final = 4
_STREAMS: Final = 3
"""Streams that compute the parts of a product, each with a workspace."""


def _obstacles(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yields what rules it out, and what to do about it."""
    model, parallel = experiment.model, experiment.parallel
    if parallel.tensor_model_parallel_size not in _SIZES:
        yield "needs a tensor_model_parallel_size of 2, 4, 8, 16 or 32", "use one of them"
    elif not parallel.sequence_parallel:
        yield "needs sequence_parallel", "set parallel.sequence_parallel to true"
    if model.transformer_impl not in (None, TE):
        yield "needs TransformerEngine's layers", "set model.transformer_impl to transformer_engine"
    if experiment.precision != "bf16":
        yield "its kernels sum in bf16", "set precision to bf16"
    if model.hidden_size % _WIDTH:
        yield f"needs a hidden_size that is a multiple of {_WIDTH}", "choose another hidden_size"


def problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields why the experiment cannot have it, if it asks for it."""
    if experiment.parallel.tp_comm_overlap:
        for what, todo in _obstacles(experiment):
            yield Problem(FIELD, what, "true", f"{todo}, or leave it out", ("null", "false"))


def node_problems(experiment: Experiment, slots: int) -> Iterator[Problem]:
    """Yields tensor parallel ranks on several nodes, if the experiment asks for it. ``slots``: of a node."""
    size = experiment.parallel.tensor_model_parallel_size
    if experiment.parallel.tp_comm_overlap and slots % size:
        what, todo = "needs tensor parallel ranks on one node", "lower tensor_model_parallel_size, or leave it out"
        got = f"{size} ranks on nodes with {slots} slots"
        yield Problem(FIELD, what, got, todo, ("null", "false"))


def gpu_problems(experiment: Experiment, gpu: Gpu) -> Iterator[Problem]:
    """Yields a GPU without multicast, if the experiment needs it."""
    if needs_multicast(experiment) and not gpu.has_multicast:
        what = f"a {gpu.name} has no CUDA multicast (Hopper and newer, with NVSwitch)"
        todo = f"leave it out, or set {WITHOUT_MULTICAST}: 1 in env to use CUDA IPC over NVLink"
        yield Problem(FIELD, what, "true", todo, ("null", "false"))


def needs_multicast(experiment: Experiment) -> bool:
    """Returns whether a GPU without multicast ends the run, instead of ending the overlap."""
    return experiment.parallel.tp_comm_overlap is True and not uses_ipc(experiment)


def uses_ipc(experiment: Experiment) -> bool:
    return experiment.env.get(WITHOUT_MULTICAST, "0") not in ("", "0")


def is_possible(experiment: Experiment, slots: int) -> bool:
    """Returns whether the ranks try to, on GPUs with multicast."""
    wanted = experiment.parallel.tp_comm_overlap is not False
    return wanted and not slots % experiment.parallel.tensor_model_parallel_size and not any(_obstacles(experiment))


def buffer_shape(experiment: Experiment) -> tuple[int, int]:
    """Returns the rows and columns of what tensor parallel ranks exchange, as ``initialize_ub`` takes it."""
    return tokens_of(experiment), experiment.model.hidden_size


def is_planned(experiment: Experiment, shape: LayoutShape) -> bool:
    """Returns whether the plan counts on it."""
    return is_possible(experiment, shape.slots) and (shape.has_multicast or bool(experiment.parallel.tp_comm_overlap))


def term(experiment: Experiment) -> Term:
    """Returns the memory of its buffers."""
    rows, columns = buffer_shape(experiment)
    short = FORMAT_BYTES[experiment.precision]
    gathered = 1 if experiment.model.fp8 is not None else short
    size = rows * columns * (_GATHERED * gathered + _SCATTERED * short) + _STREAMS * WORKSPACE_BYTES
    return Term(OVERLAP, size, "12 buffers of a layer's input or output, and workspaces; torch allocates none of them")
