"""docs/guides/any-script.md on the twin, line by line: every command runs, but for those of Slurm, which are shown."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import pytest

from tests.documentation import blocks
from tests.integration.rack import PROGRAMS
from tests.integration.support import ROOT, execute, own_name
from tests.integration.test_programs import NODES, Twin
from tests.integration.test_wrapped_image import BASE
from tridock.yaml_text import parse_yaml

pytestmark = pytest.mark.full  # tests/unit/test_docs_commands.py reads and previews them

PAGE = "docs/guides/any-script.md"
TRAIN = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--resume")
torch.distributed.init_process_group("gloo")
for epoch in range(parser.parse_args().epochs):
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print(f"step={epoch + 1} loss={total.item() / (epoch + 1)}", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def twin(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    made = Twin(tmp_path_factory.mktemp("twin"))
    (made.folder / "hostfile").write_text("".join(f"{node} slots=1\n" for node in NODES))
    settings = f"name: {own_name()}\ntransport: compose\nimage: {cpu_image}\nenv: {{OMP_NUM_THREADS: '1'}}\n"
    (made.folder / "hostfile.yaml").write_text(settings)
    (made.folder / "train.py").write_text(TRAIN)
    (made.folder / "train.sh").write_text("exec torchrun train.py\n")
    (made.folder / "requirements.txt").touch()
    (made.folder / ".tridockignore").write_text("data/\n")
    shutil.copy(ROOT / "fabfile.py", made.folder)
    try:
        yield made
    finally:
        made.tridock("down")


def test_every_line(twin: Twin, cpu_image: str) -> None:
    wrapped = f"{own_name()}:wrapped"
    here = {
        "image wrap pytorch/pytorch:latest": f"image wrap {BASE}",
        "my-image:wrapped": wrapped,
        "pytorch/pytorch:latest": cpu_image,
        "--slurm site.yaml": "--slurm site.yaml --dry-run",
        "tridock reproduce": "tridock reproduce --yes",  # it asks a terminal
    }
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    first, ran = "", 0
    try:
        for block in blocks(PAGE):
            if block.language == "yaml":
                assert parse_yaml(block.text, str(block))
            if block.language != "sh" or "--run runs/" in block.text:  # a run of Slurm's
                continue
            text = re.sub(r"main-\d{8}-\d{6}-\w{4}", first, block.text)
            for shown, own in here.items():
                text = text.replace(shown, own)
            done = execute("bash", "-euo", "pipefail", "-c", text, cwd=twin.folder, env=env)
            output = done.stdout + done.stderr
            assert done.returncode == 0, f"{block}\n{text}\n{output}"
            if found := re.search(r"^run (\S+): ", output, re.MULTILINE):
                first, ran = first or found[1], ran + 1
                assert "step=2 loss=1.0" in output, f"{block}\n{output}"
                assert twin.processes(found[1]) == "", block
        assert ran == 9
    finally:
        execute("docker", "image", "rm", wrapped)
