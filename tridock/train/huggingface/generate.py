"""``python -m tridock.train.huggingface.generate``: generates text from a run's weights, or from a transformers folder.

The model is engine torch's, on one device. Every token takes a forward pass over all previous tokens.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import torch
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tridock.contracts.tokenizers import CHAT_TEMPLATE, TOKENIZER_CONFIG, read_json
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.errors import ClusterError, Problem, RequestError, RunError, exit_code_of
from tridock.experiment.generation_config import GENERATION_CONFIG, GenerationConfig, read_generation_config
from tridock.strict_yaml import read_text
from tridock.train.huggingface.saved import Saved
from tridock.train.huggingface.weights import names_of
from tridock.train.models.gpt import GPT, Shape
from tridock.train.models.layered import fill
from tridock.train.sampling import choose

_OLDEST: Final = (3, 1, 6)
"""The version of Jinja that has the fixes of all known escapes from its sandbox."""


class ChatTemplate:
    """A transformers folder's chat template, rendered in Jinja's sandbox as transformers 5 does
    (``utils/chat_template_utils.py``): turns messages into the text that a model was trained with."""

    def __init__(self, template: Template, special: Mapping[str, str], where: str) -> None:
        self._template, self._special, self._where = template, special, where

    @classmethod
    def of(cls, folder: Path, special: Mapping[str, str]) -> Self:
        """Reads a tokenizer's folder; ``special`` are its tokens by their names. Raises :class:`RequestError` without a
        template, and :class:`ClusterError` for a Jinja whose sandbox is not safe."""
        if tuple(map(int, version("jinja2").split(".")[:3])) < _OLDEST:
            oldest = ".".join(map(str, _OLDEST))
            what, todo = "has a sandbox with known escapes", f"install Jinja2 {oldest} or newer"
            raise ClusterError(Problem("--chat: jinja2", what, version("jinja2"), todo))
        file = folder / CHAT_TEMPLATE
        text: object = file.read_text("utf-8") if file.is_file() else None
        if text is None:
            file = folder / TOKENIZER_CONFIG
            text = (read_json(file) or {}).get("chat_template")
        if isinstance(text, list):
            text = {it["name"]: it["template"] for it in text}.get("default")
        if not isinstance(text, str):
            todo = f"leave --chat out, or add the model's {CHAT_TEMPLATE}"
            raise RequestError(Problem(str(folder), "has no chat template", "", todo))
        try:
            return cls(_environment().from_string(text), special, str(file))
        except TemplateError as error:
            raise _wrong(str(file), error) from None

    def asking(self, content: str) -> str:
        """Returns a conversation of one message of the user, up to where the model's answer begins."""
        messages = [{"role": "user", "content": content}]
        given: dict[str, Any] = {"tools": None, "documents": None, **self._special}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **given)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise _wrong(self._where, error) from None


def _wrong(where: str, error: Exception) -> RequestError:
    return RequestError(Problem(where, "is a chat template that cannot be rendered", str(error), "leave --chat out"))


class _Generation(Extension):
    """``{% generation %}``, which marks the model's answers and changes no text."""

    tags = {"generation"}  # noqa: RUF012  as the class above declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(Namespace):
    """Takes no names with which a template could replace an object's methods, and so pass by the sandbox."""

    def __init__(*given: Any, **attributes: Any) -> None:
        this, *others = given
        for name in dict(*others, **attributes):
            _check(name)
        Namespace.__init__(this, *others, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with _, as {name!r}")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    found.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    found.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *given, **items: dict(*given, **items),
        "namespace": _Namespace,
    }
    return found


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decodes from the first bytes of a character whose other bytes are in the next token."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tridock.train.huggingface.generate", description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--iteration", type=int)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=1234)
    given = parser.parse_args()
    return exit_code_of(lambda: generate(given))


