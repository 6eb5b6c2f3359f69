"""``python -m tridock.train.huggingface.export``: writes a run's checkpoint as a folder that transformers loads.

Weights are read and written one after another; at most one file's weights are in memory.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tridock.contracts.partials import partial_folder
from tridock.contracts.pretrained import CONFIG, INDEX, SINGLE
from tridock.contracts.tokenizers import MORE_TEMPLATES, TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.errors import Problem, RequestError, RunError, exit_code_of, reason_of
from tridock.experiment.generation_config import GENERATION_CONFIG
from tridock.experiment.parameters import model_parameters
from tridock.experiment.transformers_config import config_of
from tridock.progress import Bars, bars
from tridock.train.huggingface.saved import Saved
from tridock.train.huggingface.weights import exported

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILE_BYTES: Final = 2 << 30
"""Maximum bytes of weights per file; a larger weight has its own file."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tridock.train.huggingface.export", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--iteration", type=int)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--quiet", action="store_true")
    given = vars(parser.parse_args())
    return exit_code_of(lambda: export(**given))


def export(
    run: Path,
    output: Path,
    iteration: int | None = None,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    *,
    quiet: bool = False,
) -> None:
    """Writes the folder ``output`` atomically. Raises :class:`RequestError` if it exists, or cannot be written."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RequestError(Problem("-o", "exists", str(output), "name a new folder"))
    saved = Saved.open(run, iteration)
    tokenizer = saved.tokenizer_in(tokenizer)
    has_tokens = tokenizer is not None and (tokenizer / TOKENIZER).is_file()
    opened = HuggingFaceTokenizer(tokenizer) if tokenizer is not None and has_tokens else None
    special, generation = saved.special(opened, tokenizer)
    config_of(saved.model, saved.tokens, "", special)  # before anything is written: whether there is such a model
    try:
        with partial_folder(output) as partial:
            with bars(quiet=quiet) as begin:
                names, size, kind = _write_weights(saved, partial, dtype, begin)
            _write(partial / CONFIG, config_of(saved.model, saved.tokens, kind, special))
            _write(partial / GENERATION_CONFIG, generation)
            for file in partial.glob("*.safetensors"):
                shutil.copymode(partial / CONFIG, file)  # the library writes files that only their owner may read
            copied = _copy_tokenizer(tokenizer, partial, opened)
            if output.exists():
                output.rmdir()
            partial.rename(output)
    except (OSError, SafetensorError) as error:
        todo = "free space there or fix its permissions, or name another folder"
        raise RunError(Problem(str(output), "the weights could not be written", reason_of(error), todo)) from None
    print(f"{saved.description}: {names} weights, {size / 1e6:,.1f} MB in {kind}, written to {output}")
    if not copied:
        print("no tokenizer was found: name its folder with --tokenizer")


def _write_weights(saved: Saved, folder: Path, dtype: str | None, begin: Bars) -> tuple[int, int, str]:
    """Writes the weights; returns their number, their total bytes and their dtype."""
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total, kind, bar = 0, "", begin("export", model_parameters(saved.model, saved.tokens), unit="parameters")

    def flush() -> None:
        files.append(list(pending))
        save_file(pending, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        pending.clear()

    for name, tensor in exported(saved.model, saved.tokens, saved.read):
        given = tensor.to(DTYPES[dtype]) if dtype else tensor
        if pending and sum(one.nbytes for one in pending.values()) + given.nbytes > FILE_BYTES:
            flush()
        pending[name] = given.clone() if given.data_ptr() == tensor.data_ptr() else given
        total, kind = total + given.nbytes, str(given.dtype).removeprefix("torch.")
        bar(given.numel())
    flush()
    if len(files) == 1:
        (folder / "1.safetensors").rename(folder / SINGLE)
    else:
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        for number, file in enumerate(names, start=1):
            (folder / f"{number}.safetensors").rename(folder / file)
        weight_map = {name: file for file, members in zip(names, files, strict=True) for name in members}
        _write(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return sum(map(len, files)), total, kind


def _copy_tokenizer(source: Path | None, folder: Path, opened: HuggingFaceTokenizer | None) -> bool:
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()] if source is not None else []
    for file in files:
        shutil.copyfile(file, folder / file.name)
    if source is not None and (source / MORE_TEMPLATES).is_dir():
        shutil.copytree(source / MORE_TEMPLATES, folder / MORE_TEMPLATES, copy_function=shutil.copyfile)
    if opened is not None and not (folder / TOKENIZER_CONFIG).is_file():
        _write(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **opened.special})
    return bool(files)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
