"""The project's own files: in the current folder first, then in the checkout or the wheel."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tridock import project_files
from tridock.cli import main
from tridock.cluster.settings import load_cluster
from tridock.cluster.transports import HostFacts, transport_of
from tridock.experiment.load import load_command
from tridock.ops import project
from tridock.project_files import ROOT, project_file, starter_files

FACTS = HostFacts(uid=1000, gid=100, home="/home/ada", gpus=0, infiniband=False)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is empty."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "empty"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- looked up -----------------------------------------------------------------------------------


def test_a_config_that_the_folder_lacks_is_tridocks_own(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "configs/demo.yaml", "--nodes", "2", "--gpus-per-node", "4", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 8
    (empty / "configs").mkdir()
    (empty / "configs/demo.yaml").write_text("name: x\nmode: {}\n")
    assert main(arguments) == 2
    assert json.loads(capsys.readouterr().out)["verdict"] == "illegal"


@pytest.mark.parametrize("name", ["configs/none.yaml", "README.md", "tridock/gpus.py", "configs/../README.md"])
def test_only_the_files_of_a_new_folder_are_looked_up(empty: Path, name: str) -> None:
    assert project_file(Path(name)) == Path(name)


def test_the_twin_in_an_empty_folder(empty: Path) -> None:
    cluster = load_cluster(Path("hostfiles/twin"))
    assert (cluster.settings.transport, cluster.project_folder) == ("compose", empty)
    argv = transport_of(cluster).command(FACTS, "x.json", "up").argv  # type: ignore[union-attr]
    assert argv[4:8] == ("--project-directory", str(empty), "--file", str(ROOT / "docker-compose.yml"))
    assert list(empty.iterdir()) == []


def test_settings_come_from_beside_the_hostfile_that_is_used(empty: Path) -> None:
    (empty / "hostfiles").mkdir()
    (empty / "hostfiles/twin").write_text("gpu-1 slots=8\n")
    assert load_cluster(Path("hostfiles/twin")).settings.transport == "ssh"


# ---- tridock init --------------------------------------------------------------------------------


def test_a_new_folder(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "a b"]) == 0
    made = files(empty / "a b")
    assert {"configs/demo.yaml", "hostfiles/example", "docker-compose.gpu.yml", "fabfile.py"} <= made.keys()
    assert capsys.readouterr().out == (
        f"files written to {empty}/a b: {len(made)}\n"
        "next: cd 'a b' && cp hostfiles/example hostfile, and name your hosts in it\n"
    )
    assert main(["init", "a b"]) == 0
    assert capsys.readouterr().out == f"files written to {empty}/a b: 0\n"


def test_what_is_there_is_kept(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty / "configs").mkdir()
    (empty / "configs/demo.yaml").write_text("mine")
    (empty / "fabfile.py").mkdir()
    assert main(["init"]) == 2
    todo = "move it away, or replace it with --force"
    assert capsys.readouterr().err.splitlines() == [
        f"configs/demo.yaml: exists and differs; {todo}",
        f"fabfile.py: exists and differs; {todo}",
    ]
    assert files(empty) == {"configs/demo.yaml": b"mine"}
    (empty / "fabfile.py").rmdir()
    assert main(["init", "--force"]) == 0
    assert files(empty)["configs/demo.yaml"] == (ROOT / "configs/demo.yaml").read_bytes()


def test_a_folder_that_cannot_be_written(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty / "file").touch()
    assert main(["init", "file"]) == 2
    assert "cannot be written; got " in capsys.readouterr().err


# ---- recipes -------------------------------------------------------------------------------------


def test_every_recipe_is_listed_and_copied(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed.keys() == {path.name for path in (ROOT / "configs/recipes").iterdir() if path.is_dir()}
    assert all(listed.values())
    for name in listed:
        assert main(["init", "--recipe", name]) == 0
        assert f"next: read {name}/README.md" in capsys.readouterr().out
        for config in (empty / name).glob("run*.yaml"):
            assert f"--config {name}/{config.name}" in (empty / name / "README.md").read_text()
            if "engine: command" in config.read_text():
                experiment = load_command(config)
                words = experiment.command if experiment.code == "." else ()
                assert all((empty / name / word).is_file() for word in words if word.endswith((".yaml", ".json")))
                (config.parent / experiment.code).mkdir(exist_ok=True)
                assert main(["run", "--dry-run", "--hosts", "hostfiles/twin", "--config", str(config)]) == 0
                assert experiment.command[-1] in capsys.readouterr().out
    assert not any(path.is_symlink() for path in empty.rglob("*"))


def test_files_that_recipes_share_are_whole_copies() -> None:
    """Not links: a download as ZIP and git with core.symlinks=false make files of them that hold the other's path."""
    assert not [path for path in starter_files().values() if path.is_symlink()]
    folder = ROOT / "configs/recipes"
    requirements = [path.read_bytes() for path in folder.glob("*/requirements.txt")]
    assert len(requirements) == 3
    assert len(set(requirements)) == 1
    assert b"\ntrl==" in requirements[0]
    for name, other in (("fsdp2.json", "dpo"), ("zero3.json", "llama-factory")):
        assert json.loads((folder / other / name).read_bytes()) == json.loads((folder / "sft" / name).read_bytes())


