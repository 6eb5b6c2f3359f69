"""Fixtures of the tests with a real Docker engine. Each removes what it made."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.integration.rack import rack, rack_up  # noqa: F401  (fixtures, made once for all modules)
from tests.integration.slurm_cluster import slurm_cluster  # noqa: F401  (a fixture)
from tests.integration.sshd import host, make_sshd, shared  # noqa: F401  (fixtures)
from tests.integration.support import (
    CPU_IMAGE,
    ROOT,
    Containers,
    Twin,
    execute,
    give,
    hold_session,
    killed_sessions,
    once,
    own_name,
    remove_everything,
    succeed,
    wait_until,
)  # fmt: skip
from tridock.cluster.keys import ClusterKeys, node_files
from tridock.cluster.settings import load_cluster

OWN_UID = os.getuid()
REQUIRED = os.environ.get("TRIDOCK_REQUIRE_INTEGRATION") == "1"


# Modules that share a cluster run in one worker, one after the other; two workers have a rack each.
RACK_1 = (
    *("test_bad_input", "test_runs_on_docker_hosts", "test_docker_hosts", "test_queue_over_ssh", "test_megatron"),
    "test_run",
)
RACK_2 = ("test_doctor", "test_disks_of_hosts", "test_data_on_hosts", "test_two_operators", "test_first_cluster")
SLURM = ("test_slurm", "test_guide_slurm")
CLUSTERS = {**dict.fromkeys(RACK_1, "rack"), **dict.fromkeys(RACK_2, "rack-2"), **dict.fromkeys(SLURM, "slurm")}
# These begin first: a rack, whose worker builds the image; what needs no image meanwhile; then the longest.
FIRST = (
    *(*RACK_1, "test_remote_commands", "test_fab_over_ssh", "test_host_faults", *RACK_2, *SLURM),
    *("test_readme", "test_faults", "test_twin", "test_moved_runs", "test_image", "test_node"),
)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        hold_session()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            own = CLUSTERS.get(item.path.stem, "")
            for fixture, cluster in (("rack_up", "rack"), ("slurm_cluster", "slurm")):
                if fixture in getattr(item, "fixturenames", ()) and not own.startswith(cluster):
                    raise pytest.UsageError(
                        f"{item.path.name}: uses {fixture}; add it to CLUSTERS, or another one starts"
                    )
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Each worker takes a cluster's modules, or a module, at a time. (xdist's own groups are lost on pytest 9.)"""

    class ByCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = Path(nodeid.split("::")[0]).stem
            return CLUSTERS.get(module, module)

    config.option.loadscopereorder = False
    return ByCluster(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Once all workers have ended."""
    if not hasattr(session.config, "workerinput") and shutil.which("docker"):
        remove_everything()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where these tests are required (CI) one that is skipped has failed: what it needs is missing."""
    report = yield
    if REQUIRED and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("optional"):
        report.outcome, report.longrepr = "failed", f"required, but skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def docker() -> str:
    """A Docker engine that answers, with debian:bookworm-slim, on which all images here build. Without an engine these
    tests are skipped, or fail where they are required (CI)."""
    found = shutil.which("docker") is not None and execute("docker", "info").returncode == 0
    if not found:
        pytest.skip("no Docker engine answers (tools/docker-engine.sh installs and starts one on Debian)")
    with once("base-image") as first:
        if first:
            for session in killed_sessions():
                remove_everything(session)
            succeed("tools/base-image.sh", cwd=ROOT)
    return "docker"


@pytest.fixture(scope="session")
def cpu_image(docker: str) -> str:
    """The twin's image, built from this working tree under a name of this session's own."""
    with once("cpu-image") as first:
        if first:
            keep = {**os.environ, "KEEP_COMPOSE": "1"}  # the user of this tree keeps the image they had
            succeed("make", "image", "FLAVOR=cpu", f"IMAGE={CPU_IMAGE}", cwd=ROOT, env=keep)
    return CPU_IMAGE


@pytest.fixture
def containers(cpu_image: str) -> Iterator[Containers]:
    made = Containers(cpu_image)
    yield made
    made.remove()


@pytest.fixture
def secrets(tmp_path: Path) -> Callable[..., Mapping[str, Path]]:
    """Makes the key folders of a cluster, as `tridock keys` would, owned by a uid that is given."""

    def make(*nodes: str, uid: int = OWN_UID) -> Mapping[str, Path]:
        hostfile = tmp_path / "testcluster"
        hostfile.write_text("".join(f"{node} slots=1\n" for node in nodes))
        cluster = load_cluster(hostfile)
        keys = ClusterKeys.generate(nodes)
        folders = {node: tmp_path / "secrets" / uuid.uuid4().hex / node for node in nodes}
        files_of = node_files(cluster, keys)
        for node, folder in folders.items():
            folder.mkdir(parents=True)
            for name, content in files_of(node).items():
                (folder / name).write_bytes(content)
                (folder / name).chmod(0o600)
                give(folder / name, uid)
            folder.chmod(0o700)
            give(folder, uid)
        return folders

    return make


@pytest.fixture
def start_twin(
    containers: Containers, secrets: Callable[..., Mapping[str, Path]], tmp_path: Path
) -> Iterator[Callable[..., Twin]]:
    """Starts two nodes with the environment that is given, as a uid, and waits until both answer."""
    networks: list[str] = []

    def start(uid: int = OWN_UID, environment: Mapping[str, str] | None = None, mounts: Sequence[str] = ()) -> Twin:
        network = own_name()
        succeed("docker", "network", "create", network)
        networks.append(network)
        folders = secrets("node-1", "node-2", uid=uid)
        workspace = tmp_path / "workspace"
        workspace.mkdir(exist_ok=True)
        give(workspace, uid)
        names = {}
        for node, folder in folders.items():
            options = ["--network", network, "--network-alias", node, "--hostname", node]
            options += ["--volume", f"{folder}:/run/tridock/secrets:ro", "--volume", f"{workspace}:/workspace"]
            options += ["--env", f"TRIDOCK_NODE={node}", "--env", "TRIDOCK_CLUSTER=testcluster"]
            for name, value in (environment or {}).items():
                options += ["--env", f"{name}={value}"]
            options += [word for mount in mounts for word in ("--volume", mount)]
            names[node] = containers.start("node", options=options)
        for name in names.values():
            wait_until(lambda name=name: "Server listening" in execute("docker", "logs", name).stderr, "sshd listens")
        return Twin(names, folders, workspace)

    yield start
    containers.remove()
    for network in networks:
        execute("docker", "network", "rm", network)
