"""A tokenizer's files as transformers reads them, and the SHA-256 that identifies it. Nodes have no tokenizers library.

Checked against transformers 5: ``TokenizersBackend`` in ``tokenization_utils_tokenizers.py``, and ``_from_pretrained``
in ``tokenization_utils_base.py``.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tridock.contracts.git_lfs import refuse_pointer
from tridock.contracts.records import read_object
from tridock.errors import Problem, RequestError, reason_of

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
ADDED_TOKENS: Final = "added_tokens.json"
TOKENIZER_SHA256: Final = "tokenizer_sha256"
"""Field of a data set's manifest, and of what a run's checkpoints say of their data."""
GPT2_FILES: Final = ("vocab.json", "merges.txt")
SENTENCE_PIECE: Final = "tokenizer.model"
CHAT_TEMPLATE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"
"""Folder of templates with other names than default."""
TOKENIZER_FILES: Final = (
    *(TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, *GPT2_FILES, SENTENCE_PIECE),
    CHAT_TEMPLATE,
)
"""What goes with a tokenizer to another folder."""

_OLDER: Final = "additional_special_tokens"
_MORE: Final = "model_specific_special_tokens"
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HONOURED: Final = ("added_tokens_decoder", _OLDER, "extra_special_tokens", _MORE, "add_prefix_space", "auto_map")
_WITHOUT_EFFECT: Final = frozenset(
    (
        # the class, and how a program finds the files
        *("tokenizer_class", "processor_class", "backend", "name_or_path", "tokenizer_file", "vocab_file"),
        *("merges_file", "special_tokens_map_file", "is_local", "local_files_only", "files_loaded", "use_fast"),
        *("transformers_version", "device_map", "torch_dtype", "verbose"),
        # length and shape of a model's input
        *("model_max_length", "max_len", "max_length", "stride", "truncation", "truncation_side"),
        *("truncation_strategy", "padding", "padding_side", "pad_to_multiple_of", "pad_token_type_id"),
        *("model_input_names", "return_token_type_ids", "add_bos_token", "add_eos_token"),
        # decoding, chats, and options of tokenizers that are not read from tokenizer.json
        *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors", "trim_offsets", "legacy"),
        *("chat_template", "chat_control_tokens", "response_schema", "response_template"),
        *("use_default_system_prompt", "sp_model_kwargs"),
    )
)
"""Keys of ``tokenizer_config.json`` that do not change the ids of a ``tokenizer.json``."""
_ONLY_OFF: Final = ("fix_mistral_regex", "from_slow", "init_inputs", "split_special_tokens", "trust_remote_code")
"""Keys that may change ids unless they are false or empty."""
_ODD: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a JSON file of another shape raises."""
_CORRECT: Final = "correct the file, or remove it"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as its folder describes it."""

    description: dict[str, Any]
    """``tokenizer.json``, and in it the tokens that the files beside it declare."""
    special: Mapping[str, str]
    """The texts of ``bos_token``, ``eos_token`` and the others, as far as they are declared."""
    alone: bool
    """Whether ``tokenizer.json`` has all tokens itself."""

    @property
    def largest_id(self) -> int:
        return max(_ids_of(self.description).values())


def files_of(path: Path) -> list[Path]:
    """Returns the files that a tokenizer is read from, ``tokenizer.json`` first; the others may be missing."""
    folder = path if path.is_dir() else path.parent
    others = (TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
    return [path / TOKENIZER if path.is_dir() else path, *(folder / name for name in others)]


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Reads a folder with ``tokenizer.json``, or that file, and the files beside it.

    Raises :class:`RequestError` with everything that transformers may read into other ids.
    """
    file, *others = files_of(path)
    description = read_description(file)
    with RequestError.in_place_of(_ODD, others[0], "is no tokenizer's configuration", _CORRECT):
        declared = _Declared(description, others)
        if not (problems := list(declared.problems())):
            whole = declared.whole()
            return TokenizerFiles(whole, declared.special, whole == description)
    raise RequestError(problems)


