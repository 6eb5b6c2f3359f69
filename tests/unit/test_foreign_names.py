"""No text of the repository names what a stranger has or can take: a package, an address, a server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
import yaml

from tridock.cluster.settings import wrapped_name

ROOT = Path(__file__).parents[2]
PACKAGE = re.compile(
    r"tridock\[[a-z]|(?:\bpip3? install|\bpipx|\buvx|\buv (?:tool|pip|add|run))\b[^\n|]*?[ '\"]tridock(?![\w/.-])"
)
"""``tridock`` as a name that pip, pipx or uv look up in a package index."""
ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])|(?:[23][0-9a-f]{3}|f[cd][0-9a-f]{2}):[0-9a-f:]*:\w+")
NETWORKS = tuple(
    map(ip_network, ("127.0.0.0/8", "0.0.0.0/32", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32"))
)
"""This machine, and what RFC 5737 and RFC 3849 reserve for documentation."""
RANKS = {"docs/pictures/rank-map.svg", "tests/unit/report/test_rank_map.py", "tests/unit/test_plan_command.py"}
RANKS |= {"tridock/report/rank_map.py"}
"""Files with ranks such as 1.0.0.3: pipeline, data, context, tensor."""
SERVER = re.compile(r"https?://(?:[^\s/@'\"`]*@)?([\w-]+(?:\.[\w-]+)+)")
RESERVED = re.compile(r"(?:^|\.)(?:example|invalid|test|localhost|example\.(?:com|org|net))$|\.\d+$")
"""Names of RFC 2606; an address is the other test's."""
UPSTREAM = {
    "creativecommons.org", "docs.nvidia.com", "docs.pytorch.org", "git-lfs.github.com", "github.com", "huggingface.co",
    "nvidia.github.io", "openaipublic.blob.core.windows.net", "purl.org", "www.apache.org", "www.textualize.io",
    "www.w3.org", "api.wandb.ai",
}  # fmt: skip


@cache
def texts() -> dict[str, str]:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    own = Path(__file__).relative_to(ROOT).as_posix()
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in names
        if name != own and not re.match(r"locks/.*\.txt", name) and (ROOT / name).is_file()
    }


def found(pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for name, text in texts().items():
        for match in pattern.finditer(text):
            yield f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}", match


def is_nobodys(address: str) -> bool:
    return any(ip_address(address) in network for network in NETWORKS)


def test_nothing_is_installed_under_a_name_that_a_stranger_can_take() -> None:
    assert len(texts()) > 800
    assert [where for where, _ in found(PACKAGE)] == []


def test_every_address_is_this_machines_or_nobodys() -> None:
    others = [where for where, match in found(ADDRESS) if not is_nobodys(match[0])]
    assert [where for where in others if where.partition(":")[0] not in RANKS] == []


def test_no_image_of_our_own_is_looked_up_in_a_registry() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {name: service["pull_policy"] for name, service in services.items()} == dict.fromkeys(services, "never")
    assert wrapped_name("pytorch/pytorch:latest") == "localhost/tridock-wrapped/pytorch/pytorch:latest"


def test_every_server_is_known_or_nobodys() -> None:
    assert [where for where, match in found(SERVER) if match[1] not in UPSTREAM and not RESERVED.search(match[1])] == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'tridock[data]'", "tridock[trackers]", "pip install -U tridock", "uv tool install tridock",
        "uvx tridock", "uv tool install --with numpy tridock", "pipx install tridock==0.1.0",
    ],
)  # fmt: skip
def test_a_package_is_recognized(text: str) -> None:
    assert PACKAGE.search(text)


def test_what_is_recognized_as_an_address() -> None:
    text = "\\n10.0.0.1 192.168.0.2:22 [fd00::1]:2222 2600:1::8 192.0.2.1 127.0.1.1 2001:db8::7 2.10.0 10.0 fe80::1"
    addresses = [match[0] for match in ADDRESS.finditer(text)]
    assert [it for it in addresses if not is_nobodys(it)] == ["10.0.0.1", "192.168.0.2", "fd00::1", "2600:1::8"]
