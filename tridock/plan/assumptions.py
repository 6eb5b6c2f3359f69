"""What a plan assumes besides the experiment and the hostfile."""

from dataclasses import dataclass, replace

from tridock.contracts.calibration import Calibration
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.activations import Attention
from tridock.layout.shape import Shape
from tridock.plan.correction import Correction
from tridock.plan.goodput import Failures
from tridock.plan.rates import Rates


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The user's assumptions. None: unknown."""

    gpu: Gpu | None = None
    network_gbit: float | None = None
    """Bandwidth between nodes, of one node; the usual one for the GPU if omitted."""
    tflops: float | None = None
    """Rate of one GPU while it computes, measured or desired."""
    tokens: float | None = None
    """Tokens to train on in all; the run's own number if omitted."""
    cost_per_gpu_hour: float | None = None
    """In the user's currency."""
    attention: Attention = "fused"
    """What computes it: older programs have slower kernels; unfused ones write the scores to memory."""
    overlaps: bool = True
    """False: the program does not overlap computation and communication."""

    calibration: Calibration | None = None
    """The measurements of ``tridock calibrate``; ``tflops`` takes precedence."""
    calibration_source: str = ""
    """The file that holds the calibration."""
    correction: Correction | None = None
    """The correction by a run's measurements."""
    failures: Failures | None = None

    def shape(self, data: int, accumulation: int, per_node: int, world_size: int) -> Shape:
        """Returns the shape of a layout with so many replicas and micro batches on nodes of ``per_node`` slots, which
        the GPU's NVLink may connect."""
        gpu, nodes = self.gpu, 1
        if gpu is not None and gpu.domain is not None:
            nodes = max(1, min(gpu.domain, world_size) // per_node)
        multicast = gpu is not None and gpu.has_multicast
        return Shape(data, accumulation, nodes * per_node, multicast, nodes)

    def rates(self, experiment: Experiment, shape: Shape) -> Rates:
        """Returns the rates between nodes as the shape has them. Raises :class:`RequestError` if the calibration lacks
        the precision."""
        precision, tflops = experiment.precision, self.tflops
        if self.correction is not None and self.correction.planned_s is None:
            tflops = 1.0
        gbit = None if self.network_gbit is None else self.network_gbit * shape.nodes
        rates = Rates.of(self.gpu, precision, tflops, gbit, experiment.train.tf32, slots=shape.slots)
        rates = replace(rates, attention=self.attention, overlaps=self.overlaps)
        if self.calibration is not None and tflops is None:
            rates = rates.measured(self.calibration, precision, self.calibration_source)
        return rates if self.correction is None else rates.corrected(self.correction)
