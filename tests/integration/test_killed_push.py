"""A command that is killed while it pushes an image: the next one removes the name that it gave the image here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.support import ROOT, execute, own_name, succeed

pytestmark = pytest.mark.usefixtures("docker")

# As `fab up` does for hosts that lack the image, up to the moment at which they would pull.
PUSH = """
import os, signal, sys
from pathlib import Path
from tridock.ops.image.pull import Export
from tridock.ops.image.registry import LoopbackRegistry
from tridock.remote import LocalHost
image, folder, kill = sys.argv[1:]
local = LocalHost()
with LoopbackRegistry(Path(folder), lambda _: None, local.close) as registry:
    with Export(registry, local, image, [], None).pushed():
        if kill == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def names(image: str) -> list[str]:
    return succeed("docker", "image", "inspect", "--format", '{{join .RepoTags "\\n"}}', image).split()


def test_the_name_that_a_killed_push_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    image = f"{own_name()}:push"
    other = f"127.0.0.1:9/tridock-{own_name()}/image:push"  # of another command, which may live
    archive = subprocess.run(["tar", "-cf", "-", "-T", "/dev/null"], capture_output=True, check=True).stdout
    subprocess.run(["docker", "import", "-", image], input=archive, check=True, capture_output=True)
    try:
        succeed("docker", "tag", image, other)
        execute(sys.executable, "-c", PUSH, image, str(tmp_path), "kill", cwd=ROOT)
        (left,) = set(names(image)) - {image, other}
        assert left.startswith("127.0.0.1:")
        succeed(sys.executable, "-c", PUSH, image, str(tmp_path), "end", cwd=ROOT)
        assert sorted(names(image)) == sorted([image, other])
        assert not (tmp_path / "pushed-as").exists()
    finally:
        for name in names(image):
            execute("docker", "image", "rm", name)
