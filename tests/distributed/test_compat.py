"""The stand-ins: what they compute, and that they stay away from what is there. Each in a process of its own."""

from pathlib import Path

import pytest

from tests.distributed import fork_server
from tests.distributed.ranks import ROOT, rank_environment

pytest.importorskip("torch")

pytestmark = pytest.mark.distributed


def run(script: str, path: str = "") -> str:
    env = rank_environment() | {"PYTHONPATH": f"{ROOT}:{path}", "DS_ACCELERATOR": "cpu"}
    done = fork_server.run(["-c", script], "torch", env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_on_a_cpu() -> None:
    out = run(
        """
import numpy as np, torch
from tridock import compat
print("\\n".join(compat.install("cpu", 3)))
from torch._six import inf
from apex.normalization.fused_layer_norm import FusedLayerNorm
from apex.optimizers import FusedAdam
from apex.multi_tensor_apply import multi_tensor_applier
import amp_C
assert inf == float("inf") and FusedLayerNorm is torch.nn.LayerNorm
assert np.dtype(np.float).itemsize == 4 and np.float is not np.double
weight = torch.nn.Parameter(torch.ones(2))
adam = FusedAdam([weight], lr=0.1, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
assert type(adam) is torch.optim.AdamW
overflow = torch.cuda.IntTensor([0])
source, target = [torch.tensor([3.0, 4.0])], [torch.zeros(2)]
assert float(multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [source], False)[0]) == 5.0
multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [source, target], 0.5)
assert target[0].tolist() == [1.5, 2.0] and overflow.item() == 0
multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [[torch.tensor([inf])], [torch.zeros(1)]], 0.5)
assert overflow.item() == 1
assert torch.cuda.device_count() == 3 and not torch.cuda.is_available()
torch.cuda.set_device(1); torch.cuda.synchronize()
assert torch.empty(1, device=torch.cuda.current_device()).cuda().device.type == "cpu"
torch.cuda.manual_seed(5); first = torch.rand(3)
torch.manual_seed(5); assert torch.equal(first, torch.rand(3))
state = torch.cuda.get_rng_state(); again = torch.rand(1); torch.cuda.set_rng_state(state)
assert torch.equal(again, torch.rand(1))
"""
    )
    assert out.splitlines() == [
        "torch._six: gone since torch 2.0",
        "numpy.float: gone since numpy 1.24; 4 bytes, as Megatron's table of sizes has it",
        "torch.cuda: devices, tensors and random states are the CPU's",
        "apex: FusedAdam is torch.optim.AdamW(fused=True), FusedLayerNorm is torch.nn.LayerNorm",
    ]


def test_what_is_there_stays(tmp_path: Path) -> None:
    """On a GPU with apex, the torch of its day and numpy's: nothing is replaced."""
    for name in ("apex/optimizers", "apex/normalization/fused_layer_norm", "apex/multi_tensor_apply", "amp_C"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("real = True\n")
    out = run(
        """
import sys, types
import numpy, torch
numpy.float = float
sys.modules["torch._six"] = six = types.ModuleType("torch._six")
six.__spec__ = types.SimpleNamespace(name="torch._six")
before = dict(vars(torch.cuda))
from tridock import compat
assert compat.install("cuda", 8) == []
import apex.optimizers, amp_C
assert apex.optimizers.real and amp_C.real and numpy.float is float
assert dict(vars(torch.cuda)) == before
print("same")
""",
        str(tmp_path),
    )
    assert out == "same\n"


def test_half_an_apex_is_none(tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/optimizers.py").write_text("raise RuntimeError('compiled for another CUDA')\n")
    out = run("from tridock.compat import apex; print(apex._importable('apex.optimizers'))", str(tmp_path))
    assert out == "False\n"
