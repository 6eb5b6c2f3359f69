"""Rules about the way between the ranks: ssh, rendezvous, collectives."""

from __future__ import annotations

from typing import Final

from tridock.triage.rule import Rule, words

NETWORK: Final = (
    Rule(
        "address-in-use",
        "the port of the rendezvous was taken between the launch and the start",
        "launch again, which picks another; a fixed launch.master_port has to be free: `ss -ltnp` on the head shows "
        "who listens",
        "torch, TCPStore; the operating system (EADDRINUSE)",
        says=words(r"EADDRINUSE|[Aa]ddress already in use"),
    ),
    Rule(
        "ssh-host-key",
        "a node shows another host key than the cluster's",
        "bring the keys in order with fab keys; if it stays so, something else listens on the nodes' ssh port",
        "OpenSSH",
        says=words(r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED"),
    ),
    Rule(
        "ssh-refused",
        "a node refuses the cluster's key, or something else listens on its ssh port",
        "run fab keys, then fab up; fab check names the node",
        "OpenSSH",
        says=words(r"Permission denied \((?:publickey|password)[^)]*\)|Too many authentication failures"),
    ),
    Rule(
        "ssh-unreachable",
        "the head cannot reach a node over ssh",
        "see that the node is up (fab status) and that the head resolves and reaches its name (fab check); "
        "nodes.<name>.address in the settings says how",
        "OpenSSH; pdsh",
        says=words(
            r"ssh: (?:Could not resolve hostname|connect to host) \S+|^pdsh@\S+: \S+: ssh exited with exit code 255"
        ),
    ),
    Rule(
        "launcher-missing-program",
        "a program that the launcher needs is not in the image",
        "build the image anew: make image",
        "bash; DeepSpeed's launcher",
        says=words(r"pdsh: (?:command )?not found|'pdsh' is not installed|launcher 'pdsh' not installed"),
        proof="recorded",
    ),
    Rule(
        "collective-timeout",
        "a collective did not end in time: a rank does not take part in it",
        "look at the log of the rank that was late; DEEPSPEED_TIMEOUT (minutes) in the experiment's env allows more",
        "NCCL's watchdog in torch; Gloo, unbound_buffer.cc",
        says=words(
            r"Watchdog caught collective operation timeout|Timed out waiting \d+ ?ms for|wait timeout after \d+ms"
        ),
        own=True,
        waits=True,
    ),
    Rule(
        "no-such-interface",
        "a network interface that the environment names is not on {node}",
        "mend NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (Gloo takes exact names); fab check shows the interfaces",
        "Gloo, tcp/device.cc; NCCL, bootstrap.cc",
        says=words(r"Unable to find address for:|no socket interface found|Unable to find interface"),
        own=True,
    ),
    Rule(
        "rendezvous",
        "not all ranks met",
        "see logs/launcher.log for nodes that did not start, and that all nodes reach the head's address (fab check)",
        "Tridock, train/process_group.py",
        says=words(r"^(?:rank \d+: )?rendezvous: the \d+ ranks did not all meet"),
        own=True,
    ),
    Rule(
        "nccl-error",
        "NCCL failed on {node}",
        "launch again with NCCL_DEBUG=INFO in the experiment's env: the line before the error names the interface, "
        "device or peer",
        "torch, NCCLUtils.hpp",
        says=words(r"nccl(?:UnhandledCuda|System|Internal|InvalidUsage|Remote)Error|NCCL error"),
        proof="recorded",
    ),
)
