"""What a node says of a folder of weights to start from (``train.load: FORMAT:DIR``), without torch."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tridock.contracts.megatron_weights import (
    flat_names,
    megatron_files,
    megatron_folder,
    megatron_sizes,
    name_in_pipeline,
)
from tridock.contracts.pretrained import (
    DEEPSPEED,
    HF,
    INDEX,
    MEGATRON,
    StoredWeights,
    config_folder,
    deepspeed_folder,
    one_model_rank,
    safetensors_problem,
    stored_sizes,
)
from tridock.errors import Problem, RequestError
from tridock.node.probes.torch_files import Shape, is_whole, read_shapes


def stored_weights(kind: str, folder: Path) -> StoredWeights:
    """Returns what is wrong with a folder of weights, or the sizes of the model in it."""
    try:
        return _READ[kind](folder)
    except RequestError as error:
        return StoredWeights(error.problems[0])
    except OSError as error:
        return StoredWeights(Problem(str(folder), "cannot be read", error.strerror or str(error), "check its files"))


def _safetensors(folder: Path) -> StoredWeights:
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError):
        index = None
    return StoredWeights(safetensors_problem(folder, index), has_config=True)


def _deepspeed(folder: Path) -> StoredWeights:
    checkpoint = deepspeed_folder(folder)
    files = one_model_rank(checkpoint)
    require_whole((*files.models, *files.optimizers))
    state = read_shapes(files.models[0])
    has_config = config_folder(folder, checkpoint) is not None
    if files.optimizers:
        _require_ranks(checkpoint, read_shapes(files.optimizers[0]), len(files.optimizers))
    sizes = stored_sizes(_shapes(state, has_module=files.has_module), has_config=has_config)
    # Without ZeRO, nothing tells tied weights from others.
    return sizes if state.get("param_shapes") else replace(sizes, parameters=None)


def _shapes(state: Mapping[str, Any], *, has_module: bool) -> dict[str, Shape]:
    """Returns the shapes of a model's weights, those that were frozen too."""
    shapes: dict[str, Shape] = {}
    others = {*(state.get("buffer_names") or ()), *(state.get("shared_params") or ())}
    if has_module:
        module = (state.get("module") or {}).items()
        shapes |= {name: found for name, found in module if isinstance(found, Shape) and name not in others}
    for group in (*(state.get("param_shapes") or ()), state.get("frozen_param_shapes") or {}):
        shapes |= group
    return shapes


def _megatron(folder: Path) -> StoredWeights:
    checkpoint = megatron_folder(folder)
    files = megatron_files(checkpoint)
    require_whole(files.all)
    shapes: dict[str, Any] = {}
    arguments = None
    for file in files.first:
        state = read_shapes(file)
        if files.layers:
            number = next(number for number, path in files.layers[0].items() if path == file)
            shapes |= {name_in_pipeline(number, max(files.layers[0]), name): it for name, it in state.items()}
            continue
        shapes |= flat_names(state.get("model") or state.get("module") or {})
        for group in state.get("param_shapes") or ():
            shapes |= group
        arguments = getattr(state.get("args"), "state", None)
    shapes = {name: found for name, found in shapes.items() if isinstance(found, Shape)}
    for own in files.states:
        if own.optimizers:
            _require_ranks(checkpoint, read_shapes(own.optimizers[0]), len(own.optimizers))
    ranks = len(files.plain or files.layers or files.states)
    return megatron_sizes(checkpoint, shapes, ranks, arguments)


def require_whole(files: Iterable[Path]) -> None:
    """Raises :class:`RequestError` if a file is cut short."""
    for file in files:
        if not is_whole(file):
            got = f"{file.stat().st_size:,} bytes"
            raise RequestError(Problem(str(file), "is cut short", got, "copy it again"))


def _require_ranks(folder: Path, state: Any, found: int) -> None:
    count = state["optimizer_state_dict"].get("partition_count") if isinstance(state, Mapping) else None
    ranks = max(count) if isinstance(count, list) and count else count
    if isinstance(ranks, int) and ranks != found:
        todo = "copy the files of all ranks into this one folder"
        what = f"was written by {ranks} ranks and lacks files of some"
        raise RequestError(Problem(str(folder), what, f"{found} *_optim_states.pt", todo))


_READ: Final[Mapping[str, Callable[[Path], StoredWeights]]] = {
    HF: _safetensors,
    DEEPSPEED: _deepspeed,
    MEGATRON: _megatron,
}
