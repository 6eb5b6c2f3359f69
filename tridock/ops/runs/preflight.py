"""Preconditions on the nodes, checked before a run's first file is written there: data, and a rendezvous port."""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from tridock.contracts.images import SUFFIXES
from tridock.contracts.node_answers import Fingerprint, PreflightAnswer
from tridock.contracts.prerequisites import COMPILER, MEGATRON_SOURCE, VARIABLES
from tridock.contracts.pretrained import CONFIG, DEEPSPEED, FORMATS, MEGATRON, NAMES, StoredWeights
from tridock.contracts.run_folder import is_run_id
from tridock.contracts.tokenizers import TOKENIZER, TOKENIZER_SHA256
from tridock.engines import program_of
from tridock.engines.progress import Progress, misfits
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment, fields_digest, load_experiment
from tridock.experiment.inputs import (
    blend_problems,
    data_problems,
    image_problems,
    parts_problems,
    tokenizer_folders,
    weights_problems,
)
from tridock.ops.hosts.client import NodeClient
from tridock.ops.runs.node_problems import node_problems
from tridock.ops.runs.prepared import Preflight, port_of, refuse_other_contract
from tridock.ops.runs.this_machine import ask_here
from tridock.plan import Assumptions, Plan, assess
from tridock.remote import Host

_TIMEOUT_S = 60.0


def check_nodes(client: NodeClient, config: Path, experiment: Experiment, plan: Plan) -> Preflight:
    """Queries every node once. Raises :class:`RequestError` with every file that does not fit.

    A file may be missing on a node, differ from the head's, or not match the experiment. A port in use is a
    :class:`ClusterError`.
    """
    head = client.head

    def ask(node: str, _: Host) -> PreflightAnswer:
        argv = preflight_argv(experiment, head=node == head)
        return client.ask(node, PreflightAnswer, *argv, timeout=_TIMEOUT_S)

    answers = client.hosts.each(ask)
    refuse_other_contract(client, answers[head])
    _refuse_other_fields(client, answers[head].image_manifest)
    bring = f"copy the data to the nodes: tridock data sync {client.cluster.hosts_option} --path "
    problems = list(_differences(config, data_files(experiment), head, answers, bring))
    problems += node_problems(config, experiment, plan, answers)
    problems += folder_problems(config, experiment, answers)
    hosts = client.cluster.hosts_option
    elsewhere = any(answer.loads and answer.load_lacks is None for answer in answers.values())
    problems += mismatches(config, experiment, plan, answers[head], elsewhere=elsewhere, hosts=hosts)
    RequestError.raise_for(problems)
    field = None if experiment.launch.master_port is None else f"{config}: launch.master_port"
    answer = answers[head]
    return Preflight(port_of(head, answer, field), answer.image_manifest, fingerprints(experiment, answer))


def _refuse_other_fields(client: NodeClient, manifest: object) -> None:
    """Raises :class:`ClusterError` if the image's code does not know the experiment that this code writes."""
    known = manifest.get("experiment_fields") if isinstance(manifest, Mapping) else None
    if known is not None and known != fields_digest():
        commit = str(manifest.get("git_commit") if isinstance(manifest, Mapping) else None)[:12]
        raise client.other_version(client.head, f"its experiments have other fields; its commit is {commit}")


def check_files(
    config: Path, experiment: Experiment, plan: Plan, workspace: Path
) -> Mapping[str, Mapping[str, object]]:
    """Like :func:`check_nodes` for this machine's files, without a port; returns the data's fingerprints."""
    answer = ask_here(PreflightAnswer, *preflight_argv(experiment, head=True), workspace=workspace)
    maker = "docs/torch.md" if experiment.model.is_vision else "tridock data"
    todo = f"copy it into {workspace}, or make it: {maker}"
    problems = [
        Problem(f"{config}: {field}", "is not on this machine", name, todo)
        for name, field in data_files(experiment).items()
        if answer.files[name] is None
    ]
    # Every machine of a run without ssh has as many ranks as this one.
    problems += node_problems(config, experiment, plan, dict.fromkeys((it.node for it in plan.ranks), answer))
    problems += mismatches(config, experiment, plan, answer)
    RequestError.raise_for(problems)
    return fingerprints(experiment, answer)


