"""`make bench-launch`: time to the first training step, `fab launch` beside `deepspeed --hostfile` typed on the head.

All start the same ranks on the same nodes of the twin, in turns; `fab launch` with either launcher. The run by hand
is given what our launch prepares (hostfile, environment file, configuration): it measures the least that a user could
wait for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tridock.cluster.settings import load_cluster
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.nodes.containers import up
from tridock.ops.runs.launch import preview
from tridock.ops.runs.prepare import prepare_on

CONFIG = Path("configs/demo.yaml")
SHORT = [
    "train.train_iters=1",
    "optimizer.lr_warmup_iters=0",
    "train.log_interval=1",
    "train.eval_interval=0",
    "train.save=false",
]
GOAL = 1.15
ONE_SLOT_A_NODE = "node-1:0@node-2:0"  # more ranks than cores would measure the machine
FIRST_STEP = "iteration 1/1 "
SSH = "fab launch, launch.launcher: ssh"


def seconds_to_first_step(argv: list[str]) -> float:
    """Runs a command; seconds from its start to the line of the first step. Its failure is ours."""
    started, first, lines = time.monotonic(), None, []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if first is None and FIRST_STEP in line:
                first = time.monotonic() - started
    if process.returncode or first is None:
        sys.exit(f"{' '.join(argv)} ended with {process.returncode} and no first step:\n{''.join(lines[-20:])}")
    return first


def by_hand(client: NodeClient) -> list[str]:
    """The command that a user types on the head, in a folder that was prepared beforehand."""
    request = prepare_on(client.cluster, CONFIG, SHORT)
    bundle = preview(client.cluster, request)
    client.hosts[client.head].put_tree(bundle.files, f"{client.cluster.project_folder}/runs/{bundle.run_id}")
    return list(client.inside(client.head, "bash", f"{bundle.path}/launch.sh").argv)


def main() -> None:
    """Prints a table and writes runs/bench-launch.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=Path, default=Path("hostfiles/twin"))
    parser.add_argument("--include", default=ONE_SLOT_A_NODE)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    hosts = Hosts(load_cluster(arguments.hosts, include=arguments.include))
    up(hosts)
    client = NodeClient.of(hosts)
    fab = [
        str(Path(sys.executable).with_name("fab")),
        "launch",
        "--hosts",
        str(arguments.hosts),
        "--include",
        arguments.include,
    ]
    fab += ["--config", str(CONFIG), *(word for field in SHORT for word in ("--set", field))]
    ssh = [*fab, "--set", "launch.launcher=ssh"]
    times: dict[str, list[float]] = {"fab launch": [], SSH: [], "deepspeed by hand": []}
    for _ in range(arguments.repeats):
        times["deepspeed by hand"].append(seconds_to_first_step(by_hand(client)))
        times["fab launch"].append(seconds_to_first_step(fab))
        times[SSH].append(seconds_to_first_step(ssh))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:35s} median {medians[name]:6.2f} s   from {min(values):.2f} to {max(values):.2f} s")
    ratio = medians["fab launch"] / medians["deepspeed by hand"]
    # What else the machine does only ever adds: where the two figures differ, it was not quiet.
    least = min(times["fab launch"]) / min(times["deepspeed by hand"])
    print(f"ratio of the medians {ratio:.3f}, of the least {least:.3f}; the goal is at most {GOAL}")
    print(f"of the medians with launch.launcher: ssh {medians[SSH] / medians['deepspeed by hand']:.3f}")
    Path("runs/bench-launch.json").write_text(
        json.dumps({"seconds": times, "ratio": ratio, "ratio_of_least": least}, indent=2) + "\n"
    )
    if min(ratio, least) > GOAL:
        sys.exit(1)


if __name__ == "__main__":
    main()
