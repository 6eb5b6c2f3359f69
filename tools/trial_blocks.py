"""The five blocks of `make gpu-trial`, as data: their steps, and the command line of a run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Train:
    """A run of ``tridock train`` on one rank; ``fails_with`` names the rule of triage, or the ``where`` of Tridock's
    own message, that has to explain why it fails."""

    config: str
    changes: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    resumes: str = ""
    """The step whose newest checkpoint it loads."""
    further: int = 5
    """The iterations after that checkpoint."""
    fails_with: str = ""
    signal_after: tuple[int, signal.Signals] | None = None
    """After so many iterations: SIGTERM to the command, as a scheduler does, or SIGKILL to the rank."""
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a block: a run, a file of tests, or a name for one of the other two."""

    name: str
    what: Train | str
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
COLLIDE: Final = "two ranks on one GPU"
_QUIET: Final = ("train.log_interval=1", "train.eval_interval=0", "train.tensorboard=false")
_SHORT: Final = (*_QUIET, "optimizer.lr_warmup_iters=0", "train.train_iters=5")
_UNSAVED: Final = (*_SHORT, "train.save=false")
_SAVED: Final = (*_SHORT, "train.save=true", "train.save_interval=5")
_DEMO, _LARGE = "configs/demo.yaml", "configs/bench/gpt-1.3b.yaml"
_DDP: Final = ("engine=torch", "parallel.strategy=ddp", "parallel.zero_stage=0")
_FSDP: Final = ("engine=torch", "parallel.strategy=fsdp", "parallel.zero_stage=0")
_CORE: Final = ("engine=megatron-core", "parallel.strategy=ddp", "parallel.zero_stage=0")
_MEASURED: Final = (*_QUIET, "train.train_iters=20", "train.profile_iters=3")
# On a GPU an iteration takes some milliseconds, and the signal is there when some hundred are over.
_LONG: Final = (*_QUIET, "train.train_iters=50000", "train.save=true", "train.save_interval=1000")
_LIMIT_S: Final = 520
"""Of a block. A run that it interrupts takes up to a minute to end: the whole stays below ten minutes."""


def _zero(stage: int) -> tuple[str, ...]:
    return ("engine=torch", "parallel.strategy=zero", f"parallel.zero_stage={stage}")


BLOCKS: Final[Mapping[int, tuple[str, int, tuple[Step, ...]]]] = {
    1: (
        "Every strategy starts",
        480,
        (
            Step("nvidia-smi", "nvidia-smi", needs_gpu=True),
            Step("ddp", Train(_DEMO, (*_UNSAVED, *_DDP))),
            Step("fsdp", Train(_DEMO, (*_UNSAVED, *_FSDP))),
            *(Step(f"ZeRO-{stage}", Train(_DEMO, (*_UNSAVED, *_zero(stage)))) for stage in range(4)),
            Step("megatron-core", Train(_DEMO, (*_UNSAVED, *_CORE))),
            Step("fsdp, saved", Train(_DEMO, (*_SAVED, *_FSDP))),
            Step("fsdp, resumed", Train(_DEMO, (*_SAVED, *_FSDP), resumes="fsdp, saved")),
            Step(
                "no visible GPU",
                Train(_DEMO, (*_UNSAVED, *_DDP), env={"CUDA_VISIBLE_DEVICES": ""}, fails_with="device", exit_code=4),
                needs_gpu=True,
            ),
            Step(COLLIDE, COLLIDE, needs_gpu=True),
        ),
    ),
    2: ("Every engine trains", _LIMIT_S, (Step("engines", "tests/gpu/test_engines.py", needs_gpu=True),)),
    3: (
        "1.3B on one GPU",
        _LIMIT_S,
        (
            Step("ddp", Train(_LARGE, (*_MEASURED, *_DDP))),
            Step("ddp, compiled", Train(_LARGE, (*_MEASURED, *_DDP, "train.compile=true"))),
            Step(
                "ddp, compiled, saved every 10 steps",
                Train(_LARGE, (*_MEASURED, *_DDP, "train.compile=true", "train.save=true", "train.save_interval=10")),
            ),
            Step("fsdp, compiled", Train(_LARGE, (*_MEASURED, *_FSDP, "train.compile=true"))),
            Step("megatron-core", Train(_LARGE, (*_MEASURED, *_CORE))),
        ),
    ),
    4: ("Predicted and measured memory", _LIMIT_S, (Step("memory", "tests/gpu/test_memory.py", needs_gpu=True),)),
    5: (
        "Signals, faults and restarts",
        300,
        (
            Step("SIGTERM saves", Train(_DEMO, (*_LONG, *_DDP), signal_after=(20, signal.SIGTERM), exit_code=85)),
            Step("resumed", Train(_DEMO, (*_LONG, *_DDP), resumes="SIGTERM saves", further=20)),
            Step(
                "out of memory",
                Train(
                    _LARGE,
                    (*_UNSAVED, *_DDP, "batch.micro_batch_size=512"),
                    fails_with="cuda-out-of-memory",
                    exit_code=4,
                ),
                needs_gpu=True,
            ),
            Step(
                "killed and restarted",
                Train(
                    _DEMO,
                    (*_LONG, *_DDP, "train.train_iters=600", "train.save_interval=100", "restart.max=1"),
                    signal_after=(250, signal.SIGKILL),  # the second checkpoint waits until the first is whole
                ),
            ),
        ),
    ),
}  # fmt: skip
TINY: Final = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.seq_length=64",
    "model.make_vocab_size_divisible_by=128", "batch.micro_batch_size=1", "precision=fp32",
)  # fmt: skip
"""What a rehearsal changes."""


def argv_of(step: Train, noted: Path, checkpoint: str | None, *, tiny: bool) -> list[str]:
    """The command line; ``noted`` is the file for the run's id, ``checkpoint`` the folder that it loads."""
    changes = [*step.changes, *(TINY if tiny else ()), *([f"train.load={checkpoint}"] if checkpoint else ())]
    argv = [sys.executable, "-m", "tridock.cli", "train", str(ROOT / step.config), "--nproc", "1", "--force"]
    return [*argv, "--run-id-file", str(noted), *(word for change in changes for word in ("--set", change))]
