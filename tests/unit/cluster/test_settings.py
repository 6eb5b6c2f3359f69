"""The settings beside a hostfile, and the cluster that the two make."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from tridock.cluster.schema import Settings, parse_settings
from tridock.cluster.settings import Cluster, ClusterNode, cluster_name, load_cluster, node_label
from tridock.errors import RequestError


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfiles" / "lab"
    path.parent.mkdir()
    path.write_text("node-1 slots=2\n192.0.2.2 slots=1\n2001:DB8::3 slots=4\n")
    return path


def settings_file(hostfile: Path, text: str) -> None:
    hostfile.with_name("lab.yaml").write_text(text)


def message(text: str) -> str:
    with pytest.raises(RequestError) as caught:
        parse_settings(text, "lab.yaml")
    return str(caught.value)


def load_message(hostfile: Path, **filters: str) -> str:
    with pytest.raises(RequestError) as caught:
        load_cluster(hostfile, **filters)
    return str(caught.value)


def test_without_a_settings_file(hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostfile.parents[1])
    cluster = load_cluster(hostfile)
    assert cluster.name == "lab"
    assert cluster.settings == Settings()
    assert cluster.workdir == "~/tridock/lab"
    assert cluster.project_folder == hostfile.parents[1]
    assert cluster.state_folder == hostfile.parents[1] / ".tridock" / "lab"
    assert cluster.head == "node-1"
    assert cluster.slots == {"node-1": (0, 1), "192.0.2.2": (0,), "ip6-2001-db8--3": (0, 1, 2, 3)}
    assert cluster.nodes[0] == ClusterNode("node-1", "node-1", "node-1", 2)


def test_ipv6_addresses_get_a_label_that_pdsh_and_docker_take(hostfile: Path) -> None:
    cluster = load_cluster(hostfile)
    assert cluster.nodes[2] == ClusterNode("ip6-2001-db8--3", "2001:DB8::3", "2001:DB8::3", 4)
    assert cluster.node("ip6-2001-db8--3").host == "2001:DB8::3"
    assert node_label("fe80::1%eth0") == "ip6-fe80--1-eth0"
    assert node_label("192.0.2.1") == "192.0.2.1"


def test_everything_that_can_be_set(hostfile: Path) -> None:
    settings_file(
        hostfile,
        """
name: rack-3
transport: ssh
ssh: {user: ops, port: 2200, identity_file: ~/.ssh/rack, config_file: ssh.conf, connect_timeout: 5.0,
      max_connections: 4, retries: 0}
workdir: /scratch/tridock
image: registry.example.org:5000/tridock:24.12
container:
  network: host
  ipc: private
  shm_size: 16g
  ulimits: {memlock: -1, nofile: "1024:524288"}
  gpus: all
  devices: [/dev/infiniband]
  mounts: ["/data:/data:ro", "cache:/root/.cache"]
  cap_add: []
  extra_args: [--cpuset-cpus, 0-15]
ssh_port: 2300
listen: [192.0.2.1]
env: {NCCL_DEBUG: INFO, GLOO_SOCKET_IFNAME: eth0}
nodes:
  node-1: {address: 198.51.100.1, listen: [198.51.100.1], env: {GLOO_SOCKET_IFNAME: eth1}}
  2001:DB8::3: {address: storage.example.org}
