"""The program of engine ``torch``, and its checkpoints."""

from collections.abc import Mapping

from tridock.engines.offload import NVME_OP, nvme_folders
from tridock.engines.program import Program, RankProgram
from tridock.experiment import Experiment
from tridock.layout import Plan


class TorchProgram(Program):
    """Tridock's own training loop."""

    checkpoints_load_on = "other replicas"
    has_plain_loop = True

    def of_rank(self, experiment: Experiment, plan: Plan, run_path: str, load: str | None) -> RankProgram:
        return RankProgram("tridock.train", ("--run-folder", run_path, *(() if load is None else ("--load", load))))

    def packages(self, experiment: Experiment) -> Mapping[str, str]:
        field = next(iter(nvme_folders(experiment).values()), None)
        return {} if field is None else {NVME_OP: field}

    def checkpoint_strategy(self, experiment: Experiment) -> str:
        """A strategy that splits the model writes fsdp's checkpoints."""
        return "fsdp" if experiment.parallel.splits_model else experiment.parallel.strategy

    nvme_folders = staticmethod(nvme_folders)
