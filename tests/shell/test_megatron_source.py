"""Where the image's build takes Megatron-LM v1.1.5 from, and what it says where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import STEP_S

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "e7c8cb767acddba8ad5d2c41fe18e30de7870d30"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the script, and with what an earlier build has brought."""
    folder = tmp_path / "project"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "megatron-source.sh", folder / "tools")
    (folder / "upstream" / "megatron-v1.1.5").mkdir(parents=True)
    (folder / "upstream" / "megatron-v1.1.5" / "pretrain_gpt2.py").write_text("earlier")
    return folder


def bring(project: Path, where: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(project / "tools" / "megatron-source.sh"), where]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=STEP_S, check=False
    )


def source(project: Path) -> Path:
    return project / "upstream" / "megatron-v1.1.5"


def without_an_answer(tmp_path: Path) -> dict[str, str]:
    """A `git` that cannot fetch, as behind a closed network."""
    real, folder = shutil.which("git"), tmp_path / "bin"
    folder.mkdir()
    script = f'#!/bin/sh\ncase "$*" in *fetch*) echo "fatal: no route to host" >&2; exit 128;; esac\nexec {real} "$@"\n'
    (folder / "git").write_text(script)
    (folder / "git").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_folder_is_copied_whole_and_replaces_what_was_there(project: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "megatron").mkdir(parents=True)
    (mine / "pretrain_gpt2.py").write_text("mine")
    (mine / "megatron" / "training.py").write_text("")
    done = bring(project, str(mine))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = sorted(str(path.relative_to(source(project))) for path in source(project).rglob("*") if path.is_file())
    assert found == ["megatron/training.py", "pretrain_gpt2.py", "tridock-source"]
    assert (source(project) / "pretrain_gpt2.py").read_text() == "mine"
    assert (source(project) / "tridock-source").read_text() == "a folder\n"


def test_none_takes_the_engine_away(project: Path) -> None:
    assert bring(project, "none").returncode == 0
    assert not source(project).exists()


def test_a_folder_that_holds_something_else(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    done = bring(project, str(other))
    assert (done.returncode, done.stderr) == (
        3,
        f"MEGATRON: holds neither pretrain_gpt2.py nor commit {COMMIT}; got {other}; "
        "name that folder, or a repository that has the commit, or write none\n",
    )
    assert (source(project) / "pretrain_gpt2.py").read_text() == "earlier"


def test_a_mirror_that_does_not_answer(project: Path, tmp_path: Path) -> None:
    done = bring(project, "https://mirror.example/x.git", **without_an_answer(tmp_path))
    assert (done.returncode, done.stderr) == (
        3,
        "MEGATRON: cannot be fetched (fatal: no route to host); got https://mirror.example/x.git; "
        "name a mirror or a folder (MEGATRON, or --megatron), or write none for an image without this engine\n",
    )


def test_auto_without_an_answer_says_what_the_image_lacks(project: Path, tmp_path: Path) -> None:
    done = bring(project, "auto", **without_an_answer(tmp_path))
    assert (done.returncode, done.stdout) == (
        0,
        "the image will lack engine megatron-deepspeed: its source cannot be fetched (fatal: no route to host); "
        "name another with MEGATRON, or --megatron\n",
    )
    assert not source(project).exists()


@pytest.mark.parametrize("where", ["auto", "https://mirror.example/x.git"])
def test_what_was_brought_before_is_not_fetched_again(project: Path, tmp_path: Path, where: str) -> None:
    (source(project) / "tridock-source").write_text(f"{COMMIT}\n")
    done = bring(project, where, **without_an_answer(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (source(project) / "pretrain_gpt2.py").read_text() == "earlier"


@pytest.mark.parametrize("where", ["auto", "https://github.com/deepspeedai/DeepSpeedExamples.git"])
def test_a_folder_that_was_named_is_kept_by_a_build_that_names_none(project: Path, tmp_path: Path, where: str) -> None:
    (source(project) / "tridock-source").write_text("a folder\n")
    done = bring(project, where, **without_an_answer(tmp_path))
    kept = "Megatron-LM v1.1.5: from a folder, as named before (MEGATRON, or --megatron: none leaves it out)\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, kept, "")
    assert (source(project) / "pretrain_gpt2.py").read_text() == "earlier"


def test_a_folder_within_a_repository_is_patched_too(tmp_path: Path) -> None:
    """There git apply skips what lies outside of its index, and says nothing."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    for name in ("tools", "megatron"):
        (tmp_path / "other" / name).mkdir(parents=True)
    for name in ("pretrain_gpt2.py", "LICENSE", "megatron/a.py"):
        (tmp_path / "other" / name).write_text("old\n")
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches/0001-new.patch").write_text(
        "diff --git a/megatron/a.py b/megatron/a.py\n"
        "--- a/megatron/a.py\n+++ b/megatron/a.py\n@@ -1 +1 @@\n-old\n+new\n"
    )
    script, target = ROOT / "tools/image-megatron.sh", tmp_path / "target"
    subprocess.run([script, tmp_path / "other", tmp_path / "patches", target], capture_output=True, check=True)
    assert (target / "megatron/a.py").read_text() == "new\n"


def test_a_patch_that_does_not_apply_stops_the_build(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for folder in ("megatron", "tools"):
        (other / folder).mkdir(parents=True)
    (other / "pretrain_gpt2.py").write_text("")
    (other / "LICENSE").write_text("")
    (other / "megatron" / "learning_rates.py").write_text("class Another:\n    pass\n")
    command = [
        str(ROOT / "tools/image-megatron.sh"),
        str(other),
        str(ROOT / "patches/megatron-v1.1.5"),
        str(tmp_path / "t"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False)
    assert done.returncode == 3
    (patch, *_) = sorted((ROOT / "patches/megatron-v1.1.5").glob("*.patch"))
    assert done.stderr.splitlines()[-1] == (
        f"MEGATRON: {patch.name} does not apply; "
        "the source is not commit e7c8cb767acd of DeepSpeedExamples, or was changed"
    )
