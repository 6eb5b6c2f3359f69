"""`fab report` and `fab reproduce` on the twin: a page of two runs; the same losses from a run's folder; other data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clone import Clone, a_clone
from tests.integration.rack import TINY, write_data

pytestmark = pytest.mark.full  # tests/distributed/test_reproduce.py, on one machine

HOSTS = "--hosts hostfiles/twin"


@pytest.fixture(scope="module")
def twin(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    with a_clone(tmp_path_factory.mktemp("again"), cpu_image) as clone:
        (clone.folder / "configs" / "tiny.yaml").write_text(json.dumps(TINY))
        write_data(clone.folder / "data" / "tiny")
        clone.succeed(f"fab launch {HOSTS} --config configs/tiny.yaml --run-id-file first")
        yield clone


@pytest.fixture(scope="module")
def first(twin: Clone) -> Path:
    return twin.folder / "runs" / (twin.folder / "first").read_text().strip()


def test_a_run_is_done_once_more_on_its_cluster(twin: Clone, first: Path) -> None:
    done = twin.run("bash", "-c", f"fab reproduce {HOSTS} --run {first.name}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"verdict +│ identical", done.stdout)
    (again,) = (path for path in first.parent.iterdir() if path != first)
    found = json.loads((again / "reproduction.json").read_text())
    assert (found["then"], found["now"], found["verdict"]) == (first.name, again.name, "identical")
    assert found["environment"] == []
    assert found["losses"]["compared"] >= 12

    page = twin.succeed(f"fab report {HOSTS} --run {first.name} --run {again.name}")
    assert page.splitlines()[:2] == [
        f"page        runs/{first.name}/report.html",
        f"chart       runs/{first.name}/report-loss.png",
    ]
    text = (first / "report.html").read_text()
    # The experiments are the same; of the manifests only the file differs that each was read from.
    assert text.count("No differences.") == 1
    config = '<th class="mono">config</th><td class="mono">{}</td><td class="mono">{}</td>'
    assert config.format("configs/tiny.yaml", f"runs/{first.name}/experiment.yaml") in text
    assert (first / "report-loss.png").read_bytes().startswith(b"\x89PNG")


def test_other_data_is_refused_before_anything_starts(twin: Clone, first: Path) -> None:
    runs = {path.name for path in first.parent.iterdir()}
    manifest = first / "manifest.json"
    whole = manifest.read_text()
    content = json.loads(whole)
    (index,) = (name for name in content["data_sha256"] if name.endswith(".idx"))
    try:
        manifest.write_text(json.dumps({**content, "data_sha256": {index: "00"}, "image_id": "sha256:other"}))
        done = twin.run("bash", "-c", f"fab reproduce {HOSTS} --run {first.name}")
    finally:
        manifest.write_text(whole)
    assert done.returncode == 2
    assert f"{index}: is not the data that the run has read: data_sha256 was 00; got " in done.stderr
    assert re.search(r"image_id +│ sha256:other +│ sha256:", done.stdout)
    assert {path.name for path in first.parent.iterdir()} == runs


def test_a_run_that_there_is_not(twin: Clone) -> None:
    done = twin.run("bash", "-c", f"fab report {HOSTS} --run none-20260101-000000-0000")
    assert (done.returncode, done.stderr.partition(";")[0]) == (2, "--run: is not a run of this cluster")
