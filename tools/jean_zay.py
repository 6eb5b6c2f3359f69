"""Writes the table of docs/results.md that users on V100 hosts compare with (`make reference`).

The times are what Megatron-LM of 2021 logged on the Jean Zay cluster for the experiments of configs/jean-zay; all
else is computed from those experiments. A test compares the page with this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.engines import rules_of
from tridock.experiment import load_experiment
from tridock.experiment.parameters import model_flops_per_token, model_parameters, recomputed_flops_per_token
from tridock.gpus import GPUS
from tridock.layout.shape import GPT2_TOKENS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- Jean Zay: written by make reference -->", "<!-- end of Jean Zay -->"
GPU: Final = GPUS["v100-16gb"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that was measured: its experiment, the nodes of four GPUs that it had, seconds of an iteration."""

    name: str
    nodes: int
    seconds: float
    note: str = ""


MEASURED: Final = (
    Measured("7.5b", 4, 0.4300),
    Measured("30b", 16, 1.4393, "ran out of memory after 60 iterations"),
)
NOT_MEASURED: Final = "76b"
GPUS_OF_A_NODE: Final = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """What follows from a time. Rates are of one GPU, in TFLOP/s."""

    gpus: int
    parameters: int
    layout: str
    tokens: int
    """Of one iteration."""
    tokens_per_second: float
    model_tflops: float
    mfu: float
    hardware_tflops: float
    """With the activations that are computed again."""


def figures(run: Measured) -> Figures:
    """Model FLOPs of an iteration (tridock/experiment/parameters.py) over its time and over the GPUs."""
    experiment = load_experiment(ROOT / "configs" / "jean-zay" / f"{run.name}.yaml")
    model, parallel, gpus = experiment.model, experiment.parallel, run.nodes * GPUS_OF_A_NODE
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    replicas = gpus // (tensor * pipeline)
    tokens = experiment.batch.samples_per_step(replicas) * model.seq_length
    rows = rules_of(experiment).rows_of_vocabulary(experiment)
    speed = tokens / run.seconds
    needed = model_flops_per_token(model, rows)
    again = recomputed_flops_per_token(model, model.num_layers, selective=False)
    rate = speed * needed / gpus / 1e12
    peak = GPU.tflops(experiment.precision)
    assert peak is not None
    return Figures(
        gpus=gpus,
        parameters=model_parameters(model, rows),
        layout=f"TP{tensor} PP{pipeline} DP{replicas}",
        tokens=tokens,
        tokens_per_second=speed,
        model_tflops=rate,
        mfu=rate / peak,
        hardware_tflops=speed * (needed + again) / gpus / 1e12,
    )


def table() -> str:
    """The table and what it stands on, in Markdown."""
    names = ("experiment", "GPUs", "parameters", "layout", "tokens an iteration", "time", "tokens/s",
             "model TFLOP/s a GPU", "MFU", "with recomputation", "")  # fmt: skip
    head = f"| {' | '.join(names)}|\n{'|---' * len(names)}|\n"
    rows = "".join(_row(run, figures(run)) for run in MEASURED)
    experiment = load_experiment(ROOT / "configs" / "jean-zay" / f"{MEASURED[0].name}.yaml")
    return (
        f"{head}{rows}\n"
        f"`configs/jean-zay/{NOT_MEASURED}.yaml` never received an allocation and has no time.\n\n"
        "Model FLOPs of an iteration of B samples with V rows in the vocabulary:\n"
        "72 B s l h² (1 + s / 6h + V / 12 l h), forward and backward, without recomputation, with full\n"
        "attention (Narayanan et al., 2021, section 5.1; `tridock/experiment/parameters.py`). MFU is their\n"
        f"rate over {GPU.tflops_16:g} TFLOP/s, the dense fp16 peak of a V100 SXM2 (NVIDIA's data sheet;\n"
        "`tridock/gpus.py`). The column with recomputation adds each layer's second forward pass. GPT-2's\n"
        f"vocabulary of {GPT2_TOKENS:,} is padded to {rules_of(experiment).rows_of_vocabulary(experiment):,} rows.\n"
    )


def _row(run: Measured, found: Figures) -> str:
    cells = (
        f"`configs/jean-zay/{run.name}.yaml`",
        f"{found.gpus} V100-16GB",
        f"{found.parameters / 1e9:.2f}B",
        found.layout,
        f"{found.tokens:,}",
        f"{run.seconds * 1000:,.0f} ms",
        f"{found.tokens_per_second:,.0f}",
        f"{found.model_tflops:.1f}",
        f"{found.mfu:.1%}",
        f"{found.hardware_tflops:.1f}",
        run.note,
    )
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def with_table(page: str) -> str:
    """docs/results.md with its table brought up to date."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
