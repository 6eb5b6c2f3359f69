"""Training scripts that nobody here wrote, unmodified: nanoGPT, DeepSpeed's CIFAR, accelerate, Lightning, torchtune.

``TRIDOCK_PROGRAMS`` names a folder with their repositories and with the wheels of what they import, in ``wheels/``;
without it these tests are skipped. Nothing is downloaded: images and weights are random ones.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.support import succeed, wait_until
from tests.integration.twin import NODES, Twin, two_nodes
from tests.patience import MATRIX_S, WORK_S

SOURCES = os.environ.get("TRIDOCK_PROGRAMS")
pytestmark = [
    pytest.mark.timeout(MATRIX_S),
    pytest.mark.optional,
    pytest.mark.skipif(SOURCES is None, reason="TRIDOCK_PROGRAMS names no folder with programs"),
]
INSTALL = "pip install -q --no-index --no-deps --find-links /workspace/data/wheels --target deps --upgrade"

# Of ranks: the wheel of torchvision has its operators for CUDA only, and the images are not CIFAR's.
TORCHVISION = """
import os
if "LOCAL_RANK" in os.environ:
    import torch
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision.datasets.cifar
    torchvision.datasets.cifar.check_integrity = lambda *_: True
"""
# nanoGPT's own kind of configuration file: under torchrun train.py names cuda:N, and the CPU stands in.
NANOGPT = """
dataset, device, dtype, backend, compile = "shakespeare_char", "cpu", "float32", "gloo", False
n_layer, n_head, n_embd, block_size, batch_size, gradient_accumulation_steps = 2, 2, 32, 32, 4, 4
eval_interval, eval_iters, max_iters, lr_decay_iters, warmup_iters = 1000, 2, 30, 30, 5
torch.cuda.set_device = lambda _: None
torch.Tensor.pin_memory = lambda self, *_: self
torch.nn.Module.to = lambda self, *_: self
_to = torch.Tensor.to
torch.Tensor.to = lambda self, *a, **k: self if a and str(a[0]).startswith("cuda") else _to(self, *a, **k)
DDP = lambda model, device_ids: torch.nn.parallel.DistributedDataParallel(model)
"""
CIFAR = """
import pathlib, pickle, numpy
folder = pathlib.Path("data/cifar-10-batches-py")
folder.mkdir(parents=True, exist_ok=True)
random, labels = numpy.random.default_rng(0), [image % 10 for image in range(64)]
for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
    images = random.integers(0, 256, (64, 3072), dtype=numpy.uint8)
    (folder / name).write_bytes(pickle.dumps({"data": images, "labels": labels}))
(folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
"""
PETS = """
import pathlib, numpy, timm
from PIL import Image
from safetensors.torch import save_file
random, images = numpy.random.default_rng(0), pathlib.Path("images")
images.mkdir(exist_ok=True)
for n in range(16):
    Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)).save(images / f"pet{n % 2}_{n}.jpg")
model = timm.create_model("resnet50d", pretrained=False)
home = pathlib.Path("hub") / ("models--" + model.pretrained_cfg["hf_hub_id"].replace("/", "--"))
for folder in ("refs", "snapshots/0"):
    (home / folder).mkdir(parents=True, exist_ok=True)
(home / "refs/main").write_text("0")
save_file(model.state_dict(), home / "snapshots/0/model.safetensors")
"""
MNIST = """
import pathlib, torch
folder = pathlib.Path("Datasets/MNIST/complete")
folder.mkdir(parents=True, exist_ok=True)
for name, images in (("training.pt", 60000), ("test.pt", 64)):
    pictures = torch.zeros(images, 28, 28, dtype=torch.uint8)
    torch.save((pictures, torch.zeros(images, dtype=torch.long)), folder / name)
"""
# torchtune's recipe for one GPU, with its own test's texts and tokenizer, on a small Llama 2.
TORCHTUNE_MODEL = """
import pathlib, torch
from torchtune.models.llama2 import llama2
pathlib.Path("ckpt").mkdir(exist_ok=True)
torch.manual_seed(0)
sizes = {"vocab_size": 2000, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "embed_dim": 64, "max_seq_len": 512}
torch.save(llama2(**sizes, norm_eps=1e-5).state_dict(), "ckpt/model.pt")
"""
TORCHTUNE = """
model: {_component_: torchtune.models.llama2.llama2, vocab_size: 2000, num_layers: 2, num_heads: 4, num_kv_heads: 4,
  embed_dim: 64, max_seq_len: 512, norm_eps: 1.0e-5}
