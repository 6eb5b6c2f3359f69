"""Plans by their sizes alone, for tests of what depends on nothing else."""

from collections.abc import Sequence
from typing import Any

from tests.experiments import make_plan
from tridock.experiment import Experiment
from tridock.plan import Plan

TOKENIZER = {"vocab_file": "v", "merge_file": "m"}


def laid_out(
    tensor: int = 1,
    stages: int = 1,
    context: int = 1,
    data: int = 1,
    *,
    slots: Sequence[int] = (),
    virtual: int = 1,
    engine: str = "megatron-core",
    strategy: str = "ddp",
    stages_are_neighbours: bool = False,
    experts: int = 0,
    expert_tensor: int | None = None,
) -> Plan:
    """A legal experiment of these sizes on nodes n0, n1, ... of so many slots; on one node where ``slots`` is empty.

    ``experts``: the expert parallel size of a mixture of twice as many.
    """
    world, layers = tensor * stages * context * data, stages * virtual
    fields: dict[str, Any] = {
        "name": "tiny",
        "engine": engine,
        "precision": "fp32",
        "model": {
            "num_layers": layers,
            "hidden_size": tensor,
            "num_attention_heads": tensor,
            "seq_length": 2 * context * tensor,
            **({"num_moe_experts": 2 * experts, "add_bias_linear": False} if experts else {}),
        },
        "parallel": {
            "strategy": strategy,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": virtual,
            "context_parallel_size": context,
            "use_tp_pp_dp_mapping": stages_are_neighbours,
            **({"expert_model_parallel_size": experts, "sequence_parallel": tensor > 1} if experts else {}),
            **({"expert_tensor_parallel_size": expert_tensor} if expert_tensor else {}),
        },
        "batch": {"micro_batch_size": 1, "global_batch_size": data * stages if virtual > 1 else data},
        "data": {"data_path": "data/x", **(TOKENIZER if engine == "megatron-deepspeed" else {})},
        "train": {"train_iters": 1},
    }
    nodes = {f"n{number}": range(count) for number, count in enumerate(slots or [world])}
    plan = make_plan(Experiment.model_validate(fields), nodes, "e.yaml")
    assert plan.world_size == world
    return plan
