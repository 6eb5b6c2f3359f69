"""What torch.compile needs is looked for before the first step."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._composable.fsdp
import torch.distributed.fsdp
import torch.distributed.pipelining  # which takes names that a test hides

from tridock.contracts.prerequisites import compiler_problems


def _at(folder: Path, name: str, mode: int) -> Path:
    path = folder / name
    path.touch(mode)
    return path


def test_all_is_there(tmp_path: Path) -> None:
    _at(tmp_path, "Python.h", 0o644)
    compiler = _at(tmp_path, "g++", 0o755)
    assert list(compiler_problems("cpu", {"PATH": str(tmp_path)}, tmp_path)) == []
    assert list(compiler_problems("cpu", {"PATH": "/nonexistent", "CXX": str(compiler)}, tmp_path)) == []


def test_nothing_is_there(tmp_path: Path) -> None:
    assert [str(problem) for problem in compiler_problems("cpu", {"PATH": str(tmp_path)}, tmp_path)] == [
        "train.compile: needs a C++ compiler where the ranks are on the CPU; got no g++ on the PATH; install g++, name "
        "another in CXX, or set it to false",
        "train.compile: needs Python's headers where the ranks are on the CPU; got no "
        f"{tmp_path}/Python.h; install python3-dev, or set it to false",
    ]


def test_the_compiler_that_is_named_is_looked_for(tmp_path: Path) -> None:
    _at(tmp_path, "g++", 0o755)
    _at(tmp_path, "Python.h", 0o644)
    (problem,) = compiler_problems("cpu", {"PATH": str(tmp_path), "CXX": "clang++"}, tmp_path)
    assert problem.got == "no clang++ on the PATH"


def test_on_a_gpu_triton_needs_a_c_compiler(tmp_path: Path) -> None:
    assert [str(problem) for problem in compiler_problems("cuda", {"PATH": str(tmp_path)}, tmp_path)] == [
        "train.compile: needs a C compiler where the ranks are on GPUs; got no gcc or clang on the PATH; install gcc, "
        "name another in CC, or set it to false",
        f"train.compile: needs Python's headers where the ranks are on GPUs; got no {tmp_path}/Python.h; install "
        "python3-dev, or set it to false",
    ]
    _at(tmp_path, "clang", 0o755)
    _at(tmp_path, "Python.h", 0o644)
    assert list(compiler_problems("cuda", {"PATH": str(tmp_path)}, tmp_path)) == []


def test_engine_torch_imports_with_the_older_torch_of_base_image_24_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its "2.6.0a0" is of October 2024. `make test-torch TORCH=2.5.1` runs the tests with such a version itself."""

    def disable(fn: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        return fn or (lambda wrapped: wrapped)

    monkeypatch.setattr(torch.compiler, "disable", disable)
    for name in ("fully_shard", "MixedPrecisionPolicy"):
        monkeypatch.delattr(torch.distributed.fsdp, name, raising=False)
    for module in ("models.gpt", "parallel.mesh_strategy"):
        spec = importlib.util.find_spec(f"tridock.train.{module}")
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
