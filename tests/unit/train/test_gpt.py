"""The model: shapes, initial weights, causality, the padded vocabulary, recomputation."""

import math

import pytest
import torch

from tests.unit.train.experiments import experiment
from tridock.errors import RequestError
from tridock.train.models.gpt import GPT, Shape, parameter_groups


def build(vocab_size: int = 300, **fields: object) -> GPT:
    torch.manual_seed(1)
    fields = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0} | fields
    return GPT(Shape.of(experiment(**fields).model, vocab_size))


def batch(vocab_size: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, vocab_size, (3, 9), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(("vocab_size", "multiple", "padded"), [(300, 128, 384), (384, 128, 384), (385, 1, 385)])
def test_the_vocabulary_is_padded(vocab_size: int, multiple: int, padded: int) -> None:
    model = build(vocab_size, **{"model.make_vocab_size_divisible_by": multiple})
    assert model.token_embedding.weight.shape == (padded, 16)


def test_the_number_of_parameters() -> None:
    hidden, layers = 16, 2
    layer = 12 * hidden * hidden + 13 * hidden  # matrices, then biases and norms (GPT-2's own count)
    expected = 384 * hidden + 8 * hidden + layers * layer + 2 * hidden
    assert sum(parameter.numel() for parameter in build().parameters()) == expected


def test_the_initial_weights() -> None:
    model = build(4000, **{"model.hidden_size": 64, "model.num_layers": 8, "model.init_method_std": 0.05})
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
            assert parameter.std().item() == pytest.approx(0.05 / math.sqrt(16), rel=0.1), name
        elif parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), name
        elif "norm" in name and name.endswith("weight"):
            assert (parameter == 1).all(), name
        else:
            assert (parameter == 0).all(), name


def test_the_first_loss_is_that_of_guessing() -> None:
    assert build()(*batch()).item() == pytest.approx(math.log(384), abs=0.05)


def test_no_position_sees_a_later_one() -> None:
    model = build().eval()
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 4:] = 7
    assert torch.equal(model(tokens)[:, :4], model(changed)[:, :4])
    assert not torch.equal(model(tokens), model(changed))


def test_recomputed_activations_give_the_same_gradients() -> None:
    found = []
    for recompute in (False, True):
        fields = {
            "model.checkpoint_activations": recompute,
            "model.hidden_dropout": 0.2,
            "model.attention_dropout": 0.2,
        }
        model = build(**fields)
        torch.manual_seed(3)
        model(*batch()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))


def test_biases_and_norms_do_not_decay() -> None:
    model = build()
    decayed, plain = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert all(
        names[parameter].endswith("weight") and "norm" not in names[parameter] for parameter in decayed["params"]
    )
    assert all("bias" in names[parameter] or "norm" in names[parameter] for parameter in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_heads_have_a_size_of_their_own() -> None:
    model = build(**{"model.num_attention_heads": 3, "model.kv_channels": 5})
    attention = model.layers["0"].attention
    assert attention.query_key_value.weight.shape == (3 * 3 * 5, 16)
    assert attention.dense.weight.shape == (16, 3 * 5)
    assert model(*batch()).isfinite()


def test_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(RequestError) as caught:
        build(**{"model.num_attention_heads": 3})
    expected = "model.num_attention_heads: must divide hidden_size 16; got 3; change one of the two"
    assert str(caught.value) == expected
