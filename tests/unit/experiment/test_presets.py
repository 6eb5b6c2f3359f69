"""Presets and ``--set``: a preset replaces the file's model, a preset's own value changes nothing, in any order."""

import itertools
import json
from pathlib import Path
from typing import get_args

import pytest

from tridock.errors import RequestError
from tridock.experiment import load_experiment, parse_experiment
from tridock.experiment.model import Model
from tridock.experiment.parameters import model_parameters
from tridock.experiment.presets import Preset
from tridock.experiment.transformers_config import model_fields

PRESETS = get_args(Preset)
CONFIGS = [it for it in sorted(Path("configs").rglob("*.yaml")) if "\nmodel:" in it.read_text()]
FILE = """\
name: tiny
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 16, hidden_dropout: 0.0, fp8: hybrid}
batch: {micro_batch_size: 1}
data: {data_path: data/x}
train: {train_iters: 3}
"""


def of_preset(preset: str, **fields: object) -> Model:
    length = {} if preset == "resnet50" else {"seq_length": 64}
    return Model.model_validate({"preset": preset, **length, **fields})


def message(text: str, *overrides: str) -> str:
    with pytest.raises(RequestError) as caught:
        parse_experiment(text, "e.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_field_that_equals_the_presets_changes_nothing(preset: str) -> None:
    given = f"preset: {preset}" + (", seq_length: 64" if preset != "resnet50" else "")
    text = FILE.replace(FILE.splitlines()[1], f"model: {{{given}}}")
    whole = parse_experiment(text, "e.yaml")
    for name in Model.model_fields:
        own = f"model.{name}={json.dumps(getattr(whole.model, name))}"
        assert parse_experiment(text, "e.yaml", [own]) == whole, own


def parameters(model: Model) -> int:
    return model_parameters(model, model.vocab_size or 50257)


STRETCH = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
QWEN25 = {"vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
LARGE = {**QWEN25, "vocab_size": 152064, "max_position_embeddings": 131072}
QWEN3 = {**QWEN25, "max_position_embeddings": 40960, "rope_theta": 1000000, "head_dim": 128}
EXPERTS = {**QWEN3, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
SMOLLM2 = {"vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000, "rms_norm_eps": 1e-5}
MISTRAL = {"vocab_size": 32768, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5}
NEMO = {**MISTRAL, "vocab_size": 131072, "max_position_embeddings": 128000, "head_dim": 128}
PHI4 = {"vocab_size": 100352, "max_position_embeddings": 16384, "rope_theta": 250000, "rms_norm_eps": 1e-5}
OLMO2 = {"vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000, "rms_norm_eps": 1e-6}
SMOLLM3 = {"vocab_size": 128256, "max_position_embeddings": 65536, "rope_theta": 5000000.0, "rms_norm_eps": 1e-6}
MIXTRAL = {**MISTRAL, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
_8, _32 = ({**LLAMA3, "rope_scaling": {**STRETCH, "factor": it}} for it in (8.0, 32.0))
TIED, EPS5 = {"tie_word_embeddings": True}, {"rms_norm_eps": 1e-5}
PUBLISHED: dict[str, tuple[str, tuple[int, ...], dict[str, object], int]] = {
    "llama-3.1-8b": ("llama", (32, 4096, 14336, 32, 8), _8, 8_030_261_248),
    "llama-3.1-70b": ("llama", (80, 8192, 28672, 64, 8), _8, 70_553_706_496),
    "llama-3.1-405b": ("llama", (126, 16384, 53248, 128, 8), _8, 405_853_388_800),
    "llama-3.2-1b": ("llama", (16, 2048, 8192, 32, 8), _32 | TIED, 1_235_814_400),
    "llama-3.2-3b": ("llama", (28, 3072, 8192, 24, 8), _32 | TIED, 3_212_749_824),
    "llama-3.3-70b": ("llama", (80, 8192, 28672, 64, 8), _8, 70_553_706_496),
    "qwen2.5-0.5b": ("qwen2", (24, 896, 4864, 14, 2), QWEN25 | TIED, 494_032_768),
    "qwen2.5-1.5b": ("qwen2", (28, 1536, 8960, 12, 2), QWEN25 | TIED | {"max_position_embeddings": 131072},
                     1_543_714_304),
    "qwen2.5-3b": ("qwen2", (36, 2048, 11008, 16, 2), QWEN25 | TIED, 3_085_938_688),
    "qwen2.5-7b": ("qwen2", (28, 3584, 18944, 28, 4), LARGE, 7_615_616_512),
    "qwen2.5-14b": ("qwen2", (48, 5120, 13824, 40, 8), LARGE | EPS5, 14_770_033_664),
    "qwen2.5-32b": ("qwen2", (64, 5120, 27648, 40, 8), LARGE | EPS5, 32_763_876_352),
    "qwen2.5-72b": ("qwen2", (80, 8192, 29568, 64, 8), LARGE | EPS5, 72_706_203_648),
    "qwen3-0.6b": ("qwen3", (28, 1024, 3072, 16, 8), QWEN3 | TIED, 596_049_920),
    "qwen3-1.7b": ("qwen3", (28, 2048, 6144, 16, 8), QWEN3 | TIED, 1_720_574_976),
    "qwen3-4b": ("qwen3", (36, 2560, 9728, 32, 8), QWEN3 | TIED, 4_022_468_096),
    "qwen3-8b": ("qwen3", (36, 4096, 12288, 32, 8), QWEN3, 8_190_735_360),
    "qwen3-14b": ("qwen3", (40, 5120, 17408, 40, 8), QWEN3, 14_768_307_200),
    "qwen3-32b": ("qwen3", (64, 5120, 25600, 64, 8), QWEN3, 32_762_123_264),
    "qwen3-30b-a3b": ("qwen3_moe", (48, 2048, 6144, 32, 4), EXPERTS | {"moe_intermediate_size": 768}, 30_532_122_624),
    "qwen3-235b-a22b": ("qwen3_moe", (94, 4096, 12288, 64, 4), EXPERTS | {"moe_intermediate_size": 1536},
                        235_093_634_560),
    "smollm2-135m": ("llama", (30, 576, 1536, 9, 3), SMOLLM2 | TIED, 134_515_008),
    "smollm2-360m": ("llama", (32, 960, 2560, 15, 5), SMOLLM2 | TIED, 361_821_120),
    "smollm2-1.7b": ("llama", (24, 2048, 8192, 32, 32), SMOLLM2 | TIED | {"rope_theta": 130000}, 1_711_376_384),
    "mistral-7b-v0.3": ("mistral", (32, 4096, 14336, 32, 8), MISTRAL | {"sliding_window": None}, 7_248_023_552),
    "mistral-nemo": ("mistral", (40, 5120, 14336, 32, 8), NEMO | {"sliding_window": None}, 12_247_782_400),
    "phi-4": ("phi3", (40, 5120, 17920, 40, 10), PHI4, 14_659_507_200),
    "olmo2-1b": ("olmo2", (16, 2048, 8192, 16, 16), OLMO2, 1_484_916_736),
    "olmo2-7b": ("olmo2", (32, 4096, 11008, 32, 32), OLMO2, 7_298_617_344),
    "olmo2-13b": ("olmo2", (40, 5120, 13824, 40, 40), OLMO2, 13_716_198_400),
    "olmo2-32b": ("olmo2", (64, 5120, 27648, 40, 8), OLMO2, 32_234_279_936),
    "smollm3-3b": ("smollm3", (36, 2048, 11008, 16, 4), SMOLLM3 | TIED, 3_075_098_624),
    "mixtral-8x7b": ("mixtral", (32, 4096, 14336, 32, 8), MIXTRAL, 46_702_792_704),
}  # fmt: skip
"""Of base models what config.json says on Hugging Face, and the parameters that are stated there."""
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_the_published_model(preset: str) -> None:
    kind, sizes, others, count = PUBLISHED[preset]
    config = {"model_type": kind, "hidden_act": "silu", **dict(zip(SIZES, sizes, strict=True)), **others}
    theirs, own = model_fields(config, "config.json"), of_preset(preset)
    assert {name: own.value_of(name) for name in theirs} == theirs
    assert parameters(own) == count
    assert (own.hidden_dropout, own.attention_dropout) == (0.0, 0.0)


def test_every_preset_of_a_model_with_rotations_is_a_published_one() -> None:
    assert {it for it in PRESETS if of_preset(it).position_embedding_type == "rope"} == {*PUBLISHED}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_preset_replaces_the_model_of_every_file(config: Path) -> None:
    for preset in PRESETS:
        needed = ["model.seq_length=64"] if preset != "resnet50" else []
        model = load_experiment(config, [f"model.preset={preset}", *needed]).model
        assert parameters(model) == parameters(of_preset(preset)), preset


def test_the_length_and_how_it_trains_stay_but_no_size_does() -> None:
    model = parse_experiment(FILE, "e.yaml", ["model.preset=gpt2"]).model
    assert model == Model(preset="gpt2", seq_length=16, fp8="hybrid")
    assert model.hidden_dropout == 0.1
    assert parse_experiment(FILE, "e.yaml", ["model.preset=resnet50"]).model == Model(preset="resnet50")


def test_other_fields_change_the_preset_in_any_order() -> None:
    changes = ("model.num_layers=3", "model.preset=llama-3.1-8b", "model.hidden_size=4096", "model.vocab_size=512")
    found = [parse_experiment(FILE, "e.yaml", order).model for order in itertools.permutations(changes)]
    expected = Model(preset="llama-3.1-8b", num_layers=3, vocab_size=512, seq_length=16, fp8="hybrid")
    assert found == [expected] * 24
    assert expected.num_query_groups == 8


def test_sizes_in_the_file_of_a_preset_override_it() -> None:
    text = FILE.replace("hidden_size: 8, num_attention_heads: 2", "preset: llama-3.1-8b")
    assert parse_experiment(text, "e.yaml").model.num_layers == 2
    assert parse_experiment(text, "e.yaml", ["model.preset=llama-3.1-8b"]).model.num_layers == 32
    other = parse_experiment(text, "e.yaml", ["model.hidden_size=2048"]).model
    assert (other.num_query_groups, other.ffn_hidden_size) == (None, None)


def test_no_preset_and_no_such_preset_replace_nothing() -> None:
    assert parse_experiment(FILE, "e.yaml", ["model.preset=null"]) == parse_experiment(FILE, "e.yaml")
    refused = message(FILE, "model.preset=llama")
    assert refused.startswith("e.yaml: model.preset: is not one of the choices; got 'llama'")
    assert refused.count("\n") == 0


def test_an_override_below_a_deepspeed_json_keeps_the_rest_of_it(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}')
    text = FILE + f"deepspeed: {file}\n"
    for start in ([], [f"deepspeed={file}"]):
        given = parse_experiment(text, "e.yaml", [*start, "deepspeed.zero_optimization.overlap_comm=true"])
        assert given.parallel.zero_stage == 1
        sections = {"stage": 1, "reduce_bucket_size": 1000, "overlap_comm": True}
        assert given.deepspeed == {"zero_optimization": sections}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("name.first=1", "--set name.first: name has no fields; got 'tiny'; set name as a whole"),
        ("train.train_iters.a.b=1", "--set train.train_iters.a.b: train.train_iters has no fields; got 3; "
         "set train.train_iters as a whole"),
    ],
)  # fmt: skip
def test_an_override_below_a_value_is_refused(override: str, expected: str) -> None:
    assert message(FILE, override) == expected


def test_an_empty_section_takes_overrides() -> None:
    assert parse_experiment(FILE + "optimizer:\n", "e.yaml", ["optimizer.lr=0.5"]).optimizer.lr == 0.5
