"""Limits of tests only end hung tests: they are those of tests/patience.py, not numbers that a busy machine exceeds."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
WAITS = {"wait", "wait_until", "until", "join", "settimeout", "timeout"}
KEYWORDS = {"timeout", "timeout_s", "patience", "patience_s"}
# A moment in which nothing may happen, or a limit that is the test's subject.
MEANT = {
    ("distributed/fork_server.py", 0.0), ("distributed/pretended_v115.py", 1), ("distributed/small_worlds.py", 60.0),
    ("distributed/test_fork_server.py", 0.05), ("integration/test_remote_commands.py", 1),
    ("integration/test_remote_commands.py", 4), ("unit/contracts/test_appends.py", 0.3),
    ("unit/node/test_rank_starter.py", 1.5), ("unit/node/test_runs.py", 2.0), ("unit/ops/test_rendezvous.py", 0.05),
    ("unit/ops/test_rendezvous.py", 1.0),
}  # fmt: skip


def limits(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that say how long something is waited for."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=args, keywords=keywords):
            yield from (keyword.value for keyword in keywords if keyword.arg in KEYWORDS)
            if name in WAITS:
                yield from args[-1:]
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if "PATIENCE" in name.upper():
            yield value
        case ast.Assign(targets=[ast.Name(id="deadline")], value=ast.BinOp(right=value)):
            yield value
        case ast.arguments():
            for argument, value in zip(node.args[::-1], node.defaults[::-1], strict=False):
                if argument.arg in KEYWORDS:
                    yield value
            for argument, default in zip(node.kwonlyargs, node.kw_defaults, strict=True):
                if argument.arg in KEYWORDS and default is not None:
                    yield default


def bare(source: str) -> list[float]:
    found = (limit for node in ast.walk(ast.parse(source)) for limit in limits(node))
    return [it.value for it in found if isinstance(it, ast.Constant) and isinstance(it.value, int | float)]


def test_limits_have_names() -> None:
    found = {
        (str(path.relative_to(TESTS)), number)
        for path in TESTS.rglob("*.py")
        if path.name != "patience.py"
        for number in bare(path.read_text())
    }
    assert found - MEANT == set(), "wait for STEP_S or WORK_S of tests/patience.py"
    assert MEANT - found == set(), "they are gone: remove them here"


def test_numbers_are_found_where_they_are_limits() -> None:
    lines = ("p.wait(60)", "wait_until(a, 'b', 9)", "run(a, timeout=2.0)", "deadline = now() + 5", "PATIENCE = 7")
    assert [bare(line) for line in lines] == [[60], [9], [2.0], [5], [7]]
    assert bare("def f(a, *, timeout=3): g(timeout=STEP_S, seconds=4)") == [3]
    assert bare("@pytest.mark.timeout(8)\ndef f(timeout=1, *b): ...") == [1, 8]
