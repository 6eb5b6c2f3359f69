"""HTML, put together of parts that are escaped: nothing that a run or a log holds becomes markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from tridock.report.text import printable

Row = Sequence[str]


def escape(text: str) -> str:
    """A text as HTML, in an element or in an attribute."""
    return html.escape(printable(text), quote=True)


def element(tag: str, text: str, **attributes: str) -> str:
    """An element with escaped text; an attribute ``class_`` is ``class``."""
    words = "".join(f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items())
    return f"<{tag}{words}>{escape(text)}</{tag}>"


def table(head: Row, rows: Iterable[Row], *, numbers: Sequence[int] = (), mono: Sequence[int] = ()) -> str:
    """A table whose first column names its rows. ``numbers`` and ``mono`` are columns, from 0."""
    return marked_table(head, ((row, "") for row in rows), numbers=numbers, mono=mono)


def marked_table(
    head: Row,
    rows: Iterable[tuple[Row, str]],
    *,
    numbers: Sequence[int] = (),
    mono: Sequence[int] = (),
    kind: str = "",
) -> str:
    """The same with a class for each row, and one for the table (``kind``)."""

    def looks(column: int) -> dict[str, str]:
        names = [name for name, columns in (("number", numbers), ("mono", mono)) if column in columns]
        return {"class_": " ".join(names)} if names else {}

    def cells(row: Row, of_head: bool) -> str:
        return "".join(
            element("td" if column and not of_head else "th", text, **looks(column)) for column, text in enumerate(row)
        )

    lines = [f"<tr{_class(mark)}>{cells(row, of_head=False)}</tr>" for row, mark in rows]
    heads = f"<thead><tr>{cells(head, of_head=True)}</tr></thead>" if any(head) else ""
    body = "\n".join(lines)
    return f'<div class="scroll"><table{_class(kind)}>{heads}<tbody>\n{body}\n</tbody></table></div>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def folded(title: str, content: str, *, open_: bool = False) -> str:
    """What is shown when its title is clicked."""
    return f"<details{' open' if open_ else ''}>{element('summary', title)}{content}</details>"


def section(name: str, title: str, content: str) -> str:
    """A part of the page that can be linked to."""
    return f'<section id="{escape(name)}">{element("h2", title)}{content}</section>'