def known_problems(
    config: Path, overrides: Sequence[str], slots: Mapping[str, Sequence[int]], assumptions: Assumptions
) -> list[Problem]:
    """Returns every problem of the plan, if data or weights of the run are in the current folder too and do not fit it.

    A plan needs neither: what is not here is not checked. A folder may have a model's ``config.json`` alone.
    """
    experiment = load_experiment(config, overrides)
    train = experiment.train
    load = train.pretrained_folder or train.load
    has_load = load is not None and Path(load).is_dir() and [it.name for it in Path(load).iterdir()] != [CONFIG]
    if not has_load and not all(Path(f"{prefix}.idx").is_file() for prefix in experiment.data.prefixes):
        return []
    if not has_load:
        experiment = experiment.with_fields({"train.load": None})
    read, tokenizer = _argv_of_files(experiment), program_of(experiment).tokenizer_fields
    names = filter(None, (getattr(experiment.data, field) for field in tokenizer))
    answer = ask_here(PreflightAnswer, "preflight", *_load_argv(experiment), *read, "--", *names)
    assessment = assess(experiment, slots, str(config), assumptions)
    found = [
        replace(it, where=it.where.removeprefix(f"{config}: "))
        for it in mismatches(config, experiment, assessment.plan, answer)
    ]
    return [*assessment.problems, *found] if found else []


def preflight_argv(experiment: Experiment, *, head: bool) -> tuple[str, ...]:
    """Returns the ``tridock.node`` arguments that query a node for the experiment's needs; the head reports more."""
    argv = ["preflight", *(f"--package={name}" for name in program_of(experiment).packages(experiment))]
    needs = [COMPILER] * experiment.train.compile + [MEGATRON_SOURCE] * program_of(experiment).needs_megatron_source
    argv += [f"--needs={it}" for it in needs]
    if needs:
        argv += [f"--rank-env={name}={experiment.env[name]}" for name in VARIABLES if name in experiment.env]
    if program_of(experiment).needs_multicast(experiment):
        argv.append("--multicast")
    argv += [f"--nvme={folder}" for folder in program_of(experiment).nvme_folders(experiment)]
    argv += _load_argv(experiment)
    if experiment.train.save:
        argv.append(f"--save={save_folder(experiment)}")
    if head:
        port = experiment.launch.master_port
        argv += ["--head", *(() if port is None else ("--port", str(port))), *_argv_of_files(experiment)]
        if experiment.train.sample_prompts:
            argv += [f"--tokenizer={folder}/{TOKENIZER}" for folder in tokenizer_folders(experiment)]
    return (*argv, "--", *data_files(experiment))


def _load_argv(experiment: Experiment) -> list[str]:
    train = experiment.train
    return [] if train.load is None or train.loads_own_folder else [f"--load={train.pretrained_folder or train.load}"]


def _argv_of_files(experiment: Experiment) -> list[str]:
    """Returns the arguments that ask what :func:`mismatches` compares with the experiment."""
    data = experiment.data
    argv = [f"--read={prefix}.json" for prefix in data.prefixes]
    if experiment.train.pretrained is not None:
        argv.append(f"--weights={experiment.train.load}")
    elif experiment.train.load is not None:
        argv.append(f"--progress-of={experiment.train.load}")
    if experiment.train.load is not None and not experiment.model.is_vision:
        argv.append(f"--tokenizer-of={experiment.train.load}")
    files = (getattr(data, field) for field in program_of(experiment).tokenizer_fields)
    argv += [f"--gpt2-file={name}" for name in files if name is not None]
    if experiment.model.is_vision:
        argv.append(f"--images={data.prefix}")
    else:
        argv += [*(f"--data={prefix}" for prefix in data.prefixes), f"--split={data.shares}"]
        argv += [] if program_of(experiment).whole_samples else ["--v115"]
    return argv


def save_folder(experiment: Experiment) -> str:
    """Returns the folder, in the workspace, in or below which a run saves."""
    return experiment.train.checkpoint_folder or "runs"


def folder_problems(config: Path, experiment: Experiment, answers: Mapping[str, PreflightAnswer]) -> Iterator[Problem]:
    """Yields the nodes without the weights to load, and those that cannot save.

    The first node's problems with the former are of :func:`mismatches`. Ranks bring a checkpoint to nodes that lack it.
    """
    first, *others = answers.values()
    if first.loads and experiment.train.pretrained_folder is not None and not all(it.loads for it in others):
        without = ", ".join(node for node, answer in answers.items() if not answer.loads)
        what, todo = f"no such folder on {without}", _sync(config)
        yield Problem(f"{config}: train.load", what, repr(experiment.train.load), todo)
    folder, where = save_folder(experiment), f"{config}: train.save"
    for node, answer in answers.items():
        if answer.save_problem:
            todo = "let the user of the nodes write there, or name another folder in train.checkpoint_folder"
            yield Problem(where, f"cannot write on {node}", f"{folder}: {answer.save_problem}", todo)


def _sync(config: Path) -> str:
    return f"copy it there: tridock data sync --config {shlex.quote(str(config))}"