def read_description(file: Path) -> dict[str, Any]:
    """Reads a ``tokenizer.json``. Raises :class:`RequestError` if it is none."""
    todo = f"name a folder with {TOKENIZER}, as transformers' save_pretrained writes it"
    try:
        content = file.read_bytes()
        refuse_pointer(file, content)
        description = json.loads(content)
        _ids_of(description)
    except OSError as error:
        raise RequestError(Problem(str(file), "cannot be read as a tokenizer", reason_of(error), todo)) from None
    except _ODD as error:
        raise RequestError(Problem(str(file), "is not a tokenizer", str(error), todo)) from None
    return dict(description)


class _Declared:
    """The tokens that ``tokenizer_config.json`` and the two older files declare, and what of them is not honoured."""

    def __init__(self, description: dict[str, Any], files: list[Path]) -> None:
        self._description, self._files = description, files
        self.config, self._special, self._added = (read_json(file) or {} for file in files)
        end = _token(self.config.get("eos_token") or self._special.get("eos_token"))
        if "added_tokens_decoder" in self.config:  # then transformers reads no older file
            self._special, self._added = {}, {}
        values, extra, named = dict(self.config), "extra_special_tokens", dict(self.config.get(_MORE) or {})
        if _OLDER in values and not values.get(extra):
            values[extra] = values.pop(_OLDER)
        for found in (values, self._special):
            if isinstance(found.get(extra), dict):
                named |= found.pop(extra)
        lists = [it for it in (values.get(extra), self._special.get(extra)) if it is not None]
        values |= self._special
        self._listed = [it for each in lists for it in each]
        self._extra = self._listed if lists else values.get(_OLDER) or []
        self._named = {name: it for name in _NAMED if (it := values.get(name)) is not None}
        self._named |= {
            name: it for name, it in values.items() if name.endswith("_token") and isinstance(it, str | dict)
        }
        self._named |= named
        named = {"eos_token": end, **self._named}
        self.special = {name: text for name in _NAMED if (text := _token(named.get(name)))}

    def problems(self) -> Iterator[Problem]:
        """Yields what transformers would not read as here."""
        config, special, added = map(str, self._files)
        tokens = self.config.get("added_tokens_decoder") or {}
        if not isinstance(tokens, dict) or not all(_token(it) and str(key).isdecimal() for key, it in tokens.items()):
            yield Problem(f"{config}: added_tokens_decoder", "does not map ids to tokens", _short(tokens), _CORRECT)
            return
        if not all(type(number) is int and token for token, number in self._added.items()):
            yield Problem(added, "does not map tokens to ids", _short(self._added), _CORRECT)
            return
        wrong = [
            (special if name in self._special else config, name, value)
            for name, value in self._named.items()
            if not _token(value)
        ]
        if not isinstance(self._extra, list) or not all(map(_token, self._extra)):
            wrong.append((config, "extra_special_tokens", self._extra))
        for file, name, value in wrong:
            yield Problem(f"{file}: {name}", "is not a token", _short(value), _CORRECT)
        if wrong:
            return
        yield from self._key_problems(config)
        ids = _ids_of(self.whole())
        for file, content, number in (
            *((config, _content(token), int(number)) for number, token in tokens.items()),
            *((added, content, number) for content, number in self._added.items()),
        ):
            if ids.get(content) != number:
                what = f"gives {json.dumps(content)} the id {number}, and {TOKENIZER} another one"
                yield Problem(file, what, str(ids.get(content)), f"save the tokenizer again, with {TOKENIZER}")

    def _key_problems(self, config: str) -> Iterator[Problem]:
        for name, value in self.config.items():
            known = name in _HONOURED or name in _WITHOUT_EFFECT or name.endswith(("_token", "_token_id"))
            if not known and value is not None and (value or name not in _ONLY_OFF):
                todo = f"remove it, if {TOKENIZER} gives the ids that you expect"
                yield Problem(f"{config}: {name}", "may change ids, and is not supported", _short(value), todo)
        programs = self.config.get("auto_map")
        programs = programs.get("AutoTokenizer") if isinstance(programs, dict) else programs
        if programs:
            todo = f"remove it, if {TOKENIZER} gives the ids that you expect"
            yield Problem(f"{config}: auto_map", "names a program, which is not run", _short(programs), todo)
        prefix, there = self.config.get("add_prefix_space"), _adds_space(self._description)
        if prefix is not None and prefix is not there:
            what = f"differs from {TOKENIZER}, which {'puts a' if there else 'puts no'} space before a text"
            todo = f"set it to {json.dumps(there)}, or save the tokenizer again"
            yield Problem(f"{config}: add_prefix_space", what, json.dumps(prefix), todo)

    def whole(self) -> dict[str, Any]:
        """Returns ``tokenizer.json`` with all tokens, in the order in which transformers adds them."""
        known = {token["content"]: token for token in self._description.get("added_tokens") or ()}
        taken = {token["id"] for token in known.values()}
        decoder = {int(number): token for number, token in (self.config.get("added_tokens_decoder") or {}).items()}
        usual = [self._named.get(name) for name in _NAMED]
        special = {it for it in (*usual, *self._listed) if isinstance(it, str)}
        special |= {_content(self._special.get(name)) for name in _NAMED}
        for content, number in self._added.items():
            if number not in taken:
                is_special = content in special
                decoder[number] = {"content": content, "special": is_special, "normalized": not is_special}
        named = {_content(token) for token in self._named.values()}
        ids, size = _ids_of(self._description), len(self._description["model"]["vocab"])
        following = max([size, *(number + 1 for number in taken)])

        def add(token: dict[str, Any]) -> None:
            nonlocal following
            if (content := token["content"]) not in ids:
                ids[content], following = following, following + 1
            known[content] = {"id": ids[content], **token}

        for _, value in sorted(decoder.items()):
            token = _added(value, special=False)
            if {name: known.get(token["content"], {}).get(name) for name in token} != token:
                add({**token, "special": token["special"] or token["content"] in named})
        numbered = {*known}
        for value in (*self._named.values(), *self._extra):
            if (content := _content(value)) not in numbered:
                token = _added(value, special=content in named or isinstance(value, str))
                if content in known and known[content] != {"id": ids[content], **token}:
                    what = f"declares {json.dumps(content)} in two ways"
                    raise RequestError(Problem(str(self._files[0]), what, _short(token), _CORRECT))
                add(token)
        return {**self._description, "added_tokens": sorted(known.values(), key=lambda token: token["id"])}


