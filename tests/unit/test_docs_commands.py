"""Every command and every YAML of the README, of docs/ and of the help texts, on the machines that users have.

Commands that contact nothing run here, in a folder that `tridock init` made: plans, dry runs of launches, scripts for
Slurm, `tridock data`. Of others the real parser reads the line. The two guides run whole in tests of their own
(tests/distributed/test_guide_data.py, tests/integration/test_guide_slurm.py).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
import zstandard

from tests.documentation import PAGES, ROOT, Block, blocks, commands, listed_commands, spans, split
from tests.unit.test_help import ALL
from tridock.bench.cells import load_bench
from tridock.cli import build_parser, main
from tridock.cli.fab import COMMANDS
from tridock.cluster.schema import parse_settings
from tridock.data.corpus import collect_corpus
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import RequestError
from tridock.experiment import Experiment
from tridock.strict_yaml import validated
from tridock.yaml_text import parse_yaml

ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
SCRIPTS = [block for block in ALL_BLOCKS if block.language in ("sh", "bash")]
GUIDES = ("docs/guides/data.md", "docs/guides/slurm.md")
SHAPES = {
    "two hosts of 8 GPUs": "gpu-1 slots=8\ngpu-2 slots=8\n",
    "one host of 4 GPUs": "gpu-1 slots=4\n",
    "one GPU": "gpu-1 slots=1\n",
}
OTHER_PROGRAMS = {
    "source", "cd", "echo", "printf", "python3", "pip", "uv", "pytest", "torchrun", "sleep", "until",
    "do", "done", "sha256sum", "sudo", "curl", "sed", "export", "lm_eval", "hf", "vllm", "git", "llama-server",
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": True,
}  # fmt: skip
"""Of config.json of Qwen3-0.6B: sizes and what differs from its class."""
REFUSED = {"tridock plan configs/jean-zay/76b-as-written.yaml --hosts hostfile"}
"""The line says that it is."""


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder with what the pages take for granted: a hostfile, texts, an experiment, and what was fetched."""
    folder = tmp_path_factory.mktemp("starter")
    assert main(["init", str(folder)]) == 0
    shutil.copy(folder / "hostfiles/example", folder / "hostfile")
    shutil.copy(folder / "configs/demo.yaml", folder / "configs/mine.yaml")
    shutil.copy(folder / "configs/megatron/gpt2-345m.yaml", folder / "experiment.yaml")
    texts = collect_corpus(60_000)
    lines = "".join(f'{{"text": "line {number} of a text"}}\n' for number in range(2000))
    (folder / "corpus.jsonl").write_text(lines)
    for name in ("corpus", "raw/openwebtext-10k"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    BytePairTokenizer.train(texts, 400).save(folder / "data")
    BytePairTokenizer.train(texts, 400).save(folder / "models/Qwen3-0.6B")
    (folder / "models/Qwen3-0.6B/config.json").write_text(json.dumps(QWEN3))
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / "data" / name, folder)
        (folder / "data" / name).rename(folder / f"data/gpt2-{name}")
    return folder


