"""What a launch settles for trackers and notifications before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.report.test_page import BASE
from tests.unit.trackers.conftest import python  # noqa: F401 - a fixture
from tridock.cli import main
from tridock.cluster.schema import parse_settings
from tridock.cluster.settings import load_cluster
from tridock.command import Command
from tridock.contracts.supervision import Supervision
from tridock.contracts.trackers import Reachable
from tridock.errors import ClusterError, RequestError
from tridock.experiment import dump_experiment, parse_experiment
from tridock.extras import install_command
from tridock.launchers.run import RunBundle
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs import this_machine
from tridock.ops.runs.launch import start
from tridock.ops.runs.trackers import RunTrackers, check_here, check_on_head, trackers_of, with_cluster_trackers
from tridock.remote import Completed
from tridock.tracker_settings import contracts
from tridock.yaml_text import dump_yaml


def experiment(**fields: Any) -> Any:
    return parse_experiment(dump_yaml({**BASE, **fields}), "e.yaml")


def problems(**fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        trackers_of(experiment(**fields))
    return str(caught.value)


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        (["wand"], "e.yaml: trackers.0.name: is not one of the choices; got 'wand'; use 'wandb', 'mlflow' or"),
        ([{"name": "wandb", "projekt": "a"}], "e.yaml: trackers.0.projekt: is not a field; got 'a'; did you mean proj"),
        (["mlflow", "mlflow"], "names a tracker twice"),
        ([{"name": "wandb", "address": "host:80"}], "an address that is no server, 'host:80': write http:// or"),
        ([{"name": "wandb", "variable": "A", "file": "b"}], "a variable and a file for its key: keep one of them"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused(trackers: list[Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        experiment(trackers=trackers)
    assert message in str(caught.value)


def test_an_address_to_notify_is_named_and_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needs either a variable or a file that holds the address"):
        experiment(notify=[{"events": ["failed"]}])
    (tmp_path / "a").write_text("json://localhost/x\n")
    monkeypatch.setenv("HOOK", "slack://a/b")
    found = experiment(notify=[{"variable": "HOOK"}, {"file": str(tmp_path / "a"), "events": ["failed"]}])
    assert trackers_of(found).secrets == {"TRIDOCK_NOTIFY_0": "slack://a/b", "TRIDOCK_NOTIFY_1": "json://localhost/x"}
    assert [it.variable for it in contracts(found.notify)] == ["TRIDOCK_NOTIFY_0", "TRIDOCK_NOTIFY_1"]
    assert "slack" not in dump_experiment(found)


def test_every_secret_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    monkeypatch.setenv("HOOK", "not an address")
    found = problems(
        trackers=[{"name": "wandb", "variable": "MY_KEY"}, {"name": "mlflow", "file": "/none"}],
        notify=[{"variable": "HOOK"}],
        env={"WANDB_API_KEY": "abc"},
    )
    assert found.splitlines() == [
        "env.WANDB_API_KEY: would be readable by everyone in the run folder; got a secret; remove it,"
        " and export it in the shell that you launch from",
        "trackers[0].variable: is not set; got MY_KEY; export it in the shell that you launch from",
        "trackers[1].file: cannot be read; got /none: No such file or directory; name a text file on this machine",
        "notify[0].variable: holds no address; got HOOK; write apprise's form, as json://host/path, mailtos://… or"
        " slack://…",
    ]


def test_the_librarys_own_variable_and_one_of_another_name_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "own")
    assert trackers_of(experiment(trackers=["wandb"])).secrets == {"WANDB_API_KEY": "own"}
    monkeypatch.setenv("TEAM_KEY", "team")
    found = trackers_of(experiment(trackers=[{"name": "wandb", "variable": "TEAM_KEY"}]))
    assert found.secrets == {"WANDB_API_KEY": "team"}


def test_the_clusters_trackers_are_those_of_experiments_that_name_none() -> None:
    settings = parse_settings("trackers: [mlflow]\nnotify: [{variable: A}]\n", "h.yaml")
    own, other = experiment(trackers=["wandb"]), experiment()
    assert [it.name for it in with_cluster_trackers(own, settings).trackers] == ["wandb"]
    assert [it.name for it in with_cluster_trackers(other, settings).trackers] == ["mlflow"]
    assert with_cluster_trackers(other, settings).notify[0].variable == "A"


def test_a_library_that_is_missing_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIDOCK_TRACKERS_PYTHON", "/none")
    monkeypatch.setattr(this_machine, "node_argv", lambda: ["sh", "-c", 'echo "$ANSWER"', "--"])
    monkeypatch.setenv("ANSWER", '{"missing": ["wandb", "apprise"], "unreachable": {}}')
    monkeypatch.setenv("HOOK", "json://a")
    with pytest.raises(ClusterError) as caught:
        check_here(trackers_of(experiment(trackers=["wandb"], notify=[{"variable": "HOOK"}])))
    assert str(caught.value).splitlines() == [
        f"this machine: wandb: is not installed; {install_command('wandb')}",
        f"this machine: apprise: is not installed; {install_command('wandb')}",
    ]


def test_a_library_that_the_head_lacks_is_installed_by_its_own_name() -> None:
    head = SimpleNamespace(head="node-1", ask=lambda *_, **__: Reachable(("mlflow",), {}))
    with pytest.raises(ClusterError) as caught:
        check_on_head(cast(NodeClient, head), trackers_of(experiment(trackers=["mlflow"])))
    todo = "make image TRACKERS=yes; in an image of your own: pip install mlflow"
    assert str(caught.value) == f"node-1: mlflow: is not installed; {todo}"


def test_an_address_and_a_key_that_nobody_takes_are_told_before_the_launch(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    python: str,  # noqa: F811
) -> None:
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOOK", "json://localhost/x")
    monkeypatch.setenv("OTHER", "telegraf-typo://hidden/secret")
    given = experiment(trackers=["wandb"], notify=[{"variable": "HOOK"}, {"variable": "OTHER"}])
    with pytest.raises(RequestError) as caught:
        check_here(trackers_of(given))
    assert str(caught.value).splitlines() == [
        "notify[1]: holds an address that apprise does not understand; write one of its forms, as json://host/path,"
        " mailtos://user:password@host or slack://…",
        "trackers: wandb: has no API key; export WANDB_API_KEY where you launch, or set offline: true",
    ]


def test_a_server_that_does_not_answer_is_a_warning(capsys: pytest.CaptureFixture[str], python: str) -> None:  # noqa: F811
    check_here(trackers_of(experiment(trackers=[{"name": "mlflow", "address": "http://127.0.0.1:9"}])))
    assert capsys.readouterr().err == (
        "warning: this machine: http://127.0.0.1:9 does not answer (Connection refused); the run's records are"
        " sent once it does\n"
    )


def test_track_says_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["track"]) == 2
    assert main(["track", str(tmp_path), "--tracker", "wandb"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "RUN: is missing; give runs/<run-id>, or a Megatron log with --log",
        f"{tmp_path}: is not a run's folder; got no experiment.yaml in it; give runs/<run-id>",
    ]


@pytest.mark.parametrize(("restarts", "receivers"), [(1, ["b"]), (0, [])])
def test_the_node_that_may_take_the_run_over_gets_the_secrets(
    restarts: int, receivers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab").write_text("a slots=1\nb slots=1\n")
    client, asked = NodeClient(Hosts(load_cluster(tmp_path / "lab")), {}), []

    def verb(node: str, *argv: str, stdin: bytes | None = None, **_: object) -> Completed:
        asked.append((node, argv[0], stdin))
        return Completed(0, b"", b"")

    monkeypatch.setattr(client, "node_verb", verb)
    supervision = Supervision("a", {"a": (0,), "b": (1,)}, ("b",), 20000, 30.0, max_restarts=restarts)
    files = {"supervision.json": supervision.to_json().encode()}
    bundle = RunBundle("t", "/workspace/runs/t", Command.of("true"), files)
    start(
        client,
        SimpleNamespace(node_verb=lambda it, *given, **named: verb(it.head, *given, **named)),
        bundle,
        RunTrackers(secrets={"A": "hunter2"}),
    )  # type: ignore[arg-type]
    secrets = b'{"A": "hunter2"}'
    assert asked == [("a", "start", secrets), *((node, "keep-secrets", secrets) for node in receivers)]
