"""The loss in chunks, against torch's own."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tridock.train.models import cross_entropy as module
from tridock.train.models.cross_entropy import cross_entropy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def sample(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 9, 50, generator=generator).mul(8).to(dtype)
    return logits, torch.randint(50, (2, 9), generator=generator)


def both(logits: Tensor, labels: Tensor, scale: float, *, compiled: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradient: ours and torch's, of the logits in fp32."""
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    # Its gradient takes the place of the logits: those of a leaf may not be overwritten.
    mine = cross_entropy(ours * 1, labels, compiled=compiled)
    other = functional.cross_entropy(theirs.float().flatten(0, 1), labels.flatten())
    (mine * scale).backward()
    (other * scale).backward()
    return [mine, ours.grad], [other, theirs.grad]


@pytest.mark.parametrize("rows", [1, 4, 1000], ids=["a row a chunk", "the last chunk shorter", "one chunk"])
@pytest.mark.parametrize("precision", DTYPES)
def test_loss_and_gradient_are_torchs(precision: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOSS_CHUNK_BYTES", rows * 50 * 4)
    ours, theirs = both(*sample(DTYPES[precision]), scale=512.0)
    assert ours[0].dtype == torch.float32
    assert ours[1].dtype == DTYPES[precision]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours[1], theirs[1])


@pytest.mark.full  # tests/distributed/test_compile.py
@pytest.mark.parametrize("precision", DTYPES)
def test_compiled_loss_and_gradient_are_torchs(precision: str) -> None:
    ours, theirs = both(*sample(DTYPES[precision]), scale=512.0, compiled=True)
    assert ours[1].dtype == DTYPES[precision]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours[1], theirs[1])


def test_far_apart_logits_and_a_hopeless_label() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0], [float("-inf"), 0.0, 0.0]]])
    ours, theirs = both(logits, torch.tensor([[1, 2]]), scale=1.0)
    assert ours[0].item() == theirs[0].item() == pytest.approx((2e4 + 0.6931472) / 2)
    assert torch.equal(ours[1].nan_to_num(9), theirs[1].nan_to_num(9))


def test_a_second_backward_pass_is_refused() -> None:
    logits, labels = sample(torch.float32)
    loss = cross_entropy(logits.requires_grad_() * 1, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class LargestFp32(TorchDispatchMode):
    """The most elements that a tensor in fp32 had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


def test_no_more_than_a_chunk_is_ever_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOSS_CHUNK_BYTES", 5 * 50 * 4)
    logits, labels = sample(torch.bfloat16)
    with LargestFp32() as seen:
        cross_entropy(logits.requires_grad_() * 1, labels).backward()
    assert seen.elements == 5 * 50
