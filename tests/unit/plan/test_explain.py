"""`tridock plan --explain`: every field of both schemas, and no rule that it does not name."""

import re
from itertools import chain

import pytest

from tridock.cluster.schema import Settings
from tridock.errors import RequestError
from tridock.experiment import Experiment, parse_experiment
from tridock.plan.explain import COMPLETE, _places, effects, explain, rules_of
from tridock.plan.legality import layout_problems

BASE = """\
name: tiny
model: {num_layers: 6, hidden_size: 8, num_attention_heads: 3, seq_length: 15, max_position_embeddings: 8}
batch: {micro_batch_size: 2, global_batch_size: 7}
data: {data_path: data/x, split: "1,0,1"}
optimizer: {lr_warmup_iters: 30, min_lr: 1.0}
train: {train_iters: 30, seed: 0, save: false, checkpoint_folder: x, eval_interval: 5}
megatron_args: [--fp16]
"""
ALL = [
    "model.checkpoint_num_layers=4", "model.partition_activations=true", "model.checkpoint_in_cpu=true",
    "model.contiguous_checkpointing=true", "model.synchronize_each_layer=true", "model.recompute_method=block",
    "model.recompute_num_layers=4", "parallel.strategy=zero", "parallel.zero_stage=2",
    "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=4",
    "parallel.virtual_pipeline_model_parallel_size=2", "parallel.context_parallel_size=2",
    "parallel.sequence_parallel=true", "parallel.use_distributed_optimizer=true",
]  # fmt: skip
PARAMETERS = [field.path for field in _places("experiment", Experiment, "") if field.section is None]


def test_a_field_whole() -> None:
    assert (
        explain("parallel.virtual_pipeline_model_parallel_size")
        == """\
parallel.virtual_pipeline_model_parallel_size (experiment)
  Engines megatron-core and torch: model chunks per pipeline stage, for the interleaved schedule.
  type     whole number, greater than 0 and at most 16384
  default  1
  rule     only with engine torch or megatron-core
  rule     torch: goes with pipeline_schedule interleaved
  rule     needs pipeline_model_parallel_size 2 or more
  rule     divides the layers of a stage
  rule     global_batch_size: a multiple of micro_batch_size x d p
  memory   the first stage keeps 1 + (p - 1) / (p v) times the activations, v being this
  time     the waiting is divided by it; v times as many messages between stages
  where    s tokens of a sample, b samples of a micro-batch, h hidden size, a heads, V rows of the vocabulary;
           t, p, c, d tensor, pipeline, context and data parallel size; m micro-batches of a step
"""
    )


def test_a_section_whole() -> None:
    assert (
        explain("batch")
        == """\
batch (experiment)
  Samples per step.
  micro_batch_size   Samples per forward pass on one rank.
  global_batch_size  Samples per optimizer step: micro batch x data parallel size x accumulation steps.
                     Default: no accumulation.
"""
    )


def test_a_name_of_both_schemas_gives_both() -> None:
    assert (
        explain("name")
        == """\
name (experiment)
  Short name; every run id starts with it.
  type     text that matches ^[a-z0-9][a-z0-9._-]{0,40}$
  default  none: it must be given

name (cluster settings)
  Name of the cluster. Default: the hostfile's name.
  type     text that matches ^[a-z0-9][a-z0-9_-]{0,40}$ or null
  default  null
"""
    )


def test_a_nodes_own_field() -> None:
    assert explain("nodes.gpu-a.listen") == explain("nodes.NAME.listen")
    assert explain("nodes.gpu-a.listen").startswith("nodes.NAME.listen (cluster settings)\n")


@pytest.mark.parametrize(
    ("field", "type_and_default"),
    [
        ("engine", ["one of torch, megatron-deepspeed, megatron-core", "torch"]),
        ("model.hidden_dropout", ["number, at least 0 and less than 1", "0.1"]),
        ("model.recompute_method", ["one of uniform, block or null", "null"]),
        ("parallel.zero_stage", ["one of 0, 1, 2, 3", "0"]),
        ("parallel.sequence_parallel", ["true or false", "false"]),
        ("optimizer.lr_decay_iters", ["whole number, greater than 0 or null", "null"]),
        ("megatron_args", ["list of text that matches ^[^\\n\\r\\x00']+$", "[]"]),
        ("ssh_port", ["whole number, at least 1024 and at most 65535", "2222"]),
        ("container.ulimits",
         ["mapping of names to text that matches ^(-1|[0-9]+)(:(-1|[0-9]+))?$ or whole number",
          '{"memlock": -1, "stack": 67108864}']),
    ],
)  # fmt: skip
def test_type_and_default_as_text(field: str, type_and_default: list[str]) -> None:
    assert re.findall(r"^  (?:type|default) +(.+)$", explain(field), re.MULTILINE) == type_and_default


@pytest.mark.parametrize(
    ("field", "todo"),
    [
        ("paralel.zero_stage", "did you mean parallel.zero_stage?"),
        ("zero_stage", "did you mean parallel.zero_stage?"),
        ("nodes..env", "did you mean nodes.NAME.env?"),
        ("qqqq", "configs/reference.yaml and docs/cluster.md have all of them"),
    ],
)
def test_an_unknown_field_is_told_its_neighbour(field: str, todo: str) -> None:
    with pytest.raises(RequestError) as caught:
        explain(field)
    assert str(caught.value) == f"--explain: is not a field; got {field!r}; {todo}"


def test_every_field_of_both_schemas_is_explained() -> None:
    for model in (Experiment, Settings):
        for place in _places("", model, ""):
            text = explain(place.path)
            assert f"{place.path} (" in text
            assert all(len(line) <= 110 for line in text.splitlines() if " that matches " not in line)


def test_no_field_that_memory_or_time_depends_on_is_missing() -> None:
    wanted = {path for path in PARAMETERS if path.startswith(COMPLETE)}
    assert wanted == {path for path in effects() if path.startswith(COMPLETE)}
    assert set(PARAMETERS) >= effects().keys()


@pytest.mark.parametrize("engine", ["torch", "megatron-deepspeed", "megatron-core"])
def test_a_field_that_can_be_refused_has_a_rule(engine: str) -> None:
    changes = [[], ["model.checkpoint_activations=true", "parallel.strategy=ddp"], ["model.recompute_granularity=full"]]
    experiments = [parse_experiment(BASE, "e.yaml", [f"engine={engine}", *ALL, *change]) for change in changes]
    problems = list(chain.from_iterable(layout_problems(experiment, 9) for experiment in experiments))
    assert len(problems) > 20
    for where in {problem.where for problem in problems} - {"parallel"}:
        assert rules_of(where), where