def generate(given: argparse.Namespace) -> None:
    """Prints each prompt and its continuation, or with ``chat`` the answer to it."""
    prompts = list(given.prompt)
    if given.prompt_file is not None:
        prompts += read_text(given.prompt_file, "a prompt").removesuffix("\n").split("\n")
    saved = Saved.open(given.weights, given.iteration)
    folder = saved.tokenizer_in(given.tokenizer)
    if folder is None:
        what, todo = "the tokenizer of the data was not found", "name its folder with --tokenizer"
        raise RequestError(Problem("--tokenizer", what, "", todo))
    tokenizer = HuggingFaceTokenizer(folder)
    config = _config(given, saved, tokenizer, folder)
    template = ChatTemplate.of(folder, tokenizer.special) if given.chat else None
    encoded = [
        tokenizer.encode([it])[0].tolist() if template is None else tokenizer.ids_of(template.asking(it))
        for it in prompts
    ]
    if (largest := max(map(max, filter(None, encoded)), default=0)) >= saved.tokens:
        what = f"has a token beyond the model's vocabulary of {saved.tokens}"
        raise RequestError(Problem("--prompt", what, str(largest), "leave special tokens out, or give its --tokenizer"))
    model = built(saved, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(given.seed)
    for prompt, ids in zip(prompts, encoded, strict=True):
        print(prompt, end="\n" if given.chat else "", flush=True)
        for piece in _pieces(tokenizer, ids, islice(sampled(model, saved.tokens, ids, config), given.max_new_tokens)):
            print(piece, end="", flush=True)
        print()


def _config(given: argparse.Namespace, saved: Saved, tokenizer: HuggingFaceTokenizer, folder: Path) -> GenerationConfig:
    """Returns the options, the folder's ``generation_config.json`` where one is not given, else the defaults."""
    ids, content = saved.special(tokenizer, folder)
    content = {**ids, **{name: it for name, it in content.items() if it is not None}}
    config = read_generation_config(content, str(folder / GENERATION_CONFIG))
    options = {name: it for name in ("temperature", "top_k", "top_p") if (it := getattr(given, name)) is not None}
    return config.model_copy(update={**({} if config.do_sample else {"temperature": 0.0}), **options})


def built(saved: Saved, device: torch.device) -> GPT:
    """Returns the model with its weights: fp32 on a CPU, bf16 on a GPU."""
    with torch.device("meta"):
        model = GPT(Shape.of(saved.model, saved.tokens))
    model.given_weights = lambda: ((name, saved.read(name)) for name in names_of(saved.model))
    model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to_empty(device=device)
    fill([model], model)
    return model.eval()


@torch.no_grad()
def sampled(model: GPT, tokens: int, prompt: Sequence[int], config: GenerationConfig) -> Iterator[int]:
    """Yields tokens one by one until the end of the text; at temperature 0 the most likely ones."""
    device, penalty = next(model.parameters()).device, config.repetition_penalty
    ids = torch.tensor([list(prompt) or [config.begin]], device=device)
    while True:
        logits = model(ids[:, -model.shape.model.positions :])[0, -1, :tokens].float()
        seen = logits[ids[0]]
        logits[ids[0]] = torch.where(seen < 0, seen * penalty, seen / penalty)
        following = int(choose(logits, config.temperature, config.top_k, config.top_p))
        if following == -1:
            todo = "use an earlier checkpoint: the training may have diverged"
            raise RunError(Problem("the model", "computes no finite logits", "", todo))
        if following in config.eos_token_id:
            return
        yield following
        ids = torch.cat([ids, torch.tensor([[following]], device=device)], 1)


def _pieces(tokenizer: HuggingFaceTokenizer, prompt: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """Yields the text of tokens as soon as whole characters are complete."""
    new: list[int] = []
    text = tokenizer.decode(prompt)
    shown = len(text)
    for token in tokens:
        new.append(token)
        text = tokenizer.decode(prompt + new)
        if not text.endswith(_INCOMPLETE):
            yield text[shown:]
            shown = len(text)
    yield text[shown:]


if __name__ == "__main__":
    sys.exit(main())
