"""Whatever a user writes: an answer within seconds, never a traceback, an exit code that is documented."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Sequence
from json import dumps, loads
from pathlib import Path

import pytest
import yaml

from tests.bounded import run_bounded
from tests.fuzz import CASES, legal, mutated, option_value
from tests.unit.plan.test_from_run import write_run
from tridock.bench.cells import cells_of, load_bench
from tridock.cli import main
from tridock.errors import exit_code_of
from tridock.experiment import Experiment, load_command

GOOD = """\
name: tiny
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 16, vocab_size: 100}
batch: {micro_batch_size: 1}
data: {data_path: data/x}
train: {train_iters: 3}
"""
COMMAND = """\
name: mine
engine: command
command: [torchrun, train.py]
setup: make
code: .
metrics: hf-trainer
launch: {hang_timeout: 60}
restart: {max: 1, node_timeout: 90s}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "e.yaml").write_text(GOOD)
    (tmp_path / "hosts").write_text("a slots=4\n")
    return tmp_path


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
HUGE = "9" * 400
NESTED = "[" * 5000

PROVOKED = {
    "a huge prime": (GOOD, ("--nodes", "1", "--set", "model.hidden_size=1000000007")),
    "a million nodes": (GOOD, ("--nodes", "1000000")),
    "millions of slots": (GOOD, ("--nodes", "1", "--gpus-per-node", "4000000")),
    "an alias bomb": (GOOD + BOMB, ("--nodes", "1")),
    "a bomb in a section": (BOMB + GOOD.replace("{train_iters: 3}", "*a11"), ("--nodes", "1")),
    "unhashable keys": (GOOD + "{a: b}: c\n[1]: 2\n", ("--nodes", "1")),
    "nesting": (GOOD + f"deepspeed: {NESTED}", ("--nodes", "1")),
    "nesting in --set": (GOOD, ("--nodes", "1", "--set", f"deepspeed={NESTED}")),
    "nesting by blocks": (GOOD + "deepspeed:\n" + "".join(f"{' ' * n}a:\n" for n in range(1, 900)), ("--nodes", "1")),
    "many digits": (GOOD, ("--nodes", "1", "--set", f"model.hidden_size={HUGE}", "--set", f"train.seed=-{HUGE}")),
    "too many digits": (GOOD, ("--nodes", "1", "--set", f"model.hidden_size={'9' * 5000}")),
    "digits in a GPU": (GOOD, ("--nodes", "1", "--gpu", f"{HUGE}gib")),
    "digits of nodes": (GOOD, ("--nodes", "9" * 5000)),
    "a network": (GOOD, ("--nodes", "1", "--gpu", "h100", "--network-gbit", "1e-320", "--tokens", "1e308")),
    "control characters": (GOOD, ("--nodes", "1", "--set", '"data.\x1b[2J=1"', "--set", '"name=\x9b"', "--\x1b[31m")),
    "a long value": (GOOD.replace("tiny", "T" * 5000), ("--nodes", "1")),
    "a long key": (GOOD + f"{'k' * 5000}: 1\n", ("--nodes", "1")),
    "deep paths": (GOOD, ("--nodes", "1", "--set", f"{'a.' * 5000}b=1")),
    "not finite": (GOOD, ("--nodes", "1", "--set", "deepspeed={x: .inf, y: .nan}")),
}


