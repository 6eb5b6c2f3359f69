"""HTML from escaped parts: nothing that a run or a log contains becomes markup."""

import html
from collections.abc import Iterable, Sequence
from typing import Final

_LONGEST: Final = 4000
"""Characters. Names of runs and files and values of fields may hold any text."""


def printable(text: str, longest: int = _LONGEST) -> str:
    """Returns the text without control characters and lone surrogates, at most ``longest`` characters."""
    clean = "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)
    return clean if len(clean) <= longest else f"{clean[: longest - 1]}…"


def one_line(text: str, longest: int = 60) -> str:
    """Returns the text on one line, for a legend or a heading."""
    return printable(" ".join(text.split()), longest) or "?"


def gib(size: float) -> str:
    """Formats a size in bytes as ``1.50 GiB``; below 0.01 GiB in MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 100 else f"{size / 2**20:.2f} MiB"


Row = Sequence[str]


def escape(text: str) -> str:
    """Returns the text as HTML, without control characters."""
    return html.escape(printable(text), quote=True)


def element(tag: str, text: str, **attributes: str) -> str:
    """Returns an element with escaped text; ``class_`` sets ``class``."""
    given = "".join(f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items())
    return f"<{tag}{given}>{escape(text)}</{tag}>"


def table(head: Row, rows: Iterable[Row], *, numbers: Sequence[int] = (), mono: Sequence[int] = ()) -> str:
    """Returns a table whose first column is its row headings. ``numbers`` and ``mono`` are columns, from 0."""
    return marked_table(head, ((row, "") for row in rows), numbers=numbers, mono=mono)


def marked_table(
    head: Row, rows: Iterable[tuple[Row, str]], *, numbers: Sequence[int] = (), mono: Sequence[int] = (), kind: str = ""
) -> str:
    """Returns a table with a class for each row, and one for the table (``kind``)."""

    def classes(column: int) -> dict[str, str]:
        names = [name for name, columns in (("number", numbers), ("mono", mono)) if column in columns]
        return {"class_": " ".join(names)} if names else {}

    def cells(row: Row, of_head: bool) -> str:
        return "".join(
            element("td" if column and not of_head else "th", text, **classes(column))
            for column, text in enumerate(row)
        )

    lines = [f"<tr{_class(mark)}>{cells(row, of_head=False)}</tr>" for row, mark in rows]
    heads = f"<thead><tr>{cells(head, of_head=True)}</tr></thead>" if any(head) else ""
    body = "\n".join(lines)
    return f'<div class="scroll"><table{_class(kind)}>{heads}<tbody>\n{body}\n</tbody></table></div>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def folded(title: str, content: str, *, open_: bool = False) -> str:
    """Returns a section that opens on a click, with an escaped title."""
    return f"<details{' open' if open_ else ''}>{element('summary', title)}{content}</details>"


def section(name: str, title: str, content: str) -> str:
    """Returns a section of the page with an anchor and an escaped title."""
    return f'<section id="{escape(name)}">{element("h2", title)}{content}</section>'
