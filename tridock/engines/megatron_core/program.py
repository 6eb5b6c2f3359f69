"""The program of engine ``megatron-core``, and its checkpoints."""

from tridock.engines.megatron_core import overlap, transformer_engine
from tridock.engines.program import Program, RankProgram
from tridock.experiment import Experiment
from tridock.layout import Plan


class MegatronCoreProgram(Program):
    """NVIDIA's package under Tridock's training loop."""

    checkpoints_load_on = "any layout"
    # Its checkpoints do not depend on the layout, only on what the optimizer holds.
    checkpoint_fields = ("precision", "parallel.use_distributed_optimizer")

    def of_rank(self, experiment: Experiment, plan: Plan, run_path: str, load: str | None) -> RankProgram:
        arguments = ("--run-folder", run_path, *(() if load is None else ("--load", load)))
        # GPUs before Blackwell then start computation and communication in Megatron's order.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        return RankProgram("tridock.train.megatron_core.pretrain_gpt", arguments, env)

    packages = staticmethod(transformer_engine.packages)
    needs_multicast = staticmethod(overlap.needs_multicast)
