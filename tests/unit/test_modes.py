"""Modes of files where the operator's umask lets nobody else in."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN_ID = "demo-20261123-195500-abcd"


def run_lines(dockerfile: str) -> list[str]:
    """The instructions of a Dockerfile, each on one line, without comments."""
    text = "".join(
        line for line in (ROOT / dockerfile).read_text().splitlines(keepends=True) if not line.startswith("#")
    )
    return text.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.wrap"])
def test_an_image_of_a_clone_that_is_its_owners_alone_opens_to_the_containers_user(
    tmp_path: Path, dockerfile: str
) -> None:
    """Carries out what the build does with the modes: copies the sources, then runs the line that opens them."""
    clone, image = tmp_path / "clone", tmp_path / "opt/tridock"
    image.mkdir(parents=True)
    lines = run_lines(dockerfile)
    copied = [found[1] for line in lines if (found := re.match(r"COPY (\w+) /opt/tridock/\1$", line))]
    copied += re.findall(r"cp -R /code/(\w+) /opt/tridock/", "\n".join(lines))
    assert {"entrypoint", "tridock"} <= set(copied)
    for name in copied:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chmod", "-R", "go=", clone], check=True)
    for name in copied:
        subprocess.run(["cp", "-R", clone / name, image], check=True)
    image.chmod(0o755)
    (last,) = [line for line in lines if "cp -R /code/tridock" in line]
    opening = last.rpartition("&& find ")[2].replace("/opt/tridock", shlex.quote(str(image)))
    subprocess.run(f"find {opening}", shell=True, check=True)
    for path in image.rglob("*"):
        wanted = 0o755 if path.is_dir() or os.access(ROOT / path.relative_to(image), os.X_OK) else 0o644
        assert path.lstat().st_mode & 0o777 == wanted, path
    before = subprocess.run(["find", image, "-printf", "%C@"], check=True, capture_output=True).stdout
    subprocess.run(f"find {opening}", shell=True, check=True)  # what is open already is left alone
    assert subprocess.run(["find", image, "-printf", "%C@"], check=True, capture_output=True).stdout == before


FETCHED = """
import sys, tarfile
from pathlib import Path
from tridock.ops.runs.archives import unpack
with tarfile.open("a.tar", "w") as archive:
    archive.add(sys.argv[1], "runs/a/run.sh")
    archive.add(sys.argv[2], "runs/a/plan.json")
unpack("node-1", Path("a.tar"), Path("home"))
"""


@pytest.mark.parametrize(("umask", "modes"), [("022", (0o755, 0o755, 0o644)), ("077", (0o700, 0o700, 0o600))])
def test_what_is_fetched_follows_the_umask(tmp_path: Path, umask: str, modes: tuple[int, ...]) -> None:
    script, plan = tmp_path / "run.sh", tmp_path / "plan.json"
    for path, mode in ((script, 0o755), (plan, 0o644)):
        path.touch()
        path.chmod(mode)
    line = f'umask {umask}; exec "$@"'
    argv = ["sh", "-c", line, "sh", sys.executable, "-c", FETCHED, str(script), str(plan)]
    subprocess.run(argv, cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    run = tmp_path / "home/runs/a"
    assert tuple(path.stat().st_mode & 0o777 for path in (run, run / "run.sh", run / "plan.json")) == modes


SECRETS = f"""
from pathlib import Path
from tridock.contracts.trackers import keep_secrets, secrets_file
keep_secrets(Path("runs/{RUN_ID}"), {{"WANDB_API_KEY": "k"}})
print(secrets_file("{RUN_ID}"))
"""


@pytest.mark.parametrize("umask", ["000", "077"])
def test_secrets_of_trackers_are_their_owners_alone(tmp_path: Path, umask: str) -> None:
    argv = ["sh", "-c", f'umask {umask}; exec "$@"', "sh", sys.executable, "-c", SECRETS]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True, text=True, env=env)
    path = Path(done.stdout.strip())
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize(("umask", "mode"), [("000", 0o664), ("002", 0o664), ("077", 0o600)])
def test_a_data_set_follows_the_umask_and_is_never_everybodys_to_write(tmp_path: Path, umask: str, mode: int) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "1 2 3"}\n' * 9)
    options = ["--input", "t.jsonl", "--output-prefix", "data/t", "--workers", "1", "--quiet"]
    options += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    tridock = [sys.executable, "-m", "tridock.cli", "data", "preprocess", *options]
    argv = ["sh", "-c", f'mkdir data; umask {umask}; exec "$@"', "sh", *tridock]
    subprocess.run(argv, cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "data").glob("t_*")}
    assert modes == dict.fromkeys((f"t_text_document.{kind}" for kind in ("bin", "idx", "json")), mode)
