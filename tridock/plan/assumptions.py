"""What a plan assumes beside the experiment and the hostfile."""

from dataclasses import dataclass, replace

from tridock.contracts.calibration import Calibration
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.compute_time import Attention
from tridock.plan.correction import Correction
from tridock.plan.goodput import Failures
from tridock.plan.rates import Rates


@dataclass(frozen=True, slots=True)
class Assumptions:
    """None: not known."""

    gpu: Gpu | None = None
    network_gbit: float | None = None
    """Between nodes, of one node; what is usual with the GPU where left out."""
    tflops: float | None = None
    """Of one GPU while it computes, measured or wished for."""
    tokens: float | None = None
    """How many the model is to see in all; the run's own where left out."""
    cost_per_gpu_hour: float | None = None
    """In a currency of the user's."""
    attention: Attention = "fused"
    """Unfused: it writes its scores to memory, as Megatron's did until 2023."""
    overlaps: bool = True
    """False: a program that computes nothing while it communicates."""

    calibration: Calibration | None = None
    """What ``tridock calibrate`` measured; ``tflops`` wins over it."""
    calibration_source: str = ""
    """The file that it was read from."""
    correction: Correction | None = None
    """By the measurements of a run."""
    failures: Failures | None = None

    def rates(self, experiment: Experiment, slots: int) -> Rates:
        """Of nodes of so many slots. Raises :class:`RequestError` where the calibration lacks the precision."""
        precision, tflops = experiment.precision, self.tflops
        if self.correction is not None and self.correction.planned_s is None:
            tflops = 1.0
        rates = Rates.of(self.gpu, precision, tflops, self.network_gbit, experiment.train.tf32, slots=slots)
        rates = replace(rates, attention=self.attention, overlaps=self.overlaps)
        if self.calibration is not None and tflops is None:
            rates = rates.measured(self.calibration, precision, self.calibration_source)
        return rates if self.correction is None else rates.corrected(self.correction)
