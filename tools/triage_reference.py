"""Writes docs/triage.md's list of rules from the rules themselves (`make reference`)."""

from __future__ import annotations

import re
from pathlib import Path

from tridock.triage import RULES

BEGIN, END = "<!-- rules: written by make reference -->", "<!-- end of rules -->"
_PLACES = {
    "who": "the rank",
    "node": "its node",
    "killed": "its node",
    "file": "…",
    "path": "…",
    "name": "…",
    "peer": "…",
    "rank": "N",
    "code": "…",
    "signal": "",
    "host": "its node",
    "number": "…",
    "meaning": "its name",
}


def with_rules(page: str) -> str:
    """The page with its list brought up to date."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    rows = [
        f"| `{rule.name}` | {_plain(rule.cause)} | {_plain(rule.remedy)} | {rule.origin} | {rule.proof} |"
        for rule in RULES
    ]
    table = "\n".join(["| rule | cause | remedy | from | tests |", "|---|---|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _plain(template: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: _PLACES[found[1]], template).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Writes the page."""
    page = Path("docs/triage.md")
    page.write_text(with_rules(page.read_text()))


if __name__ == "__main__":
    main()
