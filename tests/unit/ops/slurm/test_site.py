"""A request against what sinfo says: everything that no set of nodes has, with what there is."""

from __future__ import annotations

import pytest

from tridock.launchers.slurm.request import make_request
from tridock.ops.slurm.site import gpu_of, idle_nodes, parse_sinfo, site_problems

SINFO = [
    "gpu*|3/6/1/10|gpu:v100:4(S:0-1)|190000|40|20:00:00|v100-16g",
    "gpu*|0/2/0/2|gpu:v100:4(S:0-1)|190000|40|20:00:00|v100,v100-32g",
    "train|4/0/0/4|gpu:a100:8|1000000+|96|infinite|(null)",
    "cpu|40/8/2/50|(null)|64000|16|1-00:00:00|(null)",
    "a line that is none",
]


def problems(**fields: object) -> list[str]:
    request = make_request("gpus_per_node: 4\n", "p", fields)
    return [str(problem) for problem in site_problems(parse_sinfo(SINFO), request, "p")]


@pytest.mark.parametrize(
    "fields",
    [
        {"nodes": 12},
        {"nodes": 2, "constraint": "v100-32g", "time": "20:00:00"},
        {"nodes": 4, "partition": "train", "gpus_per_node": 8, "time": "7-0", "mem": "900G", "cpus_per_node": 96},
        {"nodes": 10, "partition": "cpu", "gpu_request": "none"},
        {"nodes": 1, "constraint": "a|b"},  # not ours to judge
    ],
)
def test_what_there_is(fields: dict[str, object]) -> None:
    assert problems(**fields) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partition": "tain"}, "p: partition: is not one of this cluster; got 'tain'; use one of gpu, train, cpu"),
        ({"nodes": 13}, "p: nodes: are more than partition gpu has; got 13; ask for at most 12"),
        ({"nodes": 3, "constraint": "v100-32g"},
         "p: constraint: 2 nodes of partition gpu have it, and 3 are asked for; got v100-32g; "
         "the features there are: v100, v100-16g, v100-32g"),
        ({"partition": "cpu"},
         "p: gpus_per_node: 0 nodes of partition cpu have it, and 1 are asked for; got 4; "
         "ask for at most 0, or for fewer nodes"),
        ({"cpus_per_node": 41},
         "p: cpus_per_node: 0 nodes of partition gpu have it, and 1 are asked for; got 41; "
         "ask for at most 40, or for fewer nodes"),
        ({"mem": "200G"},
         "p: mem: 0 nodes of partition gpu have it, and 1 are asked for; got 200G; "
         "ask for at most 190000M, or for fewer nodes"),
        ({"time": "20:00:01"},
         "p: time: is longer than partition gpu allows; got 20:00:01; "
         "ask for at most 1200 minutes: a run that has saved is queued again"),
    ],
)  # fmt: skip
def test_what_there_is_not(fields: dict[str, object], message: str) -> None:
    assert problems(**fields) == [message]


def test_all_at_once() -> None:
    found = problems(partition="gpu,other", constraint="a100", mem="2T", time="2-0")
    assert [problem.split(": ")[1] for problem in found] == ["partition", "constraint", "mem", "time"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"nodes": 8}, "nodes: 8 of 12 in partition gpu are idle; the job needs 8"),
        ({"nodes": 9},
         "nodes: 8 of 12 in partition gpu are idle; the job needs 9, so it waits for 1 more; "
         "1 are down, drained or reserved"),
        ({"nodes": 1, "constraint": "v100-32g"}, "nodes: 2 of 2 in partition gpu are idle; the job needs 1"),
        ({"nodes": 4, "partition": "train,gpu"},
         "nodes: 8 of 16 in partition gpu and train are idle; the job needs 4"),
        ({"nodes": 2, "partition": "train,gpu", "gpus_per_node": 8},
         "nodes: 0 of 4 in partition train are idle; the job needs 2, so it waits for 2 more"),
        ({"nodes": 1, "partition": "none"}, None),
    ],
)  # fmt: skip
def test_the_nodes_that_are_idle(fields: dict[str, object], expected: str | None) -> None:
    request = make_request("gpus_per_node: 4\n", "p", fields)
    assert idle_nodes(parse_sinfo(SINFO), request) == expected


@pytest.mark.parametrize(
    ("fields", "gpu"),
    [
        ({}, "v100-16gb"),
        ({"constraint": "v100-32g"}, "v100-32gb"),
        ({"partition": "train"}, "a100-80gb"),
        ({"partition": "cpu"}, None),
    ],
)
def test_the_gpu_for_the_plan(fields: dict[str, object], gpu: str | None) -> None:
    found = gpu_of(parse_sinfo(SINFO), make_request("gpus_per_node: 4\n", "p", fields))
    assert (found and found.name) == gpu
