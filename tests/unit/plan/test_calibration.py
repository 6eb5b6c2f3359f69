"""What was measured on a cluster, in the plan's rates."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.plan.test_narayanan import ROWS, planned
from tridock.contracts.calibration import Attended, Calibration, Product, Summed
from tridock.errors import RequestError
from tridock.gpus import GPUS
from tridock.layout.kernels import attention_seconds, product_seconds
from tridock.ops.calibrate import calibration_path, read_calibration, summary, write_calibration
from tridock.plan import Assumptions, assess
from tridock.plan.rates import measured_device, measured_links

MEASURED = Calibration(
    device="NVIDIA A100-SXM4-80GB",
    ranks=16,
    units=108,
    memory_gb_s=1600.0,
    launch_s=5e-6,
    products=(Product("fp16", 4096, 4096, 4096, 0.001), Product("fp16", 1024, 4096, 4096, 0.0005)),
    attention=(Attended("fp16", 2048, 32, 128, 4, 0.001, 0.004),),
    sums=(
        Summed(8, 1, 1 << 20, 60e-6), Summed(8, 1, 256 << 20, 2.5e-3),
        Summed(16, 2, 1 << 20, 150e-6), Summed(16, 2, 256 << 20, 5e-3),
    ),
)  # fmt: skip


def test_products_and_attention_take_what_was_measured() -> None:
    device = measured_device(MEASURED, "fp16", "c.json")
    assert product_seconds(device, 4096, 4096, 4096) == pytest.approx(0.001, rel=0.05)
    assert product_seconds(device, 1024, 4096, 4096) == pytest.approx(0.0005, rel=0.05)
    between = product_seconds(device, 2048, 4096, 4096)
    assert 0.0005 < between < 0.001
    assert attention_seconds(device, 2048, 32, 128, 4) == pytest.approx((0.001, 0.004))


def test_links_have_the_latency_and_the_rate_of_two_sizes() -> None:
    links = measured_links(MEASURED)
    moved = 2 * 7 / 8 * (255 << 20)
    assert links["node"] == pytest.approx((60e-6 - 2.44e-3 / 255, moved / 2.44e-3 / 1e9))
    assert links["network"][1] == pytest.approx(2 * 15 / 16 * (255 << 20) / 4.85e-3 / 1e9)


def test_a_plan_says_what_it_stands_on() -> None:
    experiment = planned(*ROWS[3][1:8]).experiment
    slots = {f"node-{number}": range(8) for number in range(32)}
    assumed = Assumptions(GPUS["a100-80gb"], calibration=MEASURED, calibration_source="hostfile.calibration.json")
    cost = assess(experiment, slots, "e", assumed).cost
    assert cost is not None
    assert cost.estimate is not None
    text = "measured: hostfile.calibration.json"
    assert (cost.rates.tflops_source, cost.rates.network_source) == (text, text)
    # What the user gives wins: the network's rate, or that of all products.
    given = assess(experiment, slots, "e", replace(assumed, network_gbit=800.0, tflops=None)).cost
    assert given is not None
    assert (given.rates.network_source, given.rates.network_gb_s) == ("given", 100.0)
    flat = assess(experiment, slots, "e", replace(assumed, tflops=100.0)).cost
    assert flat is not None
    assert flat.rates.tflops_source == "given"


def test_a_precision_that_was_not_measured() -> None:
    with pytest.raises(RequestError) as caught:
        measured_device(MEASURED, "bf16", "c.json")
    message = "c.json: has no measurements in this precision; got bf16; use fp16, or --tflops"
    assert str(caught.value) == message


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = calibration_path(tmp_path / "hostfile")
    assert path.name == "hostfile.calibration.json"
    write_calibration(MEASURED, path)
    assert read_calibration(path) == MEASURED
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    path.write_text("{}")
    with pytest.raises(RequestError, match="is not a calibration; write one with tridock calibrate"):
        read_calibration(path)
    write_calibration(replace(MEASURED, version=2), path)
    with pytest.raises(RequestError, match="is of another version; got 2; write one with tridock calibrate"):
        read_calibration(path)
    with pytest.raises(RequestError, match="cannot be read; got No such file or directory"):
        read_calibration(tmp_path / "none")


def test_what_a_person_sees() -> None:
    lines = summary(MEASURED)
    assert lines[0] == "NVIDIA A100-SXM4-80GB, 16 ranks at the same time"
    assert lines[1] == "matrix products in fp16: 68.7 to 137 TFLOP/s"
    assert lines[-1] == "all-reduce of 256 MiB, 16 ranks over 2 nodes: 101 GB/s"


def test_a_plan_reads_a_calibration_where_fabric_is_missing() -> None:
    """In a container."""
    program = "import sys; sys.modules.update(dict.fromkeys(('fabric', 'paramiko'))); import tridock.ops.calibrate"
    subprocess.run([sys.executable, "-c", program], check=True)
