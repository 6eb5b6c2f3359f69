"""Hashes of the code that a rank runs on this node: they show files that were changed inside a container."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tridock.contracts import run_folder


def code() -> dict[str, object]:
    """SHA-256 of Tridock's code and of the patched Megatron-LM (None if absent), and the versions of the manifest."""
    ours, megatron = Path(run_folder.CODE), Path(run_folder.MEGATRON)
    try:
        manifest = json.loads((ours / "manifest.json").read_text())
    except (OSError, ValueError):
        manifest = {}
    return {
        "tridock": digest([ours / "tridock", ours / "entrypoint"]),
        "megatron": digest([megatron]),
        "cuda": manifest.get("cuda"),
        "torch": manifest.get("torch"),
        "commit": manifest.get("git_commit"),
    }


def digest(folders: list[Path]) -> str | None:
    """One SHA-256 over the files' paths and contents, without ``__pycache__``; None if there is no file."""
    whole, count = hashlib.sha256(), 0
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if "__pycache__" in path.parts or not path.is_file():
                continue
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{content}  {folder.name}/{path.relative_to(folder)}\n".encode())
            count += 1
    return whole.hexdigest() if count else None
