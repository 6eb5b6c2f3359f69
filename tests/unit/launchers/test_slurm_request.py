"""What a job asks of Slurm: fields that cannot be, and how times are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridock.errors import RequestError
from tridock.launchers.slurm.profile import make_request
from tridock.launchers.slurm.ranks import tasks_per_node
from tridock.launchers.slurm.request import seconds_of

PROFILES = Path(__file__).parents[3] / "configs" / "slurm"


SITES = sorted(path for path in PROFILES.glob("*.yaml") if path.stem != "reference")


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
def test_the_profiles_load(path: Path) -> None:
    assert make_request(path.read_text(), str(path), {"nodes": 2}).nodes == 2


def test_the_sites_are_as_they_were_described() -> None:
    jean_zay, gcp = (make_request((PROFILES / f"{n}.yaml").read_text(), n, {}) for n in ("jean-zay", "gcp"))
    assert (jean_zay.constraint, jean_zay.hint, jean_zay.cpus_per_node) == ("v100-32g", "nomultithread", 32)
    assert jean_zay.qos is not None
    assert (gcp.partition, gcp.gpus_per_node, gcp.cpus_per_node) == ("train", 8, 96)


def test_the_command_line_wins_over_the_profile() -> None:
    text = "gpus_per_node: 4\nlauncher: srun\ncontainer: {kind: docker, image: a, mounts: [/data]}\n"
    made = make_request(text, "p", {"gpus_per_node": 2, "container.image": "b"})
    assert (made.gpus_per_node, made.container.image, made.container.mounts) == (2, "b", ("/data",))
    assert tasks_per_node(made) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "p: gpus_per_node: is missing; add it, or give --gpus-per-node"),
        ("{gpus_per_node: 8, launcher: srun, cpus_per_node: 4}",
         "p: cpus_per_node: is less than a CPU a task; got 4; give at least 8, one a task"),
        ("{gpus_per_node: 1, container: {kind: apptainer}}",
         "p: container.image: is missing; name the image for apptainer, or --image"),
        ("{gpus_per_node: 1, launcher: deepspeed-pdsh, container: {kind: pyxis, image: x}}",
         "p: launcher: starts the ranks from the first node, and cannot from within pyxis; got deepspeed-pdsh; "
         "use torchrun, srun or deepspeed, which start inside of it"),
        ("{gpus_per_node: 1, container: {kind: docker, image: x, mounts: [data]}}",
         "p: container.mounts: is not a mount; got 'data'; write /source, /source:/target or …:ro"),
        ("{gpus_per_node: 1, time: '5', signal_lead: 300}",
         "p: signal_lead: is no less than the time, 5; got 300 s; lower signal_lead, or ask for more time"),
        ("{gpus_per_node: 1, sbatch: [mail]}", "p: sbatch: is not an option; got 'mail'; write --name or --name=value"),
        ("{gpus_per_node: 1, srun: [mpi]}", "p: srun: is not an option; got 'mpi'; write --name or --name=value"),
        ("{gpus_per_node: 1, env: {SLURM_X: '1'}}",
         "p: env.SLURM_X: is reserved for Tridock or Slurm; got '1'; choose another name"),
        ("{gpus_per_node: 1, partition: a b}",
         r"p: partition: has the wrong form; got 'a b'; write text that matches ^[^\s\x00]+$"),
        ("{gpus_per_node: 1, time: soon}",
         "p: time: is not a time limit: 90 (minutes), 1:30:00, 2-12 (days-hours), 2-12:30:00 or UNLIMITED; "
         "got 'soon'; correct it"),
        ("{gpus_per_node: 1, time: 360}", "p: time: must be text; got 360; put it in quotes"),
        ("{gpus_per_node: 1, partitions: a}", "p: partitions: is not a field; got 'a'; did you mean partition?"),
    ],
)  # fmt: skip
def test_what_cannot_be(text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_request(text, "p", {})
    assert str(caught.value) == message


@pytest.mark.parametrize("time", ["UNLIMITED", "unlimited", "INFINITE"])
def test_no_time_limit(time: str) -> None:
    assert make_request(f"{{gpus_per_node: 1, time: {time}}}", "p", {}).time == "0"


def test_a_gpu_that_is_not_known() -> None:
    with pytest.raises(RequestError) as caught:
        make_request("{gpus_per_node: 1, gpu: v99}", "p", {})
    assert str(caught.value).startswith("p: gpu: is not a known GPU; got 'v99'; use one of ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("6:00:00", 21600), ("1-0", 86400), ("2-12:30", 217800), ("1-0:0:5", 86405)],
)
def test_times_are_slurms(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds
