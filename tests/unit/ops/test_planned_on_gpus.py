"""A launch, and a run on this machine, are planned on the GPUs that are really there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tridock.cluster.settings import load_cluster
from tridock.errors import RequestError
from tridock.gpus import GPUS, Gpu
from tridock.ops.runs.local_run import run_here
from tridock.ops.runs.prepare import Planned, on_hosts_gpus, prepare_on

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "jean-zay" / "7.5b.yaml"
V100, SMALL = GPUS["v100-16gb"], Gpu("Small", 8192)


def planned(folder: Path, gpus: list[Gpu | None], settings: str = "") -> tuple[Any, Planned]:
    """The states of hosts with such GPUs, and what is planned before they are read."""
    (folder / "lab").write_text("".join(f"gpu-{number} slots=4\n" for number in range(4)))
    (folder / "lab.yaml").write_text(settings or "{}\n")
    states = {f"gpu-{number}": SimpleNamespace(gpu=gpu) for number, gpu in enumerate(gpus)}
    return states, prepare_on(load_cluster(folder / "lab"), CONFIG)


def test_a_launch_is_refused_where_the_hosts_gpus_are_too_small(tmp_path: Path) -> None:
    states, request = planned(tmp_path, [V100, V100, SMALL, None])
    assert request.assessment.verdict == "fits"  # nobody has said anything yet
    with pytest.raises(RequestError) as caught:
        on_hosts_gpus(states, request)
    assert str(caught.value) == (
        f"{CONFIG}: a rank of stage 0 needs more memory than the 8.0 GiB of a Small; got 10.1 GiB; "
        "see `tridock plan --search` for layouts that fit, or start it all the same with --force"
    )
    forced = on_hosts_gpus(states, replace(request, force=True))
    assert forced.assessment.verdict == "no-fit"


@pytest.mark.parametrize(("gpus", "verdict"), [([V100] * 4, "tight"), ([None] * 4, "fits")])
def test_what_the_hosts_say_is_the_plan(tmp_path: Path, gpus: list[Gpu | None], verdict: str) -> None:
    assert on_hosts_gpus(*planned(tmp_path, gpus)).assessment.verdict == verdict


def test_what_the_settings_say_wins(tmp_path: Path) -> None:
    assert on_hosts_gpus(*planned(tmp_path, [SMALL] * 4, "gpu: v100-32gb\n")).assessment.verdict == "fits"


def test_a_run_here_is_planned_on_this_machines_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '1024, Small'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(RequestError, match=r"needs more memory than the 1\.0 GiB of a Small; got ") as caught:
        run_here(CONFIG, 16, tmp_path)
    assert str(caught.value).endswith("or start it all the same with --force")
    with pytest.raises(RequestError, match="is not on this machine"):  # the data: the plan no longer stands in the way
        run_here(CONFIG, 16, tmp_path, force=True)
    assert not (tmp_path / "runs").exists()
