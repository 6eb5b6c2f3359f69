"""The steps of `tools/gpu_trial.py`, as data: what tells most comes first. Pure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tridock.contracts.run_folder import EXIT_PREEMPTED
from tridock.errors import Problem, RequestError

ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Train:
    """A run of ``tridock train`` on one rank, and what must come of it."""

    config: str
    changes: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    resumes: str = ""
    """The step whose newest checkpoint it loads."""
    further: int = 5
    """The iterations after that checkpoint."""
    fails_with: str = ""
    """The rule of triage, or the ``where`` of Tridock's own message, that has to explain why it fails, with code 4."""
    signal_after: tuple[int, signal.Signals] | None = None
    """After so many iterations: SIGTERM to the command, as a scheduler does, or SIGKILL to the rank."""
    exit_code: int = 0
    force: bool = False
    """Starts although the plan does not fit."""
    falls: float = 0.0
    """By how much the loss must fall, at least."""
    within: float | None = None
    """By what share the planned memory may differ from what torch allocates."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its estimated seconds on a GPU, without which it is not started, and its limit."""

    name: str
    what: Train | Literal["nvidia-smi", "two ranks"]
    expected_s: int
    limit_s: int
    needs_gpu: bool = False


SMI: Final = {
    "report": ("-q", "-x"),
    "table": (),
    "nvlink": ("nvlink", "--status"),
    "list": ("--list-gpus",),
    "topology": ("topo", "--matrix"),
    "compute-apps": ("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader"),
    "capability": ("--query-gpu=uuid,compute_cap", "--format=csv,noheader"),
}
"""The forms in which the doctor and the launchers ask, and more for the reader."""
_QUIET: Final = ("train.log_interval=1", "train.eval_interval=0", "train.tensorboard=false")
_SHORT: Final = (*_QUIET, "optimizer.lr_warmup_iters=0", "train.train_iters=5")
_UNSAVED: Final = (*_SHORT, "train.save=false")
_SAVED: Final = (*_SHORT, "train.save=true", "train.save_interval=5")
_DEMO, _LARGE = "configs/demo.yaml", "configs/bench/gpt-1.3b.yaml"
_DDP: Final = ("engine=torch", "parallel.strategy=ddp", "parallel.zero_stage=0")
_FSDP: Final = ("engine=torch", "parallel.strategy=fsdp", "parallel.zero_stage=0")
_CORE: Final = ("engine=megatron-core", "parallel.strategy=ddp", "parallel.zero_stage=0")
_COMPILED: Final = "train.compile=true"
_MEASURED: Final = (*_QUIET, "train.log_interval=5", "train.train_iters=20")
# On a GPU an iteration takes some milliseconds, and the signal is there when some hundred are over.
_LONG: Final = (*_QUIET, "train.train_iters=50000", "train.save=true", "train.save_interval=1000")


def _zero(stage: int) -> tuple[str, ...]:
    return ("engine=torch", "parallel.strategy=zero", f"parallel.zero_stage={stage}")


_SIZES: Final = {
    "125m": ("configs/bench/gpt-125m.yaml", ()),
    "345m": (
        "configs/bench/gpt-125m.yaml",
        ("model.num_layers=24", "model.hidden_size=1024", "model.num_attention_heads=16", "batch.micro_batch_size=8"),
    ),
    "1.3b": (_LARGE, ()),
}
_KINDS: Final = {
    "core": _CORE,
    "core-full": (
        *_CORE, "model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1",
    ),
    "core-selective": (*_CORE, "model.recompute_granularity=selective"),
    "core-dropout": (*_CORE, "model.hidden_dropout=0.1"),
    "ddp": _DDP,
    "ddp-recomputed": (*_DDP, "model.checkpoint_activations=true"),
    **{f"zero-{stage}": _zero(stage) for stage in range(4)},
}  # fmt: skip
MEMORY: Final = {
    name: Step(name, Train(config, (*_UNSAVED, "train.train_iters=3", *size_, *kind_), within=0.05), 15, 60)
    for size, (config, size_) in _SIZES.items()
    for kind, kind_ in _KINDS.items()
    for name in [f"{size}-{kind}"]
}
"""The plan's total without context, NCCL and fragmentation, and ``torch.cuda.max_memory_allocated``."""
_MOST_TELLING: Final = ("125m-zero-1", "125m-zero-2", "125m-zero-3", "125m-ddp-recomputed")


def _engine(name: str, config: str, *changes: str, expected_s: int = 20) -> Step:
    return Step(name, Train(config, (*changes, "train.tensorboard=false"), falls=0.5), expected_s, 6 * expected_s)


ENGINES: Final = (
    # DeepSpeed compiles FusedAdam first.
    _engine("v1.1.5-fp16", "configs/megatron/tiny-345m.yaml", "precision=fp16", expected_s=60),
    _engine("v1.1.5-fp32", "configs/megatron/tiny-345m.yaml", "precision=fp32"),
    *(
        _engine(f"v1.1.5-distributed-{short}", "configs/megatron/tiny-345m-distributed.yaml", f"precision={short}")
        for short in ("fp16", "fp32")
    ),
    *(
        _engine(f"core-{precision}", _DEMO, *_CORE, f"precision={precision}")
        for precision in ("bf16", "fp16", "fp32")
    ),
    *(
        _engine(f"{name}-{precision}", _DEMO, *strategy, f"precision={precision}")
        for name, strategy in (("ddp", _DDP), ("zero-0", _zero(0)))
        for precision in ("bf16", "fp16")
    ),
)  # fmt: skip
"""Every engine in the formats that it has: the loss falls, and the run says on what it ran."""
_OF_1_3B: Final = "1.3B in bf16, 8,192 tokens a step"
_FAULTS, _OF_MEMORY = "Faults that Tridock must name", "Planned and allocated memory"

