"""What a strategy refuses before it builds anything, and what it does not refuse."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.train.experiments import experiment
from tridock.errors import RequestError, RunError
from tridock.train.models.gpt import GPT, Shape, parameter_groups
from tridock.train.parallel import pipeline
from tridock.train.parallel.strategies import build_strategy
from tridock.train.rank.process_group import Ranks, join, leave

ZERO = {"parallel.strategy": "zero", "parallel.zero_stage": 2}


def model() -> GPT:
    with torch.device("meta"):
        return GPT(Shape.of(experiment().model, 96))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRIDOCK_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield join()
    leave()


def test_fp16_where_the_processor_has_none(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    monkeypatch.setattr(type(deepspeed.get_accelerator()), "is_fp16_supported", lambda _: False)
    (tmp_path / "ds_config.json").write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,'
        ' "fp16": {"enabled": true, "loss_scale": 0}}'
    )
    made = build_strategy(model(), experiment(**ZERO, precision="fp16"), alone, tmp_path)
    assert next(made.engine.parameters()).dtype == torch.float16


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_ddp_on_one_rank_is_torchs_own_loop(alone: Ranks, tmp_path: Path, micro_batches: int, precision: str) -> None:
    """Clipped, over micro-batches, with fp16's loss scale: the update is that of the mean gradient, each step anew."""
    scale = {"precision": precision, **({"fp16.loss_scale": 256.0} if precision == "fp16" else {})}
    still = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0, "parallel.strategy": "ddp"}
    given = experiment(**{"optimizer.clip_grad": 0.25, **still, "parallel.zero_stage": 0, **scale})
    by = 256.0 if precision == "fp16" else 1.0
    torch.manual_seed(5)
    with torch.device("meta"):
        made = GPT(Shape.of(given.model, 96))
    mine = build_strategy(made, given, alone, tmp_path)
    theirs = copy.deepcopy(mine.module)
    settings = given.optimizer
    optimizer = torch.optim.AdamW(
        parameter_groups(theirs, settings.weight_decay), lr=1e-2, eps=settings.adam_eps,
        betas=(settings.adam_beta1, settings.adam_beta2),
    )  # fmt: skip
    for seed in range(3):
        torch.manual_seed(seed)
        batches = [torch.randint(96, (2, given.model.seq_length + 1)) for _ in range(micro_batches)]
        step = mine.step(batches, 1e-2)
        optimizer.zero_grad()
        for batch in batches:
            with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
                loss = theirs(batch[:, :-1], batch[:, 1:])
            (loss * by / micro_batches).backward()
        for parameter in theirs.parameters():
            parameter.grad.div_(by)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.25)
        assert norm > 0.25
        optimizer.step()
        torch.testing.assert_close(step.grad_norm.float(), norm, rtol=1e-4, atol=0)
    for ours, other in zip(mine.module.parameters(), theirs.parameters(), strict=True):
        # Keys have no use for a bias: its gradient is rounding alone, which Adam makes as large as others.
        torch.testing.assert_close(ours, other, rtol=0, atol=2e-3 if precision == "fp16" else 2e-5)


def test_a_broken_deepspeed_config(alone: Ranks, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{")
    with pytest.raises(RequestError) as caught:
        build_strategy(model(), experiment(**ZERO), alone, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/ds_config.json: cannot be read; strategy zero needs it; "
        "got Expecting property name enclosed in double quotes: line 1 column 2 (char 1); "
        "start the run with `tridock launch` or `tridock train`, which write it"
    )


def test_a_pipeline_is_refused_by_a_torch_whose_stages_want_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of torch 2.5 do, and perhaps of base image 24.12."""

    def stage(submodule: Any, stage_index: int, num_stages: int, device: Any, input_args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(pipeline, "PipelineStage", stage)
    parallel = experiment(**{"parallel.pipeline_model_parallel_size": 2}).parallel
    given: Any = ([], parallel, None, torch.device("cpu"), None, 2, None)
    with pytest.raises(RunError) as caught:
        pipeline.Pipeline(*given)
    assert str(caught.value) == (
        "parallel.pipeline_model_parallel_size: this torch is too old for pipelines of engine torch, which need 2.6; "
        f"got {torch.__version__}; use engine megatron-core, no pipeline, or an image on a newer base (docs/gpus.md)"
    )
