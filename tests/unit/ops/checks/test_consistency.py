"""What has to be the same everywhere, and what is said where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ops.checks.lab import make_cluster, node_report, shown
from tridock.contracts.mesh_answers import Clock
from tridock.contracts.node_answers import Code
from tridock.ops.checks import consistency

IMAGE, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


def test_another_image() -> None:
    assert shown(consistency.image_findings("--hosts lab", {"host-1": IMAGE, "host-2": IMAGE})) == []
    assert shown(consistency.image_findings("--hosts lab", {"host-1": IMAGE, "host-2": OTHER})) == [
        "fail  host-2: runs a different image than the head; got sha256:222222222222, sha256:111111111111 on host-1; "
        "run tridock up --hosts lab"
    ]


def test_other_code() -> None:
    here = node_report()
    there = node_report(code=Code("c" * 64, None))
    assert shown(consistency.code_findings("--hosts lab", {"host-1": here, "host-2": here})) == []
    assert shown(consistency.code_findings("--hosts lab", {"host-1": here, "host-2": there})) == [
        "fail  host-2: has different code in /opt/tridock than the head; got cccccccccccc, aaaaaaaaaaaa on host-1; "
        "recreate its container: tridock down, then tridock up --hosts lab",
        "fail  host-2: has different code in /opt/megatron-v1.1.5 than the head; got none, bbbbbbbbbbbb on host-1; "
        "recreate its container: tridock down, then tridock up --hosts lab",
    ]


def test_variables_that_differ_are_listed_by_name(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, hosts=3)
    head = {"NCCL_DEBUG": "WARN", "PATH": "/bin", "HF_TOKEN": "(secret 1)"}
    other = {"NCCL_DEBUG": "INFO", "PATH": "/bin", "HF_TOKEN": "(secret 2)", "UCX_TLS": "tcp"}
    found = consistency.environment_findings(cluster, {"host-1": head, "host-2": other, "host-3": {"PATH": "/bin"}})
    todo = "set them for all nodes (env in the settings), then tridock up"
    assert shown(found) == [
        "fail  host-2: its environment differs from the head's; got HF_TOKEN=(secret 2), (secret 1) on host-1; "
        f"NCCL_DEBUG=INFO, WARN on host-1; UCX_TLS=tcp, not set on host-1; {todo}",
        "fail  host-3: its environment differs from the head's; got HF_TOKEN is not set, (secret 1) on host-1; "
        f"NCCL_DEBUG is not set, WARN on host-1; {todo}",
    ]


def test_variables_that_the_settings_set_for_single_nodes_differ_by_intent(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, nodes={"host-2": {"env": {"GLOO_SOCKET_IFNAME": "eno1"}}})
    found = consistency.environment_findings(
        cluster, {"host-1": {}, "host-2": {"GLOO_SOCKET_IFNAME": "eno1", "A": "1"}}
    )
    assert [finding.problem.got for finding in found] == ["A=1, not set on host-1"]


def test_many_differences_are_counted(tmp_path: Path) -> None:
    here = {f"A{number}": "1" for number in range(9)}
    (said,) = shown(consistency.environment_findings(make_cluster(tmp_path), {"host-1": {}, "host-2": here}))
    assert "A5=1, not set on host-1; and 3 more; set them" in said


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        (0.9, []),
        (2.5, ["warn  host-2: its clock is ahead of the others'; got 2.5 s; {todo}"]),
        (-2.5, ["warn  host-2: its clock is behind of the others'; got 2.5 s; {todo}"]),
        (31.0, ["fail  host-2: its clock is ahead of the others'; got 31.0 s; {todo}"]),
    ],
)
def test_clocks(offset: float, said: list[str]) -> None:
    todo = "set it by NTP there (timedatectl set-ntp true)"
    clocks = {"host-1": Clock(0.0, 0.01), "host-2": Clock(offset, 0.01), "host-3": Clock(0.0, 0.01)}
    assert shown(consistency.clock_findings(clocks)) == [line.format(todo=todo) for line in said]


def test_a_head_whose_clock_is_wrong_is_named_itself() -> None:
    clocks = {"host-1": Clock(0.0, 0.01), "host-2": Clock(60.0, 0.01), "host-3": Clock(60.1, 0.01)}
    assert [it.problem.where for it in consistency.clock_findings(clocks)] == ["host-1"]


def test_a_clock_is_not_called_wrong_for_what_the_way_there_took() -> None:
    assert shown(consistency.clock_findings({"host-1": Clock(0.0, 0.0), "host-2": Clock(1.5, 0.6)})) == []


def test_one_node_has_no_clock_to_differ_from() -> None:
    assert shown(consistency.clock_findings({"host-1": Clock(99.0, 0.0)})) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_nodes_that_see_one_folder_are_one_group(folders: list[int]) -> None:
    nodes = [f"host-{number}" for number in range(len(folders))]
    seen = dict(zip(nodes, map(str, folders), strict=True))
    expected = [
        [node for node, there in zip(nodes, folders, strict=True) if there == folder]
        for folder in dict.fromkeys(folders)
    ]
    assert consistency.sharing(seen) == expected
    assert consistency.sharing({**seen, "a": "", "b": ""}) == [*expected, ["a"], ["b"]]


def test_a_node_without_the_others_shared_folder() -> None:
    assert shown(consistency.sharing_findings([["a", "b", "c"]])) == []
    assert shown(consistency.sharing_findings([["a"], ["b"]])) == []
    assert shown(consistency.sharing_findings([["a", "c"], ["b"]])) == [
        "warn  b: does not share the others' /workspace/runs; got b apart from a, c; "
        "mount the shared folder there too, or make them all local (workdir in the settings)"
    ]
