"""ResNet-50 in numbers: its convolutions, and what follows from them (He et al., 2016, table 1)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tridock.experiment.model import Model

STAGES: Final = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
"""Of each: blocks, width of their 3x3 convolution, its stride in the first one."""
EXPANSION: Final = 4
STEM: Final = 64


@dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution, followed by a batch normalization, on an image of ``height`` x ``width`` that it makes."""

    block: int
    """0 for the stem, then from 1."""
    inputs: int
    outputs: int
    kernel: int
    height: int
    width: int
    read: int
    """Elements of its input, of one image."""

    @property
    def weights(self) -> int:
        """Of the convolution itself."""
        return self.inputs * self.outputs * self.kernel**2

    @property
    def parameters(self) -> int:
        """Its weights, and the normalization's scale and shift."""
        return self.weights + 2 * self.outputs

    @property
    def made(self) -> int:
        """Elements of its output, of one image."""
        return self.outputs * self.height * self.width

    @property
    def products(self) -> int:
        """Multiplications of one image's forward pass."""
        return self.height * self.width * self.weights


def _half(size: int) -> int:
    return (size + 1) // 2


def convolutions(model: Model) -> Iterator[Convolution]:
    """All 53 in the order of the forward pass, of images of the model's size."""
    height, width = _half(model.img_h or 0), _half(model.img_w or 0)
    yield Convolution(0, 3, STEM, 7, height, width, 3 * (model.img_h or 0) * (model.img_w or 0))
    height, width, inputs, block = _half(height), _half(width), STEM, 0  # after the pooling
    for blocks, inner, first_stride in STAGES:
        for number in range(blocks):
            block += 1
            stride, outputs = first_stride if number == 0 else 1, inner * EXPANSION
            there = (_half(height), _half(width)) if stride == 2 else (height, width)
            yield Convolution(block, inputs, inner, 1, height, width, inputs * height * width)
            yield Convolution(block, inner, inner, 3, *there, inner * height * width)
            yield Convolution(block, inner, outputs, 1, *there, inner * there[0] * there[1])
            if number == 0:
                yield Convolution(block, inputs, outputs, 1, *there, inputs * height * width)
            (height, width), inputs = there, outputs


def classes_of(model: Model) -> int:
    return model.vocab_size or 0


def head_parameters(model: Model) -> int:
    """Of the last, fully connected layer."""
    return (model.hidden_size + 1) * classes_of(model)


def parameters(model: Model) -> int:
    """25,557,032 with 1000 classes."""
    return sum(one.parameters for one in convolutions(model)) + head_parameters(model)


def cast_elements(model: Model) -> int:
    """What autocast copies into the short format: weights of the convolutions and of the last layer."""
    return sum(one.weights for one in convolutions(model)) + head_parameters(model)


def largest_block(model: Model) -> int:
    """Weights of the block that has most."""
    sizes: dict[int, int] = {}
    for one in convolutions(model):
        sizes[one.block] = sizes.get(one.block, 0) + one.parameters
    return max(sizes.values())


def forward_flops(model: Model) -> float:
    """Of one image: two for each multiplication; normalizations and activation functions are not counted."""
    return 2.0 * (sum(one.products for one in convolutions(model)) + model.hidden_size * classes_of(model))


def kept_elements(model: Model) -> int:
    """What one image leaves for the backward pass: each convolution's input and output (its normalization's input).
    Activation functions work in place, and the few others are left out.
    """
    return sum(one.read + one.made for one in convolutions(model))