def mismatches(
    config: Path,
    experiment: Experiment,
    plan: Plan | None,
    answer: PreflightAnswer,
    *,
    elsewhere: bool = False,
    hosts: str = "",
) -> Iterator[Problem]:
    """Yields the problems of the head's files: another vocabulary, too little data, a checkpoint of another layout.

    ``elsewhere``: another node has the checkpoint to resume from. ``hosts``: the option that names the cluster.
    """
    manifests = {prefix: answer.read[f"{prefix}.json"] for prefix in experiment.data.prefixes}
    data_manifest = manifests[experiment.data.prefix]
    vocabulary = answer.files.get(experiment.data.vocab_file or "")
    brought = elsewhere and experiment.train.pretrained_folder is None
    if not answer.loads and not brought:
        todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
        if experiment.train.pretrained_folder is not None:
            todo = _sync(config)
        elif ":" in (experiment.train.load or ""):
            todo = f"name a folder, or FORMAT:DIR with one of the formats {', '.join(FORMATS)}"
        elif hosts and is_run_id(run := (experiment.train.load or "").removeprefix("runs/").partition("/")[0]):
            fetch = f"tridock fetch --hosts HOSTFILE --run {run} --checkpoints"
            todo = f"bring it from its own hosts: {fetch}; then tridock data sync {hosts} --path runs/{run}"
        yield Problem(f"{config}: train.load", "no such folder on the first node", repr(experiment.train.load), todo)
    elif answer.load_lacks is not None and not brought:
        todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
        nearest: tuple[str, ...] = ()
        if answer.load_inside is not None:
            todo, nearest = f"set it to {answer.load_inside}", (answer.load_inside,)
        got = f"{experiment.train.load}: {answer.load_lacks}"
        yield Problem(f"{config}: train.load", "holds no checkpoint on the first node", got, todo, nearest)
    if answer.load_format is not None and answer.load_format not in program_of(experiment).resumes_formats:
        what = f"is a {NAMES[answer.load_format]}, of which engine {experiment.engine} loads the weights only"
        todo = f"set it to {answer.load_format}:{experiment.train.load}"
        yield Problem(f"{config}: train.load", what, str(experiment.train.load), todo)
    if isinstance(answer.load_progress, dict):
        yield from _progress_problems(config, experiment, data_manifest, answer.load_progress)
    if answer.weights is not None:
        yield from _weights_problems(config, experiment, data_manifest, answer.weights)
    if (known := answer.tokenizers_of_weights) is not None:
        yield from _tokenizer_problems(config, experiment, data_manifest, known, "train.load")
    if (own := answer.tokenizer_of_files) is not None:
        yield from _tokenizer_problems(config, experiment, data_manifest, (own,), "data.vocab_file")
    if not answer.has_tokenizer:
        places = " and no ".join(f"{folder}/{TOKENIZER}" for folder in tokenizer_folders(experiment))
        what, todo = "needs the tokenizer of the data", f"{_sync(config)}; or leave the prompts out"
        yield Problem(f"{config}: train.sample_prompts", what, f"no {places} on the first node", todo)
    if answer.damage is not None:
        it = answer.damage
        yield Problem(f"{config}: data.data_path", f"{it.where} {it.what}", it.got, it.todo)
    whole_samples = program_of(experiment).whole_samples
    found = list(blend_problems(manifests))
    for prefix, manifest in manifests.items():
        parts = answer.parts.get(prefix, ())
        there = sum(part.tokens for part in parts) if parts and whole_samples else None
        found += data_problems(experiment, prefix, manifest, vocabulary.entries if vocabulary else None, there)
    found += parts_problems(experiment, answer.parts, whole_samples=whole_samples)
    if answer.images is not None:
        found += image_problems(experiment, experiment.data.prefix, answer.images)
    if plan is not None:
        found += program_of(experiment).checkpoint_problems(experiment, plan.data_parallel_size, answer.load_progress)
    yield from (Problem(f"{config}: {it.where}", it.what, it.got, it.todo) for it in found)


def _tokens(experiment: Experiment, manifest: object) -> int | None:
    """Returns the size of the vocabulary, by the experiment or its data; None if neither says it."""
    given = experiment.model.vocab_size
    return manifest.get("vocab_size") if given is None and isinstance(manifest, Mapping) else given


