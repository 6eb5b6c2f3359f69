"""`make soak`: a run on the twin under random faults has to end with the losses of an undisturbed one.

First a run that nobody disturbs, then, until the time is over, runs that are hit again and again: ranks, launchers and
ssh sessions killed, ranks stopped, checkpoints spoiled, a node paused, stopped, killed or cut off the network, the
supervisor killed or stopped; for root also packets lost, a slow disk, and a run's folder that cannot be written. Which
fault comes when follows from the seed that is printed. A run may be restarted as often as it needs. At the end of each
every loss is that of the undisturbed run, and no process, no container and no file is left that was not there before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from tridock.cluster.settings import load_cluster
from tridock.contracts import run_folder
from tridock.contracts.records import read_lines
from tridock.contracts.run_state import exit_code_of
from tridock.ops.hosts.hosts import Hosts

CONFIG: Final = "configs/demo.yaml"
CHANGES: Final = (
    "train.log_interval=1",
    "train.save_interval=10",
    "train.eval_interval=0",
    "train.tensorboard=false",
    "train.keep_checkpoints=3",
    "restart.max=1000",
    "launch.hang_timeout=10",
    # With fewer replicas the losses would differ by their rounding.
    "restart.node_timeout=10m",
)
_RUNS: Final = Path("runs")
_PATIENCE_S: Final = 600.0
"""Without a new iteration for so long a disturbed run has hung in a way that nobody noticed."""


class Soak:
    """The twin, and what is done to it."""

    def __init__(self, hostfile: Path, iterations: int, chance: random.Random, pattern: str = "*") -> None:
        self.hostfile, self.chance = hostfile, chance
        self.changes: tuple[str, ...] = (*CHANGES, f"train.train_iters={iterations}")
        hosts = Hosts(load_cluster(hostfile))
        self.containers = {node: hosts.transport.container_name(node) for node in hosts}
        self.head, *self.others = hosts
        # Not SIGTERM: with that a scheduler asks a run to save and to end.
        self.faults: dict[str, Callable[[str], object]] = {
            "SIGKILL a rank": lambda run: self._signal(run, "KILL", "tridock.train"),
            "SIGSTOP a rank": lambda run: self._signal(run, "STOP", "tridock.train"),
            "SIGKILL a node's launcher": lambda run: self._signal(run, "KILL", "deepspeed.launcher.launch"),
            "SIGKILL the run's launcher": lambda run: self._signal(run, "KILL", "bin/deepspeed", self.head),
            "SIGKILL an ssh session": lambda _: self._inside(self._any(), "pkill -KILL -f 'sshd: tridock'"),
            "pause a node": lambda _: self._paused(self._any(), self.chance.uniform(2, 40)),
            "stop a node": lambda _: self._stopped(self.chance.choice(self.others)),
            "spoil the newest checkpoint, and SIGKILL a rank": self._spoil,
            "cut a node off": lambda _: self._cut_off(self._any(), self.chance.uniform(2, 50)),
            "SIGKILL a node": lambda _: self._killed(self._any(), self.chance.uniform(2, 50)),
            "SIGKILL the supervisor": lambda _: self._inside_all(f"pkill -KILL {_SUPERVISOR}"),
            "SIGSTOP the supervisor": lambda _: self._supervisor_stopped(self.chance.uniform(2, 60)),
            "SIGSTOP a node's sshd": lambda _: self._sshd_stopped(self._any(), self.chance.uniform(2, 40)),
        }
        if os.geteuid() == 0 and all(map(shutil.which, ("nsenter", "iptables"))):
            lossy = "INPUT -m statistic --mode random --probability 0.3 -j DROP"
            self.faults |= {
                "lose 30 % of a node's packets": lambda _: self._outside(
                    self._any(), "-n", f"iptables -A {lossy}", f"iptables -D {lossy}", self.chance.uniform(5, 60)
                ),
                "make the runs read-only": lambda _: self._outside(
                    self._any(),
                    "-m -p",
                    # A mount of its own: one with files that are open for writing cannot be made read-only.
                    "mount --bind /workspace/runs /workspace/runs && mount -o remount,bind,ro /workspace/runs",
                    "umount --lazy /workspace/runs",
                    self.chance.uniform(2, 40),
                ),
            }
        if _THROTTLES.exists() and os.access(_THROTTLES, os.W_OK):
            self.faults["slow a node's disk"] = lambda _: self._slowed(self._any(), self.chance.uniform(5, 60))
        only = [name for name in self.faults if fnmatch(name, pattern)]
        if not only:
            sys.exit(f"--only: names no fault; got {pattern!r}; use one of: {', '.join(self.faults)}")
        self.faults = {name: self.faults[name] for name in only}

    def undisturbed(self) -> dict[int, float]:
        """The losses that every other run has to have."""
        run = self._launch()
        if (code := self._follow(run)) != 0:
            sys.exit(f"the undisturbed run {run} ended with {code}")
        return self.losses(run)

    def losses(self, run: str) -> dict[int, float]:
        """Each iteration's loss; what a restart repeats has to be the same."""
        return losses(run, read_lines(_RUNS / run / run_folder.METRICS))

    def events(self, run: str, name: str) -> int:
        """How many of this event the run has."""
        events: list[Any] = read_lines(_RUNS / run / run_folder.EVENTS)
        return [event["event"] for event in events].count(name)

    def disturbed(self, pause_s: float) -> tuple[str, list[str], int]:
        """A run under faults: its id, what was done to it, and its exit code."""
        run, done = self._launch(), list[str]()
        moved, reached = time.monotonic(), 0
        until = time.monotonic() + self.chance.uniform(0.5, 1.5) * pause_s
        while (code := exit_code_of(_RUNS / run)) is None:
            time.sleep(0.5)
            iteration = max(self.losses(run), default=0)
            if iteration > reached:
                moved, reached = time.monotonic(), iteration
            if time.monotonic() - moved > _PATIENCE_S:
                sys.exit(f"{run}: no new iteration for {_PATIENCE_S:.0f} s after {done[-1:] or 'its start'}")
            if time.monotonic() >= until:
                name = self.chance.choice(list(self.faults))
                done.append(f"{name} at iteration {reached}")
                print(f"  {time.strftime('%H:%M:%S')}  {done[-1]}", flush=True)
                self.faults[name](run)
                until = time.monotonic() + self.chance.uniform(0.5, 1.5) * pause_s
        return run, done, code

    def left_over(self, run: str) -> Iterator[str]:
        """Whatever of a run is still there that should not be."""
        for node, container in self.containers.items():
            found = json.loads(output("docker", "exec", container, *_NODE, "processes", run))
            yield from (f"{node}: process {entry['pid']} {' '.join(entry['command'])[:80]}" for entry in found)
        for path in (_RUNS / run).rglob("*"):
            if path.name.startswith(".put.") or path.suffix in (".part", ".tmp"):
                yield f"file {path}"

    def _launch(self) -> str:
        overrides = [argument for change in self.changes for argument in ("--set", change)]
        output(fab(), "launch", "--hosts", str(self.hostfile), "--config", CONFIG, *overrides, "--detach",
               "--run-id-file", "runs/soak.id")  # fmt: skip
        return Path("runs/soak.id").read_text().strip()

    def _follow(self, run: str) -> int:
        command = [fab(), "logs", "--hosts", str(self.hostfile), "--run", run]
        return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode

    def _any(self) -> str:
        return self.chance.choice(list(self.containers))

    def _signal(self, run: str, name: str, mark: str, node: str | None = None) -> None:
        """Sends a signal to one of the run's processes whose command line holds ``mark``."""
        node = node or self._any()
        found = json.loads(output("docker", "exec", self.containers[node], *_NODE, "processes", run))
        parents = {entry["pid"]: entry["ppid"] for entry in found if any(mark in word for word in entry["command"][:6])}
        # A child of a rank only writes its log.
        fitting = sorted(pid for pid, parent in parents.items() if parent not in parents)
        if fitting:
            self._inside(node, f"kill -{name} {self.chance.choice(fitting)}")

    def _spoil(self, run: str) -> None:
        """Overwrites a byte of one of its files; the run has to take the one before."""
        folders = sorted((_RUNS / run / run_folder.CHECKPOINTS).glob("iter_*"))
        if len(folders) > 1:
            files = sorted(path for path in folders[-1].iterdir() if path.is_file() and path.stat().st_size)
            if files:
                with self.chance.choice(files).open("r+b") as file:
                    byte = file.read(1)
                    file.seek(0)
                    file.write(bytes((byte[0] ^ 0xFF,)))
        self._signal(run, "KILL", "tridock.train")

    def _inside(self, node: str, script: str) -> None:
        # It may have ended meanwhile: nothing to hit is no failure of the soak.
        subprocess.run(["docker", "exec", self.containers[node], "sh", "-c", script], capture_output=True, check=False)

    def _paused(self, node: str, seconds: float) -> None:
        # The kernel may refuse to freeze a process that waits for its disk: then there is no fault.
        subprocess.run(["docker", "pause", self.containers[node]], capture_output=True, check=False)
        time.sleep(seconds)
        subprocess.run(["docker", "unpause", self.containers[node]], capture_output=True, check=False)

    def _stopped(self, node: str) -> None:
        output("docker", "restart", "--time", "1", self.containers[node])

    def _killed(self, node: str, seconds: float) -> None:
        output("docker", "kill", self.containers[node])
        time.sleep(seconds)
        output("docker", "start", self.containers[node])

    def _inside_all(self, script: str) -> None:
        for node in self.containers:
            self._inside(node, script)

    def _supervisor_stopped(self, seconds: float) -> None:
        self._inside_all(f"pkill -STOP {_SUPERVISOR}")
        time.sleep(seconds)
        self._inside_all(f"pkill -CONT {_SUPERVISOR}")

    def _sshd_stopped(self, node: str, seconds: float) -> None:
        """No new session begins there; those that are open go on."""
        self._inside(node, "pkill -STOP -o -x sshd")
        time.sleep(seconds)
        self._inside(node, "pkill -CONT -o -x sshd")

    def _outside(self, node: str, namespaces: str, begin: str, end: str, seconds: float) -> None:
        """Root's command in the network or the mounts of a node, and the one that undoes it."""
        pid = output("docker", "inspect", "--format", "{{.State.Pid}}", self.containers[node]).strip()
        output("nsenter", "-t", pid, *namespaces.split(), "sh", "-c", begin)
        time.sleep(seconds)
        output("nsenter", "-t", pid, *namespaces.split(), "sh", "-c", end)

    def _slowed(self, node: str, seconds: float) -> None:
        """The node's own writes to the disk of the runs take 200 kB a second."""
        container = output("docker", "inspect", "--format", "{{.Id}}", self.containers[node]).strip()
        device, throttle = disk_of(Path("runs")), _THROTTLES / container / "blkio.throttle.write_bps_device"
        throttle.write_text(f"{device} 200000")
        time.sleep(seconds)
        if throttle.exists():  # gone with the container's processes
            throttle.write_text(f"{device} 0")

    def _cut_off(self, node: str, seconds: float) -> None:
        container = self.containers[node]
        (network,) = json.loads(
            output("docker", "inspect", "--format", "{{json .NetworkSettings.Networks}}", container)
        )
        output("docker", "network", "disconnect", network, container)
        time.sleep(seconds)
        output("docker", "network", "connect", "--alias", node, network, container)


_SUPERVISOR: Final = "-P 1 -f 'tridock[.]node (start|agent) /workspace/runs/'"
"""Options of pkill: the supervisor on the head, or on a node that has taken over. Node agents have other parents."""
_THROTTLES: Final = Path("/sys/fs/cgroup/blkio/docker")
"""Has a control group for each container, where Linux has the first version of control groups."""
_NODE: Final = ("python", "-P", "-m", "tridock.node")


def fab() -> str:
    """The command beside this Python."""
    return str(Path(sys.executable).with_name("fab"))


def output(*argv: str) -> str:
    """A command's standard output; its failure is ours."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def disk_of(folder: Path) -> str:
    """The numbers of the whole disk that a folder lies on: a partition has no throttle of its own."""
    device = folder.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    return ((block.parent if (block / "partition").exists() else block) / "dev").read_text().strip()


def losses(run: str, entries: list[Any]) -> dict[int, float]:
    """Each iteration's loss, which is the same wherever it is logged again."""
    found: dict[int, float] = {}
    for entry in entries:
        if "split" not in entry and found.setdefault(entry["iteration"], entry["loss"]) != entry["loss"]:
            sys.exit(
                f"{run}: iteration {entry['iteration']} had loss {found[entry['iteration']]}, then {entry['loss']}"
            )
    return found