compose: {file: twin.yml, project: twin}
""",
    )
    cluster = load_cluster(hostfile)
    assert (cluster.name, cluster.workdir) == ("rack-3", "/scratch/tridock")
    assert cluster.settings.container.ulimits == {"memlock": -1, "nofile": "1024:524288"}
    assert cluster.settings.container.mounts == ("/data:/data:ro", "cache:/root/.cache")
    assert cluster.node("node-1").address == "198.51.100.1"
    assert cluster.node("192.0.2.2").address == "192.0.2.2"
    assert cluster.node("ip6-2001-db8--3").address == "storage.example.org"
    assert cluster.env_of("node-1") == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1"}
    assert cluster.env_of("192.0.2.2") == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0"}
    assert cluster.listen_of("node-1") == ("198.51.100.1",)
    assert cluster.listen_of("192.0.2.2") == ("192.0.2.1",)


def test_no_run_begins_on_a_spare(hostfile: Path) -> None:
    settings_file(hostfile, "spares: [node-1, '2001:DB8::3']")
    cluster = load_cluster(hostfile)
    assert cluster.slots == {"192.0.2.2": (0,)}
    assert cluster.spares == {"node-1": (0, 1), "ip6-2001-db8--3": (0, 1, 2, 3)}
    assert list(cluster.everywhere) == ["192.0.2.2", "node-1", "ip6-2001-db8--3"]
    assert cluster.head == "192.0.2.2"
    assert load_cluster(hostfile, exclude="node-1").spares == {"ip6-2001-db8--3": (0, 1, 2, 3)}
    asked_for = load_cluster(hostfile, include="node-1@192.0.2.2")
    assert (asked_for.head, asked_for.spares) == ("node-1", {})


def test_spares_that_cannot_be(hostfile: Path) -> None:
    path = hostfile.with_name("lab.yaml")
    settings_file(hostfile, "spares: [node-1, node-2]")
    assert load_message(hostfile) == (
        f"{path}: spares.1: is not a node of {hostfile}; got 'node-2'; did you mean node-1?"
    )
    settings_file(hostfile, "spares: [node-1, 192.0.2.2, '2001:DB8::3']")
    assert load_message(hostfile) == (
        f"{path}: spares: names every node; got node-1, 192.0.2.2, 2001:DB8::3; keep at least one node "
        "that is not a spare: runs start there"
    )


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().image = "other"  # type: ignore[misc]


def test_every_field_is_described() -> None:
    def undescribed(model: type[BaseModel]) -> list[str]:
        missing = []
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                missing += undescribed(inner)
            elif not field.description:
                missing.append(f"{model.__name__}.{name}")
        return missing

    assert undescribed(Settings) == []


def test_all_wrong_fields_are_named_at_once() -> None:
    text = """
ssh: {prot: 22, port: "22", connect_timeout: 0}
transport: docker
image: "UPPER case"
container: {gpus: 4}
ssh_port: 22
"""
    assert message(text) == (
        "lab.yaml: transport: is not one of the choices; got 'docker'; use 'ssh' or 'compose'\n"
        "lab.yaml: ssh.port: must be a whole number; got '22'; write it without quotes or a fraction\n"
        "lab.yaml: ssh.connect_timeout: must be greater than 0; got 0; raise it\n"
        "lab.yaml: ssh.prot: is not a field; got 22; did you mean port?\n"
        "lab.yaml: image: has the wrong form; got 'UPPER case'; write text that matches ^[a-z0-9][A-Za-z0-9._/:@-]*$\n"
        "lab.yaml: container.gpus: is not one of the choices; got 4; use 'auto', 'all' or 'none'\n"
        "lab.yaml: ssh_port: must be at least 1024; got 22; raise it"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("network_gbit: 12:48", "network_gbit: must be a number; got '12:48'; write a number, as in 0.5"),
        ("network_gbit: 1_000", "network_gbit: must be a number; got '1_000'; write a number, as in 0.5"),
        ("network_gbit: '100'", "network_gbit: must be a number; got '100'; write it without quotes"),
        ("network_gbit: true", "network_gbit: must be a number; got true; write a number, as in 0.5"),
        ("network_gbit: .inf", "network_gbit: must be a finite number; got inf; write an ordinary number"),
        ("ssh_port: 2222.0", "ssh_port: must be a whole number; got 2222.0; write 2222"),
        ("gpu: 010", "gpu: must be text; got 10; put it in quotes"),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text: str, problem: str) -> None:
    assert message(text) == f"lab.yaml: {problem}"


def test_a_wrong_field_of_a_node_is_told_the_right_one() -> None:
    text = "nodes: {node-1: {adress: 192.0.2.1}, node-2: {zz: 1}, address: {lisen: [192.0.2.2]}}"
    assert message(text) == (
        "lab.yaml: nodes.node-1.adress: is not a field; got '192.0.2.1'; did you mean address?\n"
        "lab.yaml: nodes.node-2.zz: is not a field; got 1; remove it, or use one of address, listen, env\n"
        "lab.yaml: nodes.address.lisen: is not a field; got ['192.0.2.2']; did you mean listen?"
    )


@pytest.mark.parametrize("text", ["container: {devices: /dev/x}", "listen: 192.0.2.1"])
def test_a_list_must_be_one(text: str) -> None:
    field = "listen" if text.startswith("listen") else "container.devices"
    value = text.split(": ")[-1].rstrip("}")
    assert message(text) == f"lab.yaml: {field}: must be a list; got {value!r}; write `- value` lines below it"


def test_environment_that_would_break_something() -> None:
    text = """
