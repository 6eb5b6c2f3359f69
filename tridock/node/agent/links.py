"""How often this node's network links went down, by the kernel's counters.

Not their errors: a noisy link that works has some, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts.rank_status import LinkFaults

SYSTEM: Final = Path("/sys/class")


def link_counters(system: Path = SYSTEM) -> dict[str, LinkFaults]:
    """Returns the counters of the node's own interfaces and InfiniBand ports, by name."""
    return {link.name: link for link in _counters(system)}


def _counters(system: Path) -> Iterator[LinkFaults]:
    interfaces = [path for path in (system / "net").glob("*") if (path / "carrier_down_count").exists()]
    # Beside a host's own ones are those of its containers, which come and go; a container may have none but its own.
    own = [path for path in interfaces if (path / "device").exists()] or interfaces
    for path in own:
        with suppress(OSError, ValueError):  # it is gone
            yield LinkFaults(path.name, _count(path / "carrier_down_count"))
    for path in (system / "infiniband").glob("*/ports/*/counters"):
        with suppress(OSError, ValueError):
            yield LinkFaults(f"{path.parts[-4]}:{path.parts[-2]}", _count(path / "link_downed"))


def _count(path: Path) -> int:
    return int(path.read_text())


def link_faults(before: Mapping[str, LinkFaults], now: Mapping[str, LinkFaults]) -> tuple[LinkFaults, ...]:
    """Returns the links that went down in between; a counter that began again is not judged."""
    rises = (LinkFaults(name, link.downs - before[name].downs) for name, link in now.items() if name in before)
    return tuple(rise for rise in rises if rise.downs > 0)
