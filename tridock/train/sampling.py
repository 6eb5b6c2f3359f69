"""Samples of text at evaluations (``train.sample_prompts``): the model continues the prompts, in any layout.

Every token takes a forward pass of all ranks over whole samples, like an evaluation's. Tokens are drawn with seeds of
their own, so that training draws the same random numbers as without samples, and every layout gives the same text.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tridock.contracts.tokenizers import sha256_of_data
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.errors import Problem, RequestError
from tridock.experiment.schema import Experiment
from tridock.train.data.dataset import mixed_seed
from tridock.train.huggingface.tokenizer import tokenizer_of
from tridock.train.parallel.strategies import Strategy
from tridock.train.rank.process_group import Ranks, agree_on_errors


class Sampler:
    """Continues an experiment's prompts, with the tokenizer that made its data. The constructor is a collective."""

    def __init__(self, experiment: Experiment, workspace: Path, strategy: Strategy, tokens: int, ranks: Ranks) -> None:
        """``tokens`` is the vocabulary size, without padding. Raises :class:`AgreedError` without a tokenizer."""
        self._experiment, self._strategy, self._tokens, self._ranks = experiment, strategy, tokens, ranks
        known: list[Any] = [None, None]
        with agree_on_errors(ranks):
            if ranks.first:  # other nodes need no tokenizer
                self._tokenizer = _tokenizer_of(experiment, workspace)
                known = [_encoded(self._tokenizer, experiment, tokens), self._tokenizer.end_of_document]
        dist.broadcast_object_list(known, src=0)
        self._prompts, self._end = known

    def texts(self, begin_pass: Callable[[], None]) -> list[str]:
        """Returns each prompt's continuation on rank 0: up to ``sample_tokens`` tokens, or to the end of the text.

        Calls ``begin_pass`` before each forward pass. A collective."""
        rows, ended = [list(prompt) for prompt in self._prompts], [False] * len(self._prompts)
        for number in range(self._experiment.train.sample_tokens):
            begin_pass()
            for row, token in enumerate(self._following(rows, number)):
                ended[row] |= token in (-1, self._end)
                if not ended[row]:
                    rows[row].append(token)
            if all(ended):
                break
        if not self._ranks.first:
            return []
        decode = self._tokenizer.decode
        return [decode(row)[len(decode(prompt)) :] for prompt, row in zip(self._prompts, rows, strict=True)]

    def _following(self, rows: Sequence[Sequence[int]], number: int) -> list[int]:
        """Returns the next token of each row, the same on all ranks; -1 if its logits are not finite."""
        chosen = torch.full((len(rows),), -1, device=self._ranks.device)
        first = 0
        for batches, last in self._passes(rows):
            logits = self._strategy.logits(batches, last)
            if logits is not None:
                for row, found in enumerate(logits[: len(rows) - first, : self._tokens].float().cpu(), start=first):
                    seed = mixed_seed(self._experiment.train.seed, row, number) >> 1
                    chosen[row] = choose(found, generator=torch.Generator().manual_seed(seed))
            first += sum(map(len, last))
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX)  # a rank without the logits has -1
        return chosen.tolist()

    def _passes(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yields the rows as micro-batches, as many as a pipeline's schedule needs, and where each row ends.

        Rows are padded to whole samples: later tokens do not change a token's logits, and kernels and schedules have
        compiled this shape.
        """
        batch, parallel = self._experiment.batch, self._experiment.parallel
        length, micro = self._experiment.model.seq_length, batch.micro_batch_size
        stages, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
        replicas = self._ranks.world_size // (stages * tensor * parallel.context_parallel_size)
        at_once = batch.accumulation_steps(replicas) if stages > 1 else 1
        count = -(-len(rows) // (at_once * micro)) * at_once * micro
        tokens = torch.zeros(count, length, dtype=torch.long)
        last = torch.zeros(count, dtype=torch.long)
        for number, row in enumerate(rows):
            window = torch.tensor(row[-length:])
            tokens[number, : len(window)], last[number] = window, len(window) - 1
        tokens, last = tokens.to(self._ranks.device), last.to(self._ranks.device)
        for first in range(0, count, at_once * micro):
            part = slice(first, first + at_once * micro)
            yield list(tokens[part].split(micro)), list(last[part].split(micro))


def _tokenizer_of(experiment: Experiment, workspace: Path) -> HuggingFaceTokenizer:
    made_with = sha256_of_data(workspace / experiment.data.prefix)
    if (folder := tokenizer_of(experiment, workspace, made_with)) is None:
        todo = f"copy the tokenizer.json that made {experiment.data.prefix} beside it, or leave the prompts out"
        raise RequestError(Problem("train.sample_prompts", "the tokenizer of the data was not found", "", todo))
    return HuggingFaceTokenizer(folder)


def _encoded(tokenizer: HuggingFaceTokenizer, experiment: Experiment, tokens: int) -> list[list[int]]:
    prompts = experiment.train.sample_prompts
    encoded = [ids.tolist() or [tokenizer.end_of_document] for ids in tokenizer.encode(prompts)]
    for number, ids in enumerate(encoded):
        if max(ids) >= tokens:
            what = f"has a token beyond the vocabulary of {tokens}"
            todo = "leave special tokens out of it"
            raise RequestError(Problem(f"train.sample_prompts[{number}]", what, str(max(ids)), todo))
    return encoded


def choose(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws a token from ``logits`` [vocabulary] by its probability; the most likely one at temperature 0.

    ``top_p``: only from the most likely tokens whose probabilities sum up to it. Returns an int64 scalar; -1 if the
    logits are not finite."""
    if not logits.isfinite().all():
        return torch.tensor(-1)
    if temperature <= 0:
        return logits.argmax()
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    likely = (logits / temperature).softmax(-1)
    if top_p < 1:
        rising, order = likely.sort()
        likely[order[:-1][rising.cumsum(-1)[:-1] <= 1 - top_p]] = 0
    return torch.multinomial(likely, 1, generator=generator)[0]
