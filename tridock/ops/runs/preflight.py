"""Preconditions on the nodes, checked before a run's first file is written there: data, and a rendezvous port."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock.contracts import checkpoints
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import Fingerprint, PreflightAnswer
from tridock.contracts.pretrained import DEEPSPEED, FORMATS, MEGATRON, NAMES, StoredWeights
from tridock.engines import engine_of
from tridock.errors import ClusterError, Problem, RequestError, count
from tridock.experiment import Experiment, fields_digest
from tridock.experiment.inputs import IMAGE_SUFFIXES, TOKENIZER, data_problems, tokenizer_folders, weights_problems
from tridock.gpus import MIB
from tridock.ops.runs.start import refuse_other_contract
from tridock.ops.runs.this_machine import node_argv, node_environment
from tridock.plan import Plan
from tridock.plan.host_memory import host_memory_of
from tridock.plan.memory import GIB

if TYPE_CHECKING:  # a run on one machine needs no ssh, and its image lacks the packages for it
    from tridock.ops.hosts.session import Session
    from tridock.remote import Host

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Preflight:
    """The nodes' answers: the port to use on the head, the data's fingerprints, the image's manifest."""

    port: int
    data: Mapping[str, Mapping[str, object]]
    """For the run's manifest, as in :func:`fingerprints`."""
    image_manifest: object


def check_nodes(session: Session, config: Path, experiment: Experiment, plan: Plan) -> Preflight:
    """Queries every node once. Raises :class:`RequestError` with every file that does not fit.

    A file may be missing on a node, differ from the head's, or not match the experiment. A port in use is a
    :class:`ClusterError`.
    """
    head = session.head

    def ask(node: str, _: Host) -> PreflightAnswer:
        return session.ask(node, PreflightAnswer, *preflight_argv(experiment, head=node == head), timeout=_TIMEOUT_S)

    answers = session.each(ask)
    refuse_other_contract(session, answers[head])
    _refuse_other_fields(session, answers[head].image_manifest)
    bring = f"copy the data to the nodes: tridock data sync {session.cluster.hosts_option} --path "
    problems = list(_differences(config, data_files(experiment), head, answers, bring))
    problems += package_problems(config, experiment, answers)
    problems += multicast_problems(config, experiment, answers)
    problems += too_little_memory(config, experiment, plan, {node: it.memory for node, it in answers.items()})
    problems += nvme_problems(config, experiment, plan, answers)
    problems += mismatches(config, experiment, plan, answers[head])
    if problems:
        raise RequestError(problems)
    return _passed(head, config, experiment, answers[head])


def _refuse_other_fields(session: Session, manifest: object) -> None:
    """Raises :class:`ClusterError` if the image's code does not know the experiment that this code writes."""
    known = manifest.get("experiment_fields") if isinstance(manifest, Mapping) else None
    if known is not None and known != fields_digest():
        commit = str(manifest.get("git_commit") if isinstance(manifest, Mapping) else None)[:12]
        raise session.other_version(session.head, f"its experiments have other fields; its commit is {commit}")


def check_files(
    config: Path, experiment: Experiment, plan: Plan, workspace: Path
) -> Mapping[str, Mapping[str, object]]:
    """Like :func:`check_nodes` for this machine's files, without a port; returns the data's fingerprints."""
    argv = [*node_argv(), *preflight_argv(experiment, head=True)]
    done = subprocess.run(argv, env=node_environment(1), cwd=workspace, capture_output=True, check=True)
    answer = decode(PreflightAnswer, done.stdout)
    maker = "docs/torch.md" if experiment.model.is_vision else "tridock data"
    todo = f"copy it into {workspace}, or make it: {maker}"
    problems = [
        Problem(f"{config}: {field}", "is not on this machine", name, todo)
        for name, field in data_files(experiment).items()
        if answer.files[name] is None
    ]
    problems += package_problems(config, experiment, {"localhost": answer})
    problems += multicast_problems(config, experiment, {"localhost": answer})
    # Every machine of a run without ssh has as many ranks as this one.
    alike = dict.fromkeys((it.node for it in plan.ranks), answer)
    problems += too_little_memory(config, experiment, plan, dict.fromkeys(alike, answer.memory))
    problems += nvme_problems(config, experiment, plan, alike)
    problems += mismatches(config, experiment, plan, answer)
    if problems:
        raise RequestError(problems)
    return fingerprints(experiment, answer)