tokenizer: {_component_: torchtune.models.llama2.llama2_tokenizer, path: tests/assets/m.model, max_seq_len: 256}
dataset: {_component_: torchtune.datasets.alpaca_dataset, source: json, data_files: tests/assets/alpaca_tiny.json,
  split: train, packed: false}
checkpointer: {_component_: torchtune.training.FullModelTorchTuneCheckpointer, checkpoint_dir: ckpt,
  checkpoint_files: [model.pt], output_dir: out, model_type: LLAMA2}
optimizer: {_component_: torch.optim.AdamW, lr: 0.001}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
metric_logger: {_component_: torchtune.training.metric_logging.StdoutLogger}
device: cpu
dtype: fp32
seed: 1
shuffle: true
batch_size: 2
epochs: 1
max_steps_per_epoch: 20
gradient_accumulation_steps: 1
optimizer_in_bwd: false
clip_grad_norm: null
compile: false
enable_activation_checkpointing: false
enable_activation_offloading: false
resume_from_checkpoint: false
output_dir: out
log_every_n_steps: 1
log_peak_memory_stats: false
log_level: INFO
"""


@dataclass(frozen=True)
class Program:
    """A program, how it is started, and what it prints."""

    folder: str
    """Of the sources."""
    wheels: str
    command: str
    longer: str
    """Arguments that make it train for long."""
    trains: str
    """What it prints once it trains, as a regular expression."""
    done: str
    process: str
    """The command line of a rank."""
    prepare: str = ""
    files: tuple[tuple[str, str], ...] = ()
    env: tuple[str, ...] = ()
    metrics: str = ""
    nodes: int = 2


LIMITS = "".join(f" --trainer.limit_{kind}_batches=2" for kind in ("val", "test", "predict"))
WEB = "requests urllib3 certifi charset-normalizer"
TUNE = f"{WEB} torchvision torchao torchdata datasets kagglehub kagglesdk blobfile omegaconf antlr4-python3-runtime"
TUNE += " dill multiprocess xxhash pandas pytz lxml pycryptodomex"
PROGRAMS = {
    "nanoGPT": Program(
        "nanoGPT", WEB, "torchrun train.py config/cpu.py", "--max_iters=100000", r"iter 3:", r"iter 30: loss \d",
        "-u .*train.py config",
        "cp README.md data/shakespeare_char/input.txt && python data/shakespeare_char/prepare.py",
        (("config/cpu.py", NANOGPT),), metrics=r"iter (?P<iteration>\d+): loss (?P<loss>[\d.]+)",
    ),
    "cifar": Program(
        "DeepSpeedExamples/training/cifar", "torchvision",
        "deepspeed cifar10_deepspeed.py --dtype fp32 --stage 2 --log-interval 5 --epochs 2", "--epochs 100000",
        r"\[ 1, +5\] loss:", r"Accuracy of the network on the 64 test images", "-u .*cifar10_deepspeed.py --local_rank",
        "python prepare.py", (("prepare.py", CIFAR), ("sitecustomize.py", TORCHVISION)),
    ),
    "accelerate": Program(
        "accelerate/examples", "torchvision accelerate timm safetensors",
        "python -m accelerate.commands.launch cv_example.py --data_dir images --cpu", "", r"epoch 0:", r"epoch 2: \d",
        "-u .*cv_example.py --data_dir", "LOCAL_RANK=0 python prepare.py",
        (("prepare.py", PETS), ("sitecustomize.py", TORCHVISION)), ("HF_HUB_CACHE=hub", "HF_HUB_OFFLINE=1"),
    ),
    "lightning": Program(
        "pytorch-lightning/examples",
        f"{WEB} torchvision lightning lightning-utilities torchmetrics jsonargparse docstring-parser typeshed-client",
        "torchrun pytorch/basics/autoencoder.py --trainer.num_nodes=2 --trainer.devices=1 --trainer.accelerator=cpu"
        f" --trainer.limit_train_batches=60{LIMITS} --trainer.max_epochs=1", "--trainer.max_epochs=-1",
        r"Total FLOPs", r"test_loss", "-u .*autoencoder.py --trainer", "python prepare.py",
        (("prepare.py", MNIST), ("sitecustomize.py", TORCHVISION)), ("PL_USE_MOCKED_MNIST=1",),
    ),
    "torchtune": Program(
        "torchtune", TUNE, "python recipes/full_finetune_single_device.py --config cpu.yaml", "epochs=100000",
        r"Step 3 ", r"Step 20 ", "^python recipes/full_finetune", "LOCAL_RANK=0 python prepare.py",
        (("prepare.py", TORCHTUNE_MODEL), ("cpu.yaml", TORCHTUNE), ("sitecustomize.py", TORCHVISION)),
        metrics=r"Step (?P<iteration>\d+) \| loss:(?P<loss>[\d.]+)", nodes=1,
    ),
}  # fmt: skip


class Programs(Twin):
    """With the wheels of what programs import in ``data/``."""

    def run(self, program: Program, code: Path, *options: str, longer: bool) -> tuple[str, str]:
        """The id of the run, and its output."""
        given = ["--workdir", str(code), "--env", "PYTHONPATH=deps:.", "--nodes", str(program.nodes), *options]
        given += [word for variable in program.env for word in ("--env", variable)]
        given += ["--metrics", program.metrics] if program.metrics else []
        given += ["--setup", f"{INSTALL} {program.wheels} && {program.prepare}", *(["--detach"] if longer else [])]
        done = self.tridock("run", *given, "--", *program.command.split(), *(program.longer.split() if longer else ()))
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        found = re.search(r"^run (\S+): ", output, re.MULTILINE)
        assert found, output
        return found[1], output

    def training(self, program: Program, code: Path) -> str:
        """The id of a run that is training, and will not end by itself."""
        run_id, _ = self.run(program, code, longer=True)
        log = self.folder / "runs" / run_id / "logs" / "launcher.log"
        wait_until(lambda: re.search(program.trains, log.read_text()), f"{run_id} trains", WORK_S)
        return run_id


@pytest.fixture(scope="module")
def twin(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    assert SOURCES is not None
    folder = tmp_path_factory.mktemp("twin")
    shutil.copytree(Path(SOURCES) / "wheels", folder / "data" / "wheels")
    with two_nodes(cpu_image, folder, Programs) as made:
        yield made


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]


@pytest.fixture
def code(program: Program, tmp_path: Path) -> Path:
    """The program's folder as its repository has it, and beside its files the data that it would download."""
    assert SOURCES is not None
    folder = shutil.copytree(Path(SOURCES) / program.folder, tmp_path / "code", ignore=shutil.ignore_patterns(".git"))
    for name, text in program.files:
        assert not (folder / name).exists()
        (folder / name).write_text(text)
    return folder


