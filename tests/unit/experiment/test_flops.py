"""Model FLOPs against the sum of the matrix products, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.experiment.model import Model
from tridock.experiment.parameters import model_flops_per_token, model_parameters

SIZES = st.integers(1, 4096)


@given(layers=SIZES, width=SIZES, sequence=SIZES, vocabulary=SIZES)
def test_the_papers_formula_is_the_sum_of_the_products(layers: int, width: int, sequence: int, vocabulary: int) -> None:
    model = Model(num_layers=layers, hidden_size=width, num_attention_heads=1, seq_length=sequence)
    # Multiply-adds of a token: query, key, value, output; scores and weighted values; the two of the MLP; the logits.
    layer = 4 * width**2 + 2 * sequence * width + 8 * width**2
    forward = 2 * (layers * layer + width * vocabulary)
    assert model_flops_per_token(model, vocabulary) == pytest.approx(3 * forward)


@given(width=SIZES, heads=st.integers(1, 64), size=st.integers(1, 256), sequence=SIZES)
def test_heads_with_a_size_of_their_own(width: int, heads: int, size: int, sequence: int) -> None:
    model = Model(num_layers=1, hidden_size=width, num_attention_heads=heads, kv_channels=size, seq_length=sequence)
    attention = 4 * width * heads * size + 2 * sequence * heads * size
    assert model_flops_per_token(model, 0) == pytest.approx(3 * 2 * (attention + 8 * width**2))


def test_gpt_xl_has_gpt3s_heads_unless_others_are_given() -> None:
    preset = Model(preset="gpt-xl", seq_length=1024)
    assert (preset.num_attention_heads, preset.kv_channels, preset.attention_size) == (24, 128, 3072)
    assert model_parameters(preset, 50257) == 1_515_026_432
    fewer = Model(preset="gpt-xl", num_attention_heads=16, seq_length=1024)
    assert (fewer.kv_channels, fewer.attention_size) == (None, 2048)
    assert model_parameters(fewer, 50257) == 1_313_626_112
    assert Model(preset="gpt-large", seq_length=8).attention_size == 1536


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("smollm2-135m", 134_515_008),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_parameters_that_are_published(preset: str, parameters: int) -> None:
    model = Model.model_validate({"preset": preset, "seq_length": 1024})
    assert model_parameters(model, model.vocab_size or 50257) == parameters


def test_a_mixture_of_experts_works_on_a_token_with_some_of_them() -> None:
    """Mixtral 8x7B: 12.9 B of its 46.7 B parameters (Jiang et al., 2024); the others take no FLOPs."""
    model = Model.model_validate({"preset": "mixtral-8x7b", "seq_length": 1024})
    assert model_parameters(model, 32000, active=True) == 12_879_925_248
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 8 * 4096
    wanted = 3 * 2 * (32 * (layer + 2 * 1024 * 4096) + 4096 * 32000)
    assert model_flops_per_token(model, 32000) == pytest.approx(wanted)


@given(groups=st.sampled_from((1, 2, 4, 8)), width=SIZES, ffn=SIZES, swiglu=st.booleans(), sequence=SIZES)
def test_query_groups_and_swiglu(groups: int, width: int, ffn: int, swiglu: bool, sequence: int) -> None:
    model = Model(
        num_layers=1, hidden_size=width, num_attention_heads=8, kv_channels=16, num_query_groups=groups,
        ffn_hidden_size=ffn, swiglu=swiglu, seq_length=sequence,
    )  # fmt: skip
    attention = 2 * width * 128 + 2 * width * 16 * groups + 2 * sequence * 128
    mlp = (3 if swiglu else 2) * width * ffn
    assert model_flops_per_token(model, 0) == pytest.approx(3 * 2 * (attention + mlp))


def test_gpt3_as_the_paper_counts_it() -> None:
    """175 B: 96 layers of 12288, sequence 2048, vocabulary 51200; a batch of 1536 in 1024 GPUs at 140 TFLOP/s each."""
    model = Model(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048)
    with_recomputation = model_flops_per_token(model, 51200) * 4 / 3
    tokens = 300e9
    days = tokens * with_recomputation / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, abs=1)