def preflight_argv(experiment: Experiment, *, head: bool) -> tuple[str, ...]:
    """Returns the ``tridock.node`` arguments that query a node for the experiment's needs; the head reports more."""
    argv = ["preflight", *(f"--package={name}" for name in engine_of(experiment).packages(experiment))]
    if engine_of(experiment).needs_multicast(experiment):
        argv.append("--multicast")
    argv += [f"--nvme={folder}" for folder in engine_of(experiment).nvme_folders(experiment)]
    if head:
        port = experiment.launch.master_port
        argv += ["--head", *(() if port is None else ("--port", str(port)))]
        argv += [f"--read={name}" for name in _read(experiment).values()]
        train = experiment.train
        if train.load is not None and not train.loads_own_folder:
            argv.append(f"--load={train.pretrained_folder or train.load}")
            argv += [f"--weights={train.load}"] if train.pretrained is not None else []
        if train.sample_prompts:
            argv += [f"--tokenizer={folder}/{TOKENIZER}" for folder in tokenizer_folders(experiment)]
    return (*argv, "--", *data_files(experiment))


def _read(experiment: Experiment) -> dict[str, str]:
    files = {"manifest": f"{experiment.data.data_path}.json"}
    if experiment.train.load is not None and experiment.train.pretrained_folder is None:
        files["layout"] = f"{experiment.train.load}/{checkpoints.LAYOUT}"
    return files


def mismatches(config: Path, experiment: Experiment, plan: Plan, answer: PreflightAnswer) -> Iterator[Problem]:
    """Yields the problems of the head's files: another vocabulary, too little data, a checkpoint of another layout."""
    read = {name: answer.read[path] for name, path in _read(experiment).items()}
    vocabulary = answer.files.get(experiment.data.vocab_file or "")
    if not answer.loads:
        todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
        if experiment.train.pretrained_folder is not None:
            todo = "copy it there: tridock data sync copies folders of data/"
        elif ":" in (experiment.train.load or ""):
            todo = f"name a folder, or FORMAT:DIR with one of the formats {', '.join(FORMATS)}"
        yield Problem(f"{config}: train.load", "no such folder on the first node", repr(experiment.train.load), todo)
    elif answer.load_lacks is not None:
        todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
        nearest: tuple[str, ...] = ()
        if answer.load_inside is not None:
            todo, nearest = f"set it to {answer.load_inside}", (answer.load_inside,)
        got = f"{experiment.train.load}: {answer.load_lacks}"
        yield Problem(f"{config}: train.load", "holds no checkpoint on the first node", got, todo, nearest)
    if answer.load_format is not None and answer.load_format not in engine_of(experiment).resumes_formats:
        what = f"is a {NAMES[answer.load_format]}, of which engine {experiment.engine} loads the weights only"
        todo = f"set it to {answer.load_format}:{experiment.train.load}"
        yield Problem(f"{config}: train.load", what, str(experiment.train.load), todo)
    if answer.weights is not None:
        yield from _weights_problems(config, experiment, read["manifest"], answer.weights)
    if not answer.has_tokenizer:
        places = " and no ".join(f"{folder}/{TOKENIZER}" for folder in tokenizer_folders(experiment))
        what, todo = "needs the tokenizer of the data", "copy it there, or leave the prompts out"
        yield Problem(f"{config}: train.sample_prompts", what, f"no {places} on the first node", todo)
    found = [
        *data_problems(experiment, read["manifest"], vocabulary.entries if vocabulary else None),
        *engine_of(experiment).checkpoint_problems(experiment, plan.data_parallel_size, read.get("layout")),
    ]
    yield from (Problem(f"{config}: {it.where}", it.what, it.got, it.todo) for it in found)