def _token(value: object) -> str | None:
    """Returns a token's text, if the value is one."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _content(value: object) -> str:
    return _token(value) or ""


def _added(value: Any, special: bool) -> dict[str, Any]:
    """Returns a token as ``tokenizer.json`` has it; its flags default as in ``tokenizers.AddedToken``."""
    given = value if isinstance(value, dict) else {"special": special}
    found = {name: bool(given.get(name)) for name in _FLAGS}
    found["normalized"] = bool(given.get("normalized", not found["special"]))
    return {"content": _content(value), **found, "special": found["special"] or special}


def _adds_space(description: Mapping[str, Any]) -> bool:
    """Whether a tokenizer puts a space before a text that has none."""

    def adds(part: Any) -> bool:
        if isinstance(part, list):
            return any(map(adds, part))
        match part:
            case {"type": "ByteLevel"}:
                return bool(part.get("add_prefix_space", True))
            case {"type": "Metaspace"}:
                return bool(part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True))
            case {"type": "Prepend"}:
                return True
            case {"type": "Sequence"}:
                return adds(part.get("pretokenizers") or part.get("normalizers") or [])
        return False

    return adds([description.get("normalizer"), description.get("pre_tokenizer")])


def _short(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns a JSON file's object; None without the file. Raises :class:`RequestError` if it is something else."""
    try:
        content = path.read_bytes()
        refuse_pointer(path, content)
        found = json.loads(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(Problem(str(path), "cannot be read", reason_of(error), _CORRECT)) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(Problem(str(path), "is not valid JSON", str(error), _CORRECT)) from None
    if not isinstance(found, dict):
        raise RequestError(Problem(str(path), "is not a JSON object", _short(found), _CORRECT))
    return found


# ---- which tokenizer it is ----


def tokenizer_sha256(description: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of all that ids depend on in a ``tokenizer.json``, whichever version of its library wrote it.

    Without ``post_processor`` it is that of the same tokenizer without tokens around a text.
    """
    model = {name: value for name, value in description["model"].items() if name not in ("type", "vocab", "merges")}
    vocab = description["model"]["vocab"]
    merges = [it.split(" ") if isinstance(it, str) else it for it in description["model"].get("merges") or ()]
    added = [(token["content"], _rules(token)) for token in description.get("added_tokens") or ()]
    content = [
        sorted(_ids_of(description).items()),
        [score for _, score in vocab] if isinstance(vocab, list) else [],
        merges,
        _plain(model),
        sorted(rules for rules in added if rules[1]),
        _plain(description.get("normalizer")),
        _plain(description.get("pre_tokenizer")),
        _around(description.get("post_processor")),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256s_in(path: Path) -> tuple[str, ...]:
    """Returns the SHA-256 that a data set's manifest may have of the tokenizer in a folder, by the ways to read it.

    ``path`` may be its ``tokenizer.json``.
    """
    file = files_of(path)[0]
    ways: tuple[Callable[[], str | None], ...] = (
        lambda: tokenizer_sha256(read_tokenizer(path).description),
        lambda: tokenizer_sha256(read_tokenizer(path).description | {"post_processor": None}),
        # --tokenizer-type GPT2BPETokenizer: that file alone, and no tokens around a text
        lambda: tokenizer_sha256(read_description(file) | {"post_processor": None}),
        lambda: sha256_of_gpt2(*(path / name for name in GPT2_FILES)) if not file.is_file() else None,
        lambda: hashlib.sha256((path / SENTENCE_PIECE).read_bytes()).hexdigest(),
    )
    found = []
    for way in ways:
        with suppress(RequestError, OSError, *_ODD):
            found.append(way())
    return tuple(dict.fromkeys(each for each in found if each is not None))


def sha256_of_gpt2(vocab_file: Path, merge_file: Path) -> str | None:
    """Returns the SHA-256 of GPT-2's two files; None if they are not there, or something else."""
    with suppress(OSError, *_ODD):
        model = {"vocab": json.loads(vocab_file.read_bytes()), "merges": gpt2_merges(merge_file.read_text("utf-8"))}
        return tokenizer_sha256({"model": model, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}})
    return None


def sha256_of_data(prefix: Path) -> str | None:
    """Returns the SHA-256 of the tokenizer that made a data set; None if its manifest names none."""
    found = read_object(prefix.parent / f"{prefix.name}.json").get(TOKENIZER_SHA256)
    return found if isinstance(found, str) and found else None


def gpt2_merges(text: str) -> list[list[str]]:
    """Returns a ``merges.txt``'s merges as Megatron reads them: without the first line, and up to the last newline."""
    return [line.split() for line in text.split("\n")[1:-1]]


def _ids_of(description: Mapping[str, Any]) -> dict[str, int]:
    """Returns the id of every token."""
    vocab = description["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in description.get("added_tokens") or ()}


def _rules(token: Mapping[str, Any]) -> list[str]:
    """Returns how an added token is found in a text; nothing for a special one that is found as it is written."""
    names = [name for name in ("single_word", "lstrip", "rstrip") if token.get(name)]
    return names if token.get("special") else [*names, f"normalized {token.get('normalized')}"]


def _plain(part: Any) -> Any:
    """Returns a part of a tokenizer without what has no effect on ids, or is the library's default."""
    if isinstance(part, list):
        return [_plain(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        name: _plain(value)
        for name, value in part.items()
        if name != "trim_offsets" and not (value is None or value == "" or value is (name in _TRUE))
    }


_TRUE: Final = ("add_prefix_space", "split", "use_regex")
"""Options that are on by default."""


def _around(part: Any) -> Any:
    """Returns what puts tokens around a single text in a post processor; None if nothing does."""
    match part:
        case {"type": "ByteLevel"} | None:
            return None
        case {"type": "Sequence", "processors": processors}:
            return [found for found in map(_around, processors) if found is not None] or None
        case {"type": "TemplateProcessing", "single": single, "special_tokens": tokens}:
            return [single, tokens] if len(single) > 1 else None
    return _plain(part)
