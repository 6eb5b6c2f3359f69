"""The image of `make image-rehearsal`, and an nvidia-smi for its containers that prints what a test gives it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.conftest import containers, docker, secrets, start_twin  # noqa: F401  (fixtures)

_PLACE = "/run/nvidia-smi"
_PROGRAM = f"""\
#!/bin/sh
cd {_PLACE}
echo "$@" >>calls
. ./before
cat "answers/${{*:-table}}" 2>/dev/null
"""


@pytest.fixture(scope="session")
def cpu_image() -> str:
    """What the other fixtures start containers of: here the GPU image of `make image-rehearsal`."""
    return "tridock:rehearsal"


@dataclass
class NvidiaSmi:
    """A folder with the answers of an nvidia-smi, and the list of its calls."""

    folder: Path

    @property
    def mounts(self) -> list[str]:
        """The volumes of a container that has it, where NVIDIA's container toolkit puts the real one."""
        return [f"{self.folder}:{_PLACE}", f"{self.folder}/program:/usr/bin/nvidia-smi:ro"]

    def answer(self, table: str = "", report: str = "", listing: str = "", *, before: str = "") -> None:
        """Sets the table, the report as XML and the list of GPUs; ``before`` is shell that runs first."""
        for name, text in (("table", table), ("-q -x", report), ("--list-gpus", listing)):
            (self.folder / "answers" / name).write_text(text)
        (self.folder / "before").write_text(before)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


def make_nvidia_smi(folder: Path) -> NvidiaSmi:
    """Without any answer yet."""
    made = NvidiaSmi(folder)
    (folder / "answers").mkdir(parents=True)
    (folder / "program").write_text(_PROGRAM)
    (folder / "program").chmod(0o755)
    (folder / "calls").touch()
    (folder / "calls").chmod(0o666)
    made.answer()
    return made


@pytest.fixture
def nvidia_smi(tmp_path: Path) -> NvidiaSmi:
    return make_nvidia_smi(tmp_path / "nvidia-smi")