env:
  TRIDOCK_RUN_ID: x
  PATH: /bin
  PYTHONSTARTUP: "$(id)"
  NCCL_DEBUG: a"b
  FINE: "$HOME"
nodes: {node-1: {env: {HOME: /x}}}
"""
    quoting = (
        'has one of " $ ` \\, which DeepSpeed passes to a shell unquoted; got {}; '
        "write it without these, or set it in the experiment's env, which is quoted"
    )
    assert message(text) == (
        "lab.yaml: env.TRIDOCK_RUN_ID: is reserved for Tridock; got 'x'; choose a name without TRIDOCK_\n"
        "lab.yaml: env.PATH: is set by the image; got '/bin'; remove it; use `mounts` to add programs\n"
        f"lab.yaml: env.PYTHONSTARTUP: {quoting.format(repr('$(id)'))}\n"
        f"lab.yaml: env.NCCL_DEBUG: {quoting.format(repr('a' + chr(34) + 'b'))}\n"
        "lab.yaml: nodes.node-1.env.HOME: is set by the image; got '/x'; remove it; use `mounts` to add programs"
    )


def test_environment_of_the_wrong_form() -> None:
    assert message('env: {"A B": x, OK: "a\\nb"}') == (
        "lab.yaml: env.A B: has the wrong form; got 'A B'; write text that matches ^[A-Za-z_][A-Za-z0-9_]*$\n"
        "lab.yaml: env.OK: has the wrong form; got 'a\\nb'; write text that matches ^[^\\n\\r\\x00]*$"
    )


def test_addresses_of_the_wrong_form() -> None:
    text = """
listen: [eth0]
nodes:
  a: {address: "192.0.2.1:22", listen: ["[::1]"]}
  b: {address: "-oProxyCommand=id"}
  c: {address: "fe80::1%eth0", listen: ["::1"]}
