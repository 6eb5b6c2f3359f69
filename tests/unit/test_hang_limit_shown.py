"""The hang limit, as `launch`, `run` and `resume` print it once a run has started on a cluster."""

from dataclasses import replace
from typing import Any, cast

import pytest

from tridock.cli.launch import report_start
from tridock.cli.options import Arguments
from tridock.contracts import run_folder
from tridock.experiment import AnyExperiment, CommandExperiment, parse_experiment
from tridock.launchers.run import Run, make_bundle
from tridock.launchers.ssh import Ssh
from tridock.ops.runs.prepare import prepared_from
from tridock.plan import assess

TRAINED = """\
name: tiny
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 16}
batch: {micro_batch_size: 1, global_batch_size: 4}
data: {data_path: data/x}
train: {train_iters: 3}
launch: {hang_timeout: 60}
"""


@pytest.mark.parametrize(
    ("experiment", "said"),
    [
        (parse_experiment(TRAINED, "e.yaml"), "60 s or 3 longest steps without progress; at first 1,800 s"),
        (
            CommandExperiment(name="own", engine="command", command=("torchrun", "train.py")),
            "1,800 s without output or processor time",
        ),
    ],
)
@pytest.mark.parametrize("quiet", [False, True])
def test_a_start_shows_it(
    experiment: AnyExperiment, said: str, quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    slots, run_id = {"a": (0, 1)}, run_folder.new_run_id("own")
    if isinstance(experiment, CommandExperiment):
        run = Run(experiment, slots, run_id, master_port=1)
    else:
        run = replace(prepared_from(assess(experiment, slots, "e.yaml"), slots, run_id), master_port=1)
    bundle = make_bundle(run, Ssh())
    arguments = Arguments(quiet=quiet, detach=True, hosts="hostfile", program="fab", run_id_file=None)
    assert report_start(arguments, cast("Any", None), bundle) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (bundle.run_id if quiet else f"hang limit: {said}")
