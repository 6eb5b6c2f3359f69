"""The weights in a checkpoint of DeepSpeed, whoever wrote it, by DeepSpeed's own ``zero_to_fp32``.

Its functions find each weight; they hold no copy of all weights, because files are memory-mapped and ZeRO 1 and 2's
flat vectors are joined on the meta device, only to learn the places of weights.
"""

import contextlib
import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tridock.contracts.git_lfs import refuse_pointer
from tridock.contracts.megatron_weights import flat_names
from tridock.contracts.pretrained import DEEPSPEED_TODO, DTYPES, StateFiles
from tridock.errors import Problem, RequestError
from tridock.train.checkpoints.pickles import refusing_foreign, safe_torch_load
from tridock.train.checkpoints.write_errors import replaced
from tridock.train.checkpoints.zero_reshard import gather_slice

_BF16_VECTORS: Final = "single_partition_of_fp32_groups"
_OF_CLIENTS: Final = ("args", "checkpoint_version")


class DeepSpeedWeights:
    """Whole weights by their names in the model that DeepSpeed trained: ZeRO's fp32 weights where it has them,
    otherwise the model's own.

    Raises :class:`RequestError` if a file is damaged, or holds an object that is neither a tensor nor a plain value.
    """

    def __init__(self, folder: Path, files: StateFiles, classes: Sequence[Any] = ()) -> None:
        """``classes`` are further classes in the files that are safe to load."""
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._reads: dict[str, Callable[[], Tensor]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for file in (*files.models, *files.optimizers):
            refuse_pointer(file)
        with safe_torch_load(classes, mmap=True), refusing_foreign(DEEPSPEED_TODO), _understood(folder):
            state = torch.load(files.models[0], map_location="cpu", weights_only=True)
            for name, it in flat_names(state["module"]).items():
                tensor = it if isinstance(it, Tensor) else torch.empty(())
                self._add(name, tensor.shape, partial(_given, tensor), tensor.dtype)
            if files.optimizers and state.get("param_shapes") is not None:
                self._add_zero(files)
            elif not files.has_module:
                raise KeyError("param_shapes")
        self.client_state: Mapping[str, Any] = {name: state[name] for name in _OF_CLIENTS if name in state}
        """What Megatron-LM v1.1.5 adds: its arguments and the version of its checkpoints."""
        shared = {**self._same_tensors(), **(state.get("shared_params") or {})}
        self.aliases: Mapping[str, str] = {name: source for name, source in shared.items() if source in self.shapes}
        """Names of weights that are another weight, with that one's name."""
        for name, source in self.aliases.items():
            self.shapes[name], self._reads[name] = self.shapes[source], self._reads[source]

    @property
    def names(self) -> Collection[str]:
        return self.shapes.keys()

    @property
    def other_dtypes(self) -> dict[str, str]:
        return other_dtypes(self._dtypes)

    def read(self, name: str) -> Tensor:
        return self._reads[name]()

    def _add(self, name: str, shape: Sequence[int], read: Callable[[], Tensor], dtype: torch.dtype) -> None:
        self.shapes[name], self._reads[name], self._dtypes[name] = tuple(shape), read, dtype

    def _add_zero(self, files: StateFiles) -> None:
        from deepspeed.utils import zero_to_fp32

        quiet = [replaced(zero_to_fp32, "tqdm", lambda items, **_: items), contextlib.redirect_stdout(io.StringIO())]
        with contextlib.ExitStack() as changes:
            for change in quiet:
                changes.enter_context(change)
            models = zero_to_fp32.parse_model_states(files.models)
            stage, ranks, flats, paddings = self._partitions(files, zero_to_fp32)
            found: dict[str, Any] = {}
            if stage <= 2:
                places = [[flat.to("meta") for flat in rank] for rank in flats]
                zero_to_fp32._zero2_merge_trainable_params(found, ranks, places, models, paddings)
                groups = [(name, number) for number, group in enumerate(models[0].param_shapes) for name in group]
                for name, number in groups:
                    place, parts = found[name], [rank[number] for rank in flats]
                    self._add(
                        name, place.shape, partial(_slice, parts, place.storage_offset(), place.shape), place.dtype
                    )
            else:
                zero_to_fp32._zero3_merge_trainable_params(found, ranks, flats, models)
                for name, gathered in found.items():
                    self._add(name, gathered.shape, gathered.contiguous, gathered.dtype)
            for name, shape in (models[0].frozen_param_shapes or {}).items():
                fragments = [model.frozen_param_fragments[name] for model in models]
                self._add(name, shape, partial(_joined, fragments, shape), fragments[0].dtype)

    def _partitions(self, files: StateFiles, zero_to_fp32: Any) -> tuple[int, int, list[Any], Any]:
        """Returns ZeRO's stage, the number of ranks, their flat fp32 vectors, and paddings between weights.

        DeepSpeed's bf16 optimizer (ZeRO 1 with fp32 gradients) names no stage; its vectors are those of ZeRO 1.
        """
        first = torch.load(files.optimizers[0], map_location="cpu", weights_only=True)["optimizer_state_dict"]
        if zero_to_fp32.ZERO_STAGE in first or _BF16_VECTORS not in first:
            found: tuple[int, int, list[Any], Any] = zero_to_fp32.parse_optim_states(files.optimizers, str(self.folder))
            return found
        states = [torch.load(file, map_location="cpu", weights_only=True) for file in files.optimizers]
        flats = [state["optimizer_state_dict"][_BF16_VECTORS] for state in states]
        if (ranks := max(first["partition_count"])) != len(flats):
            raise ValueError(f"{len(flats)} of {ranks} *_optim_states.pt")
        return 1, ranks, flats, None

    def _same_tensors(self) -> dict[str, str]:
        """Names of the model's own weights that share a tensor with an earlier one."""
        first: dict[int, str] = {}
        found = {}
        for name, read in self._reads.items():
            if isinstance(read, partial) and read.func is _given:
                place = read.args[0].data_ptr() or id(read)
                found.update({name: first[place]} if place in first else {})
                first.setdefault(place, name)
        return found


def other_dtypes(dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Returns the types of weights that are not read (:class:`tridock.contracts.pretrained.StoredWeights`)."""
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    return {name: dtype for name, dtype in names.items() if dtype not in DTYPES}


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _slice(parts: Sequence[Tensor], first: int, shape: Sequence[int]) -> Tensor:
    return gather_slice(parts, first, math.prod(shape)).view(*shape)


def _joined(fragments: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    return torch.cat([fragment.flatten() for fragment in fragments])[: math.prod(shape)].view(*shape)


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Turns what DeepSpeed's functions raise about a checkpoint's content into a :class:`RequestError`."""
    try:
        yield
    except (ValueError, KeyError, NotImplementedError, AttributeError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else str(error)
        todo = "copy the files of all ranks; convert another format with the tools of the program that wrote it"
        raise RequestError(Problem(str(folder), "is no checkpoint that zero_to_fp32 reads", got, todo)) from None