@pytest.mark.parametrize("json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("case", PROVOKED)
def test_a_plan_of_it_is_refused_at_once(case: str, json: bool, folder: Path) -> None:
    text, options = PROVOKED[case]
    (folder / "e.yaml").write_text(text)
    run_bounded(["plan", "e.yaml", *options, *(["--json"] if json else [])], folder, seconds=5).check(2)


@pytest.mark.parametrize(
    "command",
    [["triage"], ["report"], ["init"], ["plan", "--nodes=1"], ["slurm", "render", "--gpus-per-node=1"], ["bench"]],
)
def test_a_name_that_no_file_system_takes_is_refused(command: list[str], folder: Path) -> None:
    ended = run_bounded([*command, "x" * 5000], folder).check(2)
    assert "too long" in ended.err


def without_roots_access(argv: Sequence[str]) -> int:
    """Runs tridock as a user who may not read everything; root does without its capabilities to do so."""
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, effective
    assert libc.capset(header, sets) == 0
    return main(argv)


@pytest.mark.parametrize("option", [["--from-run", "closed/run"], ["e.yaml", "--hosts", "closed/hosts"]])
@pytest.mark.parametrize("json", [[], ["--json"]], ids=["text", "json"])
def test_a_folder_of_somebody_else_is_refused(option: list[str], json: list[str], folder: Path) -> None:
    (folder / "closed").mkdir(mode=0)
    ended = run_bounded(["plan", *option, *json], folder, program=without_roots_access).check(2)
    assert "cannot be accessed; got Permission denied; give yourself access, or use another path" in ended.err


def test_an_empty_workspace_is_not_the_current_folder(folder: Path) -> None:
    ended = run_bounded(["train", "e.yaml", "--workspace", ""], folder).check(2)
    assert "argument --workspace: the name is empty" in ended.err


def test_the_root_folder_is_no_file_to_write(folder: Path) -> None:
    assert "'/' is a folder; give a file" in run_bounded(["plan", "e.yaml", "--plot", "/"], folder).check(2).err


@pytest.mark.parametrize("command", [["train"], ["launch", "--hosts", "hosts"], ["run", "--hosts", "hosts"]])
def test_a_run_id_replaces_nothing_but_a_run_id(command: list[str], folder: Path) -> None:
    program = ["--", "true"] if command[0] == "run" else ["e.yaml"]
    for name in ("e.yaml", "hosts"):
        before = (folder / name).read_text()
        ended = run_bounded([*command, "--run-id-file", name, *program], folder).check(2)
        assert f"argument --run-id-file: '{name}' does not hold a run id; give another file, or remove it" in ended.err
        assert (folder / name).read_text() == before
    for content in ("", "tiny-20261122-110613-14b7\n"):
        (folder / "id").write_text(content)
        ended = run_bounded([*command, "--run-id-file", "id", *program], folder)
        assert "--run-id-file" not in ended.err


@pytest.mark.parametrize("path", ["/dev/zero", "nested"])
def test_what_is_no_calibration_is_refused_at_once(path: str, folder: Path) -> None:
    (folder / "nested").write_text("[" * 100_000)
    options = ["plan", "e.yaml", "--nodes", "1", "--calibration", path]
    assert "is not a calibration" in run_bounded(options, folder, seconds=5).check(2).err


@pytest.mark.parametrize("field", ["train.load", "data.data_path"])
@pytest.mark.parametrize("value", ["''", "' '", '"a\\0b"', '"\\x1b[2J"'])
def test_what_is_no_path_is_refused(field: str, value: str, folder: Path) -> None:
    run_bounded(["plan", "e.yaml", "--nodes", "1", "--set", f"{field}={value}"], folder).check(2)


SETTINGS_OF_NOBODY = {
    "nesting": f"env: {NESTED}",
    "an alias bomb": BOMB,
    "unhashable keys": "{a: b}: c\n",
    "many digits": f"network_gbit: {HUGE}",
    "not finite": "network_gbit: .inf",
    "a GPU": f"gpu: {HUGE}gib",
    "control characters": 'gpu: "\\x1b[2J"',
}


@pytest.mark.parametrize("json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("case", SETTINGS_OF_NOBODY)
def test_settings_of_a_cluster_are_refused_at_once(case: str, json: list[str], folder: Path) -> None:
    (folder / "hosts.yaml").write_text(SETTINGS_OF_NOBODY[case])
    run_bounded(["plan", "e.yaml", "--hosts", "hosts", *json], folder, seconds=5).check(2)


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl", "events.jsonl"])
def test_records_without_an_end_are_refused(name: str, folder: Path) -> None:
    run = write_run(folder / "run", [9.0, 0.3])
    (run / name).unlink()
    os.mkfifo(run / name)
    run_bounded(["plan", "--from-run", "run"], folder, seconds=5).check(2)


@pytest.mark.parametrize(
    ("field", "value"), [("node", "\x1b[2J"), ("node", "\u202e"), ("node", "\0"), ("slot", "\x1b[2J"), ("slot", -1)]
)
def test_a_plan_with_a_node_or_slot_that_none_has_is_refused(field: str, value: object, folder: Path) -> None:
    path = write_run(folder / "run", [9.0, 0.3]) / "plan.json"
    plan = loads(path.read_text())
    plan["ranks"][0][field] = value
    path.write_text(dumps(plan))
    ended = run_bounded(["plan", "--from-run", "run"], folder).check(2)
    assert "has no plan.json, or a damaged one" in ended.err


def test_a_programs_own_json_option_is_not_tridocks(folder: Path) -> None:
    ended = run_bounded(["run", "--hosts", "none", "--", "train", "--json"], folder)
    assert (ended.code, ended.out) == (2, "")


def test_a_data_set_that_cannot_be_inspected_has_its_json(folder: Path) -> None:
    assert run_bounded(["data", "inspect", "none", "--json"], folder).check(2).document["problems"]


CONFIGS = [
    path.read_text() for path in sorted(Path("configs").rglob("*.yaml")) if "model" in yaml.safe_load(path.read_text())
]
SETTINGS = """\
name: lab
ssh: {user: me, port: 22, connect_timeout: 3.0, max_connections: 4}
container: {ulimits: {memlock: -1}, mounts: [/a:/b], extra_args: [--x]}
env: {NCCL_DEBUG: INFO}
gpu: h100
network_gbit: 400
spares: [b]
nodes: {a: {address: 192.0.2.1, env: {X: "1"}}}
"""
FIELDS = (
    "model.hidden_size", "model.num_layers", "parallel.zero_stage", "parallel.tensor_model_parallel_size", "engine",
    "batch.micro_batch_size", "batch.global_batch_size", "train.load", "train.seed", "data.data_path", "deepspeed",
    "megatron_args", "precision", "restart.window", "env.X", "model", "name", "model.preset", "a.b.c", "fp16",
)  # fmt: skip


def written(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="surrogatepass"))


@pytest.mark.parametrize("seed", range(CASES))
def test_any_experiment_is_planned_or_refused(seed: int, folder: Path) -> None:
    rng = random.Random(f"plan {seed}")
    written(folder / "e.yaml", mutated(rng, rng.choice(CONFIGS)) if rng.random() < 0.7 else rng.choice(CONFIGS))
    options = ["--nodes", str(rng.choice((1, 1, 2, 4, 7, 64)))]
    for _ in range(rng.randint(0, 2)):
        options += ["--set", f"{rng.choice(FIELDS)}={option_value(rng)}"]
    for option in ("--gpu", "--network-gbit", "--tflops", "--tokens", "--gpus-per-node", "--nodes", "--include"):
        if rng.random() < 0.1:
            options += [f"{option}={option_value(rng)}"]
    options += [flag for flag in ("--json", "--search") if rng.random() < 0.4]
    run_bounded(["plan", "e.yaml", *options], folder).check(0, 2)


@pytest.mark.parametrize("seed", range(2 * CASES))
def test_any_legal_sizes_are_planned_or_refused(seed: int, folder: Path) -> None:
    rng = random.Random(f"sizes {seed}")
    fields = legal(rng, yaml.safe_load(rng.choice(CONFIGS)), Experiment.model_json_schema(), rng.randint(1, 6))
    written(folder / "e.yaml", yaml.safe_dump(fields))
    nodes, slots = rng.choice(((1, 1), (2, 8), (3, 7), (512, 8), (1, 4096), (4099, 1)))
    options = ["--nodes", str(nodes), "--gpus-per-node", str(slots)]
    options += rng.choice(((), ("--gpu", "h100"), ("--gpu", "9999gib", "--tflops", "0.001", "--network-gbit", "0.001")))
    options += [flag for flag in ("--json", "--search") if rng.random() < 0.3]
    run_bounded(["plan", "e.yaml", *options], folder).check(0, 2)


@pytest.mark.parametrize("seed", range(CASES))
def test_any_hostfile_and_its_settings_are_read_or_refused(seed: int, folder: Path) -> None:
    rng = random.Random(f"hosts {seed}")
    hosts, slots = ("a", "b", "c", "fe80::1"), ("1", "4")
    lines = [f"{rng.choice((*hosts, option_value(rng)))} slots={rng.choice((*slots, option_value(rng)))}\n"
             for _ in range(rng.randint(1, 4))]  # fmt: skip
    written(folder / "hosts", "".join(lines) if rng.random() < 0.5 else "a slots=4\nb slots=4\n")
    written(folder / "hosts.yaml", mutated(rng, SETTINGS))
    options = [f"--{name}={option_value(rng)}" for name in ("include", "exclude") if rng.random() < 0.1]
    options += ["--json"] if rng.random() < 0.5 else []
    run_bounded(["plan", "e.yaml", "--hosts", "hosts", *options], folder).check(0, 2)


@pytest.mark.parametrize("seed", range(CASES))
def test_any_slurm_profile_is_rendered_or_refused(seed: int, folder: Path) -> None:
    rng = random.Random(f"slurm {seed}")
    profiles = [path.read_text() for path in sorted(Path("configs/slurm").glob("*.yaml"))]
    written(folder / "p.yaml", mutated(rng, rng.choice(profiles)))
    options = [
        f"--{name}={option_value(rng)}"
        for name in ("nodes", "time", "mem", "sweep", "set", "image")
        if rng.random() < 0.15
    ]
    run_bounded(["slurm", "render", "e.yaml", "--profile", "p.yaml", *options], folder).check(0, 2)


@pytest.mark.parametrize("seed", range(CASES))
def test_any_benchmark_and_command_is_read_or_refused(seed: int, folder: Path) -> None:
    rng = random.Random(f"bench {seed}")
    benches = [path.read_text() for path in sorted(Path("configs/bench").glob("*.yaml")) if "axes" in path.read_text()]
    written(folder / "b.yaml", mutated(rng, rng.choice(benches)))
    written(folder / "c.yaml", mutated(rng, COMMAND))

    def program(_argv: Sequence[str]) -> int:
        return max(
            exit_code_of(lambda: list(cells_of(load_bench(Path("b.yaml"))))),
            exit_code_of(lambda: load_command(Path("c.yaml"))),
        )

    run_bounded(["bench"], folder, program=program).check(0, 2)
