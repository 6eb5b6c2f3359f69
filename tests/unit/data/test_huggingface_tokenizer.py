"""``--tokenizer-type HuggingFaceTokenizer``: transformers' ids, special tokens included."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from random import Random

import pytest

from tests.unit.data.tokenizers import SPLITS
from tridock.cli import main
from tridock.contracts.tokenizers import sha256s_in
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.tokenize.encoders import HARD_TEXTS, fastest
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.errors import RequestError

TEXTS = ["one line", "another <end> line", "ümlaut \U0001f600 \U0001d518", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama-like tokenizer: bytes, a token before every text, and another end of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<begin>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["one line and another line"] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "<end>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_ids_are_those_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    own = HuggingFaceTokenizer(folder)
    assert [ids.tolist() for ids in own.encode(TEXTS)] == [theirs(text).input_ids for text in TEXTS]
    assert (own.end_of_document, own.vocab_size) == (1, len(theirs))
    assert own.decode(own.encode(TEXTS[2:3])[0].tolist()) == TEXTS[2]


def test_the_fast_encoder_has_the_same_ids(folder: Path) -> None:
    pytest.importorskip("gigatoken", reason="the fast library is not installed: locks/operator.txt has it")
    reference = HuggingFaceTokenizer(folder)
    encoder, why = fastest(reference)
    assert (encoder.name, why) == ("gigatoken", "")
    for name in ("vocab_size", "largest_id", "sha256", "end_of_document", "accepts_special"):
        assert getattr(encoder, name) == getattr(reference, name)
    texts = [*TEXTS, *HARD_TEXTS, "<begin>", "a<end><end> b"]
    assert [ids.tolist() for ids in encoder.encode(texts)] == [ids.tolist() for ids in reference.encode(texts)]


def test_other_models_take_hugging_faces_encoder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = json.loads((folder / "tokenizer.json").read_text())
    description["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "a.txt").write_text("One LINE\n")
    options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder), "--workers", "1"]
    argv = ["data", "preprocess", "--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "o"), *options]
    assert main(argv) == 0
    assert capsys.readouterr().err == (
        "encoder: Hugging Face's tokenizers, about 30 times slower: gigatoken: Unsupported normalizer type: Lowercase\n"
    )
    tokens = IndexedDataset(tmp_path / "o_text_document").tokens.tolist()
    assert tokens == HuggingFaceTokenizer(folder).encode(["one line"])[0].tolist()
    assert main([*argv, "--encoder", "reference"]) == 0
    assert capsys.readouterr().err == ""


def test_a_data_set_has_them_and_ends_documents_with_the_eos_token(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:3]))
    options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder), "--append-eod"]
    output = tmp_path / "out"
    argv = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(output), "--workers", "2", *options]
    assert main(["data", "preprocess", *argv]) == 0
    wanted = [[*ids.tolist(), 1] for ids in HuggingFaceTokenizer(folder / "tokenizer.json").encode(TEXTS[:3])]
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.tokens.tolist() == [token for document in wanted for token in document]


def test_what_is_wrong_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["data", "preprocess", "--input", "a", "--output-prefix", "o", "--tokenizer-type", "HuggingFaceTokenizer"]
    assert main([*argv, "--vocab-file", "v.json"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--tokenizer-model: is required with --tokenizer-type HuggingFaceTokenizer; name the tokenizer",
        "--vocab-file: does not go with --tokenizer-type HuggingFaceTokenizer; got v.json;"
        " leave it out, and give --tokenizer-model",
    ]
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"has no token <\|endoftext\|>, and no eos_token; name the token"):
        HuggingFaceTokenizer(folder)
    with pytest.raises(
        RequestError, match="cannot be read as a tokenizer; got No such file or directory; name a folder"
    ):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not valid JSON; got Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "is not valid JSON; got maximum recursion depth exceeded "),
        ("[]", "is not a JSON object; got []"),
        ('{"eos_token": 1}', "eos_token: is not a token; got 1"),
        ('{"eos_token": {"content": ["a"]}}', 'eos_token: is not a token; got {"content": ["a"]}'),
        ('{"added_tokens_decoder": [1]}', "added_tokens_decoder: does not map ids to tokens; got [1]"),
        ('{"added_tokens_decoder": {"a": "b"}}', 'added_tokens_decoder: does not map ids to tokens; got {"a": "b"}'),
        ('{"extra_special_tokens": ["a", 1]}', 'extra_special_tokens: is not a token; got ["a", 1]'),
        ('{"extra_special_tokens": 1}', "is no tokenizer's configuration; got 'int' object is not iterable"),
        (
            '{"eos_token": "<end>", "pad_token": "<x>", "image_token": {"content": "<x>", "lstrip": true}}',
            'declares "<x>" in two ways; got {"content": "<x>", "single_word": false, "lstrip": true,',
        ),
    ],
)
def test_a_configuration_that_cannot_be_read_does_not_change_the_end(folder: Path, content: str, says: str) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text(content)
    with pytest.raises(RequestError) as caught:
        HuggingFaceTokenizer(folder)
    assert str(caught.value).startswith(f"{config}: {says}")
    assert str(caught.value).endswith("; correct the file, or remove it")


DECLARED = {
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"271": {"content": "<x>"}}}},
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<x>"]}},
    "extra_special_tokens": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<x>"}}},
    "pad_token": {"tokenizer_config.json": {"pad_token": {"__type": "AddedToken", "content": "<x>", "lstrip": True}}},
    "added_tokens.json": {"added_tokens.json": {"<x>": 271}},
    "special_tokens_map.json": {"special_tokens_map.json": {"eos_token": "<x>"}},
}


@pytest.mark.parametrize("place", DECLARED)
def test_a_token_is_one_wherever_a_file_declares_it(folder: Path, place: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    for name, content in ({"tokenizer_config.json": {}} | DECLARED[place]).items():
        own = config if name == "tokenizer_config.json" else {}
        (folder / name).write_text(json.dumps(own | content))
    found = HuggingFaceTokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("a <x> line", "<x><x>line<end>x", "one  <x>"):
        ids = found.encode([text])[0].tolist()
        assert ids == theirs(text).input_ids
        assert 271 in ids
    assert found.vocab_size == len(theirs) == 272
    assert found.end_of_document == theirs.eos_token_id == (271 if "map" in place else 1)


def _token(random: Random, *, typed: bool = False) -> dict[str, object]:
    odds = {"lstrip": 0.2, "rstrip": 0.2, "single_word": 0.2, "normalized": 0.3, "special": 0.6}
    flags: dict[str, object] = {name: random.random() < share for name, share in odds.items()}
    return {"content": random.choice(CONTENTS), **flags, **({"__type": "AddedToken"} if typed else {})}


CONTENTS = ("<end>", "<begin>", "<x>", "[PAD]", "line", "and", "<|im_start|>", "  z", "another line", "<end>x")


def _write_files(random: Random, folder: Path) -> None:
    """Declares tokens in some of the files, in any of the ways, and some of them twice."""
    description = json.loads((folder / "tokenizer.json").read_text())
    size, own = len(description["model"]["vocab"]), description["added_tokens"]
    description["normalizer"] = random.choice([None, None, {"type": "Lowercase"}, {"type": "NFC"}])
    if random.random() < 0.3:
        own.append(_token(random) | {"id": size, "content": "<x>"})
    ids = description["model"]["vocab"] | {token["content"]: token["id"] for token in own}

    def numbered(most: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for content in random.sample(CONTENTS, random.randrange(most)):
            found[content] = ids.get(content, size + len(own) - 2 + len({*found} - {*ids}))
        return found

    def either() -> object:
        return random.choice([random.choice(CONTENTS), _token(random, typed=True)])

    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": random.choice(CONTENTS)}
    if random.random() < 0.6:
        tokens = {str(number): _token(random) | {"content": content} for content, number in numbered(5).items()}
        config["added_tokens_decoder"] = tokens
    config |= {
        name: either() for name in ("bos_token", "pad_token", "unk_token", "image_token") if random.random() < 0.3
    }
    if random.random() < 0.3:
        config["additional_special_tokens"] = [either() for _ in range(random.randrange(4))]
    if random.random() < 0.3:
        extra = [random.choice(CONTENTS) for _ in range(random.randrange(4))]
        config["extra_special_tokens"] = random.choice([extra, {"foo_token": random.choice(CONTENTS)}])
    older: dict[str, object] = {name: either() for name in ("eos_token", "cls_token") if random.random() < 0.6}
    if random.random() < 0.3:
        older["additional_special_tokens"] = random.sample(CONTENTS, 2)
    for name, content, share in (
        ("tokenizer.json", description, 1.0),
        ("tokenizer_config.json", config, 1.0),
        ("special_tokens_map.json", older, 0.3),
        ("added_tokens.json", numbered(4), 0.3),
    ):
        if random.random() < share:
            (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("seed", range(int(os.environ.get("TRIDOCK_FUZZ", "25")) * 4))
def test_files_that_are_not_refused_give_the_ids_of_transformers(folder: Path, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    random = Random(seed)
    _write_files(random, folder)
    try:
        own = HuggingFaceTokenizer(folder)
    except RequestError as error:
        assert re.search("declares .* in two ways|the id .*, and tokenizer.json another one", str(error)), error  # noqa: PT017
        return
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    words = (*CONTENTS, "one ", "line", " ", "and", "LINE", "x", "<", "ü")
    texts = ["".join(random.choices(words, k=random.randrange(12))) for _ in range(30)]
    wanted = [theirs(text).input_ids for text in texts]
    assert [ids.tolist() for ids in own.encode(texts)] == wanted
    assert [ids.tolist() for ids in fastest(HuggingFaceTokenizer(folder))[0].encode(texts)] == wanted
    assert (own.vocab_size, own.end_of_document) == (len(theirs), theirs.eos_token_id)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"split_special_tokens": True, "do_lower_case": False, "legacy": True, "from_slow": False, "unk": None},
            "split_special_tokens: may change ids, and is not supported; got true; "
            "remove it, if tokenizer.json gives the ids that you expect\n"
            "{}: do_lower_case: may change ids, and is not supported; got false; "
            "remove it, if tokenizer.json gives the ids that you expect",
        ),
        (
            {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}},
            'auto_map: names a program, which is not run; got ["own.Tokenizer", null]; '
            "remove it, if tokenizer.json gives the ids that you expect",
        ),
        (
            {"add_prefix_space": True},
            "add_prefix_space: differs from tokenizer.json, which puts no space before a text; got true; "
            "set it to false, or save the tokenizer again",
        ),
    ],
)
def test_what_may_change_ids_is_refused(folder: Path, fields: dict[str, object], says: str) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<end>", **fields}))
    with pytest.raises(RequestError) as caught:
        HuggingFaceTokenizer(folder)
    assert str(caught.value) == f"{config}: {says.format(config)}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": "<y>"}}),
        ("added_tokens.json", {"<y>": 999, "<begin>": 0}),
    ],
)
def test_an_id_that_the_library_would_not_give(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(RequestError) as caught:
        HuggingFaceTokenizer(folder)
    number = 9 if "config" in name else 999
    assert str(caught.value) == (
        f'{folder / name}: gives "<y>" the id {number}, and tokenizer.json another one; got 271; '
        "save the tokenizer again, with tokenizer.json"
    )


def test_an_eos_token_that_only_the_older_file_has(folder: Path) -> None:
    """Beside an added_tokens_decoder, transformers itself does not read that file."""
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<end>"}')
    assert HuggingFaceTokenizer(folder).end_of_document == 1


QWEN = [{"type": "Split", "pattern": {"Regex": SPLITS["Qwen"][0]}, "behavior": "Isolated", "invert": False}]
QWEN += [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
PREPEND = [{"type": "Prepend", "prepend": "\u2581"}]
PREPEND += [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
PIPELINES = {
    "GPT-2": {},
    "Qwen": {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": QWEN}},
    "Llama 2": {"normalizer": {"type": "Sequence", "normalizers": PREPEND}, "pre_tokenizer": None, "decoder": None},
}


@pytest.mark.parametrize(
    ("kind", "same"),
    [
        ("PreTrainedTokenizerFast", {"GPT-2", "Qwen", "Llama 2"}),
        ("LlamaTokenizer", {"GPT-2", "Qwen"}),
        ("GPT2Tokenizer", {"GPT-2"}),
        ("Qwen2Tokenizer", {"Qwen"}),
    ],
)
def test_classes_that_do_not_read_all_of_the_file(folder: Path, kind: str, same: set[str]) -> None:
    """As docs/data.md says; the ids here are always those of tokenizer.json."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "eos_token": "<end>"}))
    description = json.loads((folder / "tokenizer.json").read_text())
    found = set()
    for name, pipeline in PIPELINES.items():
        whole = description | pipeline
        if name == "Llama 2":
            tokens = {token.replace("\u0120", "\u2581"): number for token, number in whole["model"]["vocab"].items()}
            merges = [[part.replace("\u0120", "\u2581") for part in pair] for pair in whole["model"]["merges"]]
            whole["model"] = whole["model"] | {"vocab": tokens, "merges": merges}
        (folder / "tokenizer.json").write_text(json.dumps(whole))
        own, theirs = HuggingFaceTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
        texts = ["one line<end> and", " 123 it's", "e\u0301 12"]
        if all(own.ids_of(text) == theirs(text, add_special_tokens=False).input_ids for text in texts):
            found.add(name)
    assert found == same


