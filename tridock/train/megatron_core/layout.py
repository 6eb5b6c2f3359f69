"""A rank's place in megatron-core's groups, and its random seeds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from tridock.experiment.schema import Parallel
from tridock.layout.plan import layout_label
from tridock.train.data.dataset import mixed_seed
from tridock.train.rank.process_group import collective_timeout


@dataclass(frozen=True, slots=True)
class Layout:
    """This rank's place. Ranks are numbered by tensor, context, data, pipeline; or the last two change places."""

    data_parallel_rank: int
    data_parallel_size: int
    context_parallel_rank: int
    context_parallel_size: int
    stage: int
    stages: int
    description: str
    """The layout, to print."""

    @classmethod
    def form(cls, parallel: Parallel) -> Layout:
        """Creates megatron-core's groups in the current process group. A collective."""
        if parallel_state.is_initialized():  # by an earlier run of this process
            parallel_state.destroy_model_parallel()
        virtual = parallel.virtual_pipeline_model_parallel_size
        parallel_state.initialize_model_parallel(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            distributed_timeout_minutes=collective_timeout() / timedelta(minutes=1),
            create_gloo_process_groups=False,
        )
        return cls(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            _description(parallel),
        )

    def reseed(self, seed: int, iteration: int) -> None:
        """Seeds dropout by iteration and place, so that a resumed run draws the same numbers as an uninterrupted one.

        Tensor parallel ranks share a seed, because they must drop the same elements of replicated tensors. Megatron
        gives each rank its own seed for split tensors.
        """
        place = (self.data_parallel_rank, self.context_parallel_rank, self.stage)
        mixed = mixed_seed(seed, *place, iteration) >> 2
        torch.manual_seed(mixed)
        tensor_parallel.model_parallel_cuda_manual_seed(mixed)

    def share(self, loss: Tensor | None, device: torch.device) -> Tensor:
        """Returns on all ranks the last stage's loss, averaged over ranks with different tokens. A collective."""
        shared = torch.zeros((), device=device) if loss is None else loss.detach().float()
        if loss is not None:
            dist.all_reduce(shared, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            shared /= self.data_parallel_size * self.context_parallel_size
        if self.stages > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(shared, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        return shared


def _description(parallel: Parallel) -> str:
    layout = layout_label(parallel, parallel_state.get_data_parallel_world_size())
    layout += " sequence parallel" if parallel.sequence_parallel else ""
    return layout + (" distributed optimizer" if parallel.use_distributed_optimizer else "")
