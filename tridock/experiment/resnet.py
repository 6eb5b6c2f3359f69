"""Sizes of ResNet-50: its convolutions, parameters, FLOPs and activations (He et al., 2016, table 1)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tridock.experiment.model import Model

STAGES: Final = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
"""Each stage's number of blocks, width of their 3x3 convolution, and its stride in the first block."""
EXPANSION: Final = 4
STEM: Final = 64


@dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution with its batch normalization; ``height`` and ``width`` are those of its output."""

    block: int
    """Number of its block; 0 for the stem."""
    inputs: int
    outputs: int
    kernel: int
    height: int
    width: int
    read: int
    """Elements of its input per image."""

    @property
    def weights(self) -> int:
        """Weights of the convolution alone."""
        return self.inputs * self.outputs * self.kernel**2

    @property
    def parameters(self) -> int:
        """Weights of the convolution, and the normalization's scale and shift."""
        return self.weights + 2 * self.outputs

    @property
    def made(self) -> int:
        """Elements of its output per image."""
        return self.outputs * self.height * self.width

    @property
    def products(self) -> int:
        """Multiplications in one image's forward pass."""
        return self.height * self.width * self.weights


def _half(size: int) -> int:
    return (size + 1) // 2


def convolutions(model: Model) -> Iterator[Convolution]:
    """Yields all 53 convolutions in the order of the forward pass, for images of the model's size."""
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
    """Returns the number of classes that the model predicts."""
    return model.vocab_size or 0


def head_parameters(model: Model) -> int:
    """Returns the parameters of the last, fully connected layer."""
    return (model.hidden_size + 1) * classes_of(model)


def parameters(model: Model) -> int:
    """Returns the number of parameters: 25,557,032 with 1000 classes."""
    return sum(one.parameters for one in convolutions(model)) + head_parameters(model)


def cast_elements(model: Model) -> int:
    """Returns the number of weights that autocast copies to 16 bits: those of convolutions and the last layer."""
    return sum(one.weights for one in convolutions(model)) + head_parameters(model)


def largest_block(model: Model) -> int:
    """Returns the number of weights of the largest block."""
    sizes: dict[int, int] = {}
    for one in convolutions(model):
        sizes[one.block] = sizes.get(one.block, 0) + one.parameters
    return max(sizes.values())


def forward_flops(model: Model) -> float:
    """Returns the forward FLOPs per image: two per multiplication, without normalizations and activation functions."""
    return 2.0 * (sum(one.products for one in convolutions(model)) + model.hidden_size * classes_of(model))


def kept_elements(model: Model) -> int:
    """Returns the elements per image that stay in memory for the backward pass: each convolution's input and output
    (its normalization's input). Activation functions work in place; the few other tensors are not counted."""
    return sum(one.read + one.made for one in convolutions(model))
