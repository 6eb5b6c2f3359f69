"""Pipeline parallelism with torch's pipelining and its schedules."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tridock.experiment.schema import Parallel
from tridock.train.rank.phases import BACKWARD, FORWARD, Phases

_SCHEDULES: Final = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
Loss = Callable[[Tensor, Tensor], Tensor]


def layers_of_stage(num_layers: int, stages: int, stage: int) -> range:
    """The layers of a stage: sizes differ by at most one, larger stages first."""
    size, longer = divmod(num_layers, stages)
    first = stage * size + min(stage, longer)
    return range(first, first + size + (stage < longer))


def stages_of_rank(parallel: Parallel, place: int) -> list[int]:
    """The stages of the rank at this position of the pipeline; several with an interleaved schedule."""
    ranks = parallel.pipeline_model_parallel_size
    return [place + ranks * turn for turn in range(parallel.virtual_pipeline_model_parallel_size)]


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
        count = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
        group, numbers = mesh.get_group(), stages_of_rank(parallel, mesh.get_local_rank())
        stages = [
            PipelineStage(part, number, count, device, group=group) for part, number in zip(parts, numbers, strict=True)
        ]
        for stage in stages:
            stage.forward_one_chunk = phases.around(FORWARD, stage.forward_one_chunk)  # type: ignore[method-assign]
            stage.backward_one_chunk = phases.around(BACKWARD, stage.backward_one_chunk)  # type: ignore[method-assign]
        self.is_first, self.is_last = 0 in numbers, count - 1 in numbers
        self._schedule: Any
        if len(stages) > 1:
            self._schedule = ScheduleInterleaved1F1B(stages, n_microbatches=steps, loss_fn=loss)  # type: ignore[arg-type]
        else:
            self._schedule = _SCHEDULES[parallel.pipeline_schedule](stages[0], n_microbatches=steps, loss_fn=loss)
        # Otherwise the last stage keeps and copies the logits of all micro-batches, as older torch always does.
        has_option = "return_outputs" in inspect.signature(self._schedule.step).parameters
        self._options = {"return_outputs": False} if has_option else {}

    def run(self, batches: Sequence[Tensor], *, train: bool) -> Tensor | None:
        """Forward, and with ``train`` backward, over int64 [micro batch, seq_length + 1].

        Returns the mean loss on the last stage, None on the others.
        """
        whole = torch.cat(list(batches))
        inputs = (whole[:, :-1].contiguous(),) if self.is_first else ()
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": whole[:, 1:].contiguous(), "losses": losses} if self.is_last else {}
        (self._schedule.step if train else self._schedule.eval)(*inputs, **given, **self._options)
        return torch.stack(losses).mean() if self.is_last else None
