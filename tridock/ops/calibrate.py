"""Calibration: measures the devices of this machine or of a cluster's nodes; writes and reads the result."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tridock.contracts.calibration import SUFFIX, Calibration
from tridock.contracts.codec import JSON_VERSION, decode, encode
from tridock.contracts.run_folder import write_atomic
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.client import NodeClient
from tridock.ops.rank_group import parse, reduce_command
from tridock.ops.runs.this_machine import node_environment
from tridock.remote import Completed, clock
from tridock.strict_yaml import MOST_BYTES

LIMIT_S: Final = 120
_MARGIN_S: Final = 10.0
_MODULE: Final = "tridock.train.calibrate"
_TODO: Final = "tridock check --hosts names what is wrong with a cluster"


def calibrate_here(ranks: int, port: int) -> Calibration:
    """Measures this machine with ``ranks`` ranks. Raises :class:`ClusterError` if they fail."""
    _, *arguments = reduce_command({"localhost": range(ranks)}, "127.0.0.1", port, LIMIT_S, _MODULE)
    argv = [sys.executable, *arguments]
    try:
        done = clock.run(argv, LIMIT_S + _MARGIN_S, env=node_environment(ranks))
    except subprocess.TimeoutExpired:
        return _calibration(Completed(1, b"", b""), "this machine")
    return _calibration(Completed(done.returncode, done.stdout, done.stderr), "this machine")


def calibrate_nodes(client: NodeClient, port: int) -> Calibration:
    """Measures all slots of a cluster's nodes, which must be up. Raises :class:`ClusterError` if they fail."""
    head, slots = client.head, {node: client.cluster.everywhere[node] for node in client.hosts}
    argv = reduce_command(slots, client.cluster.node(head).address, port, LIMIT_S, _MODULE)
    done = client.run_inside(head, *argv, timeout=LIMIT_S + _MARGIN_S)
    return _calibration(done, ", ".join(client.hosts))


def _calibration(done: Completed, where: str) -> Calibration:
    found = parse(done, LIMIT_S)
    if found.result is None:
        raise ClusterError(Problem(where, "the calibration failed", found.error, _TODO))
    return decode(Calibration, encode(found.result))


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Writes the file atomically."""
    write_atomic(path, f"{encode(calibration)}\n".encode())


def read_calibration(path: Path) -> Calibration:
    """Reads a calibration. Raises :class:`RequestError` for any other file."""
    todo = "write one with tridock calibrate"
    try:
        with path.open(encoding="utf-8") as file:
            found = decode(Calibration, file.read(MOST_BYTES))
    except OSError as error:
        raise RequestError(Problem.of_error(path, "cannot be read", error, todo)) from None
    except (ValueError, RecursionError):
        raise RequestError(Problem(str(path), "is not a calibration", "", todo)) from None
    if found.version != JSON_VERSION:
        raise RequestError(Problem(str(path), "is of another version", str(found.version), todo))
    return found


def calibration_path(hostfile: Path) -> Path:
    """Returns the path of a cluster's calibration."""
    return hostfile.with_name(hostfile.name + SUFFIX)


def summary(calibration: Calibration) -> Sequence[str]:
    """Formats the measurements, one per line."""
    lines = [f"{calibration.device}, {calibration.ranks} ranks at the same time"]
    for precision in dict.fromkeys(one.precision for one in calibration.products):
        rates = [
            2 * one.rows * one.columns * one.inner / one.seconds / 1e12
            for one in calibration.products
            if one.precision == precision
        ]
        lines.append(f"matrix products in {precision}: {min(rates):.3g} to {max(rates):.3g} TFLOP/s")
    for one in calibration.attention:
        lines.append(
            f"attention in {one.precision}, {one.length} tokens: {one.forward_s * 1e3:.3g} ms forward,"
            f" {one.backward_s * 1e3:.3g} ms backward"
        )
    lines.append(f"memory: {calibration.memory_gb_s:.3g} GB/s; {calibration.launch_s * 1e6:.2g} us a kernel")
    for summed in calibration.sums:
        place = "within a node" if summed.nodes == 1 else f"over {summed.nodes} nodes"
        rate = 2 * (summed.ranks - 1) / summed.ranks * summed.bytes / summed.seconds / 1e9
        lines.append(f"all-reduce of {summed.bytes / 2**20:g} MiB, {summed.ranks} ranks {place}: {rate:.3g} GB/s")
    return lines