def main() -> None:
    """Prints each fault as it comes and a line for each run; writes runs/soak.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=Path, default=Path("hostfiles/twin"), help="a hostfile of containers here")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--iterations", type=int, default=300, help="of each run (default 300)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of the faults' names, as '*supervisor'")
    parser.add_argument("--pause", type=float, default=60.0, help="seconds between two faults, about (default 60)")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    output(fab(), "up", "--hosts", str(given.hosts))
    chance = random.Random(given.seed)  # noqa: S311  no secret
    soak = Soak(given.hosts, given.iterations, chance, given.only)
    record: list[dict[str, Any]] = []
    expected = soak.undisturbed()
    print(f"undisturbed: {len(expected)} iterations, last loss {expected[max(expected)]}", flush=True)
    deadline = time.monotonic() + 60 * given.minutes
    while not record or time.monotonic() < deadline:
        began = time.monotonic()
        run, faults, code = soak.disturbed(given.pause)
        found, left = soak.losses(run), list(soak.left_over(run))
        restarts, taken_over = soak.events(run, "run_restarted"), soak.events(run, "taken_over")
        seconds = time.monotonic() - began
        record.append(
            {"run": run, "faults": faults, "restarts": restarts, "taken_over": taken_over, "seconds": round(seconds, 1)}
        )
        counts = f"{len(faults)} faults, {restarts} restarts, {taken_over} takeovers"
        print(f"{run}: {counts}, {seconds:.0f} s", flush=True)
        wrong = [f"exit code {code}"] * (code != 0) + left
        wrong += [
            f"iteration {n}: loss {found.get(n)}, undisturbed {loss}"
            for n, loss in expected.items()
            if found.get(n) != loss
        ]
        if wrong:
            sys.exit("\n".join(wrong[:20]))
    Path("runs/soak.json").write_text(json.dumps({"seed": given.seed, "runs": record}, indent=2) + "\n")
    total = sum(len(entry["faults"]) for entry in record)
    print(f"{len(record)} runs under {total} faults ended with the losses of the undisturbed one; nothing is left over")


if __name__ == "__main__":
    main()
