"""`make bench-launch`: its exit code says whether a launch is as fast as promised."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_launch.py"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_launch", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_launch.py", "--repeats", "3"])
    monkeypatch.setattr(module, "load_cluster", lambda *_, **__: None)
    monkeypatch.setattr(module, "Hosts", lambda *_, **__: None)
    monkeypatch.setattr(module, "NodeClient", SimpleNamespace(of=lambda _: None))
    monkeypatch.setattr(module, "up", lambda _: None)
    monkeypatch.setattr(module, "by_hand", lambda _: ["by hand"])
    return module


@pytest.mark.parametrize(
    ("launches", "missed"),
    [([11.0, 11.4, 11.5], False), ([11.0, 11.6, 30.0], False), ([11.6, 11.6, 11.6], True), ([12.0, 20.0, 20.0], True)],
    ids=["below", "a machine that was not quiet", "just above", "far above"],
)
def test_above_its_goal_it_fails(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, launches: list[float], missed: bool
) -> None:
    times = iter(launches)

    def seconds(argv: list[str]) -> float:
        return next(times) if "launch" in argv and "launch.launcher=ssh" not in argv else 10.0

    monkeypatch.setattr(tool, "seconds_to_first_step", seconds)
    if missed:
        with pytest.raises(SystemExit) as ended:
            tool.main()
        assert ended.value.code == 1
    else:
        tool.main()
    assert json.loads(Path("runs/bench-launch.json").read_text())["seconds"]["fab launch"] == launches
