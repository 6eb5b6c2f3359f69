"""The twin on the GPU image, with an nvidia-smi that lists GPUs which CUDA cannot use: what the operator reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.clone import Clone, a_clone
from tests.rehearsal.conftest import make_nvidia_smi
from tests.unit.contracts.test_devices import WHOLE
from tests.unit.node.test_accelerators import FAULTY, HEALTHY, TABLES, report

NO_CUDA = (
    "CUDA has no usable GPU in its container; got libcuda.so.1: cannot open shared object file: No such file or "
    "directory; see that nvidia-smi works on the host, then recreate its container: tridock down, then tridock up"
)


@pytest.fixture(scope="module")
def clone(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    smi = make_nvidia_smi(tmp_path_factory.mktemp("smi") / "nvidia-smi")
    smi.answer(TABLES["580.65.06"], report(HEALTHY, FAULTY), WHOLE)
    with a_clone(tmp_path_factory.mktemp("clone"), cpu_image) as made:
        compose, runs = made.folder / "docker-compose.yml", "      - ./runs:/workspace/runs\n"
        assert runs in compose.read_text()
        compose.write_text(compose.read_text().replace(runs, runs + "".join(f"      - {it}\n" for it in smi.mounts)))
        made.succeed("tridock up --hosts hostfiles/twin")
        yield made


def test_the_doctor_names_what_is_wrong_with_the_gpus_of_each_node(clone: Clone) -> None:
    done = clone.run("tridock", "check", "--hosts", "hostfiles/twin")
    assert done.returncode == 3, done.stdout + done.stderr
    for node in ("node-1", "node-2"):
        for line in (
            f"fail  {node}: {NO_CUDA}",
            f"fail  {node}: GPU 1 needs recovery; got Reset; do that there (sudo nvidia-smi --gpu-reset -i 1, or "
            "restart the host), or --exclude the slot",
            f"warn  {node}: persistence mode of its GPUs is off; turn it on there: sudo nvidia-smi -pm 1",
        ):
            assert f"{line}\n" in done.stdout
        assert f"{node}: GPU 0 " not in done.stdout
    alone = "fail  node-1, node-2: the all-reduce fails among its own ranks; got rank 0: device: torch has no GPU"
    assert done.stdout.count(alone) == 1


def test_a_launch_ends_with_cudas_reason_before_a_rank_starts(clone: Clone) -> None:
    done = clone.run("tridock", "launch", "--hosts", "hostfiles/twin", "--config", "configs/demo.yaml")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.splitlines()[-2:] == [f"{node}: {NO_CUDA}" for node in ("node-1", "node-2")]
    assert not list((clone.folder / "runs").glob("demo-*"))