def test_a_recipe_that_does_not_exist(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--recipe", "sftt"]) == 2
    assert capsys.readouterr().err.startswith("--recipe: names none; got sftt; choose one of axolotl, ")
    assert list(empty.iterdir()) == []


# ---- tridock image -------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The package as the built wheel has it, unpacked."""
    build = pytest.importorskip("hatchling.builders.wheel")
    target = tmp_path / "dist"
    (path,) = build.WheelBuilder(str(Path(__file__).parents[2])).build(directory=str(target))
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
        for entry in archive.infolist():
            (tmp_path / "site" / entry.filename).chmod(entry.external_attr >> 16 & 0o777 or 0o644)
    return tmp_path / "site/tridock"


def test_the_wheel_builds_the_image_from_what_a_checkout_builds_it_from(
    wheel: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker is a script here that lists its build context, as .dockerignore leaves it."""
    programs = empty.parent / "programs"
    programs.mkdir()
    (programs / "docker").write_text(f'#!/bin/sh\necho "$@" >>{programs}/calls\n')
    (programs / "docker").chmod(0o755)
    (empty / "ca.pem").touch()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty.parent / "cache"))
    monkeypatch.setattr(project_files, "ROOT", wheel / "_project")
    monkeypatch.setattr(project, "ROOT", wheel / "_project")
    monkeypatch.setattr(project_files, "_PACKAGE", wheel)
    assert main(["init"]) == 0
    assert main(["image", "--flavor", "cpu", "--tag", "mine:1", "--ca", "ca.pem", "--megatron", "none"]) == 0
    (built,) = (line for line in (programs / "calls").read_text().splitlines() if line.startswith("build "))
    assert "--build-arg FLAVOR=cpu" in built
    assert f"--secret id=ca,src={empty}/ca.pem" in built
    assert built.endswith("--tag mine:1 .")
    assert "TRIDOCK_IMAGE=mine:1\n" in (empty / ".env").read_text()
    assert sorted(path.name for path in empty.iterdir() if path.name not in {*project_files.STARTER, "ca.pem"}) == [
        ".env"
    ]
    place = empty.parent / "cache/tridock/image"
    checkout = Path(__file__).parents[2]
    listed = subprocess.run(
        ["git", "ls-files", "Dockerfile", ".dockerignore", "configs", "entrypoint", "patches", "tridock", "tools/image",
         "tools/python", "locks/*train*.txt", "locks/uv.txt", "locks/torch.txt",
         "locks/deepspeed.txt"],
        cwd=checkout, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert {name: (place / name).stat().st_mode & 0o111 for name in listed} == {
        name: (checkout / name).stat().st_mode & 0o111 for name in listed
    }
    assert [name for name in listed if (place / name).read_bytes() != (checkout / name).read_bytes()] == []


def test_neither_works_inside_the_image(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(project_files, "ROOT", empty)
    monkeypatch.setattr(project, "ROOT", empty)
    for command in ("init", "image"):
        assert main([command]) == 2
        assert capsys.readouterr().err == (
            f"tridock {command}: cannot find the project files; got none in {empty}; "
            "run it where Tridock is installed\n"
        )