def test_one_sha256_however_a_tokenizer_is_saved(folder: Path, tmp_path: Path) -> None:
    """By transformers again, by older libraries of tokenizers, or with what has no effect on ids."""
    transformers = pytest.importorskip("transformers")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole))
    own = HuggingFaceTokenizer(folder).sha256
    again = tmp_path / "again"
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(again)
    assert (again / "tokenizer.json").read_text() != (folder / "tokenizer.json").read_text()
    assert HuggingFaceTokenizer(again).sha256 == own == sha256s_in(again)[0]
    older = {name: it for name, it in whole["model"].items() if name in ("vocab", "merges")}
    older["merges"] = [" ".join(pair) for pair in older["merges"]]
    part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(whole | {"model": older, "pre_tokenizer": part, "truncation": cut}))
    assert HuggingFaceTokenizer(folder).sha256 == own
    changed: list[dict[str, object]] = [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": part | {"use_regex": False}},
        {"post_processor": None},
        {"model": whole["model"] | {"merges": whole["model"]["merges"][:-1]}},
        {"model": whole["model"] | {"ignore_merges": True}},
        {"added_tokens": [whole["added_tokens"][0] | {"lstrip": True}, whole["added_tokens"][1]]},
        {"added_tokens": [whole["added_tokens"][0] | {"special": False}, whole["added_tokens"][1]]},
        {"added_tokens": [*whole["added_tokens"], whole["added_tokens"][0] | {"id": 271, "content": "<x>"}]},
    ]
    found = {own}
    for each in changed:
        file.write_text(json.dumps(whole | each))
        found.add(HuggingFaceTokenizer(folder).sha256)
    assert len(found) == 1 + len(changed)
