"""The hostfile, read by DeepSpeed's own parser."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tridock.cluster.hostfile import parse_hostfile
from tridock.errors import RequestError

runner = pytest.importorskip("deepspeed.launcher.runner")

# Pieces that stand on both sides of every rule of the grammar, so that valid and near-valid texts are both common.
_HOSTS = st.sampled_from(["a", "b", "c", "a.b", "192.0.2.1", "fe80::1", "a:1", "#a", "-x", "n[1-2]", "slots=2", "ä"])
_GAPS = st.sampled_from([" ", "  ", "\t", "", "\x0b", "\x1c", "\u00a0", "\x85"])
_SLOTS = st.sampled_from(["slots=2", "slots=0", "slots=12", "slots=", "slots=-1", "slots = 2", "Slots=2", "slots=٣"])
_TAILS = st.sampled_from(["", " ", " # note", " max_slots=3", "x", ",4", "\x0c"])
_ENDS = st.sampled_from(["\n", "\r\n", "\r", "\n\n", "\x0b", "\u2028", ""])
_LINES = st.one_of(
    st.tuples(st.sampled_from(["", " ", "\t"]), _HOSTS, _GAPS, _SLOTS, _TAILS, _ENDS).map("".join),
    st.sampled_from(["# note\n", "\n", "   \n", "a\n", "slots=4\n", "\ufeffa slots=2\n"]),
    st.text(max_size=12),
)
_TEXTS = st.lists(_LINES, max_size=6).map("".join)


@pytest.fixture(autouse=True, scope="module")
def _quiet_deepspeed() -> Iterator[None]:
    logger = logging.getLogger("DeepSpeed")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def deepspeed_pool(text: str) -> dict[str, int] | None:
    try:
        # As fetch_hostfile reads it: open(path, 'r').readlines().
        return dict(runner._parse_hostfile(io.StringIO(text, newline=None).readlines()))
    except ValueError:
        return None


def our_pool(text: str) -> dict[str, int] | None:
    try:
        return parse_hostfile(text, "hostfile").pool
    except RequestError:
        return None


@given(_TEXTS)
@example("a slots=" + "1" * 5000)
@example("a slots=2\ra slots=2")
def test_accepts_and_reads_what_deepspeed_does(text: str) -> None:
    theirs, ours = deepspeed_pool(text), our_pool(text)
    assert ours == theirs
    assert list(ours or {}) == list(theirs or {})


_SPECS = st.tuples(
    st.sampled_from(["a", "b", "c", "d", "zero", "fe80::1", ""]),
    st.sampled_from(["", ":0", ":1", ":0,1", ":1,0,1", ":2", ":-1", ":", ":x", ": 1", ":0,", "::1", ":0:1"]),
).map("".join)
_FILTERS = st.lists(_SPECS, max_size=4).map("@".join)
_POOL = "b slots=2\na slots=1\nzero slots=0\nc slots=3\nfe80::1 slots=2\n"


@given(_FILTERS, _FILTERS)
@example("a@a:0", "")
@example("", "b@b:0")
def test_filters_as_deepspeed_does(include: str, exclude: str) -> None:
    hostfile = parse_hostfile(_POOL, "hostfile")
    theirs: dict[str, list[int]] | None
    try:
        theirs = dict(runner.parse_inclusion_exclusion(dict(hostfile.pool), include, exclude))
    except ValueError:
        theirs = None
    try:
        ours = {name: list(slots) for name, slots in hostfile.select(include, exclude).items()}
    except RequestError:
        assert theirs is None
    else:
        assert ours == theirs
        assert list(ours) == list(theirs)
