"""Programs that start ranks themselves, and what each needs to find the other nodes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from tridock.errors import Problem, RequestError

Per = Literal["slot", "node", "cluster"]


@dataclass(frozen=True, slots=True)
class SelfLauncher:
    per: Per | None
    """Once per node, with the variables of torchrun, or once on the head, with a hostfile; None if in neither way."""
    env: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, str] | None = None
    """An option and its value without which it starts one node's ranks alone."""
    todo: str = ""
    """What to do instead, or without the option."""


_NODE: Final = SelfLauncher("node")
_LLAMA_FACTORY: Final = SelfLauncher("node", {"FORCE_TORCHRUN": "1"})
_KNOWN: Final[Mapping[tuple[str, ...], SelfLauncher]] = {
    ("llamafactory-cli", "train"): _LLAMA_FACTORY,
    ("lmf", "train"): _LLAMA_FACTORY,
    ("-m", "llamafactory.cli"): _LLAMA_FACTORY,
    # ms-swift: each starts torchrun where NNODES or NPROC_PER_NODE is set.
    **{("swift", verb): _NODE for verb in ("pt", "sft", "rlhf")},
    **{("megatron", verb): _NODE for verb in ("pt", "sft", "rlhf")},
    ("axolotl", "train"): SelfLauncher("node", needs=("--launcher", "torchrun"), todo="add --launcher torchrun"),
    ("deepy.py",): SelfLauncher("cluster"),  # gpt-neox: DeepSpeed's runner, with the hostfile in DLTS_HOSTFILE
    # TRL's commands start accelerate on one machine with a script that torchrun starts as well.
    **{
        ("trl", verb): SelfLauncher(None, todo=f"begin with torchrun -m trl.scripts.{verb} and the same options")
        for verb in ("dpo", "grpo", "kto", "reward", "rloo", "sft")
    },
    ("horovodrun",): SelfLauncher(None, todo="begin with mpirun and the same program"),
    ("colossalai", "run"): SelfLauncher(None, todo="begin with torchrun and the same script"),
    ("ray",): SelfLauncher(None, todo="use --per node with a script that starts the head where NODE_RANK is 0"),
}


def known_per(words: Sequence[str]) -> Per | None:
    """Returns where to start what these words name behind another program; None if they name nothing, or only a word
    that may be an argument, as ``ray`` is."""
    single, pair = _KNOWN.get(tuple(words[:1])), _KNOWN.get(tuple(words[:2]))
    if single is not None:
        return single.per
    return None if pair is None else pair.per or "node"


def self_launcher(words: Sequence[str]) -> SelfLauncher | None:
    """Returns what is known of a program by its first words (its name without a folder, its subcommand).

    Raises :class:`RequestError` for one that Tridock cannot give the other nodes, with what to do instead.
    """
    found = _KNOWN.get(tuple(words[:2])) or _KNOWN.get(tuple(words[:1]))
    if found is None:
        return None
    given = found.needs is None or found.needs in itertools.pairwise(words) or "=".join(found.needs) in words
    if found.per is None or not given:
        what = "starts ranks itself, and does not read where the other nodes are"
        raise RequestError(Problem("command", what, " ".join(words[:2]), found.todo))
    return found
