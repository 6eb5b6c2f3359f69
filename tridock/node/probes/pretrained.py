"""What a node says of a folder of weights to start from (``train.load: FORMAT:DIR``), without torch."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tridock.contracts.checkpoints import PROGRESS, TRACKER
from tridock.contracts.megatron_weights import (
    PLAIN,
    flat_names,
    joined_stages,
    megatron_files,
    megatron_folder,
    megatron_sizes,
    name_in_pipeline,
)
from tridock.contracts.pretrained import (
    CONFIG,
    DEEPSPEED,
    HF,
    INDEX,
    MEGATRON,
    NAMES,
    SAVED,
    SINGLE,
    StateFiles,
    StoredWeights,
    config_folder,
    deepspeed_folder,
    one_model_rank,
    read_config,
    shown_sizes,
)
from tridock.contracts.safe_pickles import (
    DEEPSPEED_CLASSES,
    DEEPSPEED_TODO,
    FOREIGN,
    MEGATRON_CLASSES,
    MEGATRON_TODO,
    foreign_class,
)
from tridock.contracts.safetensors_files import read_folder
from tridock.errors import Problem, RequestError
from tridock.node.probes.torch_files import Shape, is_whole, read_named, read_shapes


def stored_weights(kind: str, folder: Path) -> StoredWeights:
    """Returns what is wrong with a folder of weights, or the sizes of the model in it."""
    try:
        found = _READ[kind](folder)
    except RequestError as error:
        found = StoredWeights(error.problems[0])
    except OSError as error:
        where = str(error.filename or folder)
        return StoredWeights(Problem(where, "cannot be read", error.strerror or str(error), "check the file's owner"))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        got = f"{type(error).__name__}: {error}"
        todo = "name another folder, or save it again with the program that wrote it"
        found = StoredWeights(Problem(str(folder), f"holds something else than a {NAMES[kind]}", got, todo))
    there = format_of(folder) if found.problem is not None else None
    # Megatron's own files may look like DeepSpeed's: their names have been read.
    known = there in (None, kind) or (kind, there) == (MEGATRON, DEEPSPEED)
    return found if known else StoredWeights(_other_format(folder, kind, there or ""))


def format_of(folder: Path) -> str | None:
    """Returns the format of ``train.load: FORMAT:DIR`` that a folder has, by its files; an empty one for a checkpoint
    that a run of Tridock resumes from, and None for anything else."""
    if any(any(folder.glob(f"{place}{PROGRESS}")) for place in ("", "iter_*/")):
        return ""
    if (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return HF
    if any(any(folder.glob(f"{place}mp_rank_*/{PLAIN}")) for place in ("", "iter_*/", "release/")):
        return MEGATRON
    if not any(any(folder.glob(f"{place}*_model_states.pt")) for place in ("", "*/")):
        return None
    return MEGATRON if (folder / TRACKER).is_file() else DEEPSPEED


def _other_format(folder: Path, kind: str, there: str) -> Problem:
    """Returns the problem of a folder that another format reads."""
    what = f"is a {NAMES[there]}, no {NAMES[kind]}"
    return Problem(str(folder), what, "", f"use train.load: {there}{':' if there else ''}{folder}")


def _safetensors(folder: Path) -> StoredWeights:
    if not (folder / CONFIG).is_file():
        raise RequestError(Problem(str(folder), f"holds no {CONFIG}", "", SAVED))
    config = read_config(folder)
    shapes = {name: shape for name, (_, shape) in read_folder(folder).items()}
    return StoredWeights(None, str(folder), shapes, {}, config, str(folder), has_config=True)


def _deepspeed(folder: Path) -> StoredWeights:
    checkpoint = deepspeed_folder(folder)
    files = one_model_rank(checkpoint)
    require_loadable((*files.models, *files.optimizers), DEEPSPEED_CLASSES, DEEPSPEED_TODO)
    state = read_shapes(files.models[0])
    if files.optimizers:
        _require_ranks(checkpoint, read_shapes(files.optimizers[0]), len(files.optimizers))
    shapes, aliases = _weights(state, files)
    if not shapes:
        raise ValueError("no weights")
    if any(name.startswith(_OF_MEGATRON) for name in shapes):
        raise RequestError(_other_format(folder, DEEPSPEED, MEGATRON))
    place = config_folder(folder, checkpoint)
    config = None if place is None else read_config(place)
    own = {name: shape for name, shape in shapes.items() if name not in aliases}
    return StoredWeights(
        None, str(checkpoint), shapes, aliases, config, str(place or ""), shown_sizes(own), config is not None
    )


def _weights(state: Mapping[str, Any], files: StateFiles) -> tuple[dict[str, Shape], dict[str, str]]:
    """Returns the shapes of a model's weights, those that were frozen too, and the names of weights that are another
    one, as :class:`tridock.train.checkpoints.deepspeed.DeepSpeedWeights` has them."""
    shapes: dict[str, Shape] = {}
    if files.has_module:
        buffers = state.get("buffer_names") or ()
        module = flat_names(state["module"]).items()
        shapes |= {name: found for name, found in module if isinstance(found, Shape) and name not in buffers}
    of_module = dict(shapes)
    if files.optimizers and state.get("param_shapes") is not None:
        for group in (*state["param_shapes"], state.get("frozen_param_shapes") or {}):
            shapes |= group
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, found in of_module.items():
        if shapes[name] is found and first.setdefault(found.place, name) != name:
            aliases[name] = first[found.place]
    aliases |= {name: it for name, it in (state.get("shared_params") or {}).items() if it in shapes}
    return shapes | {name: shapes[source] for name, source in aliases.items()}, aliases


def _megatron(folder: Path) -> StoredWeights:
    checkpoint = megatron_folder(folder)
    files = megatron_files(checkpoint)
    todo = DEEPSPEED_TODO if files.states else MEGATRON_TODO
    require_loadable(files.all, MEGATRON_CLASSES, todo)
    arguments, parts = None, []
    if files.layers:
        parts = [_of_layers(own) for own in files.layers]
    elif files.plain:
        for stages in files.plain:
            states = [read_shapes(file) for file in stages]
            arguments = arguments or getattr(states[0].get("args"), "state", None)
            parts.append(_shapes(joined_stages(states)))
    else:
        states = [read_shapes(own.models[0]) for own in files.states]
        arguments = getattr(states[0].get("args"), "state", None)
        parts = [_weights(state, own)[0] for state, own in zip(states, files.states, strict=True)]
        if parts[0] and not any(name.startswith(_OF_MEGATRON) for name in parts[0]):
            raise RequestError(_other_format(folder, MEGATRON, DEEPSPEED))
    for own in files.states:
        if own.optimizers:
            _require_ranks(checkpoint, read_shapes(own.optimizers[0]), len(own.optimizers))
    return megatron_sizes(checkpoint, parts, arguments)


def _of_layers(files: Mapping[int, Path]) -> dict[str, Shape]:
    """Returns the shapes in a pipeline's files of one tensor parallel rank."""
    states = {number: read_shapes(file) for number, file in files.items()}
    last = max(files)
    return {
        name_in_pipeline(number, last, name): it
        for number, state in states.items()
        for name, it in _shapes(state).items()
    }