"""
    wrong, todo = "is not an IP address", "give addresses of the node itself, without ports"
    address = "is not an address"
    name = "give a host name or an IP address, without a port"
    assert message(text) == (
        f"lab.yaml: listen: {wrong}; got 'eth0'; {todo}\n"
        f"lab.yaml: nodes.a.listen: {wrong}; got '[::1]'; {todo}\n"
        f"lab.yaml: nodes.a.address: {address}; got '192.0.2.1:22'; {name}\n"
        f"lab.yaml: nodes.b.address: {address}; got '-oProxyCommand=id'; {name}"
    )


@pytest.mark.parametrize("target", ["/workspace", "/workspace/", "/run/tridock/secrets", "/opt/tridock"])
def test_mounts_that_cover_our_own_folders(target: str) -> None:
    assert message(f"container: {{mounts: ['/x:{target}:ro']}}") == (
        f"lab.yaml: container.mounts: covers one of Tridock's own folders; got '/x:{target}:ro'; choose another target"
    )


@pytest.mark.parametrize("mount", ["/data", "../data:/data", "/data:data", "/data:/data:shared", ":/data"])
def test_mounts_of_the_wrong_form(mount: str) -> None:
    assert message(f"container: {{mounts: ['{mount}']}}") == (
        f"lab.yaml: container.mounts: is not a mount; got {mount!r}; "
        "write /source:/target or /source:/target:ro (a volume's name may stand for the source)"
    )


def test_settings_for_nodes_that_are_not_there(hostfile: Path) -> None:
    settings_file(hostfile, "nodes: {node-2: {}, elsewhere: {}}")
    source = hostfile.with_name("lab.yaml")
    assert load_message(hostfile) == (
        f"{source}: nodes.node-2: is not a node of {hostfile}; did you mean node-1?\n"
        f"{source}: nodes.elsewhere: is not a node of {hostfile}; use one of node-1, 192.0.2.2, 2001:DB8::3"
    )


def test_two_nodes_at_one_address(hostfile: Path) -> None:
    settings_file(hostfile, "nodes: {node-1: {address: 192.0.2.2}}")
    assert load_message(hostfile) == (
        f"{hostfile.with_name('lab.yaml')}: nodes.192.0.2.2: has the address of node-1; got 192.0.2.2; "
        "give each node its own address"
    )


def test_filters(hostfile: Path) -> None:
    cluster = load_cluster(hostfile, exclude="node-1@192.0.2.2")
    assert (cluster.head, cluster.slots) == ("ip6-2001-db8--3", {"ip6-2001-db8--3": (0, 1, 2, 3)})
    assert len(cluster.nodes) == 3
    assert load_cluster(hostfile, include="node-1:1").slots == {"node-1": (1,)}
    hostfile.write_text("a slots=1\nb slots=1\n")
    assert load_message(hostfile, exclude="a@b") == (
        "--exclude: leaves no slot of the hostfile; got 'a@b'; leave some in"
    )
    # That filter's grammar has no place for IPv6: the message says what to do.
    hostfile.write_text("::1 slots=1\n")
    assert load_message(hostfile, include="::1:0").startswith("--include: has more than one colon in a host; ")


def test_the_first_nodes_and_slots(hostfile: Path) -> None:
    settings_file(hostfile, "spares: [node-1]")
    cluster = load_cluster(hostfile)
    assert cluster.first(None, None) == cluster
    few = cluster.first(2, 1)
    assert (few.slots, few.spares) == ({"192.0.2.2": (0,), "ip6-2001-db8--3": (0,)}, {"node-1": (0, 1)})
    assert load_cluster(hostfile, include="node-1:1").first(1, 1).slots == {"node-1": (1,)}
    for nodes, slots, problem in (
        (3, None, "--nodes: is more than the hostfile has; got 3; give at most 2"),
        (0, None, "--nodes: must be 1 or more; got 0; give 1 to 2"),
        (2, 2, "--slots: is more than 192.0.2.2 has; got 2; give at most 1"),
        (None, -1, "--slots: must be 1 or more; got -1; give 1 to 1"),
    ):
        with pytest.raises(RequestError) as caught:
            cluster.first(nodes, slots)
        assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("mine", "localhost/tridock-wrapped/mine:latest"),
        ("pytorch/pytorch:2.9-Cuda", "localhost/tridock-wrapped/pytorch/pytorch:2.9-Cuda"),
        ("registry.example:5000/team/mine:1", "localhost/tridock-wrapped/registry.example-5000/team/mine:1"),
        ("mine:1@sha256:0123456789abcdef", "localhost/tridock-wrapped/mine:0123456789ab"),
    ],
)
def test_an_image_to_wrap(hostfile: Path, image: str, name: str) -> None:
    settings_file(hostfile, f"image: {image}\nwrap: true")
    cluster = load_cluster(hostfile)
    assert (cluster.settings.image, cluster.wraps) == (name, image)
    assert load_cluster(hostfile).with_image("other:1", wrap=False).wraps is None


def test_a_missing_hostfile_or_an_unreadable_settings_file(hostfile: Path) -> None:
    missing = hostfile.with_name("nothing")
    assert load_message(missing) == (
        f"{missing}: the hostfile is missing; got no such file; give the path of a hostfile; "
        "a run never falls back to this machine alone"
    )
    settings = hostfile.with_name("lab.yaml")
    settings.mkdir()
    assert load_message(hostfile) == (
        f"{settings}: cannot be read as a cluster's settings; got a folder; give the path of a cluster's settings file"
    )


@pytest.mark.parametrize(
    ("file", "name"), [("lab", "lab"), ("Lab.local", "lab-local"), ("...", "cluster"), ("x" * 60, "x" * 41)]
)
def test_the_name_that_a_hostfile_gives(file: str, name: str) -> None:
    assert cluster_name(Path("hostfiles") / file) == name
    assert Settings(name=name).name == name


def test_the_project_is_where_the_fabfile_is(hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other" / "below"
    other.mkdir(parents=True)
    monkeypatch.chdir(other)

    def found() -> Path:
        cluster: Cluster = load_cluster(hostfile)
        return cluster.project_folder

    assert found() == other
    (other.parent / "fabfile.py").touch()
    assert found() == other.parent
    (tmp_path / "fabfile.py").touch()
    assert found() == tmp_path
    assert load_cluster(hostfile, project_folder=other).project_folder == other
