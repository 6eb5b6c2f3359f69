"""Megatron's logs, as they are printed and as they end up on disks."""

import math
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.report import logs
from tridock.errors import RequestError
from tridock.report.megatron_log import MegatronLog, read_log


def read(path: Path, text: str | bytes) -> list[MegatronLog]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(path)


def one(path: Path, text: str | bytes) -> MegatronLog:
    (log,) = read(path, text)
    return log


def points(log: MegatronLog, column: str = "loss") -> dict[int, float]:
    curve = log.columns.curve(column)
    return {int(x): y for x, y in zip(curve.x, curve.y, strict=True)}


def phases(log: MegatronLog, iteration: int) -> dict[str, float]:
    found = {}
    for name in log.phases.names():
        curve = log.phases.curve(name)
        found[name] = dict(zip(curve.x, curve.y, strict=True))[iteration]
    return found


@pytest.mark.parametrize("form", [logs.v115, logs.of_2021, logs.today])
def test_iterations_of_every_version(tmp_path: Path, form) -> None:
    log = one(tmp_path / "log", form(10, 7.5) + form(20, 7.25, ms=500.0))
    assert points(log) == {10: 7.5, 20: 7.25}
    assert points(log, "step_time_s") == {10: 0.25, 20: 0.5}
    assert points(log, "lr") == {10: 1.5e-4, 20: 1.5e-4}
    assert log.train_iters == 100


def test_what_only_later_versions_log(tmp_path: Path) -> None:
    old, middle, new = (one(tmp_path / "log", form(10, 7.5)) for form in (logs.v115, logs.of_2021, logs.today))
    assert old.columns.names() == ["loss", "loss_scale", "lr", "nan", "skipped", "step_time_s"]
    assert set(middle.columns.names()) - set(old.columns.names()) == {
        "consumed_samples",
        "global_batch_size",
        "grad_norm",
    }
    assert (points(middle, "consumed_samples"), points(middle, "grad_norm")) == ({10: 80.0}, {10: 1.25})
    assert points(middle, "skipped") == {10: 1.0}
    assert points(new, "tflops") == {10: 312.5}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (logs.TIMES, {"forward-compute": 0.05325, "backward-compute": 0.1385, "optimizer": 0.049}),
        (logs.TIMES_TODAY, {"forward-backward": 0.2105, "optimizer": 0.02175}),
        (logs.TIMES_MAX, {"forward-backward": 0.2105}),
        (logs.TIMES_ALL, {"forward-backward": 0.2105}),
    ],
)
def test_times_by_phase(tmp_path: Path, text: str, found: dict[str, float]) -> None:
    log = one(tmp_path / "log", logs.today(10, 7.5) + text + logs.today(20, 7.0) + text)
    assert phases(log, 10) == pytest.approx(found)
    assert phases(log, 20) == pytest.approx(found)


def test_times_before_the_first_iteration_belong_to_none(tmp_path: Path) -> None:
    assert one(tmp_path / "log", logs.TIMES + logs.v115(10, 7.5)).phases.names() == []


@pytest.mark.parametrize(("text", "splits"), [(logs.EVALUATED, {"valid": 6.25}),
                                              (logs.EVALUATED_TODAY, {"valid": 6.25, "test": 6.5})])  # fmt: skip
def test_evaluations(tmp_path: Path, text: str, splits: dict[str, float]) -> None:
    log = one(tmp_path / "log", logs.today(20, 7.5) + text)
    assert {split: list(found.curve("loss").y) for split, found in log.evaluations.items()} == {
        split: [loss] for split, loss in splits.items()
    }
    assert {found.curve("loss").x[0] for found in log.evaluations.values()} == {20.0}


def test_an_evaluation_without_an_iteration_follows_the_last(tmp_path: Path) -> None:
    text = " validation loss at the end of training for test data | lm loss value: 6.25E+00 | lm loss PPL: 5.0E+02 | \n"
    log = one(tmp_path / "log", logs.v115(30, 7.5) + text)
    assert list(log.evaluations["test"].curve("loss").x) == [30.0]


def test_arguments_world_and_memory(tmp_path: Path) -> None:
    old = (
        "after 10 iterations memory (MB) | allocated: 10.5 | max allocated: 20.5 | reserved: 30.0 | max reserved: 50\n"
    )
    log = one(tmp_path / "log", logs.ARGUMENTS + logs.today(10, 7.5) + logs.MEMORY + old)
    assert log.arguments["seq_length"] == "32"
    assert len(log.arguments) == 8
    assert log.world_size == 2
    assert log.memory == {0: 50.0 * 2**20, 1: 40.0 * 2**20}


