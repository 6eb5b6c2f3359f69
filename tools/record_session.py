"""Records commands at a terminal as an SVG: tools/record_session.py OUT.svg COMMAND...

Each command runs in bash, in a pseudo-terminal. The picture loads nothing from elsewhere.
"""

import os
import pty
import re
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Final

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS: Final = 108
FORMAT: Final = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
)


def output_of(command: str) -> str:
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(COLUMNS=str(COLUMNS), TERM="xterm-256color")
        os.execvp("bash", ["bash", "-c", command])  # noqa: S606
    parts = []
    with suppress(OSError):  # the terminal is closed when the command has ended
        while part := os.read(terminal, 65536):
            parts.append(part)
    os.waitpid(child, 0)
    return b"".join(parts).decode().replace("\r\n", "\n")


def main() -> None:
    target, *commands = sys.argv[1:]
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for command in commands:
        console.print(Text(f"$ {command}", "bold"))
        console.print(Text.from_ansi(output_of(command).rstrip("\n")), "")
    Path(target).write_text(console.export_svg(title="Tridock", code_format=FORMAT), encoding="utf-8")


if __name__ == "__main__":
    main()
