"""The GPU for the plan, and what a partition does not allow, from what sinfo says."""

from __future__ import annotations

import pytest

from tridock.launchers.slurm.profile import make_request
from tridock.ops.slurm.site import gpu_of, limit_problems, parse_sinfo

SINFO = [
    "gpu*|gpu:v100:4(S:0-1)|v100-16g|20:00:00|1-4",
    "gpu*|gpu:v100:4(S:0-1)|v100,v100-32g|20:00:00|1-4",
    "train|gpu:nvidia_a100-sxm4-80gb:8|(null)|4-04:00:00|1-infinite",
    "cpu|(null)|(null)|infinite|1-infinite",
    "old|gpu:v100:2|(null)|infinite|1-infinite",
    "a line that is none",
]


@pytest.mark.parametrize(
    ("fields", "gpu"),
    [
        ({}, "v100-16gb"),
        ({"constraint": "v100-32g"}, "v100-32gb"),
        ({"partition": "old"}, None),  # two sizes have the name
        ({"partition": "train"}, "a100-80gb"),
        ({"partition": "cpu"}, None),
    ],
)
def test_the_gpu_for_the_plan(fields: dict[str, object], gpu: str | None) -> None:
    found = gpu_of(parse_sinfo(SINFO), make_request("gpus_per_node: 4\n", "p", fields))
    assert (found and found.name) == gpu


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"nodes": 4, "time": "20:00:00"}, []),
        ({"nodes": 9, "partition": "gpu,train", "time": "4-04"}, []),
        ({"nodes": 9, "partition": "cpu", "time": "UNLIMITED"}, []),
        ({"nodes": 9, "partition": "unknown"}, []),  # Slurm's to refuse
        (
            {"nodes": 5, "time": "20:00:01"},
            [
                "p: time: is longer than partition gpu allows; got 20:00:01; "
                "ask for at most 1200 minutes: a run that has saved is queued again",
                "p: nodes: are more than partition gpu gives to a job; got 5; ask for at most 4",
            ],
        ),
        (
            {"partition": "gpu,train", "time": "UNLIMITED"},
            [
                "p: time: is longer than partition gpu and train allows; got 0; "
                "ask for at most 6000 minutes: a run that has saved is queued again"
            ],
        ),
    ],
)
def test_a_job_that_would_wait_for_ever(fields: dict[str, object], found: list[str]) -> None:
    request = make_request("gpus_per_node: 4\n", "p", fields)
    assert [str(problem) for problem in limit_problems(parse_sinfo(SINFO), request, "p")] == found
