"""What a user sees for each mistake in an experiment file."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tridock.errors import RequestError
from tridock.experiment import dump_experiment, load_experiment, parse_experiment

GOOD = """\
name: tiny
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 16}
batch: {micro_batch_size: 1, global_batch_size: 2}
data: {data_path: data/x}
train: {train_iters: 3}
"""


def message(text: str, *overrides: str) -> str:
    with pytest.raises(RequestError) as caught:
        parse_experiment(text, "e.yaml", overrides)
    return str(caught.value)


def test_defaults_are_megatrons() -> None:
    experiment = parse_experiment(GOOD, "e.yaml")
    assert experiment.optimizer.lr == 1.5e-4
    assert experiment.model.make_vocab_size_divisible_by == 128
    assert experiment.parallel.zero_stage == 0


def test_what_is_written_reads_back_as_the_same() -> None:
    experiment = parse_experiment(GOOD, "e.yaml", ["optimizer.lr=1e-4", "env.NCCL_DEBUG=INFO"])
    assert parse_experiment(dump_experiment(experiment), "again") == experiment


def test_every_problem_at_once_with_its_path() -> None:
    text = """\
name: Demo
model: {num_layer: 4, hidden_size: 1.5, num_attention_heads: "4", seq_length: 0}
batch: {micro_batch_size: 1, global_batch_size: 0}
data: {data_path: ""}
optimizer: {lr: fast}
precision: int8
train: {train_iters: 3, eval_interval: -1, save: 1}
env: {A: 1}
launch: {master_port: 80}
fp16: 3
"""
    assert message(text).splitlines() == [
        "e.yaml: name: has the wrong form; got 'Demo'; write text that matches ^[a-z0-9][a-z0-9._-]{0,40}$",
        "e.yaml: model.num_layers: is missing; add it",
        "e.yaml: model.hidden_size: must be a whole number; got 1.5; write it without quotes or a fraction",
        "e.yaml: model.num_attention_heads: must be a whole number; got '4'; write it without quotes or a fraction",
        "e.yaml: model.seq_length: must be greater than 0; got 0; raise it",
        "e.yaml: model.num_layer: is not a field; got 4; did you mean num_layers?",
        "e.yaml: batch.global_batch_size: must be greater than 0; got 0; raise it",
        "e.yaml: data.data_path: must not be empty; got ''; give a value",
        "e.yaml: optimizer.lr: must be a number; got 'fast'; write a number, as in 0.5",
        "e.yaml: precision: is not one of the choices; got 'int8'; use 'fp32', 'bf16' or 'fp16'",
        "e.yaml: fp16: must be a section of fields; got 3; write `field: value` lines below it",
        "e.yaml: train.eval_interval: must be at least 0; got -1; raise it",
        "e.yaml: train.save: must be true or false; got 1; write true or false, without quotes",
        "e.yaml: launch.master_port: must be at least 1024; got 80; raise it",
        "e.yaml: env.A: must be text; got 1; put it in quotes",
    ]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("12:48", "must be a whole number; got '12:48'; write only digits, as in 1000"),
        ("1_000", "must be a whole number; got '1_000'; write only digits, as in 1000"),
        ("yes", "must be a whole number; got 'yes'; write only digits, as in 1000"),
        ("true", "must be a whole number; got true; write only digits, as in 1000"),
        ("[1]", "must be a whole number; got [1]; write only digits, as in 1000"),
        ("1e3", "must be a whole number; got 1000.0; write 1000"),
        ("1.0", "must be a whole number; got 1.0; write 1"),
        ("1.5", "must be a whole number; got 1.5; write it without quotes or a fraction"),
        (".inf", "must be a whole number; got inf; write it without quotes or a fraction"),
        ("~", "must be a whole number; got null; give a value, or leave the line out"),
    ],
)
def test_only_whole_numbers_of_yaml_1_2_are_whole_numbers(written: str, problem: str) -> None:
    assert message(GOOD.replace("train_iters: 3", f"train_iters: {written}")) == f"e.yaml: train.train_iters: {problem}"
    assert message(GOOD, f"train.train_iters={written}") == f"e.yaml: train.train_iters: {problem}"


@pytest.mark.parametrize(("written", "read"), [("010", 10), ("0o10", 8), ("0x10", 16), ("+5", 5)])
def test_whole_numbers_are_those_of_yaml_1_2(written: str, read: int) -> None:
    text = GOOD.replace("train_iters: 3", f"train_iters: {written}")
    assert parse_experiment(text, "e.yaml").train.train_iters == read


@pytest.mark.parametrize("written", ["yes", "on", "1", "1.0", "'true'"])
def test_only_true_and_false_are_true_or_false(written: str) -> None:
    text = GOOD.replace("train_iters: 3", f"train_iters: 3, save: {written}")
    got = f"'{written}'" if written in ("yes", "on") else written
    expected = f"e.yaml: train.save: must be true or false; got {got}; write true or false, without quotes"
    assert message(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + "name: other\n", "e.yaml:6: the key stands twice; got 'name'; keep one of the two"),
        ("a: [1", "e.yaml:1:6: is not valid YAML; got expected ',' or ']', but got '<stream end>'; "
         "correct the syntax here"),
        ("- a\n", "e.yaml: must be a mapping of fields; got list; write `field: value` lines"),
        (GOOD + "lr: 1\n", "e.yaml: lr: is not a field; got 1; did you mean optimizer.lr?"),
        (GOOD + "seed: 1\n", "e.yaml: seed: is not a field; got 1; did you mean train.seed?"),
        (GOOD + "tran_iters: 1\n", "e.yaml: tran_iters: is not a field; got 1; did you mean train.train_iters?"),
        (GOOD + "Hidden-Size: 1\n", "e.yaml: Hidden-Size: is not a field; got 1; did you mean model.hidden_size?"),
        (GOOD.replace("iters: 3", "iters: 3, lr: 1"),
         "e.yaml: train.lr: is not a field; got 1; did you mean optimizer.lr?"),
        (GOOD + "zz: 1\n", "e.yaml: zz: is not a field; got 1; remove it, or use one of name, engine, program, model, "
         "parallel, batch, data, optimizer, precision, fp16, train, launch, restart, trackers, notify, megatron_args, "
         "deepspeed, env"),
        (GOOD + "launch: {master_port: 70000}\n", "e.yaml: launch.master_port: must be at most 65535; got 70000; lower it"),  # noqa: E501
        (GOOD.replace("num_layers: 2", "num_layers: 2, hidden_dropout: 1.0"),
         "e.yaml: model.hidden_dropout: must be less than 1; got 1.0; lower it"),
        (GOOD + "optimizer: {lr: .inf}\n", "e.yaml: optimizer.lr: must be a finite number; got inf; write an ordinary number"),  # noqa: E501
        (
            GOOD + "env: {A: b, RANK: '0', MASTER_PORT: '1'}\n",
            "e.yaml: env.RANK: is set by the launch for each rank: leave it out; got 'RANK'; correct it\n"
            "e.yaml: env.MASTER_PORT: is set by the launch for each rank: leave it out, and set launch.master_port; got"
            " 'MASTER_PORT'; correct it",
        ),
        (GOOD + "env: [A]\n", "e.yaml: env: must be a mapping; got ['A']; write `name: value` lines below it"),
    ],
)  # fmt: skip
def test_single_problems(text: str, expected: str) -> None:
    assert message(text) == expected


def test_overrides_change_fields_and_are_checked_like_the_file() -> None:
    experiment = parse_experiment(GOOD, "e.yaml", ["train.seed=7", "optimizer.lr=1e-3", "name=other"])
    assert (experiment.train.seed, experiment.optimizer.lr, experiment.name) == (7, 1e-3, "other")
    assert message(GOOD, "train.seeds=7") == "e.yaml: train.seeds: is not a field; got 7; did you mean seed?"


@pytest.mark.parametrize("override", ["train", "=3", "train..seed=1", ".a=1"])
def test_an_override_has_a_path_and_a_value(override: str) -> None:
    assert message(GOOD, override) == (
        f"--set: must be a field's path, =, and a value; got {override!r}; write for example train.seed=7"
    )


def test_an_override_leaves_anchored_sections_elsewhere_alone() -> None:
    text = GOOD.replace("train: {train_iters: 3}", "train: &t {train_iters: 3}") + "fp16: {}\n"
    assert parse_experiment(text, "e.yaml", ["train.train_iters=9"]).train.train_iters == 9


@pytest.mark.parametrize("split", ["0,0,0", "0,1,1", "0.0,5,5", f"1,{'9' * 400},1"])
def test_a_split_that_trains_on_nothing(split: str) -> None:
    what = "e.yaml: data.split: must be finite shares, that of training above 0; got '"
    assert message(GOOD, f"data.split='{split}'").startswith(what)


@pytest.mark.parametrize(
    ("given", "read", "prefixes"),
    [
        ("0.7 a 0.3 b", (0.7, "a", 0.3, "b"), ("a", "b")),
        (" 1 a .5 b 2. c", (1.0, "a", 0.5, "b", 2.0, "c"), ("a", "b", "c")),
        ("1 a", (1.0, "a"), ("a",)),
        ("[a, b]", ("a", "b"), ("a", "b")),
        ("[0.7, a, 0.3, b]", (0.7, "a", 0.3, "b"), ("a", "b")),
        ("['0.7', a, 3, b]", (0.7, "a", 3.0, "b"), ("a", "b")),
    ],
)
def test_a_blend_as_megatrons(given: str, read: tuple[Any, ...], prefixes: tuple[str, ...]) -> None:
    data = parse_experiment(GOOD, "e.yaml", [f"data.data_path={given}"]).data
    assert (data.data_path, data.prefixes, data.prefix) == (read, prefixes, "a")
    assert [it.weight for it in data.sets(1)] == ([*read[::2]] if read[1] != "b" else [None, None])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        *(
            (given, "must be a prefix, a list of prefixes, or a list of pairs: a weight above 0 and a prefix")
            for given in (
                *("[]", "[1, 2]", "[a, 1]", "[0.7, a, 0.3]", "[0, a]", "[-1, a]", "[.nan, a]", "[.inf, a]"),
                *("[true, a]", "[[a]]", "{a: 1}", "3", "0.5 a 0.5"),
            )
        ),
        ("[a, a]", "names a twice: name it once, with the sum of its weights"),
        ("[1, a, 0.00001, b]", "gives b less than one sample in 10,000: leave it out, or raise its weight"),
        ('["a\\tb", c]', "must be a path without control characters"),
    ],
)
def test_a_blend_that_is_none(given: str, problem: str) -> None:
    assert message(GOOD, f"data.data_path={given}").startswith(f"e.yaml: data.data_path: {problem}; got ")


@pytest.mark.parametrize("field", ["data.data_path", "train.checkpoint_folder"])
def test_a_path_that_no_system_has(field: str) -> None:
    assert message(GOOD, f"{field}={'a' * 4097}").startswith(f"e.yaml: {field}: must have at most 4,096 characters; ")


def test_data_of_each_part() -> None:
    own = ["data.data_path=null", "data.train_data_path=[a, b]", "data.valid_data_path=v"]
    data = parse_experiment(GOOD, "e.yaml", own).data
    assert (data.prefixes, data.shares, data.sets(2)) == (("a", "b", "v"), "1,0,0", ())
    assert data.fields == {"a": "train_data_path", "b": "train_data_path", "v": "valid_data_path"}
    both = "needs data_path; or train_data_path, with valid_data_path and test_data_path"
    for given in (own[:1], own[1:], [own[0], own[2]]):
        assert both in message(GOOD, *given)
    divided = message(GOOD, *own, "data.split='8,1,1'")
    assert "has train_data_path, which is not divided: leave split out" in divided


@pytest.mark.parametrize("path", ["data/my books", "2024 / b", "a 1 b 2"])
def test_a_path_with_spaces_is_one_data_set(path: str) -> None:
    assert parse_experiment(GOOD, "e.yaml", [f"data.data_path={path}"]).data.data_path == path


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def failing(path: Path) -> str:
        with pytest.raises(RequestError) as caught:
            load_experiment(path)
        return str(caught.value)

    missing, folder, latin = tmp_path / "no.yaml", tmp_path, tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9\n")
    assert failing(missing) == (
        f"{missing}: cannot be read as an experiment; got no such file; give the path of an experiment file"
    )
    assert failing(folder) == (
        f"{folder}: cannot be read as an experiment; got a folder; give the path of an experiment file"
    )
    assert failing(latin) == f"{latin}: cannot be read as an experiment; got byte 0xe9 at offset 9; save it as UTF-8"


def test_scientific_notation_is_a_number() -> None:
    for text in ("1e-4", "1.0e-4", "1E-4", "0.1e-3"):
        assert parse_experiment(GOOD, "e", [f"optimizer.lr={text}"]).optimizer.lr == pytest.approx(1e-4)


@pytest.mark.parametrize("path", sorted(Path("configs").rglob("*.yaml")), ids=str)
def test_every_shipped_experiment_loads(path: Path) -> None:
    fields = yaml.safe_load(path.read_text())
    # With train.load, the sizes are those of a folder that is the user's.
    if path == Path("configs/reference.yaml") or ("model" in fields and "load" not in fields["train"]):
        load_experiment(path)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("null", None)],
)
def test_a_window_as_text(text: str, seconds: int | None) -> None:
    assert parse_experiment(GOOD, "e.yaml", [f"restart.window={text}"]).restart.window == seconds


@pytest.mark.parametrize("text", ["1w", "h", "1.5h", "soon", "''"])
def test_a_window_that_is_none(text: str) -> None:
    stderr = "must be a whole number of seconds, or one with its unit as in 90s, 30m, 12h, 7d"
    got = repr(text.strip("'"))
    assert message(GOOD, f"restart.window={text}") == f"e.yaml: restart.window: {stderr}; got {got}; correct it"


def test_a_window_of_no_time() -> None:
    assert message(GOOD, "restart.window=0s") == "e.yaml: restart.window: must be greater than 0; got 0; raise it"