@pytest.mark.parametrize("prefix", ["", "[default3]:", "gpu-1: ", "3: ", "\x1b[32m", "2026-01-01 INFO "])
def test_what_launchers_put_before_a_line(tmp_path: Path, prefix: str) -> None:
    assert points(one(tmp_path / "log", prefix + logs.today(10, 7.5))) == {10: 7.5}


def test_two_ranks_on_one_line(tmp_path: Path) -> None:
    text = logs.today(10, 7.5).rstrip("\n") + logs.today(20, 7.25)
    assert points(one(tmp_path / "log", text)) == {10: 7.5, 20: 7.25}


def test_a_copy_by_every_rank_counts_once(tmp_path: Path) -> None:
    log = one(tmp_path / "log", 3 * logs.today(10, 7.5) + 3 * logs.today(20, 7.25))
    assert (points(log), log.columns.returns) == ({10: 7.5, 20: 7.25}, 0)


def test_a_run_that_continues_from_a_checkpoint_is_one(tmp_path: Path) -> None:
    loaded = "  successfully loaded checkpoint from x [ t 1/1, p 1/1 ] at iteration 10\n"
    text = logs.today(10, 7.5) + logs.today(20, 7.0) + logs.EVALUATED + logs.today(30, 6.5)
    log = one(tmp_path / "log", text + loaded + logs.today(15, 7.125))
    assert (points(log), log.columns.returns) == ({10: 7.5, 15: 7.125}, 1)
    assert len(log.evaluations["valid"]) == 0


def test_one_run_after_another_are_two(tmp_path: Path) -> None:
    first, second = read(tmp_path / "log", logs.today(20, 7.5) + logs.TIMES + logs.today(10, 9.5, end=50))
    assert (points(first), first.train_iters, first.phases.names() != []) == ({20: 7.5}, 100, True)
    assert (points(second), second.train_iters, second.phases.names()) == ({10: 9.5}, 50, [])


def test_iterations_that_jump_for_ever_end_in_few_runs(tmp_path: Path) -> None:
    text = "".join(logs.today(900 if number % 2 else number, 7.0) for number in range(1, 200))
    assert len(read(tmp_path / "log", text)) == 16


@settings(max_examples=80, deadline=None)
@given(cut=st.integers(min_value=0, max_value=len(logs.today(20, 7.25))))
def test_a_line_that_is_cut_off_never_gives_another_number(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.log"
    whole = one(path, logs.today(10, 7.5) + logs.today(20, 7.25))
    log = one(path, logs.today(10, 7.5) + logs.today(20, 7.25)[:cut])
    for column in log.columns.names():
        found = points(log, column)
        assert found[10] == points(whole, column)[10]
        assert 20 not in found or math.isnan(found[20]) or found[20] == points(whole, column)[20]


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from([
                text.encode()
                for text in (logs.v115(10, 7.5), logs.today(20, 7.0), logs.TIMES, logs.TIMES_TODAY, logs.TIMES_ALL,
                             logs.EVALUATED, logs.MEMORY, logs.ARGUMENTS, "iteration 999999999999/ 1 | lm loss: nan |")
            ]),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.log"
    path.write_bytes(b"".join(parts))
    try:
        found = read_log(path)
    except RequestError as error:
        found = []
        message = str(error)
    assert all(len(log.columns) for log in found) if found else "has no iteration as Megatron logs it" in message


def test_not_a_number_is_kept_as_such(tmp_path: Path) -> None:
    line = logs.today(20, 7.0).replace("lm loss: 7.000000E+00", "lm loss: nan")
    curve = one(tmp_path / "log", logs.today(10, 7.5) + line).columns.curve("loss")
    assert (list(curve.x), curve.gaps()) == ([10.0, 20.0], [20.0])


def test_a_log_without_line_ends_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(logs.today(10, 7.5).encode() + b"x" * 30_000_000)
    tracemalloc.start()
    read_log(path)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_what_is_no_log(tmp_path: Path) -> None:
    for path, text, message in (
        (tmp_path / "none", None, "cannot be read; got No such file or directory; give the output of a Megatron run"),
        (tmp_path, None, "cannot be read; got Is a directory; give the output of a Megatron run"),
        (tmp_path / "empty", "", "has no iteration as Megatron logs it; got 0 lines; "
         "give the output of the rank that logs (v1.1.5: the first, today: the last)"),
        (tmp_path / "other", "hello\nworld\n", "has no iteration as Megatron logs it; got 2 lines; "
         "give the output of the rank that logs (v1.1.5: the first, today: the last)"),
    ):  # fmt: skip
        if text is not None:
            path.write_text(text)
        with pytest.raises(RequestError) as caught:
            read_log(path)
        assert str(caught.value) == f"--log {path}: {message}"
