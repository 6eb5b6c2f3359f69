"""``python -m tridock.train.huggingface.generate``: generates text from a run's weights, or from a transformers folder.

The model is engine torch's, on one device. Every token takes a forward pass over all previous tokens.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.errors import Problem, RequestError, exit_code_of
from tridock.train.huggingface.saved import Saved
from tridock.train.huggingface.weights import names_of
from tridock.train.models.gpt import GPT, Shape
from tridock.train.models.layered import fill
from tridock.train.sampling import choose

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decodes from the first bytes of a character whose other bytes are in the next token."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tridock.train.huggingface.generate", description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--prompt", action="append", required=True)
    parser.add_argument("--iteration", type=int)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1234)
    given = parser.parse_args()
    return exit_code_of(lambda: generate(given))


def generate(given: argparse.Namespace) -> None:
    """Prints each prompt and its continuation."""
    saved = Saved.open(given.weights, given.iteration)
    tokenizer = _tokenizer(given.tokenizer or saved.tokenizer)
    model = built(saved, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(given.seed)
    for prompt in given.prompt:
        ids = tokenizer.encode([prompt])[0].tolist()
        tokens = sampled(model, saved.tokens, ids, given.temperature, given.top_k, tokenizer.end_of_document)
        print(prompt, end="", flush=True)
        for piece in _pieces(tokenizer, ids, tokens, given.max_new_tokens):
            print(piece, end="", flush=True)
        print()


def built(saved: Saved, device: torch.device) -> GPT:
    """Returns the model with its weights: fp32 on a CPU, bf16 on a GPU."""
    with torch.device("meta"):
        model = GPT(Shape.of(saved.model, saved.tokens))
    model.given_weights = lambda: ((name, saved.read(name)) for name in names_of(saved.model))
    model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to_empty(device=device)
    fill([model], model)
    return model.eval()


@torch.no_grad()
def sampled(
    model: GPT, tokens: int, prompt: Sequence[int], temperature: float, top_k: int, ending: int
) -> Iterator[int]:
    """Yields tokens one by one until the end of the text; at temperature 0 the most likely ones."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt) or [ending]], device=device)
    while True:
        logits = model(ids[:, -model.shape.model.positions :])[0, -1, :tokens].float()
        following = int(choose(logits, temperature, top_k))
        if following in (-1, ending):
            return
        yield following
        ids = torch.cat([ids, torch.tensor([[following]], device=device)], 1)


def _pieces(tokenizer: HuggingFaceTokenizer, prompt: list[int], tokens: Iterator[int], count: int) -> Iterator[str]:
    """Yields the text of up to ``count`` tokens as soon as whole characters are complete."""
    new: list[int] = []
    shown = len(tokenizer.decode(prompt))
    for number, token in enumerate(tokens, start=1):
        new.append(token)
        text = tokenizer.decode(prompt + new)
        if not text.endswith(_INCOMPLETE) or number == count:
            yield text[shown:]
            shown = len(text)
        if number == count:
            return


def _tokenizer(folder: Path | None) -> HuggingFaceTokenizer:
    if folder is None:
        what, todo = "the tokenizer of the data was not found", "name its folder with --tokenizer"
        raise RequestError(Problem("--tokenizer", what, "", todo))
    return HuggingFaceTokenizer(folder)


if __name__ == "__main__":
    sys.exit(main())
