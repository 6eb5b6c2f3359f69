"""The scripts in tools/ and what they write, without Docker and without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import STEP_S

ROOT = Path(__file__).resolve().parents[2]
WHEEL_FOLDERS = ROOT / "tools/python/pip-wheel-folders.sh"


def run(*arguments: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [str(argument) for argument in arguments]
    return subprocess.run(
        argv, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=STEP_S, check=False
    )


def program(folder: Path, name: str, script: str) -> Path:
    file = folder / name
    file.write_text(f"#!/usr/bin/env bash\n{script}\n")
    file.chmod(0o755)
    return file


# ---- .env ------------------------------------------------------------------------------------------

BLOCK = "# --- written by make image ---\nCOMPOSE_FILE={files}\nTRIDOCK_IMAGE={image}\n# --- end ---\n"
CPU = BLOCK.format(files="docker-compose.yml", image="tridock:cpu")
GPU = BLOCK.format(files="docker-compose.yml:docker-compose.gpu.yml", image="tridock:latest")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    for script in ("compose-env.sh", "compose.sh"):
        shutil.copy(ROOT / "tools" / script, tmp_path / "tools")
    return tmp_path


def test_env_file_is_made(project: Path) -> None:
    assert run(project / "tools/compose-env.sh", "cpu", "tridock:cpu").returncode == 0
    assert (project / ".env").read_text() == CPU
    assert sorted(file.name for file in project.iterdir()) == [".env", "tools"]


def test_env_file_keeps_the_users_lines_and_its_mode(project: Path) -> None:
    (project / ".env").write_text(f"HF_TOKEN=secret\n{CPU}MINE=1\n")
    (project / ".env").chmod(0o600)
    assert run(project / "tools/compose-env.sh", "gpu", "tridock:latest").returncode == 0
    assert (project / ".env").read_text() == f"HF_TOKEN=secret\nMINE=1\n{GPU}"
    assert (project / ".env").stat().st_mode & 0o777 == 0o600


def test_a_line_without_an_end_is_not_joined_with_ours(project: Path) -> None:
    (project / ".env").write_text("MINE=1")
    run(project / "tools/compose-env.sh", "cpu", "tridock:cpu")
    assert (project / ".env").read_text() == f"MINE=1\n{CPU}"


# ---- wheels and locks ------------------------------------------------------------------------------


def test_wheel_folders_are_pips_own_that_exist(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    links = f"{one} file://{two} /nowhere/at/all https://wheels.example/simple"
    done = run(WHEEL_FOLDERS, sys.executable, PIP_FIND_LINKS=links, PIP_CONFIG_FILE=os.devnull)
    assert (done.returncode, done.stdout) == (0, f"{one}\n{two}\n")


def test_no_wheel_folders() -> None:
    done = run(WHEEL_FOLDERS, sys.executable, PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_what_the_base_lacks_is_installed(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "# comment\n"
        "pytest==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n    # via nothing\n"
        "Not_a.package==2.0 ; python_version < '3.12' \\\n    --hash=sha256:cc\n"
        "not-a-package==2.1 ; python_version >= '3.12' \\\n    --hash=sha256:dd\n"
    )
    done = run(sys.executable, ROOT / "tools/image/missing-requirements.py", lock)
    assert done.stdout == (
        "Not_a.package==2.0 ; python_version < '3.12'  --hash=sha256:cc\n"
        "not-a-package==2.1 ; python_version >= '3.12'  --hash=sha256:dd\n"
    )


def test_a_version_that_an_added_package_cannot_use_is_put_in_front(tmp_path: Path) -> None:
    """A base with an old protobuf and an old numpy, and an environment on top with a package that wants newer ones."""
    base, environment = tmp_path / "base", tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin/python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run(python, "-c", ask).stdout.strip())
    for place, name, version, wants in (
        (base, "protobuf", "5.29.5", ()),
        (base, "numpy", "1.26.4", ()),
        (base, "remains", "", ()),
        (own, "board", "1.0", ("protobuf>=6", "numpy>=2", "protobuf<5 ; extra == 'old'", "absent>=1", "remains>=1")),
    ):
        folder = place / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        lines = [f"Name: {name}", *[f"Version: {version}"] * bool(version), *(f"Requires-Dist: {it}" for it in wants)]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
    packaging = Path(
        subprocess.check_output(
            [sys.executable, "-c", "import packaging; print(packaging.__path__[0])"], text=True
        ).strip()
    )
    shutil.copytree(packaging, base / "packaging")
    lock = tmp_path / "lock.txt"
    lock.write_text("protobuf==7.0 \\\n    --hash=sha256:aa\nnumpy==2.4 \\\n    --hash=sha256:bb\n")
    done = run(python, ROOT / "tools/image/missing-requirements.py", "--unfit", lock, PYTHONPATH=str(base))
    assert done.stdout == "protobuf==7.0  --hash=sha256:aa\n"
    assert done.stderr == (
        "the locked protobuf goes in front of the base's 5.29.5: board wants protobuf>=6\n"
        "the base's numpy 1.26.4 stays, although board wants numpy>=2\n"
        "the base's remains 0 stays, although board wants remains>=1\n"
    )


def test_the_manifest_lists_distributions_without_a_version(tmp_path: Path) -> None:
    for folder, metadata in (("a-1.dist-info", "Name: A"), ("b-1.dist-info", "Version: 1"), ("c-1.dist-info", None)):
        (tmp_path / folder).mkdir()
        if metadata is not None:
            (tmp_path / folder / "METADATA").write_text(f"Metadata-Version: 2.1\n{metadata}\n")
    program = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['python_packages']()))"
    done = run(sys.executable, "-c", program, ROOT / "tools/image-manifest.py", PYTHONPATH=f"{tmp_path}:{ROOT}")
    packages = json.loads(done.stdout)
    assert packages["a"] == "unknown"
    assert packages["numpy"][0].isdecimal()


def test_locks_name_no_index_and_have_hashes() -> None:
    for lock in ROOT.glob("locks/*.txt"):
        text = lock.read_text()
        assert "://" not in text, lock
        pinned = [line for line in text.splitlines() if "==" in line and not line.lstrip().startswith("#")]
        if lock.name != "torch.txt":
            assert len([line for line in pinned if line.endswith("\\")]) == len(pinned), lock


def test_locks_agree_on_versions_that_they_share() -> None:
    versions: dict[str, set[str]] = {}
    for lock in ("operator", "extras", "train-cpu", "train-gpu", "torch-cuda", "dev", "docs"):
        for line in (ROOT / f"locks/{lock}.txt").read_text().splitlines():
            if "==" in line and line[0].isalnum():
                versions.setdefault(line.rstrip(" \\").split("==")[0], set()).add(f"{lock}: {line.rstrip(' ')}")
    apart = {
        name: lines
        for name, lines in versions.items()
        if len({re.split("[:;]", line)[1].strip(" \\") for line in lines if "python_full_version" not in line}) > 1
    }
    assert apart == {}


# ---- the image's compiler --------------------------------------------------------------------------


def test_ops_are_compiled_for_any_cpu_of_the_kind(tmp_path: Path) -> None:
    program(tmp_path, "g++", 'printf "%s\\n" "$@"')
    program(tmp_path, "uname", "echo x86_64")
    arguments = ["-c", "a b.cpp", "-g", "-march=native", "-D__AVX512__", "-O0"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run(ROOT / "tools/image/portable-cxx.sh", *arguments, PATH=path)
    assert done.stdout.split("\n") == ["-O3", "-fopenmp", "-march=x86-64-v3", "-c", "a b.cpp", "-D__AVX256__", ""]
    program(tmp_path, "uname", "echo aarch64")
    done = run(ROOT / "tools/image/portable-cxx.sh", *arguments, PATH=path)
    assert done.stdout.split("\n") == ["-O3", "-fopenmp", "-c", "a b.cpp", "-march=native", "-D__AVX512__", ""]


def test_torchs_headers_are_compiled_once_for_files_with_the_same_options(tmp_path: Path) -> None:
    called = tmp_path / "called"
    program(tmp_path, "g++", f'echo "$*" >>{called}; while [ "$1" != -o ]; do shift; done; : >"$2"')
    compiled = tmp_path / "compiled"
    for name, option in (("a", "-O0"), ("b", "-O2"), ("c", "-DNDEBUG")):
        arguments = ("-MF", f"{name}.d", "-Ids/csrc/x", f"-DTORCH_EXTENSION_NAME={name}", option, "-c", f"{name}.cpp")
        done = run(
            ROOT / "tools/image/portable-cxx.sh", *arguments, "-o", f"{tmp_path}/{name}.o",
            PATH=f"{tmp_path}:{os.environ['PATH']}", PORTABLE_CXX_COMPILED=str(compiled),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    headers, first, second, others, third = called.read_text().splitlines()
    made = [line.rpartition(" -o ")[2].removesuffix(".gch") for line in (headers, others)]
    assert ["c++-header" in line for line in (headers, others)] == [True, True]
    assert [line.split()[1] for line in (first, second, third)] == [made[0], made[0], made[1]]
    assert made[0] != made[1]
    assert all(Path(header).read_text().startswith("// ") for header in made)


# ---- torch -----------------------------------------------------------------------------------------


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """A python whose torch is what the file `torch` says, and whose pip only writes down what it was asked for."""
    (tmp_path / "torch").write_text("")
    return program(
        tmp_path,
        "python",
        f"""
