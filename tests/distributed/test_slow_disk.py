"""A checkpoint on a slow disk delays a run, is reported, and is no hang."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port, make_data, rank_environment, read_lines
from tests.distributed.test_full_disk import EXPERIMENT
from tridock.contracts import run_folder
from tridock.contracts.run_state import exit_code_of

pytestmark = [pytest.mark.distributed, pytest.mark.full]
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
BYTES_PER_SECOND = 250_000


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A runs folder on an ext4 disk that writes 250 kB a second."""
    if not THROTTLE.exists():
        pytest.skip(f"throttling a disk takes {THROTTLE} (Linux's first version of control groups)")
    folder, image = tmp_path / "runs", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(300 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    found = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"a loop device takes root: {found.stderr.strip()}")
    device = found.stdout.strip()
    number = Path("/sys/block", Path(device).name, "dev").read_text().strip()
    try:
        subprocess.run(["mount", device, str(folder)], check=True)
        THROTTLE.write_text(f"{number} {BYTES_PER_SECOND}")
        yield folder
    finally:
        with suppress(OSError):
            THROTTLE.write_text(f"{number} 0")
        subprocess.run(["umount", str(folder)], check=False)
        subprocess.run(["losetup", "-d", device], check=False)


def test_a_checkpoint_on_a_slow_disk_is_no_hang(tmp_path: Path, runs: Path) -> None:
    """Each takes 44 s here, the agents wait for their supervisor for 25 s, and a hang is noticed after 5 s."""
    make_data(tmp_path)
    model = {**EXPERIMENT["model"], "hidden_size": 192, "num_layers": 2}  # type: ignore[dict-item]
    (tmp_path / "t.yaml").write_text(json.dumps({**EXPERIMENT, "model": model}))
    fields = {
        "launch.master_port": free_port(), "launch.hang_timeout": 5, "train.train_iters": 60, "train.log_interval": 1,
        "train.save_interval": 20,
    }  # fmt: skip
    argv = [sys.executable, "-m", "tridock.cli", "train", "t.yaml", "--run-id-file", "id", "--nproc", "2"]
    argv += [word for name, value in fields.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    done = subprocess.run(argv, cwd=tmp_path, env=rank_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = runs / (tmp_path / "id").read_text().strip()
    assert exit_code_of(run) == 0
    logged = [line["iteration"] for line in read_lines(run / run_folder.METRICS) if "split" not in line]
    assert logged == list(range(1, 61))
    events = read_lines(run / run_folder.EVENTS)
    saved = {event["iteration"]: event["seconds"] for event in events if event["event"] == "checkpoint_saved"}
    assert sorted(saved) == [20, 40, 60]
    assert min(saved.values()) > 25
    waited = [event for event in events if event["event"] == "checkpoint_waited"]
    assert [(event["iteration"], event["previous"]) for event in waited] == [(40, 20), (60, 40)]
    assert all(event["seconds"] > 25 for event in waited)
    assert "warning: the checkpoint of iteration 40 waited " in (run / run_folder.rank_log(0)).read_text()
