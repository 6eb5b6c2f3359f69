"""The hostfile: DeepSpeed's grammar, and the stricter checks beside it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.cluster.hostfile import Hostfile, Node, is_ipv6, load_hostfile, parse_hostfile
from tridock.errors import RequestError

LOCAL = "a run never falls back to this machine alone"
EXAMPLE = "write for example `node-1 slots=8`"
NAMES = "use letters, digits, dots, dashes and underscores, or an address; users and ports go into the settings"

HOSTILE_NAMES = [
    "-oProxyCommand=id",
    "user@host",
    "node[1-4]",
    "a,b",
    "a:22",
    "[::1]",
    "^file",
    "a/b",
    "..",
    ".",
    "a;b",
    "$(id)",
    "*",
    "fe80::1%x;y",
    "a..",
    "-",
    "x" * 254,
]


@given(st.lists(st.tuples(st.from_regex(r"[A-Za-z0-9._-]{1,12}", fullmatch=True), st.integers(0, 99)), min_size=1))
def test_round_trip(entries: list[tuple[str, int]]) -> None:
    hostfile = Hostfile(tuple(Node(name, slots) for name, slots in dict(entries).items()))
    assert parse_hostfile(hostfile.render(), "again") == hostfile


def test_entries_keep_their_order_and_the_first_is_the_head() -> None:
    hostfile = load("# rack 3\n\nb slots=2 # note\n  a\tslots=08 max_slots=9\r\n::1 slots=1")
    assert hostfile.nodes == (Node("b", 2), Node("a", 8), Node("::1", 1))
    assert hostfile.nodes[0] == Node("b", 2)
    assert hostfile.render() == "b slots=2\na slots=8\n::1 slots=1\n"


_POOL = "b slots=2\na slots=1\nzero slots=0\nc slots=3\nfe80::1 slots=2\n"


def load(text: str) -> Hostfile:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("lab").write_bytes(text.encode())
        return load_hostfile(Path("lab"))


def message(text: str) -> str:
    with pytest.raises(RequestError) as caught:
        load(text)
    return str(caught.value)


def test_all_bad_lines_are_named_at_once() -> None:
    assert message("a slots=1\nb\nc slots=x\na slots=2\nd slots = 4\n") == (
        f"lab:2: is not a `host slots=N` line; got 'b'; {EXAMPLE}\n"
        f"lab:3: is not a `host slots=N` line; got 'c slots=x'; {EXAMPLE}\n"
        "lab:4: names a host that line 1 has already; got 'a'; keep one of the two, with all its slots\n"
        f"lab:5: is not a `host slots=N` line; got 'd slots = 4'; {EXAMPLE}"
    )


@pytest.mark.parametrize("text", ["", "\n", "# a slots=4\n"])
def test_an_empty_hostfile(text: str) -> None:
    assert message(text) == f"lab: the hostfile names no node; got no entry; {EXAMPLE}; {LOCAL}"


def test_a_number_too_long() -> None:
    assert message("a slots=" + "1" * 5000) == f"lab:1: has a number too long to read; got 5000 digits; {EXAMPLE}"


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_that_ssh_pdsh_or_a_file_system_reads_otherwise(name: str) -> None:
    assert message(f"{name} slots=1") == f"lab:1: cannot be used as a host's name; got {name!r}; {NAMES}"


@pytest.mark.parametrize(
    "name", ["a", "node-1", "gpu_3.rack.example.org", "198.51.100.3", "::1", "fe80::1%eth0", "2001:DB8::7"]
)
def test_names_that_are_fine(name: str) -> None:
    load(f"{name} slots=1")


def test_slots_that_deepspeed_takes_and_no_run_can_use() -> None:
    assert message("a slots=0\nb slots=4,5\nc slots=4097\nd slots=8x # y\n") == (
        "lab:1: has no slots; got a slots=0; give at least 1, or comment the line out\n"
        f"lab:2: has more than a number after slots=; got 'slots=4,5'; {EXAMPLE}\n"
        "lab:3: has more slots than a host can have; got 4097; give at most 4096\n"
        f"lab:4: has more than a number after slots=; got 'slots=8x'; {EXAMPLE}"
    )


def test_names_that_differ_in_case_only() -> None:
    assert message("Node slots=1\nnode slots=1") == (
        "lab:2: differs from line 1 in case only, which ssh does not tell apart; got 'node'; keep one of the two"
    )


def select_message(include: str = "", exclude: str = "") -> str:
    with pytest.raises(RequestError) as caught:
        parse_hostfile(_POOL, "lab").select(include, exclude)
    return str(caught.value)


def test_filter_messages() -> None:
    assert select_message("a", "b") == "--include, --exclude: exclude each other; got 'a' and 'b'; give one of them"
    assert select_message("d@a:7,x@zero:0@fe80::1") == (
        "--include: names a host that lab does not have; got 'd'; use one of b, a, zero, c, fe80::1\n"
        "--include: names a slot that a does not have; got 7; use 0 to 0\n"
        "--include: has a slot of a that is not a number; got 'x'; write a:0,1\n"
        "--include: names a slot that zero does not have; got 0; it has no slots\n"
        "--include: has more than one colon in a host; got 'fe80::1'; name its host instead: "
        "in this grammar a colon begins the list of slots, so IPv6 addresses cannot stand here"
    )
    assert select_message(exclude="d").startswith("--exclude: names a host that lab does not have; got 'd'; ")


def test_filters_keep_the_numbers_of_the_slots() -> None:
    hostfile = parse_hostfile("a slots=8\nb slots=2\n", "lab")
    assert hostfile.select() == {"a": tuple(range(8)), "b": (0, 1)}
    assert hostfile.select("b@a:5,4") == {"a": (4, 5), "b": (0, 1)}
    assert hostfile.select(exclude="a@b:0") == {"b": (1,)}


def test_loading_names_every_bad_line_of_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "lab"
    path.write_text("-x slots=1\nb\nc slots=0\n")
    with pytest.raises(RequestError) as caught:
        load_hostfile(path)
    assert str(caught.value) == (
        f"{path}:1: cannot be used as a host's name; got '-x'; {NAMES}\n"
        f"{path}:2: is not a `host slots=N` line; got 'b'; {EXAMPLE}\n"
        f"{path}:3: has no slots; got c slots=0; give at least 1, or comment the line out"
    )
    path.write_text("a slots=1\n")
    assert load_hostfile(path) == Hostfile((Node("a", 1),))


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lab"
    with pytest.raises(RequestError) as caught:
        load_hostfile(path)
    assert (
        str(caught.value) == f"{path}: the hostfile is missing; got no such file; give the path of a hostfile; {LOCAL}"
    )
    path.touch()
    with pytest.raises(RequestError) as caught:
        load_hostfile(path)
    assert str(caught.value) == f"{path}: the hostfile names no node; got no entry; {EXAMPLE}; {LOCAL}"
    with pytest.raises(RequestError) as caught:
        load_hostfile(tmp_path)
    assert (
        str(caught.value) == f"{tmp_path}: cannot be read as a hostfile; got a folder; give the path of a hostfile file"
    )


def test_ipv6() -> None:
    assert [is_ipv6(name) for name in ("::1", "fe80::1%eth0", "192.0.2.1", "a:b", "node")] == [
        True,
        True,
        False,
        False,
        False,
    ]