@pytest.fixture
def folder(starter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder."""
    shutil.copytree(starter, tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "folder"


# ---- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.page == page for block in SCRIPTS)])
def test_the_commands_of_a_page(page: str, folder: Path) -> None:
    for block in blocks(page):
        script = block.language in ("sh", "bash")
        for argv in commands(block) if script else listed_commands(block) if block.language == "text" else ():
            run_or_read(argv, str(block), here=page not in {*GUIDES, "docs/commands.md"})


@pytest.mark.parametrize("prog", [prog for prog, parser in ALL.items() if parser.epilog])
def test_the_examples_of_a_help_text(prog: str, folder: Path) -> None:
    epilog = ALL[prog].epilog or ""
    for line in epilog.splitlines()[1:]:
        for argv in split(line.strip().replace("%(prog)s", prog)):
            run_or_read(argv, prog, here=argv[1] in ("plan", "launch"))


def run_or_read(argv: list[str], where: str, *, here: bool) -> None:
    """Runs a command if it contacts nothing, and otherwise reads it as its program would."""
    while argv and re.match(r"[A-Z_]+=", argv[0]):
        argv = argv[1:]
    if not argv:
        return
    line, program = " ".join(argv), Path(argv[0]).name
    if program == "salloc":
        run_or_read(argv[argv.index("tridock") :], where, here=here)
    elif program == "cat" and argv[1].startswith(">"):
        Path(argv[1][1:] or argv[2]).write_text(argv[-1])
    elif program in ("tridock", "fab"):
        argv = list(takewhile(lambda word: word[0] != ">", argv))
        arguments = [*(COMMANDS[argv[1]] if program == "fab" else [argv[1]]), *expanded(argv[2:])]
        if not here or not runs_here(arguments):
            read(arguments, where, line)
            return
        if arguments[0] in ("launch", "run"):
            arguments.insert(1, "--dry-run")
        assert main(arguments) == (2 if line in REFUSED else 0), f"{where}: {line}"
    elif program == "make":
        read_make(argv[1:], f"{where}: {line}")
    elif argv[:2] == ["docker", "compose"]:
        read_compose(argv[2:], where, line)
    elif program == "cp":
        shutil.copy(argv[1], argv[2])
    elif program == "mkdir":
        Path(argv[-1]).mkdir(exist_ok=True)
    else:
        assert program in OTHER_PROGRAMS, f"{where}: {line}: a program that this test does not know"
        for word in argv[1:]:
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), f"{where}: {line}"


def expanded(arguments: list[str]) -> Iterator[str]:
    for word in arguments:
        yield from (sorted(map(str, Path().glob(word))) if "*" in word else []) or [word]


def runs_here(arguments: list[str]) -> bool:
    match arguments:
        case ["plan", *_]:
            return not {"--from-run", "--ask-hosts"} & {*arguments}  # a run and hosts of the user's
        case ["launch" | "init", *_] | ["slurm", "render", *_]:
            return True
        case ["run", *_]:
            return "--workdir" not in arguments  # the user's own folder
        case ["data", verb, *_]:
            return verb not in ("sync", "demo", "fetch")
    return False


def read(arguments: list[str], where: str, line: str) -> None:
    """Reads the options, and plans the experiment of a run on this machine on so many slots."""
    try:
        found = build_parser().parse_args(arguments)
    except SystemExit as ended:
        raise AssertionError(f"{where}: {line}") from ended
    if arguments[0] == "train" and all(map(Path.exists, found.config)):
        nproc = ["--gpus-per-node", str(found.nproc or 8)]
        assert main(["plan", *map(str, found.config), "--nodes", str(found.nnodes), *nproc]) == 0, f"{where}: {line}"
    for config in named if isinstance(named := getattr(found, "config", None) or [], list) else [named]:
        assert Path(config).exists(), f"{where}: {line}"


@cache
def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def read_make(arguments: list[str], where: str) -> None:
    for word in arguments:
        name, equals, _ = word.partition("=")
        known = rf"\b{name}\b" if equals else rf"^{re.escape(name)}:"
        assert name.startswith("--") or re.search(known, makefile(), re.MULTILINE), where


def read_compose(arguments: list[str], where: str, line: str) -> None:
    assert arguments[0] == "run", f"{where}: {line}"
    arguments = arguments[1:]
    while arguments[0].startswith("--"):
        assert arguments[0] in ("--env", "--rm"), f"{where}: {line}"
        arguments = arguments[2 if arguments[0] == "--env" else 1 :]
    service, program, *rest = arguments
    assert f"\n  {service}:\n" in (ROOT / "docker-compose.yml").read_text(), f"{where}: {line}"
    if program == "tridock":
        read(rest, where, line)
    else:
        assert program == "bash" or (ROOT / "entrypoint" / program).is_file(), f"{where}: {line}"


def test_every_page_with_a_command_is_read() -> None:
    assert len(SCRIPTS) > 40
    assert {block.page for block in SCRIPTS} >= {
        "README.md",
        "docs/install.md",
        "docs/data.md",
        "docs/torch.md",
        *GUIDES,
    }
    named = {arguments[1] for span in spans("docs/commands.md") if (arguments := span.split())[0] == "tridock"}
    assert named >= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_in_prose_exist(page: str) -> None:
    for span in spans(page):
        program, *arguments = re.sub(r"docker compose", "docker", span).split()
        if not arguments or arguments == ["--list"]:  # of Fabric itself
            continue
        if program == "make":
            read_make([word for word in arguments[:1] if word != "…"], f"{page}: {span}")
        elif program in ("tridock", "fab"):
            names = [word for word in arguments if re.fullmatch(r"[a-z][a-z-]+", word)]
            prog = "tridock"
            for name in (*COMMANDS[names[0]], *names[1:]) if program == "fab" else names:
                prog = f"{prog} {name}" if f"{prog} {name}" in ALL else prog
            assert prog != "tridock" or arguments[0].startswith("-"), f"{page}: {span}"
            flags = re.findall(r"(?<![\w-])--?[a-z][\w-]*", span.split(" -- ")[0])
            known = {option for action in ALL[prog]._actions for option in action.option_strings}
            assert set(flags) <= known, f"{page}: {span}"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_launch_can_run(shape: str, folder: Path) -> None:
    (folder / "hostfile").write_text(SHAPES[shape])
    assert main(["launch", "--hosts", "hostfile", "--dry-run"]) == 0


# ---- YAML ----------------------------------------------------------------------------------------

YAML = [block for block in ALL_BLOCKS if block.language == "yaml"]


def test_every_experiment_is_found() -> None:
    assert sum(is_experiment(block) for block in YAML) >= 2


def is_experiment(block: Block) -> bool:
    return re.search(r"^model:", block.text, re.MULTILINE) is not None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [block for block in YAML if is_experiment(block)], ids=str)
def test_an_experiment_can_be_planned(
    block: Block, shape: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it names more ranks than there are, it is refused for that alone."""
    (folder / "x.yaml").write_text(block.text)
    (folder / "hostfile").write_text(SHAPES[shape])
    code = main(["plan", "x.yaml", "--hosts", "hostfile"])
    printed = capsys.readouterr()
    sizes = re.findall(r"(?:tensor|pipeline)_model_parallel_size: (\d+)", block.text)
    needed = int(sizes[0]) * int(sizes[1]) if len(sizes) == 2 else 1
    slots = sum(int(number) for number in re.findall(r"slots=(\d+)", SHAPES[shape]))
    if needed > slots:
        assert code == 2
        assert printed.err.count("\n") + printed.out.count("; got") <= 2, printed
    else:
        assert code == 0, printed


@pytest.mark.parametrize("block", [block for block in YAML if not is_experiment(block)], ids=str)
def test_other_yaml_is_a_part_of_an_experiment_or_settings(block: Block, folder: Path) -> None:
    """An experiment takes the fields, or a cluster's settings, or a benchmark."""
    path = folder / "configs/bench/x.yaml"
    path.write_text(block.text)
    fields = dict(parse_yaml(next(block.text for block in YAML if is_experiment(block)), "README.md"))
    for name, value in parse_yaml(block.text, "x").items():
        fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
    readers = (
        lambda: validated(Experiment, fields, "x"),
        lambda: parse_settings(block.text, "x"),
        lambda: load_bench(path),
    )
    problems = []
    for reader in readers:
        try:
            reader()
        except RequestError as error:
            problems.append(str(error))
    assert len(problems) < len(readers), problems
