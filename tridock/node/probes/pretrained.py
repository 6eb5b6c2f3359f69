"""What a node says of a folder of weights to start from (``train.load: FORMAT:DIR``), without torch."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tridock.contracts import megatron_weights, pretrained
from tridock.contracts.checkpoints import PROGRESS, TRACKER
from tridock.contracts.git_lfs import refuse_pointer
from tridock.contracts.safetensors_files import transformers_folder
from tridock.errors import Problem, RequestError
from tridock.node.probes.torch_files import Shape, is_whole, read_named, read_shapes


def stored_weights(kind: str, folder: Path) -> pretrained.StoredWeights:
    """Returns what is wrong with a folder of weights, or the sizes of the model in it."""
    try:
        found = _READ[kind](folder)
    except RequestError as error:
        found = pretrained.StoredWeights(error.problems[0])
    except OSError as error:
        where, todo = error.filename or folder, "check the file's owner"
        return pretrained.StoredWeights(Problem.of_error(where, "cannot be read", error, todo))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        got = f"{type(error).__name__}: {error}"
        todo = "name another folder, or save it again with the program that wrote it"
        found = pretrained.StoredWeights(
            Problem(str(folder), f"holds something else than a {pretrained.NAMES[kind]}", got, todo)
        )
    there = format_of(folder) if found.problem is not None else None
    # Megatron's own files may look like DeepSpeed's: their names have been read.
    known = there in (None, kind) or (kind, there) == (pretrained.MEGATRON, pretrained.DEEPSPEED)
    return found if known else pretrained.StoredWeights(_other_format(folder, kind, there or ""))


def format_of(folder: Path) -> str | None:
    """Returns the format of ``train.load: FORMAT:DIR`` that a folder has, by its files; an empty one for a checkpoint
    that a run of Tridock resumes from, and None for anything else."""
    if any(any(folder.glob(f"{place}{PROGRESS}")) for place in ("", "iter_*/")):
        return ""
    if (folder / pretrained.CONFIG).is_file() and any(
        (folder / name).is_file() for name in (pretrained.INDEX, pretrained.SINGLE)
    ):
        return pretrained.HF
    if any(any(folder.glob(f"{place}mp_rank_*/{megatron_weights.PLAIN}")) for place in ("", "iter_*/", "release/")):
        return pretrained.MEGATRON
    if not any(any(folder.glob(f"{place}*_model_states.pt")) for place in ("", "*/")):
        return None
    return pretrained.MEGATRON if (folder / TRACKER).is_file() else pretrained.DEEPSPEED


def _other_format(folder: Path, kind: str, there: str) -> Problem:
    what = f"is a {pretrained.NAMES[there]}, no {pretrained.NAMES[kind]}"
    return Problem(str(folder), what, "", f"use train.load: {there}{':' if there else ''}{folder}")


def _deepspeed(folder: Path) -> pretrained.StoredWeights:
    checkpoint = pretrained.deepspeed_folder(folder)
    files = pretrained.one_model_rank(checkpoint)
    require_loadable((*files.models, *files.optimizers), pretrained.DEEPSPEED_CLASSES, pretrained.DEEPSPEED_TODO)
    state = read_shapes(files.models[0])
    if files.optimizers:
        _require_ranks(checkpoint, read_shapes(files.optimizers[0]), len(files.optimizers))
    shapes, aliases, others = _weights(state, files)
    if not shapes:
        raise ValueError("no weights")
    if any(name.startswith(_OF_MEGATRON) for name in shapes):
        raise RequestError(_other_format(folder, pretrained.DEEPSPEED, pretrained.MEGATRON))
    place = pretrained.config_folder(folder, checkpoint)
    config = None if place is None else pretrained.read_config(place)
    own = {name: shape for name, shape in shapes.items() if name not in aliases}
    sizes, has_config = pretrained.shown_sizes(own), config is not None
    return pretrained.StoredWeights(
        None, str(checkpoint), shapes, aliases, config, str(place or ""), sizes, has_config, other_dtypes=others
    )


def _weights(
    state: Mapping[str, Any], files: pretrained.StateFiles
) -> tuple[dict[str, Shape], dict[str, str], dict[str, str]]:
    """Returns the shapes of a model's weights, those that were frozen too, the names of weights that are another one,
    and types that are not read, as :class:`tridock.train.checkpoints.deepspeed.DeepSpeedWeights` has them."""
    shapes = _shapes(megatron_weights.flat_names(state["module"]))  # ZeRO 3 has the model's weights empty there
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
    frozen = megatron_weights.flat_names(state.get("frozen_param_fragments") or {})
    others = {name: it.dtype for name, it in (shapes | frozen).items() if it.dtype not in pretrained.DTYPES}
    return shapes | {name: shapes[source] for name, source in aliases.items()}, aliases, others


def _megatron(folder: Path) -> pretrained.StoredWeights:
    checkpoint = megatron_weights.megatron_folder(folder)
    files = megatron_weights.megatron_files(checkpoint)
    todo = pretrained.DEEPSPEED_TODO if files.states else pretrained.MEGATRON_TODO
    require_loadable(files.all, pretrained.MEGATRON_CLASSES, todo)
    arguments, parts, others = None, [], dict[str, str]()
    if files.layers:
        parts = [_of_layers(own) for own in files.layers]
    elif files.plain:
        for stages in files.plain:
            states = [read_shapes(file) for file in stages]
            arguments = arguments or getattr(states[0].get("args"), "state", None)
            parts.append(_shapes(megatron_weights.joined_stages(states)))
    else:
        states = [read_shapes(own.models[0]) for own in files.states]
        arguments = getattr(states[0].get("args"), "state", None)
        found = [_weights(state, own) for state, own in zip(states, files.states, strict=True)]
        parts = [shapes for shapes, *_ in found]
        others = {name: dtype for *_, it in found for name, dtype in it.items()}
        if parts[0] and not any(name.startswith(_OF_MEGATRON) for name in parts[0]):
            raise RequestError(_other_format(folder, pretrained.MEGATRON, pretrained.DEEPSPEED))
    for own in files.states:
        if own.optimizers:
            _require_ranks(checkpoint, read_shapes(own.optimizers[0]), len(own.optimizers))
    if not files.states:
        others = {name: it.dtype for part in parts for name, it in part.items() if it.dtype not in pretrained.DTYPES}
    return megatron_weights.megatron_sizes(checkpoint, parts, arguments, others)


def _of_layers(files: Mapping[int, Path]) -> dict[str, Shape]:
    """Returns the shapes in a pipeline's files of one tensor parallel rank."""
    states = {number: read_shapes(file) for number, file in files.items()}
    last = max(files)
    return {
        megatron_weights.name_in_pipeline(number, last, name): it
        for number, state in states.items()
        for name, it in _shapes(state).items()
    }


