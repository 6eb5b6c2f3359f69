"""Programs other than Tridock's engines, as a plan describes them: each plans, and differs from its engine."""

from pathlib import Path

import pytest

from tests.experiments import with_fields
from tests.planner.compare import tables
from tridock.cli.program import main
from tridock.engines.other_programs import other_programs
from tridock.errors import RequestError
from tridock.gpus import GPUS
from tridock.ops.runs.prepare import prepare
from tridock.plan import Assessment, Assumptions, assess

NAMES = list(other_programs())
CONFIG = Path(__file__).parents[3] / "configs/demo-3d.yaml"
LLAMA = {
    "name": "llama",
    "model": {
        "num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048, "vocab_size": 32000,
        "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope",
    },
    "batch": {"micro_batch_size": 2, "global_batch_size": 64},
    "data": {"data_path": "data/x", "vocab_file": "v", "merge_file": "m"},
    "train": {"train_iters": 3},
}  # fmt: skip
GPT = {"model.swiglu": False, "model.normalization": "LayerNorm", "model.position_embedding_type": "learned_absolute",
       "model.add_bias_linear": True, "precision": "fp16"}  # fmt: skip
STRATEGIES = {
    "torch": {"data.vocab_file": None, "data.merge_file": None, "parallel.strategy": "fsdp"},
    "megatron-core": {"data.vocab_file": None, "data.merge_file": None, "parallel.use_distributed_optimizer": True},
    "megatron-deepspeed": {**GPT, "parallel.strategy": "zero", "parallel.zero_stage": 1},
}


def planned(engine: str, name: str | None, **fields: object) -> Assessment:
    experiment = with_fields(LLAMA, {"engine": engine, **STRATEGIES[engine], **fields, "program": name})
    return assess(experiment, {"a": range(8)}, "e.yaml", Assumptions(GPUS["h100-80gb"]))


@pytest.mark.parametrize("name", NAMES)
def test_a_program_differs_from_its_engine(name: str) -> None:
    engine = other_programs()[name].engine
    own, other = planned(engine, None), planned(engine, name)
    assert [str(problem) for problem in (*own.problems, *other.problems)] == []
    figures = [(one.memory[0].total_bytes, one.cost.estimate) for one in (own, other) if one.cost is not None]
    assert figures[0] != figures[1]
    assert other.cost is not None
    assert own.cost is not None
    assert own.cost.rates.spread != other.cost.rates.spread
    assert other_programs()[name].source


def test_programs_of_the_published_tables() -> None:
    assert {table["program"] for table in tables() if "program" in table} <= set(NAMES)


@pytest.mark.parametrize(
    ("engine", "name", "what"),
    [("torch", "nemo", "of engine torch describes, but one of engine megatron-core"), ("torch", "x", "describes;")],
)
def test_a_program_of_another_engine_is_refused(engine: str, name: str, what: str) -> None:
    (problem,) = planned(engine, name).problems
    assert problem.where == "program"
    assert what in str(problem)
    assert "hf-trainer" in problem.nearest


def test_what_a_program_keeps_and_sends() -> None:
    def terms(name: str | None, engine: str = "megatron-core", **fields: object) -> dict[str, int]:
        return {term.name: term.bytes for term in planned(engine, name, **fields).memory[0].terms}

    assert 2 * terms("nemo")["gradients"] == terms(None)["gradients"]
    assert terms("hf-trainer", "torch")["logits and loss"] > 2 * terms(None, "torch")["logits and loss"]
    assert terms("megatron-deepspeed-0.5", "megatron-deepspeed")["cached buffers"] > 0
    stored = {"model.checkpoint_activations": True}
    assert "outputs of operations" not in terms("torchtitan", "torch", **stored)
    assert terms("torchtitan-selective", "torch", **stored)["outputs of operations"] > 0
    plain, nemo = planned("megatron-core", None).cost, planned("megatron-core", "nemo").cost
    assert plain is not None
    assert nemo is not None
    sent = [next(one.bytes_per_rank for one in cost.traffic if one.group == "data") for cost in (plain, nemo)]
    assert sent[1] == pytest.approx(sent[0] * 4 / 6)


def test_a_program_is_planned_but_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--config", str(CONFIG), "--nodes", "2", "--gpus-per-node", "8", "--gpu", "a100-80gb"]
    assert main([*arguments, "--program", "megatron-lm-2021"]) == 0
    assert "times the known terms, typically 1.03: 315 runs" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(RequestError) as caught:
        prepare(CONFIG, {"a": range(8), "b": range(8)}, Assumptions(), ["program=megatron-lm-2021"])
    assert str(caught.value) == (
        f"{CONFIG}: program: describes another program, which Tridock can plan but not start; "
        "got megatron-lm-2021; leave it out"
    )
