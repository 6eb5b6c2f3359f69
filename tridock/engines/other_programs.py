"""Programs that a plan can describe instead of an engine: what each keeps, sends and computes that the engine does not,
from its source (``other_programs.yaml``). Pure."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout.activations import Attention
from tridock.strict_yaml import Section, read_text, validated
from tridock.yaml_text import parse_yaml


class OtherProgram(Section):
    """How a program differs from its engine."""

    engine: str = ""
    source: str = ""
    attention: Attention = Field(default="fused", description="Kernel of attention.")
    overlaps: bool = Field(default=True, description="Whether it computes while it communicates.")
    gradients: int | None = Field(default=None, description="Bytes a parameter that a rank keeps of gradients.")
    reduced: int | None = Field(default=None, description="Bytes a parameter of the gradients that are scattered.")
    adds_gradients: bool = Field(default=False, description="A kernel of its own adds a gradient after its product.")
    fp8_weights: bool = Field(default=False, description="With model.fp8, matrices are in fp8 only, and gathered so.")
    fuses_rotation: bool = Field(default=False, description="Rotary embeddings are one kernel.")
    stepwise_norms: Literal["never", "recomputed", "always"] = Field(
        default="never", description="RMSNorm is several operations in fp32 unless compiled, or in recomputed layers."
    )
    sequence_parallel: bool = Field(default=False, description="TP splits the sequence between matrices.")
    fp32_logits: int = Field(default=0, description="Copies of all logits in fp32 in the loss; 0: the engine's.")
    gathers_logits: bool = Field(default=False, description="Each tensor parallel rank has the logits of all tokens.")
    swiglu: int = Field(default=0, description="Tensors of the MLP's width that SwiGLU keeps; 0: the engine's layers.")
    recomputed: float = Field(default=1.0, description="Share of a recomputed layer's forward pass that is repeated.")
    kept: float = Field(default=0.0, description="Share of a recomputed layer's activations that are kept.")
    cached: int = Field(default=0, description="Bytes a parameter that torch's allocator keeps of flat buffers.")


OWN: Final = OtherProgram()
"""The engine itself."""


@cache
def other_programs() -> Mapping[str, OtherProgram]:
    path = Path(__file__).with_name("other_programs.yaml")
    found = parse_yaml(read_text(path, "other programs"), str(path))
    return {name: validated(OtherProgram, fields, f"{path}: {name}") for name, fields in found.items()}


def other_program_of(experiment: Experiment) -> OtherProgram:
    return OWN if experiment.program is None else other_programs()[experiment.program]


def other_program_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields a program that is not known, or that another engine's plan describes."""
    if (name := experiment.program) is None:
        return
    names = tuple(known for known, one in other_programs().items() if one.engine == experiment.engine)
    if name not in names:
        what = f"is not a program that a plan of engine {experiment.engine} describes"
        if name in other_programs():
            what += f", but one of engine {other_programs()[name].engine}"
        yield Problem("program", what, name, f"use one of {', '.join(names)}, or leave it out", names)