def _shapes(found: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: it if isinstance(it, Shape) else Shape() for name, it in found.items()}


def require_loadable(files: Iterable[Path], classes: Collection[str], todo: str) -> None:
    """Raises :class:`RequestError` if a file is cut short or damaged, or names a class that is not loaded."""
    for file in files:
        refuse_pointer(file)
        if not is_whole(file):
            got = f"{file.stat().st_size:,} bytes"
            raise RequestError(Problem(str(file), "is cut short", got, "copy it again"))
        if (foreign := pretrained.foreign_class(read_named(file)[1], classes)) is not None:
            raise RequestError(Problem(str(file), pretrained.FOREIGN, foreign, todo))


def _require_ranks(folder: Path, state: Any, found: int) -> None:
    count = state["optimizer_state_dict"].get("partition_count") if isinstance(state, Mapping) else None
    ranks = max(count) if isinstance(count, list) and count else count
    if isinstance(ranks, int) and ranks != found:
        todo = "copy the files of all ranks into this one folder"
        what = f"was written by {ranks} ranks and lacks files of some"
        raise RequestError(Problem(str(folder), what, f"{found} *_optim_states.pt", todo))


_OF_MEGATRON: Final = "language_model."
"""How the names of Megatron's weights begin."""
_READ: Final[Mapping[str, Callable[[Path], pretrained.StoredWeights]]] = {
    pretrained.HF: lambda folder: transformers_folder(folder)[0],
    pretrained.DEEPSPEED: _deepspeed,
    pretrained.MEGATRON: _megatron,
}
