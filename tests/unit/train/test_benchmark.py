"""The modes of PyTorch's data parallel benchmark as fields, and what they refuse."""

import pytest

from tridock.errors import RequestError
from tridock.train.bench.benchmark import Place, agree_on_run, overrides

WHOLE = "parallel.zero_stage=0"


@pytest.mark.parametrize(
    ("mode", "devices", "world", "fields"),
    [
        (None, 1, 2, []),
        ("ddp", 1, 2, ["parallel.strategy=ddp", WHOLE]),
        ("fsdp", 1, 2, ["parallel.strategy=fsdp", WHOLE]),
        (
            "pdp",
            2,
            4,
            [
                "parallel.strategy=ddp",
                "parallel.use_tp_pp_dp_mapping=true",
                WHOLE,
                "parallel.pipeline_model_parallel_size=2",
            ],
        ),
        ("tp", 4, 4, ["parallel.strategy=ddp", WHOLE, "parallel.tensor_model_parallel_size=4"]),
    ],
)
def test_a_modes_fields(mode: str | None, devices: int, world: int, fields: list[str]) -> None:
    assert overrides(mode, devices, world) == fields


@pytest.mark.parametrize(
    ("mode", "devices", "world", "said"),
    [
        ("pdp", 1, 2, "must be 2 or more with --mode pdp; got 1; give the devices that one model spans"),
        (
            "pdp",
            2,
            1,
            "one process drives one device: 2 devices a model want a multiple of as many; got 1 processes; give "
            "torchrun --nproc_per_node 2, or use ptd_benchmark.sh, which does",
        ),
        (None, 2, 2, "says how many devices a model spans, and no --mode how; got 2; give --mode pdp or --mode tp"),
        ("fsdp", 2, 2, "--mode fsdp has a whole model on each device; got 2; leave it out, or use --mode pdp"),
    ],
)
def test_devices_that_do_not_fit(mode: str | None, devices: int, world: int, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        overrides(mode, devices, world)
    assert str(caught.value) == f"--ndevice_per_proc: {said}"


def test_the_place_that_torchrun_gives() -> None:
    env = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert Place.of(env) == Place(9, 16, 8, 1)
    assert Place.of({}) == Place(0, 1, 1, 0)


def test_a_process_alone_asks_nobody() -> None:
    assert agree_on_run(Place(0, 1, 1, 0), {}, lambda: {"code": 2}) == {"code": 2}


def test_another_launcher_than_torchrun() -> None:
    with pytest.raises(RequestError) as caught:
        agree_on_run(Place(0, 4, 4, 0), {"MASTER_ADDR": "a"}, dict)
    assert str(caught.value) == (
        "tridock.train: cannot find torchrun's store; got 4 ranks; start it with torchrun; under another launcher use "
        "tridock train, tridock launch or tridock slurm"
    )