ROWS: Final[tuple[tuple[str, tuple[Step, ...]], ...]] = (
    ("What the driver says, and the doctor of it", (Step("nvidia-smi", "nvidia-smi", 5, 60, needs_gpu=True),)),
    ("Every strategy starts", (
        Step("ddp", Train(_DEMO, (*_UNSAVED, *_DDP)), 12, 120),  # reads torch from a cold disk
        Step("fsdp", Train(_DEMO, (*_SAVED, *_FSDP)), 12, 60),
        Step("fsdp-resumed", Train(_DEMO, (*_SAVED, *_FSDP), resumes="fsdp"), 12, 60),
        Step("zero-3", Train(_DEMO, (*_UNSAVED, *_zero(3))), 15, 60),
        Step("megatron-core", Train(_DEMO, (*_UNSAVED, *_CORE)), 15, 60),
    )),
    (_OF_1_3B, (
        Step("1.3b-ddp-compiled", Train(_LARGE, (*_MEASURED, *_DDP, _COMPILED, "train.profile_iters=3")), 60, 150),
    )),
    (_OF_1_3B, (
        Step("1.3b-ddp-eager", Train(_LARGE, (*_MEASURED, *_DDP)), 30, 90),
        Step("1.3b-fsdp-compiled", Train(_LARGE, (*_MEASURED, *_FSDP, _COMPILED)), 45, 120),
        Step("1.3b-megatron-core", Train(_LARGE, (*_MEASURED, *_CORE)), 45, 120),
    )),
    (_FAULTS, (
        Step(
            "no-gpu", Train(_DEMO, (*_UNSAVED, *_DDP), {"CUDA_VISIBLE_DEVICES": ""}, fails_with="device"), 10, 60,
            needs_gpu=True,
        ),
        Step("two-ranks", "two ranks", 10, 60, needs_gpu=True),
    )),
    (_FAULTS, (
        Step(
            "out-of-memory",
            Train(
                _LARGE, (*_UNSAVED, *_DDP, "batch.micro_batch_size=512"), fails_with="cuda-out-of-memory", force=True,
            ),
            25, 90, needs_gpu=True,
        ),
    )),
    ("Signals and restarts", (
        Step(
            "sigterm",
            Train(_DEMO, (*_LONG, *_DDP), signal_after=(20, signal.SIGTERM), exit_code=EXIT_PREEMPTED), 14, 60,
        ),
        Step("sigterm-resumed", Train(_DEMO, (*_LONG, *_DDP), resumes="sigterm", further=20), 12, 60),
        Step(
            "killed",
            Train(
                _DEMO, (*_LONG, *_DDP, "train.train_iters=400", "train.save_interval=50", "restart.max=1"),
                signal_after=(120, signal.SIGKILL),  # the second checkpoint waits until the first is whole
            ),
            24, 90,
        ),
    )),
    (_OF_MEMORY, tuple(MEMORY[name] for name in _MOST_TELLING)),
    (_OF_1_3B, (
        Step(
            "1.3b-ddp-saved",
            Train(_LARGE, (*_MEASURED, *_DDP, _COMPILED, "train.save=true", "train.save_interval=10")), 60, 150,
        ),
    )),
    ("Every engine trains", ENGINES),
    (_OF_MEMORY, tuple(step for name, step in MEMORY.items() if name not in _MOST_TELLING)),
)  # fmt: skip
"""A title and its steps; what `--steps` calls by the number of its row."""
STEPS: Final = {step.name: step for _, steps in ROWS for step in steps}
TINY: Final = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.seq_length=64",
    "model.make_vocab_size_divisible_by=128", "batch.micro_batch_size=1", "precision=fp32",
)  # fmt: skip
"""What a rehearsal changes."""


def chosen(words: Sequence[str]) -> list[Step]:
    """Returns the steps of these names and numbers of rows, in their order, each with those that it resumes; all
    without any word. Raises :class:`RequestError` with every word that is neither."""
    rows = {str(number): [step.name for step in steps] for number, (_, steps) in enumerate(ROWS, 1)}
    unknown = [word for word in words if word not in rows and word not in STEPS]
    if unknown:
        todo = f"give numbers from 1 to {len(ROWS)}, or some of {', '.join(STEPS)}"
        raise RequestError([Problem("--steps", "is not a step", word, todo) for word in unknown])
    names = {name for word in words for name in rows.get(word, [word])} or set(STEPS)
    names |= {step.what.resumes for name in names if isinstance((step := STEPS[name]).what, Train)}
    return [step for name, step in STEPS.items() if name in names]


def argv_of(train: Train, noted: Path, checkpoint: str | None, *, tiny: bool) -> list[str]:
    """The command line; ``noted`` is the file for the run's id, ``checkpoint`` the folder that it loads."""
    changes = [*train.changes, *(TINY if tiny else ()), *([f"train.load={checkpoint}"] if checkpoint else ())]
    argv = [sys.executable, "-m", "tridock.cli", "train", str(ROOT / train.config), "--nproc", "1"]
    argv += [*(["--force"] if train.force else []), "--run-id-file", str(noted)]
    return [*argv, *(word for change in changes for word in ("--set", change))]