def _progress_problems(
    config: Path, experiment: Experiment, manifest: object, found: dict[str, Any]
) -> Iterator[Problem]:
    """Yields how the model and layout of the checkpoint to continue differ from the experiment's."""
    try:
        saved = Progress(**found)
    except TypeError:  # not of this release: the ranks say what is wrong with it
        return
    wanted = Progress.of(experiment, saved.data_parallel_size, _tokens(experiment, manifest))
    for it in misfits(Path(experiment.train.load or ""), saved, wanted, experiment.train.override_checkpoint):
        yield replace(it, where=f"{config}: {it.where}")


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
    try:
        problems: Iterable[Problem] = list(weights_problems(experiment.model, stored, _tokens(experiment, manifest)))
    except RequestError as error:
        problems = error.problems
    for it in problems:
        yield Problem(f"{config}: {it.where}", it.what, it.got, it.todo, it.nearest)


def _tokenizer_problems(
    config: Path, experiment: Experiment, manifest: object, known: Sequence[str], field: str
) -> Iterator[Problem]:
    """Yields a problem if another tokenizer made the data than that of a field, whose SHA-256 is one of ``known``.

    Warns if the tokenizer of weights, or that of their data, is not known.
    """
    name, data = attrgetter(field)(experiment), experiment.data.prefix
    made = manifest.get(TOKENIZER_SHA256) if isinstance(manifest, Mapping) else None
    if made and known and made not in known and not experiment.launch.allow_other_tokenizer:
        what = f"goes with another tokenizer than {data}, which was made with that of sha256 {made}"
        todo = "use data of its tokenizer; or if the ids mean the same, set launch.allow_other_tokenizer to true"
        yield Problem(f"{config}: {field}", what, f"{name} with {known[0]}", todo)
    elif field == "train.load" and not (made and known):
        got = f"no tokenizer in {name}" if made else f"no {TOKENIZER_SHA256} in {data}.json"
        what, todo = f"was not checked to go with the tokenizer that made {data}", "make sure of it yourself"
        print(f"warning: {Problem(f'{config}: {field}', what, got, todo)}", file=sys.stderr)


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
    suffixes = SUFFIXES if experiment.model.is_vision else (".bin", ".idx")
    fields = data.fields
    files = {f"{prefix}{suffix}": f"data.{fields[prefix]}" for prefix in data.prefixes for suffix in suffixes}
    tokenizer = program_of(experiment).tokenizer_fields
    return files | {name: f"data.{field}" for field in tokenizer if (name := getattr(data, field))}


def _differences(
    config: Path, files: Mapping[str, str], head: str, answers: Mapping[str, PreflightAnswer], bring: str
) -> Iterator[Problem]:
    expected = answers[head].files
    for field, prefix, names in grouped(files):
        where, todo = f"{config}: {field}", f"{bring}{shlex.quote(f'./{prefix}' if prefix.startswith('-') else prefix)}"
        for node, answer in answers.items():
            there = answer.files
            missing = [name for name in names if there[name] is None]
            other = [name for name in names if there[name] != expected[name] and expected[name] is not None]
            if missing:
                yield Problem(where, f"is not on node {node}", ", ".join(missing), todo)
            elif other:
                got = ", ".join(_label(name, there[name]) for name in other)
                what = f"has different content on node {node} than on the head"
                yield Problem(where, what, got, f"{todo} --checksum")


def grouped(files: Mapping[str, str]) -> list[tuple[str, str, list[str]]]:
    """Returns the field, the name to copy, and the files of each data set and each other file of :func:`data_files`."""
    groups = dict[tuple[str, str], list[str]]()
    for name, field in files.items():
        groups.setdefault((field, _SUFFIX.sub("", name)), []).append(name)
    return [(field, stem, names) for (field, stem), names in groups.items()]


_SUFFIX: Final = re.compile("|".join(re.escape(it) + "$" for it in (".bin", ".idx", *SUFFIXES)))


def _label(name: str, found: Fingerprint | None) -> str:
    assert found is not None
    return f"{found.sha256}  {name}" if found.sha256 is not None else f"{found.bytes} bytes  {name}"


def fingerprints(experiment: Experiment, answer: PreflightAnswer) -> dict[str, dict[str, object]]:
    """Returns a run manifest's entry for its data, by path.

    It has current hashes (except of the tokens, which may be terabytes; their index holds every length), sizes, and the
    hashes from the data set's own manifest.
    """
    files = {name: found for name, found in answer.files.items() if found is not None}
    read = ((prefix, answer.read.get(f"{prefix}.json")) for prefix in experiment.data.prefixes)
    manifests = [(prefix, found) for prefix, found in read if isinstance(found, Mapping)]
    return {
        "data_sha256": {name: found.sha256 for name, found in files.items() if found.sha256 is not None},
        "data_bytes": {name: found.bytes for name, found in files.items()},
        "data_sha256_by_manifest": {
            f"{prefix}.{kind}": manifest[f"{kind}_sha256"]
            for prefix, manifest in manifests
            for kind in ("bin", "idx")
            if manifest.get(f"{kind}_sha256")
        },
    }