def test_it_runs_unmodified_and_again(twin: Programs, program: Program, code: Path) -> None:
    run_id, output = twin.run(program, code, longer=False)
    assert re.search(program.done, output), output
    assert twin.processes(run_id) == ""
    again = twin.tridock("reproduce", "--run", run_id, "--yes")
    assert again.returncode == 0, again.stdout + again.stderr
    assert re.search(program.done, again.stdout), again.stdout
    assert ("losses different" in again.stdout) == bool(program.metrics)


def test_a_killed_rank_is_named(twin: Programs, program: Program, code: Path) -> None:
    run_id = twin.training(program, code)
    node = NODES[program.nodes - 1]
    twin.sh(node, f"pkill -9 -f -- '{program.process}'")
    assert f"rank {program.nodes - 1} on {node} was ended by SIGKILL" in twin.followed(run_id)
    assert twin.processes(run_id) == ""


def test_a_killed_node_is_named(twin: Programs, program: Program, code: Path) -> None:
    if program.nodes == 1:
        pytest.skip("it has one rank, on the head")
    run_id = twin.training(program, code)
    succeed("docker", "kill", twin.container("node-2"))
    try:
        assert re.search(r"got exit code \d+, node-2 ", output := twin.followed(run_id)), output
        assert twin.processes(run_id) == ""
    finally:
        twin.up()


def test_stop_leaves_nothing(twin: Programs, program: Program, code: Path) -> None:
    run_id = twin.training(program, code)
    assert twin.processes(run_id) != ""
    done = twin.tridock("stop", "--run", run_id)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: twin.processes(run_id) == "", "no process is left")