def _shapes(found: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: it for name, it in found.items() if isinstance(it, Shape)}


def require_loadable(files: Iterable[Path], classes: Collection[str], todo: str) -> None:
    """Raises :class:`RequestError` if a file is cut short or damaged, or names a class that is not loaded."""
    for file in files:
        if not is_whole(file):
            got = f"{file.stat().st_size:,} bytes"
            raise RequestError(Problem(str(file), "is cut short", got, "copy it again"))
        if (foreign := foreign_class(read_named(file)[1], classes)) is not None:
            raise RequestError(Problem(str(file), FOREIGN, foreign, todo))


def _require_ranks(folder: Path, state: Any, found: int) -> None:
    count = state["optimizer_state_dict"].get("partition_count") if isinstance(state, Mapping) else None
    ranks = max(count) if isinstance(count, list) and count else count
    if isinstance(ranks, int) and ranks != found:
        todo = "copy the files of all ranks into this one folder"
        what = f"was written by {ranks} ranks and lacks files of some"
        raise RequestError(Problem(str(folder), what, f"{found} *_optim_states.pt", todo))


_OF_MEGATRON: Final = "language_model."
"""How the names of Megatron's weights begin."""
_READ: Final[Mapping[str, Callable[[Path], StoredWeights]]] = {
    HF: _safetensors,
    DEEPSPEED: _deepspeed,
    MEGATRON: _megatron,
}