def _weights_problems(
    config: Path, experiment: Experiment, manifest: object, stored: StoredWeights
) -> Iterator[Problem]:
    """Yields what is wrong with the weights to start from; warns if nothing shows all of their model's fields."""
    if (it := stored.problem) is not None:
        yield Problem(f"{config}: train.load", f"{it.where} {it.what}", it.got, it.todo)
        return
    if not stored.has_config:
        lacks, todo = _LACKS[experiment.train.pretrained[0] if experiment.train.pretrained is not None else ""]
        what = f"has no {lacks} are not checked"
        print(f"warning: {Problem(f'{config}: train.load', what, str(experiment.train.load), todo)}", file=sys.stderr)
    tokens = experiment.model.vocab_size
    if tokens is None and isinstance(manifest, Mapping):
        tokens = manifest.get("vocab_size")
    try:
        problems: Iterable[Problem] = list(weights_problems(experiment, stored, tokens))
    except RequestError as error:
        problems = error.problems
    for it in problems:
        yield Problem(f"{config}: {it.where}", it.what, it.got, it.todo, it.nearest)


_LACKS: Final = {
    DEEPSPEED: (
        "config.json: fields that no weight shows (heads, norm_epsilon, rotary_base)",
        "copy the model's config.json into it",
    ),
    MEGATRON: (
        "arguments of Megatron: num_attention_heads, norm_epsilon and activation_func",
        "set them to those of the training that wrote it (activation_func: gelu, unless it had --bias-gelu-fusion)",
    ),
}
"""By format, what may be missing with the fields that only it shows, and what to do."""


def data_files(experiment: Experiment) -> dict[str, str]:
    """Returns the files that every rank reads, each with the field that names it."""
    data = experiment.data
    suffixes = IMAGE_SUFFIXES if experiment.model.is_vision else (".bin", ".idx")
    files = {f"{data.data_path}{suffix}": "data.data_path" for suffix in suffixes}
    tokenizer = engine_of(experiment).tokenizer_fields
    return files | {name: f"data.{field}" for field in tokenizer if (name := getattr(data, field))}


def _differences(
    config: Path, files: Mapping[str, str], head: str, answers: Mapping[str, PreflightAnswer], bring: str
) -> Iterator[Problem]:
    expected = answers[head].files
    for field in dict.fromkeys(files.values()):
        names = [name for name in files if files[name] == field]
        prefix = names[0].removesuffix(".bin").removesuffix(IMAGE_SUFFIXES[0])
        where, todo = f"{config}: {field}", f"{bring}{shlex.quote(f'./{prefix}' if prefix.startswith('-') else prefix)}"
        for node, answer in answers.items():
            there = answer.files
            missing = [name for name in names if there[name] is None]
            other = [name for name in names if there[name] != expected[name] and expected[name] is not None]
            if missing:
                yield Problem(where, f"is not on node {node}", ", ".join(missing), todo)
            elif other:
                got = ", ".join(_label(name, there[name]) for name in other)
                yield Problem(where, f"has different content on node {node} than on the head", got, todo)


def package_problems(config: Path, experiment: Experiment, answers: Mapping[str, PreflightAnswer]) -> Iterator[Problem]:
    """Yields the packages that the image of some node does not have."""
    todo = "leave the field out, or build the image on a base that has it"
    for name, field in engine_of(experiment).packages(experiment).items():
        if nodes := [node for node, answer in answers.items() if name in answer.missing_packages]:
            yield Problem(f"{config}: {field}", f"needs the Python package {name}", f"not on {', '.join(nodes)}", todo)


def multicast_problems(
    config: Path, experiment: Experiment, answers: Mapping[str, PreflightAnswer]
) -> Iterator[Problem]:
    """Yields nodes with a GPU that has no CUDA multicast, if the run needs it."""
    nodes = [node for node, answer in answers.items() if answer.multicast is False]
    if engine_of(experiment).needs_multicast(experiment) and nodes:
        what, todo = "needs GPUs with CUDA multicast (Hopper and newer, with NVSwitch)", "leave it out"
        yield Problem(f"{config}: parallel.tp_comm_overlap", what, f"none on {', '.join(nodes)}", todo)


