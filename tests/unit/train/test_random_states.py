"""Random numbers of a rank's own lie beside those that all ranks draw alike."""

import pytest
import torch

from tridock.train.models.gpt import TENSOR_PARALLEL_OFFSET, tensor_parallel_random_numbers

CPU = torch.device("cpu")


def drawn(rank: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's own, and what it draws after that."""
    torch.manual_seed(seed)
    with tensor_parallel_random_numbers(rank, CPU):
        own = torch.rand(4)
    return own, torch.rand(4)


def test_each_rank_has_its_own_and_all_continue_alike() -> None:
    (first, after), (second, after_second) = drawn(0), drawn(1)
    assert not torch.equal(first, second)
    assert torch.equal(after, after_second)
    assert not torch.equal(first, after)


def test_who_puts_the_generator_back_has_them_again() -> None:
    assert torch.equal(drawn(1)[0], drawn(1)[0])
    assert not torch.equal(drawn(1)[0], drawn(1, seed=6)[0])


def test_the_seeds_lie_as_far_apart_as_megatrons() -> None:
    torch.manual_seed(5)
    seed = int(torch.randint(1 << 62, ()))
    torch.manual_seed(seed + TENSOR_PARALLEL_OFFSET + 3)
    assert torch.equal(torch.rand(4), drawn(3)[0])


def test_an_error_leaves_the_generator_as_all_have_it() -> None:
    expected = drawn(0)[1]
    torch.manual_seed(5)
    with pytest.raises(KeyError), tensor_parallel_random_numbers(1, CPU):
        raise KeyError
    assert torch.equal(torch.rand(4), expected)
