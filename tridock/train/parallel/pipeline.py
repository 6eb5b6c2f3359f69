"""Pipeline parallelism with torch's pipelining and its schedules."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tridock.errors import Problem, RunError
from tridock.experiment.schema import Parallel
from tridock.train.parallel.strategies import Batch, inputs_and_labels
from tridock.train.rank.phases import BACKWARD, FORWARD, Phases

_SCHEDULES: Final = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
Loss = Callable[[Tensor, Tensor], Tensor]


def layers_of_stage(num_layers: int, stages: int, stage: int) -> range:
    """Returns the layers of a stage. Sizes differ by at most one, and larger stages come first."""
    size, longer = divmod(num_layers, stages)
    first = stage * size + min(stage, longer)
    return range(first, first + size + (stage < longer))


def stages_of_rank(parallel: Parallel, place: int) -> list[int]:
    """Returns the stages of the rank at a position of the pipeline; several with an interleaved schedule."""
    ranks = parallel.pipeline_model_parallel_size
    return [place + ranks * turn for turn in range(parallel.virtual_pipeline_model_parallel_size)]


def _check_torch() -> None:
    """Raises :class:`RunError` if torch's stages do not tell each other their shapes, as before torch 2.6."""
    if inspect.signature(PipelineStage).parameters["input_args"].default is not inspect.Parameter.empty:
        return
    todo = "use engine megatron-core, no pipeline, or an image on a newer base (docs/gpus.md)"
    what = "this torch is too old for pipelines of engine torch, which need 2.6"
    raise RunError(Problem("parallel.pipeline_model_parallel_size", what, torch.__version__, todo))


class Pipeline:
    """This rank's stages and their schedule."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        parallel: Parallel,
        mesh: DeviceMesh,
        device: torch.device,
        loss: Loss,
        steps: int,
        phases: Phases,
    ) -> None:
        _check_torch()
        count = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
        group, numbers = mesh.get_group(), stages_of_rank(parallel, mesh.get_local_rank())
        stages = [
            PipelineStage(part, number, count, device, group=group) for part, number in zip(parts, numbers, strict=True)
        ]
        for stage in stages:
            stage.forward_one_chunk = phases.around(FORWARD, stage.forward_one_chunk)  # type: ignore[method-assign]
            stage.backward_one_chunk = phases.around(BACKWARD, stage.backward_one_chunk)  # type: ignore[method-assign]
        self.is_first, self.is_last = 0 in numbers, count - 1 in numbers
        self._loss = loss
        self._schedule: Any
        if len(stages) > 1:
            self._schedule = ScheduleInterleaved1F1B(stages, n_microbatches=steps, loss_fn=self._applied)  # type: ignore[arg-type]
        else:
            self._schedule = _SCHEDULES[parallel.pipeline_schedule](
                stages[0], n_microbatches=steps, loss_fn=self._applied
            )
        # Otherwise the last stage keeps and copies the logits of all micro-batches, as older torch always does.
        has_option = "return_outputs" in inspect.signature(self._schedule.step).parameters
        self._options = {"return_outputs": False} if has_option else {}

    def _applied(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self._loss(outputs, target)

    def run(self, batches: Sequence[Batch], *, train: bool) -> Tensor | None:
        """Runs the forward pass, and with ``train`` the backward pass, over all micro-batches of a step.

        Each of ``batches`` is int64 [micro batch, seq_length + 1]. Returns the mean loss on the last stage, else None.
        """
        inputs, labels = map(torch.cat, zip(*map(inputs_and_labels, batches), strict=True))
        losses = self._pass(inputs, labels, train=train)
        return torch.stack(losses).mean() if self.is_last else None

    def outputs(self, inputs: Tensor, target: Tensor, taken: Loss) -> list[Tensor]:
        """Returns ``taken`` of each micro-batch's output and target; nothing on the other stages."""
        found: list[Tensor] = []

        def take(outputs: Tensor, target: Tensor) -> Tensor:
            found.append(taken(outputs, target))
            return outputs.new_zeros(())

        loss, self._loss = self._loss, take
        try:
            self._pass(inputs, target, train=False)
        finally:
            self._loss = loss
        return found

    def _pass(self, inputs: Tensor, target: Tensor, *, train: bool) -> list[Tensor]:
        """Returns the losses of the micro-batches on the last stage, nothing on the others."""
        losses: list[Tensor] = []
        here = (inputs.contiguous(),) if self.is_first else ()
        given: dict[str, Any] = {"target": target.contiguous(), "losses": losses} if self.is_last else {}
        (self._schedule.step if train else self._schedule.eval)(*here, **given, **self._options)
        return losses
