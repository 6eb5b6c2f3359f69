"""Engine megatron-core without ranks: samples, positions, sizes, and what a rank finds on this machine."""

from pathlib import Path

import pytest

from tests.distributed import fork_server
from tests.distributed.ranks import rank_environment

pytest.importorskip("torch")
pytest.importorskip("megatron.core", exc_type=ImportError)

pytestmark = pytest.mark.distributed

BEGIN = """
import sys
from pathlib import Path
from tests.unit.train.experiments import experiment
from tridock.compat import megatron_core
print("\\n".join(megatron_core.prepare("cpu", 3)))
"""


def run(script: str, *arguments: str) -> list[str]:
    """In a process of its own: what is put in place of torch's functions stays there."""
    done = fork_server.run(
        ["-c", BEGIN + script, *arguments], "megatron-core", rank_environment() | {"DS_ACCELERATOR": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout.splitlines()


def test_a_cpu_stands_for_cuda() -> None:
    out = run("""
import torch
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.tensor([1.0], device=torch.device("cuda", 1)).to("cuda").to(device="cuda:0").device.type == "cpu"
assert torch.empty(3).type() == "torch.cuda.FloatTensor" and torch.empty(3).type(torch.int64).dtype == torch.int64
assert torch.empty(3, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
stream = torch.cuda.Stream()
with stream, torch.cuda.stream(stream):
    stream.wait_stream(torch.cuda.current_stream())
torch.cuda.Event(enable_timing=True).record()
assert not torch.cuda.is_available()
from megatron.core import tensor_parallel
tensor_parallel.random._set_cuda_rng_state(torch.get_rng_state())
assert torch.compile is not megatron_core._as_written and "apex" not in sys.modules
""")
    assert out == [
        "torch.cuda: devices, tensors and random states are the CPU's",
        "torch.cuda: the device cuda is the CPU, streams do nothing; torch.compile leaves Megatron alone",
    ]


def test_nothing_is_replaced_on_a_gpu() -> None:
    out = run("""
import subprocess
code = (
    "import torch; before = dict(vars(torch)), dict(vars(torch.cuda)), torch.Tensor.to\\n"
    "from tridock.compat import megatron_core\\n"
    "assert megatron_core.prepare('cuda', 8) == []\\n"
    "assert (dict(vars(torch)), dict(vars(torch.cuda)), torch.Tensor.to) == before"
)
subprocess.run([sys.executable, "-c", code], check=True)
print("same")
""")
    assert out[-1] == "same"


def test_the_gelu_is_the_models_on_a_cpu_too() -> None:
    out = run(
        """
import torch
from tridock.train.megatron_core.model import transformer_config
x = torch.linspace(-3, 3, 101)
for given in (None, "gelu", "gelu_tanh"):
    config = transformer_config(experiment(**CORE | {"model.activation_func": given}), torch.device("cpu"))
    found = config.activation_func(x)
    print(*(torch.equal(found, torch.nn.functional.gelu(x, approximate=kind)) for kind in ("none", "tanh")))
""".replace("CORE", repr({"engine": "megatron-core", "parallel.strategy": "ddp"}))
    )
    assert out[2:] == ["False True", "True False", "False True"]


def test_samples_in_megatrons_order(tmp_path: Path) -> None:
    out = run(
        """
import numpy as np
from tests.dataset_writer import IndexedDatasetWriter
from tridock.errors import RequestError
from tridock.train.data.splits import load_splits
from tridock.train.megatron_core.samples import gpt_splits
workspace = Path(sys.argv[1])
with IndexedDatasetWriter(workspace / "data/x", 2100) as writer:
    for number in range(100):
        writer.add_document([] if number == 50 else [number * 20 + place for place in range(20)])
given = experiment(**{"model.vocab_size": 2100, "data.split": "80,15,5"})
plain = load_splits(given, workspace)
splits = gpt_splits(given, workspace)
for name in splits:
    assert splits[name].per_epoch == plain[name].per_epoch, name
    assert len(splits[name].tokens) == len(plain[name].tokens)
train = splits["train"]
first, second = ([train[epoch * train.per_epoch + place] for place in range(train.per_epoch)] for epoch in (0, 1))
assert {sample.shape for sample in first} == {(9,)} and first[0].dtype == np.int64
heads = [sorted(token for sample in epoch for token in sample[:-1].tolist()) for epoch in (first, second)]
for tokens in heads:
    assert len(set(tokens)) == len(tokens) and max(tokens) < 80 * 20
assert not all((a == b).all() for a, b in zip(first, second))
again = gpt_splits(given, workspace)["train"]
assert all((again[number] == train[number]).all() for number in (0, 7, train.per_epoch + 3))
with IndexedDatasetWriter(workspace / "data/y", 2100) as writer:
    for number in range(30):
        writer.add_document([2000 + place for place in range(20)])
blend = {"data.data_path": (0.75, "data/x", 0.25, "data/y")}
mixed = gpt_splits(experiment(**{"model.vocab_size": 2100, "data.split": "80,15,5", **blend}), workspace)["train"]
taken = [int(mixed[number].min()) >= 2000 for number in range(400)]
assert sum(taken) == 100 and max(sum(taken[i : i + 4]) for i in range(0, 400, 4)) <= 2
assert all((mixed.parts[0][number] == train[number]).all() for number in (0, 7))
assert sorted(path.name for path in (workspace / "data").iterdir()) == ["x.bin", "x.idx", "y.bin", "y.idx"]
small = experiment(**{"model.vocab_size": 3, "data.split": "80,15,5"})
try:
    gpt_splits(small, workspace)["valid"][0]
except RequestError as error:
    print(str(error).split("; got")[0])
""",
        str(tmp_path),
    )
    assert out[-1] == "model.vocab_size: is too small for the data"


def test_positions_are_divided_evenly() -> None:
    out = run("""
from tridock.train.megatron_core.attention import positions
print([positions(8, rank, 2).tolist() for rank in range(2)], positions(4, 0, 1).tolist())
from tridock.train.megatron_core.model import seed_of
print(seed_of("a", 1) == seed_of("a", 1), len({seed_of("a", 1), seed_of("b", 1), seed_of("a", 2)}))
from tridock.engines import ENGINES
from tridock.experiment.parameters import model_parameters
print(ENGINES["megatron-core"].rules.padded_vocab_size(512, experiment(**{"parallel.tensor_model_parallel_size": 8})))
print(model_parameters(experiment().model, 9))
""")
    size = 2 * (12 * 16 * 16 + 13 * 16) + (9 + 8) * 16 + 2 * 16
    assert out[-4:] == ["[[0, 1, 6, 7], [2, 3, 4, 5]] [0, 1, 2, 3]", "True 3", "1024", str(size)]


DRAWN = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from tridock.train.megatron_core import model

class Largest(TorchDispatchMode):
    elements = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            self.elements = max(self.elements, out.numel())
        return out

def drawn(rows, columns, parts, axis):
    whole = torch.zeros(rows, columns)
    for number, part in enumerate(whole.chunk(parts, axis)):
        mine = torch.zeros(part.shape)
        sharded = ShardedTensor.from_rank_offsets("w", mine, (axis, number, parts))
        with Largest() as seen:
            model.draw(sharded, 0.5, 7)
        assert seen.elements == 30, seen.elements
        part.copy_(mine)
    return whole

model.BLOCK = 30  # three rows of ten
one = drawn(20, 10, 1, 0)
same = [torch.equal(one, drawn(20, 10, parts, axis)) for parts, axis in ((2, 0), (4, 0), (10, 0), (2, 1), (5, 1))]
print(same, torch.equal(one, drawn(24, 10, 2, 0)[:20]), len(one.unique()), 0.4 < one.std() < 0.6)
"""


def test_a_rank_draws_its_part_of_the_weights_block_by_block() -> None:
    assert run(DRAWN)[-1] == f"{[True] * 5} True 200 tensor(True)"


ATTENTION = """
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from tridock.train.rank import process_group
from tridock.train.megatron_core import attention
from tridock.train.megatron_core.layout import Layout
from tridock.train.megatron_core.model import transformer_config
process_group.join()
dropped = float(sys.argv[1])
given = experiment(**{"model.attention_dropout": dropped, "precision": "fp32"})
layout = Layout.form(given.parallel)
config = transformer_config(given, torch.device("cpu"))
parts = torch.randn(3, 24, 3, 2, 8, generator=torch.Generator().manual_seed(1))
toward = torch.randn(24, 3, 16, generator=torch.Generator().manual_seed(2))
later = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
def attend(kind, training=True):
    layout.reseed(7, 1)
    query, key, value = (part.clone().requires_grad_() for part in parts)
    module = kind(config, 1, AttnMaskType.causal, "self").train(training)
    mixed = module(query, key, value, later, attn_mask_type=AttnMaskType.causal)
    mixed.backward(toward)
    return torch.cat([mixed.flatten(), query.grad.flatten(), key.grad.flatten(), value.grad.flatten()]).detach()
"""


@pytest.mark.parametrize("dropout", ["0.0", "0.25"])
def test_attention_is_megatrons(dropout: str) -> None:
    """Forward and gradients in fp32, and what dropout draws: nothing at an evaluation."""
    out = run(
        ATTENTION
        + """
ours, theirs = attend(attention.FusedAttention), attend(DotProductAttention)
print((ours - theirs).abs().max().item() <= 1e-5, theirs.abs().max().item() > 1)
evaluated = attend(attention.FusedAttention, training=False)
print((evaluated - attend(DotProductAttention, training=False)).abs().max().item() <= 1e-5)
print((evaluated - ours).abs().max().item() > 0.01)
""",
        dropout,
    )
    assert out[-3:] == ["True True", "True", str(dropout != "0.0")]


def test_keys_that_come_later_are_hidden() -> None:
    out = run("""
import torch
from tridock.train.megatron_core.attention import causal_bias
print(causal_bias(4, 1, 2, torch.float16, torch.device("cpu")).tolist())
same = [causal_bias(4, 0, 2, torch.float32, torch.device("cpu")) for _ in range(2)]
print(same[0] is same[1], same[0].dtype)
""")
    # Rank 0 has the tokens 0 and 3, rank 1 has 1 and 2; the columns are tokens 0, 3, 1, 2.
    hidden = float("-inf")
    assert out[-2:] == [str([[0.0, hidden, 0.0, hidden], [0.0, hidden, 0.0, 0.0]]), "True torch.float32"]


def test_a_file_that_cannot_be_written_is_the_ranks_own_error(tmp_path: Path) -> None:
    out = run(
        """
from types import SimpleNamespace
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from tridock.train.megatron_core.checkpoint import _write_file
writer = SimpleNamespace(write_preloaded_data=FileSystemWriterAsync.write_preloaded_data, use_msc=False)
try:
    _write_file(writer, (sys.argv[1] + "/none/file", "file", ([], [])))
except OSError as error:
    print(error.strerror)
""",
        str(tmp_path),
    )
    assert out[-1] == "No such file or directory"
