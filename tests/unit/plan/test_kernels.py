"""How long kernels take by their shapes."""

from dataclasses import replace

import pytest

from tridock.gpus import GPUS
from tridock.layout.activations import Attention
from tridock.layout.kernels import KernelRates, attention_seconds, pass_seconds, product_seconds
from tridock.plan.rates import Rates

A100 = KernelRates(312.0, 108, 0.84, 0.64, 2039.0, 6e-6)
GIVEN = KernelRates(100.0, 1, 1.0, 1.0, 2039.0, 0.0, flat=True)


def share(rows: int, columns: int, inner: int) -> float:
    """Of the peak."""
    return 2.0 * rows * columns * inner / (312e12 * product_seconds(A100, rows, columns, inner))


def test_a_large_product_reaches_its_share_of_the_peak() -> None:
    assert share(8192, 8192, 8192) == pytest.approx(0.84, abs=0.05)


def test_a_last_wave_that_is_hardly_filled_takes_as_long_as_a_full_one() -> None:
    # Tiles of 256 x 128 on 108 units: 2 whole waves, and one tile more.
    full, one_more = (
        product_seconds(A100, 256 * 12, 128 * 18, 8192),
        product_seconds(A100, 256 * 12, 128 * 18 + 128, 8192),
    )
    assert one_more > 1.15 * full
    assert product_seconds(A100, 256 * 12, 128 * 18 - 64, 8192) == full


def test_a_short_inner_dimension_and_few_rows_cost_efficiency() -> None:
    assert share(8192, 8192, 256) < 0.7 * share(8192, 8192, 8192)
    assert share(128, 1024, 8192) < 0.5 * share(8192, 8192, 8192)


def test_sizes_that_are_no_multiples_of_64_are_slower() -> None:
    assert product_seconds(A100, 4096, 7200, 4096) > 1.2 * product_seconds(A100, 4096, 7232, 4096)


def test_a_thin_product_is_limited_by_memory() -> None:
    moved = 2 * (64 * 8192 + 8192 * 8192 + 64 * 8192)
    assert product_seconds(A100, 64, 8192, 8192) == pytest.approx(pass_seconds(A100, moved), rel=0.5)
    assert product_seconds(replace(A100, memory_gb_s=200.0), 64, 8192, 8192) == pytest.approx(
        pass_seconds(replace(A100, memory_gb_s=200.0), moved)
    )


def test_a_given_rate_holds_for_every_shape() -> None:
    assert product_seconds(GIVEN, 7, 13, 17) == pytest.approx(2.0 * 7 * 13 * 17 / 100e12)
    # Both products, of all tokens with all, as the FLOPs of an experiment count them.
    forward, backward = attention_seconds(GIVEN, 512, 4, 80, 2)
    assert (forward, backward) == pytest.approx((4.0 * 512 * 512 * 80 * 4 * 2 / 100e12, 8.0 * 512**2 * 640 / 100e12))


def test_attention_by_length_and_heads() -> None:
    def rate(length: int, heads: int, size: int, samples: int) -> float:
        return 2.0 * length * length * heads * size * samples / attention_seconds(A100, length, heads, size, samples)[0]

    assert rate(8192, 32, 128, 1) > 1.5 * rate(512, 32, 128, 16)
    assert rate(4096, 32, 128, 1) > rate(4096, 32, 112, 1)  # padded to 128
    assert rate(2048, 32, 128, 1) > 1.5 * rate(2048, 1, 128, 1)  # 16 blocks for 108 units
    assert rate(4096, 32, 128, 4) == pytest.approx(312e12 * 0.64 * 8 / 9, rel=0.06)


@pytest.mark.parametrize(
    ("kernel", "published"),
    [
        ("fused", {512: 315, 1024: 410, 2048: 484, 4096: 518, 8192: 529, 16384: 539}),
        ("flash-2", {512: 191, 1024: 260, 2048: 298, 4096: 319, 8192: 333, 16384: 335}),
    ],
)
def test_attention_on_h100_as_published(kernel: Attention, published: dict[int, int]) -> None:
    """cuDNN's and FlashAttention-2: causal, 16 heads of 128, 16,384 tokens (Shah et al., 2024, figure 5)."""
    device = Rates.of(GPUS["h100-80gb"], "bf16", None, None).device
    assert device is not None
    for length, tflops in published.items():
        samples = 16384 / length
        seconds, _ = attention_seconds(device, length, 16, 128, samples, kernel)
        assert 2.0 * length * length * 16 * 128 * samples / seconds / 1e12 == pytest.approx(tflops, rel=0.08), length


def test_older_kernels_of_attention_are_slower() -> None:
    def times(kernel: Attention) -> tuple[float, float]:
        return attention_seconds(A100, 4096, 32, 128, 4, kernel)

    assert times("flash-2") == times("fused")  # nothing faster was published for A100
    assert times("flash-triton") == pytest.approx((1.4 * times("flash-2")[0], 2 * times("flash-2")[1]))
    assert times("flash-1") == pytest.approx((2 * times("flash-2")[0], 2 * times("flash-2")[1]))


def test_gpus_without_figures_of_their_own_take_their_architectures() -> None:
    assert GPUS["a10"].kernels == GPUS["a6000"].kernels
    assert {gpu.network.gbit for gpu in GPUS.values()} == {25.0, 200.0, 400.0, 800.0}