if [[ $1 == -c ]]; then [[ -s {tmp_path}/torch ]] && cat {tmp_path}/torch; exit; fi
if [[ $3 == config ]]; then exit 0; fi
echo "$*" >>{tmp_path}/calls
[[ ! -e {tmp_path}/installs ]] || cp {tmp_path}/installs {tmp_path}/torch
""",
    )


def install_torch(python: Path, flavor: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    # An uv that finds nothing, as where PyTorch's index cannot be reached.
    program(python.parent, "uv", "exit 2")
    path = f"{python.parent}:{os.environ['PATH']}"
    return run(ROOT / "tools/python/install-torch.sh", python, "2.13.0", flavor, *folders, PATH=path)


def test_the_cpu_build_that_is_there_stays(fake_python: Path) -> None:
    (fake_python.parent / "torch").write_text("2.13.0+cpu cpu\n")
    assert install_torch(fake_python, "cpu").returncode == 0
    assert not (fake_python.parent / "calls").exists()


def test_a_wheel_in_a_folder_is_taken_first(fake_python: Path, tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    (tmp_path / "installs").write_text("2.13.0+cpu cpu\n")
    assert install_torch(fake_python, "cpu", tmp_path).returncode == 0
    assert (tmp_path / "calls").read_text() == (
        f"-m pip install --quiet --no-deps --no-index --find-links {tmp_path} torch==2.13.0+cpu\n"
    )


def test_a_build_with_cuda_is_refused(fake_python: Path, tmp_path: Path) -> None:
    (tmp_path / "installs").write_text("2.13.0 13.0\n")
    done = install_torch(fake_python, "cpu")
    assert done.returncode == 3
    assert done.stderr == (
        "install-torch: torch is not the CPU build of 2.13.0; got 2.13.0 13.0; "
        "put the wheel of the CPU build into locks/wheels/ or configure pip's find-links\n"
    )


def test_the_cuda_build_comes_from_its_own_lock(fake_python: Path, tmp_path: Path) -> None:
    (tmp_path / "installs").write_text("2.13.0 13.0\n")
    assert install_torch(fake_python, "cuda").returncode == 0
    lock = f"{ROOT}/tools/python/../../locks/torch-cuda.txt"
    assert (tmp_path / "calls").read_text().endswith(f"--no-deps --require-hashes -r {lock}\n")
    (tmp_path / "installs").write_text("2.13.0 cpu\n")
    done = install_torch(fake_python, "cuda")
    assert (done.returncode, done.stderr) == (
        3,
        "install-torch: torch is not the CUDA build of 2.13.0; got 2.13.0 cpu; "
        "configure pip with an index that has PyTorch's own wheels for Linux\n",
    )


def test_nvidias_torch_is_checked_and_not_replaced(fake_python: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").write_text("2.10.0a0+nv25.12 13.1\n")
    assert install_torch(fake_python, "gpu").returncode == 0
    (tmp_path / "torch").write_text("2.13.0+cpu cpu\n")
    done = install_torch(fake_python, "gpu")
    assert (done.returncode, done.stderr) == (
        3,
        "install-torch: the base image's torch has no CUDA; got 2.13.0+cpu; "
        "take NVIDIA's PyTorch image as BASE_IMAGE, or FLAVOR=cpu\n",
    )
    (tmp_path / "torch").write_text("")
    done = install_torch(fake_python, "gpu")
    assert (done.returncode, done.stderr) == (
        3,
        "install-torch: the base image has no torch; got none; "
        "take NVIDIA's PyTorch image as BASE_IMAGE, or FLAVOR=cpu\n",
    )
    assert not (tmp_path / "calls").exists()


def test_a_flavor_that_is_none(fake_python: Path) -> None:
    done = install_torch(fake_python, "tpu")
    assert (done.returncode, done.stderr) == (
        3,
        "install-torch: FLAVOR is not cpu, cuda or gpu; got tpu; write one of them\n",
    )


# ---- .venv -----------------------------------------------------------------------------------------


def test_a_python_that_is_too_old(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/venv.sh", tmp_path / "tools")
    program(tmp_path, "python3", '[[ $1 == --version ]] && echo "Python 3.9.2" || exit 1')
    done = run(tmp_path / "tools/venv.sh", "operator", PYTHON="python3", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stderr) == (
        3,
        "venv: Python 3.11 or later is needed; got Python 3.9.2; install it, or name one with PYTHON=...\n",
    )


# ---- shell scripts ---------------------------------------------------------------------------------


def test_every_shell_script_is_linted() -> None:
    found = run(ROOT / "tools/shell-scripts.sh").stdout.splitlines()
    assert len(found) == len(set(found))
    expected = {
        ".ci/run", "entrypoint/entrypoint.sh", "entrypoint/profile.sh", "entrypoint/tridock", "tools/image/ca.sh",
        "tools/venv.sh",
    }  # fmt: skip
    assert expected <= set(found)


# ---- wheels for a bare machine with a GPU ----------------------------------------------------------


def test_the_wheels_for_a_bare_machine_are_the_locks(tmp_path: Path) -> None:
    program(tmp_path, "python", 'echo "$@" >>calls; [[ "$*" != *stdin ]] || cat >wheels.in')
    (tmp_path / "out").mkdir()
    for name in ("pydantic-1.whl", "kept"):
        (tmp_path / "out" / name).touch()
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/gpu-wheels.sh", tmp_path / "tools")
    done = run(tmp_path / "tools/gpu-wheels.sh", "out", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stderr) == (0, "")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["kept"]
    asked = re.findall(r"^(\S+)==\S+ \\\n    --hash=sha256:", (tmp_path / "wheels.in").read_text(), re.MULTILINE)
    assert asked == [
        *("annotated-types", "hjson", "megatron-core", "pydantic", "pydantic-core", "typing-extensions"),
        *("typing-inspection", "zstandard"),
    ]
    download, wheel = (tmp_path / "calls").read_text().splitlines()
    assert download.startswith(
        "-m pip download --quiet --no-deps --require-hashes --only-binary=:all: --python-version 3.12 "
    )
    assert wheel.endswith("--wheel-dir out -r locks/deepspeed.txt")
