"""The tokenizer: lossless, deterministic, in GPT-2's files; and its messages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.data.tokenize.tokenizer import END_OF_TEXT, BytePairTokenizer, _without_long_words
from tridock.errors import RequestError

TEXTS = ["def main() -> int:\n    return 0\n" * 40, "class A:\n    pass\n" * 30, "žluťoučký kůň 🐎\n" * 20]
TODO = "give a tokenizer.json, or a folder that `save` wrote"


@pytest.fixture(scope="module")
def tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer.train(TEXTS, 300)


@given(st.text(max_size=60))
def test_every_text_comes_back(text: str) -> None:
    tokenizer = _trained()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def _trained(cache: list[BytePairTokenizer] = []) -> BytePairTokenizer:  # noqa: B006  shared on purpose
    if not cache:
        cache.append(BytePairTokenizer.train(TEXTS, 300))
    return cache[0]


def test_text_that_spells_the_end_is_text(tokenizer: BytePairTokenizer) -> None:
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"


def test_a_batch_is_its_texts(tokenizer: BytePairTokenizer) -> None:
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_another_process_learns_the_same(tokenizer: BytePairTokenizer) -> None:
    code = (
        "import sys, json; from tridock.data.tokenize.tokenizer import BytePairTokenizer;"
        "print(BytePairTokenizer.train(json.loads(sys.stdin.read()), 300).sha256)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(TEXTS), capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == tokenizer.sha256


def test_saved_and_loaded(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = BytePairTokenizer.load(path)
        assert (loaded.sha256, loaded.vocab_size) == (tokenizer.sha256, 300)
        assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_truncation_and_padding_of_a_file_are_ignored(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    other = Tokenizer.from_str(tokenizer.to_json())
    other.enable_truncation(3)
    other.enable_padding(length=9)
    other.save(str(tmp_path / "tokenizer.json"))
    loaded = BytePairTokenizer.load(tmp_path)
    assert loaded.encode_batch(["a", *TEXTS]) == tokenizer.encode_batch(["a", *TEXTS])
    assert loaded.to_json() == tokenizer.to_json()


def test_gpt2_files_give_the_same_ids(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer.save(tmp_path)
    assert (tmp_path / "merges.txt").read_text().startswith("#version: 0.2\n")
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    assert sorted(vocab.values()) == list(range(300))
    assert vocab[END_OF_TEXT] == tokenizer.end_of_text
    reference = ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert [reference.encode(text).ids for text in TEXTS] == tokenizer.encode_batch(TEXTS)


def test_gpt2_files_as_megatron_reads_them(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    loaded = BytePairTokenizer.from_gpt2(vocab, merges)
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert (loaded.end_of_text, loaded.vocab_size, loaded.largest_id) == (tokenizer.end_of_text, 300, 299)
    assert loaded.end_of_text not in loaded.encode(END_OF_TEXT)
    # The first line and what follows the last newline are left out, whatever they are.
    whole = merges.read_text()
    merges.write_text(whole.replace("#version: 0.2", "x y z").removesuffix("\n") + "\nžž")
    assert BytePairTokenizer.from_gpt2(vocab, merges).encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    merges.write_text(whole.removesuffix("\n"))
    assert BytePairTokenizer.from_gpt2(vocab, merges).sha256 != loaded.sha256


def test_one_name_however_the_files_spell_it(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    """Data sets made with any of them may be merged."""
    tokenizer.save(tmp_path)
    vocab, merges, file = (tmp_path / name for name in ("vocab.json", "merges.txt", "tokenizer.json"))
    assert BytePairTokenizer.from_gpt2(vocab, merges).sha256 == tokenizer.sha256
    # As GPT-2's own tokenizer.json has it.
    text = json.loads(file.read_text())
    text["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    text["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    file.write_text(json.dumps(text))
    assert BytePairTokenizer.load(file).sha256 == tokenizer.sha256
    # But what changes ids changes the name.
    file.write_text(json.dumps(text | {"pre_tokenizer": text["pre_tokenizer"] | {"add_prefix_space": True}}))
    different = [BytePairTokenizer.load(file).sha256]
    file.write_text(json.dumps(text | {"normalizer": {"type": "Lowercase"}}))
    different.append(BytePairTokenizer.load(file).sha256)
    merges.write_text("\n".join(merges.read_text().split("\n")[:-2]) + "\n")
    different.append(BytePairTokenizer.from_gpt2(vocab, merges).sha256)
    text["added_tokens"].append(text["added_tokens"][0] | {"id": 300, "content": "QQ", "special": False})
    file.write_text(json.dumps(text))
    different.append(BytePairTokenizer.load(file).sha256)
    assert len({tokenizer.sha256, *different}) == 5


def test_gpt2_files_that_are_wrong(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    tokens = json.loads(vocab.read_text())

    def message() -> str:
        with pytest.raises(RequestError) as caught:
            BytePairTokenizer.from_gpt2(vocab, merges)
        return str(caught.value)

    use = "use the merges.txt of this vocabulary"
    merges.write_text("#version: 0.2\nĠ d\na\n")
    assert message() == f"{merges}:3: is not two tokens; got 'a'; {use}"
    merges.write_text("#version: 0.2\nQ Q\n")
    assert message().startswith(f"{merges}: does not fit the vocabulary; got ")
    assert message().endswith(f"; {use}")
    merges.write_bytes(b"\xff")
    assert message() == f"{merges}: cannot be read; got not UTF-8; give GPT-2's merges.txt"
    vocab.write_text(json.dumps({key: value for key, value in tokens.items() if key not in ("!", "A")}))
    assert message() == f"{vocab}: has no token for 2 of the 256 bytes; got none for '!'; use a byte-level vocabulary"
    vocab.write_text(json.dumps({key: value for key, value in tokens.items() if key != END_OF_TEXT}))
    assert message() == f"{vocab}: has no token {END_OF_TEXT}; use one that has it"
    give = 'give a vocab.json: {"token": id, …}, each id once'
    for content, expected in (
        ("[1]", "is not a vocabulary; got null"),
        ('{"a": "b"}', 'is not a vocabulary; got "b"'),
        ('{"a": -1}', "is not a vocabulary; got -1"),
        ('{"a": 1, "b": 1, "c": 1}', "has two tokens of one id; got 2 times"),
        ("{", "is not valid JSON; got Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ):
        vocab.write_text(content)
        assert message() == f"{vocab}: {expected}; {give}"
    vocab.unlink()
    assert message() == f"{vocab}: cannot be read; got No such file or directory; {give}"


def test_words_are_cut_only_where_they_are_very_long() -> None:
    kinds = ["a", "\n", "7", "-", "_", "ž"]
    for short in ("ab1-" * 2000, *(kind * 1024 for kind in kinds)):
        assert list(_without_long_words(short)) == [short]
    for kind in kinds:
        text = f"x;{kind * 3000}; y {kind * 1025}"
        parts = list(_without_long_words(text))
        assert "".join(parts) == text
        assert (len(parts), len(parts[1])) == (4, 1024)


def test_too_small_a_vocabulary() -> None:
    with pytest.raises(RequestError) as caught:
        BytePairTokenizer.train(TEXTS, 256)
    expected = f"vocab_size: must be at least 257: every byte and {END_OF_TEXT}; got 256; raise it"
    assert str(caught.value) == expected


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"

    def message() -> str:
        with pytest.raises(RequestError) as caught:
            BytePairTokenizer.load(path)
        return str(caught.value)

    assert message() == f"{path}: cannot be read as a tokenizer; got No such file or directory; {TODO}"
    path.write_bytes(b"\xff")
    assert message() == f"{path}: cannot be read as a tokenizer; got not UTF-8; {TODO}"
    path.write_text("{}")
    assert message().startswith(f"{path}: is not a tokenizer; got ")
    assert message().endswith(f"; {TODO}")
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    assert message() == f"{path}: has no token {END_OF_TEXT}; use one that has it"
