"""The GPU image on a base like NVIDIA's: whose packages it has, what was compiled, and what its manifest says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.support import Containers, succeed

BASE = "tridock-rehearsal-base"
# Of two with the same name the first one on the path is imported.
DISTRIBUTIONS = """
import importlib.metadata as m, json
found = {d.name.lower(): d.version or "unknown" for d in reversed(list(m.distributions()))}
print(json.dumps(found))"""


@pytest.fixture(scope="module")
def base() -> dict[str, str]:
    """The base's distributions."""
    found: dict[str, str] = json.loads(succeed("docker", "run", "--rm", BASE, "python3", "-c", DISTRIBUTIONS))
    return found


def test_the_bases_packages_stay_except_where_one_of_ours_needs_another(
    containers: Containers, base: dict[str, str]
) -> None:
    manifest = json.loads(containers.run("cat", "/opt/tridock/manifest.json").stdout)
    ours = manifest["python_packages"]
    assert {name: (base[name], ours[name]) for name in base if ours[name] != base[name]} == {}
    assert {name: base[name] for name in ("torch", "numpy", "pydantic", "remains")} == {
        "torch": "2.11.0", "numpy": "1.26.4", "pydantic": "2.9.2", "remains": "unknown"
    }  # fmt: skip
    assert {"deepspeed", "megatron-core", "nvidia-ml-py", "tokenizers"} <= ours.keys() - base.keys()


def test_the_manifest_has_the_bases_torch_and_cuda(containers: Containers) -> None:
    manifest = json.loads(containers.run("cat", "/opt/tridock/manifest.json").stdout)
    expected = {
        "flavor": "gpu", "base_image": BASE, "torch": "2.11.0+cu130", "cuda": "13.0", "numpy": "1.26.4",
        "deepspeed_ops": ["async_io", "cpu_adam", "fused_adam", "pin_memory"], "megatron_v1_1_5": None,
    }  # fmt: skip
    assert {name: manifest[name] for name in expected} == expected
    assert {"sm_80", "sm_90", "sm_120"} <= set(manifest["torch_architectures"])


def test_fused_adam_was_compiled_for_every_architecture_of_the_base(containers: Containers) -> None:
    program = """
import glob, re, deepspeed
from deepspeed.ops.op_builder import FusedAdamBuilder
assert callable(FusedAdamBuilder().load().multi_tensor_adam)
(library,) = glob.glob(deepspeed.__path__[0] + "/ops/adam/fused_adam_op*.so")
print(sorted(set(re.findall(rb"sm_\\d+", open(library, "rb").read()))))"""
    done = containers.run("python", "-c", program)
    assert done.stdout.splitlines()[-1:] == ["[b'sm_90']"], done.stderr


def test_the_workspaces_owner_is_tridock_although_the_base_has_a_user_of_that_id(
    containers: Containers, tmp_path: Path
) -> None:
    options = ["--volume", f"{tmp_path}:/workspace", "--env", "TRIDOCK_UID=1000", "--env", "TRIDOCK_GID=1000"]
    done = containers.run("bash", "-c", "id -un; id -gn; echo $USER $HOME; ssh -G x | grep -m 1 user", options=options)
    assert done.stdout.splitlines() == ["tridock", "tridock", "tridock /home/tridock", "user tridock"], done.stderr
