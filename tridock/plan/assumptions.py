"""What a plan assumes besides the experiment and the hostfile."""

from dataclasses import dataclass, replace

from tridock.contracts.calibration import Calibration
from tridock.engines.other_programs import other_program_of
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.activations import Attention
from tridock.layout.shape import LayoutShape
from tridock.layout.split import size_of_replica
from tridock.plan.correction import Correction
from tridock.plan.goodput import Failures
from tridock.plan.rates import Rates
from tridock.plan.spread import RunClass, time_spreads


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
    attention: Attention | None = None
    """What computes it, if not the program's own kernel: older ones are slower; unfused ones write the scores to
    memory."""
    overlaps: bool = True
    """False: the program does not overlap computation and communication."""

    calibration: Calibration | None = None
    """The measurements of ``tridock calibrate``; ``tflops`` takes precedence."""
    calibration_source: str = ""
    """The file that holds the calibration."""
    correction: Correction | None = None
    """The correction by a run's measurements."""
    failures: Failures | None = None

    def attention_of(self, experiment: Experiment) -> Attention:
        return self.attention or other_program_of(experiment).attention

    def shape(self, experiment: Experiment, world_size: int, per_node: int) -> LayoutShape:
        """Returns the shape of a legal layout on nodes of ``per_node`` slots, which the GPU's NVLink may connect."""
        data = max(1, world_size // size_of_replica(experiment))
        gpu, nodes = self.gpu, 1
        if gpu is not None and gpu.domain is not None:
            nodes = max(1, min(gpu.domain, world_size) // per_node)
        multicast = gpu is not None and gpu.has_multicast
        return LayoutShape(data, experiment.batch.accumulation_steps(data), nodes * per_node, multicast, nodes)

    def rates(self, experiment: Experiment, shape: LayoutShape) -> Rates:
        """Returns the rates between nodes. Raises :class:`RequestError` if the calibration lacks the precision."""
        precision, tflops = experiment.precision, self.tflops
        if self.correction is not None and self.correction.planned_s is None:
            tflops = 1.0
        gbit = None if self.network_gbit is None else self.network_gbit * shape.nodes
        rates = Rates.of(self.gpu, precision, tflops, gbit, experiment.train.tf32, slots=shape.slots)
        program = other_program_of(experiment)
        ranks, measured = shape.data * size_of_replica(experiment), self.calibration is not None
        spread = time_spreads().get(RunClass.of(experiment, ranks, self.gpu, calibrated=measured))
        attention, overlaps = self.attention_of(experiment), self.overlaps and program.overlaps
        rates = replace(rates, attention=attention, overlaps=overlaps, spread=spread)
        if self.calibration is not None and tflops is None:
            rates = rates.measured(self.calibration, precision, self.calibration_source)
        return rates if self.correction is None else rates.corrected(self.correction)
