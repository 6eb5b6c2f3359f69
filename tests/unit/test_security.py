"""What holds for all of the source: scripts are constants, pickles are not read, YAML makes nothing but data."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sources import SOURCES, nodes
from tridock.errors import RequestError
from tridock.experiment import parse_experiment
from tridock.launchers.run import make_bundle
from tridock.launchers.ssh import Ssh
from tridock.ops.runs.prepare import prepared_from
from tridock.plan import assess
from tridock.yaml_text import parse_yaml

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("sources")


@cache
def calls() -> list[tuple[Path, ast.Call | ast.Tuple | ast.List]]:
    found = ((path, node) for path in SOURCES for node in nodes(path))
    return [(path, node) for path, node in found if isinstance(node, ast.Call | ast.Tuple | ast.List)]


def is_constant(script: ast.expr) -> bool:
    """Also one that is put together of names that do not change: ``run_folder.SSHD_PID``."""
    if isinstance(script, ast.JoinedStr):
        parts = [part.value for part in script.values if isinstance(part, ast.FormattedValue)]
        return all(ast.unparse(part).startswith("run_folder.") for part in parts)
    return isinstance(script, ast.Constant | ast.Name)


def test_scripts_for_a_shell_are_constants() -> None:
    """Values come to them as arguments, ``"$1"``; a script that holds a value would be a hole sooner or later."""
    found, wrong = 0, []
    for path, node in calls():
        arguments = node.args if isinstance(node, ast.Call) else node.elts
        for shell, flag, script in zip(arguments, arguments[1:], arguments[2:], strict=False):
            if [getattr(word, "value", None) for word in (shell, flag)] not in (["sh", "-c"], ["bash", "-c"]):
                continue
            found += 1
            if not is_constant(script) and not ast.unparse(script).endswith(".render()"):
                wrong.append(f"{path}:{script.lineno}: {ast.unparse(script)}")
    assert found > 3
    assert wrong == []


def test_no_shell_between_us_and_a_program() -> None:
    named = [(path, node, ast.unparse(node.func)) for path, node in calls() if isinstance(node, ast.Call)]
    assert [path for path, _, name in named if name in ("os.system", "os.popen", "subprocess.getoutput")] == []
    assert [path for path, node, _ in named for keyword in node.keywords if keyword.arg == "shell"] == []


def test_checkpoints_are_loaded_as_weights_only() -> None:
    """Of ours; DeepSpeed and Megatron load theirs themselves (docs/security.md)."""
    loads = [node for _, node in calls() if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert loads
    for load in loads:
        assert "weights_only=True" in ast.unparse(load)
    arrays = [
        ast.unparse(node) for _, node in calls() if isinstance(node, ast.Call) and "np.load" in ast.unparse(node.func)
    ]
    assert arrays
    assert all("allow_pickle=False" in load for load in arrays)
    unpicklers = {"pickle.load", "pickle.loads", "marshal.loads", "eval", "exec"}
    named = [ast.unparse(node.func) for _, node in calls() if isinstance(node, ast.Call)]
    assert unpicklers.isdisjoint(named)


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch pwned']",
        "a: !!python/name:os.system",
        "!!python/object/new:os.system ['touch pwned']",
        "a: !!python/module:os",
    ],
)
def test_yaml_makes_nothing_but_data(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=r"^e\.yaml:1:[14]: has a tag that does not fit its value; got !!python"):
        parse_yaml(text, "e.yaml")
    assert list(tmp_path.iterdir()) == []


EXPERIMENT = """\
name: tiny
engine: megatron-deepspeed
precision: fp32
model: {num_layers: 1, hidden_size: 8, num_attention_heads: 1, seq_length: 8}
batch: {micro_batch_size: 1}
data: {data_path: data/x, vocab_file: v, merge_file: m}
train: {train_iters: 1}
"""
SHOW = '#!/bin/sh\nprintf "%s\\0" "$@" "$V" >"$OUT"\n'
VALUES = st.text(st.characters(exclude_characters="\x00\n\r'", exclude_categories=["Cs"]), min_size=1)


@settings(max_examples=25)
@given(VALUES.filter(lambda text: text[0] not in "-/"), VALUES)
def test_hostile_values_of_an_experiment_reach_the_launcher_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, path: str, value: str
) -> None:
    """The run's own ``launch.sh`` in a real bash, with a stand-in for DeepSpeed that shows what it got."""
    folder = tmp_path_factory.mktemp("hostile")
    plain = parse_experiment(EXPERIMENT, "e.yaml")
    data = plain.data.model_copy(update={"vocab_file": path})
    experiment = plain.model_copy(update={"data": data, "env": {"V": value}, "megatron_args": (value,)})
    slots = {"localhost": [0]}
    run_id = "tiny-20260102-030405-abcd"
    prepared = prepared_from(assess(experiment, slots, "e.yaml"), slots, run_id)
    made = make_bundle(replace(prepared, workspace=str(folder)), Ssh())
    home = folder / "runs" / run_id
    home.mkdir(parents=True)
    (folder / "deepspeed").write_text(SHOW)
    (folder / "deepspeed").chmod(0o755)
    (home / "launch.sh").write_bytes(made.files["launch.sh"])
    env = {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(folder / "out")}
    subprocess.run(["bash", str(home / "launch.sh")], env=env, check=True, capture_output=True)
    argv = (folder / "out").read_bytes().decode().split("\0")
    assert f"{folder}/{path}" in argv
    assert argv[-2:] == [value, ""]
    assert argv[-3] == value
