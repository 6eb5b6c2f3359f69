"""ResNet-50 "v1.5" (He et al., 2016, with the stride in the 3x3 convolution of a block).

As with DDP, batch normalization uses the statistics of each micro-batch on its rank: a step on r ranks equals one on a
single rank with r micro-batches. Evaluation averages the running statistics over the ranks.
"""

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tridock.experiment.model import Model
from tridock.experiment.resnet import EXPANSION, STAGES, STEM
from tridock.train.models.layered import LayeredModel

MEAN: Final = (0.485, 0.456, 0.406)
"""ImageNet's means of red, green and blue, on a scale of 0 to 1."""
DEVIATION: Final = (0.229, 0.224, 0.225)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class Norm(nn.BatchNorm2d):
    """Batch normalization in fp32, whatever the dtype of its input and of the weights that FSDP2 gathers."""

    momentum: float

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, statistics = self.weight.float(), self.bias.float(), (self.running_mean, self.running_var)
        return F.batch_norm(x, *statistics, scale, shift, self.training, self.momentum, self.eps)


class Bottleneck(nn.Module):
    """A residual block: [batch, inputs, height, width] to [batch, 4 x inner, height / stride, width / stride]."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = inner * EXPANSION
        self.reduce, self.reduce_norm = _convolution(inputs, inner, 1), Norm(inner)
        self.convolve, self.convolve_norm = _convolution(inner, inner, 3, stride), Norm(inner)
        self.expand, self.expand_norm = _convolution(inner, outputs, 1), Norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), Norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.reduce_norm(self.reduce(x)), inplace=True)
        inside = F.relu(self.convolve_norm(self.convolve(inside)), inplace=True)
        return F.relu(self.expand_norm(self.expand(inside)) + self.shortcut(x), inplace=True)


class ResNet(LayeredModel):
    """``model(images)`` takes uint8 [batch, 3, height, width] (red, green, blue); returns logits [batch, classes].

    With labels, int64 [batch], it returns the mean cross-entropy in nats, an fp32 scalar.
    """

    scale: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.stem, self.stem_norm = _convolution(3, STEM, 7, 2), Norm(STEM)
        blocks, inputs = [], STEM
        for count, inner, stride in STAGES:
            for number in range(count):
                blocks.append(Bottleneck(inputs, inner, stride if number == 0 else 1))
                inputs = inner * EXPANSION
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.head = nn.Linear(inputs, model.num_classes or 0)
        self.register_buffer("scale", torch.empty(2, 1, 3, 1, 1), persistent=False)
        self.reset_parameters()
        self.initialize_modules()

    def reset_parameters(self) -> None:
        self.scale.copy_(torch.tensor([MEAN, DEVIATION], device="cpu").view(self.scale.shape) * 255)

    def initialize(self, name: str, module: nn.Module) -> bool:
        """Initializes convolutions (He et al., 2015), and a branch's last normalization to 0 (Goyal et al., 2017)."""
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Norm) and name.endswith("expand_norm"):
            module.reset_parameters()
            nn.init.zeros_(module.weight)
        else:
            return False
        return True

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = ((images - self.scale[0]) / self.scale[1]).to(self.stem.weight.dtype)
        x = F.relu(self.stem_norm(self.stem(x)), inplace=True)
        x = F.max_pool2d(x, 3, 2, 1)
        for block in self.layers.values():
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return logits if labels is None else F.cross_entropy(logits.float(), labels)


def statistics(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the running means and variances of a model's batch normalizations, by name."""
    return [one for one in model.named_buffers() if one[0].endswith(("running_mean", "running_var"))]


def average_statistics(model: nn.Module) -> None:
    """Averages the running statistics over the ranks. A collective; does nothing for models without them."""
    found = [buffer for _, buffer in statistics(model)]
    if found and dist.get_world_size() > 1:
        flat = torch.cat([buffer.flatten() for buffer in found])
        dist.all_reduce(flat)
        parts = flat.div_(dist.get_world_size()).split([buffer.numel() for buffer in found])
        for buffer, part in zip(found, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
