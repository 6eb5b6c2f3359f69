"""`make bench-gpu`: tokens/s, model TFLOP/s, MFU and peak memory of each engine on this machine's GPUs.

Model FLOPs are those of tridock.experiment.flops; a run's speed is the median over its logged iterations without the
first. What cannot run (memory, an engine that is not here) is named with its reason below the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tridock import run_folder
from tridock.records import read_lines
from tridock.report.summary import summarize

CONFIGS = Path("configs/bench")
TOKENIZER = "data/demo/tokenizer"
# What each engine changes in the experiment, which is written for megatron-core.
ENGINES = {
    "megatron-core bf16": [],
    "megatron-core fp16": ["precision=fp16"],
    "megatron-v1.1.5 fp16": [
        *("engine=megatron-deepspeed", "precision=fp16", "parallel.strategy=zero", "parallel.zero_stage=1"),
        *(f"data.vocab_file={TOKENIZER}/vocab.json", f"data.merge_file={TOKENIZER}/merges.txt"),
    ],
    "torch ddp bf16": ["engine=torch", "parallel.strategy=ddp"],
}


@dataclass(frozen=True)
class Measured:
    """One row: figures of a run that finished, or why it did not."""

    model: str
    engine: str
    device: str = ""
    ranks: int = 0
    tokens_per_second: float = 0.0
    model_tflops_per_rank: float = 0.0
    mfu: float | None = None
    peak_memory_gib: float = 0.0
    reason: str = ""


def measure(config: Path, engine: str, changes: list[str], nproc: int | None) -> Measured:
    """Trains once and reads what the run recorded."""
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder, "run-id")
        argv = [str(Path(sys.executable).with_name("tridock")), "train", str(config), "--run-id-file", str(noted)]
        argv += [word for change in changes for word in ("--set", change)]
        argv += ["--nproc", str(nproc)] if nproc else []
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            return Measured(config.stem, engine, reason=lines[-1] if lines else f"exit code {done.returncode}")
        run = Path("runs", noted.read_text().strip())
    return figures(config.stem, engine, run)


def figures(model: str, engine: str, run: Path) -> Measured:
    """The row of a finished run."""
    summary = summarize(run)
    end = read_lines(run / run_folder.EVENTS)[-1]
    ranks, speed, tflops = summary.ranks or 1, summary.tokens_per_second or 0.0, summary.model_tflops_per_rank or 0.0
    memory = (summary.peak_memory_bytes or 0) / 2**30
    return Measured(model, engine, end["device"], ranks, speed, tflops, summary.mfu, memory)


def show(rows: list[Measured]) -> Table:
    """The table that is printed."""
    table = Table(
        "model", "engine", "ranks", "tokens/s", "model TFLOP/s a rank", "MFU", "peak memory", title="bench-gpu"
    )
    for row in rows:
        if row.reason:
            table.add_row(row.model, row.engine, "did not run")
            continue
        mfu = "-" if row.mfu is None else f"{row.mfu:.1%}"
        speeds = (f"{row.tokens_per_second:,.0f}", f"{row.model_tflops_per_rank:.1f}")
        table.add_row(row.model, row.engine, str(row.ranks), *speeds, mfu, f"{row.peak_memory_gib:.1f} GiB")
    return table


def main() -> None:
    """Prints the table and writes runs/bench-gpu.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["gpt-125m", "gpt-345m", "gpt-1.3b"], help="of configs/bench")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--nproc", type=int, help="ranks (default: one a GPU)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for every run")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        for engine in arguments.engines:
            rows.append(measure(CONFIGS / f"{model}.yaml", engine, ENGINES[engine] + arguments.set, arguments.nproc))
            print(json.dumps(asdict(rows[-1])), flush=True)
    Console().print(show(rows))
    for row in rows:
        if row.reason:
            print(f"{row.model}, {row.engine}: {row.reason}")
    Path("runs/bench-gpu.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