def too_little_memory(
    config: Path, experiment: Experiment, plan: Plan, memory: Mapping[str, int | None]
) -> Iterator[Problem]:
    """Yields nodes without enough memory for offloaded states; warns of those that copies of a checkpoint may fill."""
    where = f"{config}: deepspeed.zero_optimization"
    for node, need in host_memory_of(experiment, plan).items():
        if (available := memory.get(node)) is None or available >= need.most:
            continue
        got = f"{available / GIB:.1f} GiB"
        if available < need.least:
            ranks, size = count(need.ranks, "rank"), f"{need.least / GIB:.1f} GiB"
            what = f"the offloaded states of {ranks} need {size} of {node}'s memory"
            yield Problem(where, what, got, "use more nodes, or offload less")
        else:
            what = f"with copies of a checkpoint, offloaded states need {need.most / GIB:.1f} GiB of {node}'s memory"
            print(f"warning: {Problem(where, what, got, 'set train.async_save to false')}", file=sys.stderr)


def nvme_problems(
    config: Path, experiment: Experiment, plan: Plan, answers: Mapping[str, PreflightAnswer]
) -> Iterator[Problem]:
    """Yields nodes on whose NVMe the run's states cannot lie."""
    folders = engine_of(experiment).nvme_folders(experiment)
    if not folders:
        return
    need = host_memory_of(experiment, plan)
    for node, answer in answers.items():
        there = [(folder, field, answer.nvme[folder]) for folder, field in folders.items()]
        bad = [(folder, field, found.problem) for folder, field, found in there if found.problem is not None]
        for folder, field, problem in bad:
            todo = "make the folder there, for the user of the nodes, and mount it into them (container.mounts)"
            yield Problem(f"{config}: {field}", f"cannot be written on {node}", f"{folder}: {problem}", todo)
        free = sum({found.device: found.free for *_, found in there}.values())
        first, field = next(iter(folders.items()))
        if not bad and free < need[node].nvme:
            what = f"{count(need[node].ranks, 'rank')} of {node} need {need[node].nvme / GIB:.1f} GiB on NVMe"
            got, todo = f"{free / GIB:.1f} GiB free in {first}", "free space, or use more nodes"
            yield Problem(f"{config}: {field}", what, got, todo)
        if answer.memlock is not None and answer.memlock < need[node].locked:
            what = f"each rank locks {need[node].locked / MIB:.0f} MiB of {node}'s memory for transfers to NVMe"
            todo = "raise the limit (container.ulimits.memlock), or lower sub_group_size"
            yield Problem(f"{config}: {field}", what, f"a limit of {answer.memlock / MIB:.0f} MiB", todo)


def _label(name: str, found: Fingerprint | None) -> str:
    assert found is not None
    return f"{found.sha256}  {name}" if found.sha256 is not None else f"{found.bytes} bytes  {name}"


def _passed(head: str, config: Path, experiment: Experiment, answer: PreflightAnswer) -> Preflight:
    assert answer.rendezvous is not None
    if answer.rendezvous.problem is not None:
        raise ClusterError(_port_problem(head, config, experiment.launch.master_port, answer.rendezvous.problem))
    assert answer.rendezvous.port is not None
    return Preflight(answer.rendezvous.port, fingerprints(experiment, answer), answer.image_manifest)


def fingerprints(experiment: Experiment, answer: PreflightAnswer) -> dict[str, dict[str, object]]:
    """Returns a run manifest's entry for its data, by path.

    It has current hashes (except of the tokens, which may be terabytes; their index holds every length), sizes, and the
    hashes from the data set's own manifest.
    """
    files = {name: found for name, found in answer.files.items() if found is not None}
    prefix = experiment.data.data_path
    found = answer.read.get(f"{prefix}.json")
    manifest = found if isinstance(found, Mapping) else {}
    return {
        "data_sha256": {name: found.sha256 for name, found in files.items() if found.sha256 is not None},
        "data_bytes": {name: found.bytes for name, found in files.items()},
        "data_sha256_by_manifest": {
            f"{prefix}.{kind}": manifest[f"{kind}_sha256"] for kind in ("bin", "idx") if manifest.get(f"{kind}_sha256")
        },
    }


def _port_problem(head: str, config: Path, wanted: int | None, problem: Problem) -> Problem:
    if wanted is None:
        return Problem(f"{head}: {problem.where}", problem.what, problem.got, problem.todo)
    what = f"{problem.where} {problem.what} on {head}"
    return Problem(f"{config}: launch.master_port", what, problem.got, "change it or leave it out")
