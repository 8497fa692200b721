"""Layouts of a document as Markdown, on a terminal and as HTML. They do not depend on its contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from lightning_fedq.privacy.document import MARK, Items, Part, Table

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 5
"""Maximum number of columns of a table on a terminal. A wider table becomes a list with a line per row."""
_SHORT = 40
"""Maximum number of letters in a cell that is not wrapped on a terminal."""
_STYLES = {"good": "green", "fair": "yellow", "bad": "red"}


def markdown(title: str, parts: Sequence[Part], level: int = 1) -> str:
    """Return a document as Markdown, with the first block in bold.

    Args:
        title: Title of the document.
        parts: Parts of the document.
        level: Heading level of the title. Titles of parts are one level below.
    """
    out = [f"{'#' * level} {title}", ""]
    for place, part in enumerate(parts):
        out += [f"{'#' * (level + 1)} {part.title}", ""] if part.title else []
        for number, block in enumerate(part.blocks):
            if isinstance(block, Items):
                out += [f"- {line}" for line in block.lines]
            elif isinstance(block, Table):
                rows = [_of_markdown(row, len(block.heads)) for row in block.rows]
                out += [f"| {' | '.join(row)} |" for row in (block.heads, ["---"] * len(block.heads), *rows)]
            else:
                out.append(block if place or number else f"**{block}**")
            out.append("")
    return "\n".join(out)


def _of_markdown(row: tuple[str, ...], width: int) -> list[str]:
    """Return the cells of a row as Markdown: group heads in italics, the wanted row in bold."""
    cells = [cell.replace("|", "\\|") for cell in row]
    if len(cells) == 1:
        return [f"*{cells[0]}*", *[""] * (width - 1)]
    return [f"**{cell}**" if cell else "" for cell in cells] if row[0].startswith(MARK) else cells


def terminal(console: Console, title: str, parts: Sequence[Part]) -> None:
    """Print a document on a terminal of at least 80 columns, with the first block in bold."""
    from rich.table import Table as RichTable
    from rich.text import Text

    console.print(Text(title, "bold"))
    for place, part in enumerate(parts):
        if part.title:
            console.print(Text(part.title, "bold underline"))
        for number, block in enumerate(part.blocks):
            if isinstance(block, str):
                console.print(Text(block, "" if place or number else "bold"))
                continue
            if isinstance(block, Table) and len(block.heads) > _WIDE:  # the table is too wide for a terminal
                block = Items(tuple(_in_words(block.heads, row) for row in block.rows))
            if isinstance(block, Items):
                for line in block.lines:
                    console.print(Text(f"- {line}"))
                continue
            whole = [row for row in (block.heads, *block.rows) if len(row) > 1]
            widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
            long = [width for width in widths if width > _SHORT]  # long columns share the remaining width
            room = console.width - 2 * (len(widths) - 1) - sum(widths) + sum(long)
            widths = [width if width <= _SHORT else room // len(long) for width in widths]
            for row in whole[:1] * bool(block.heads[-1]) + list(block.rows):
                if len(row) == 1:  # the head of a group may be longer than its column
                    console.print(Text(row[0], "italic"))
                    continue
                drawn = RichTable.grid(padding=(0, 2, 0, 0))
                for width in widths:
                    drawn.add_column(width=width, overflow="fold")
                bold = row is block.heads or row[0].startswith(MARK)
                cells = [Text(cell, _STYLES.get(block.colours.get(cell, ""), "")) for cell in row]
                drawn.add_row(*cells, style="bold" if bold else "")
                console.print(drawn)


def _in_words(heads: tuple[str, ...], row: tuple[str, ...]) -> str:
    """Return a row of a wide table as one line, with the head before each cell."""
    pairs = (f"{head} {cell}" for head, cell in zip(heads[1:], row[1:], strict=True))
    return f"{row[0]}: {', '.join(pairs)}"


def html(parts: Sequence[Part], level: int = 2) -> Markup:
    """Return a document as escaped HTML elements, with the first block in bold."""
    out: list[str] = []
    for place, part in enumerate(parts):
        out += [f"<h{level}>{escape(part.title)}</h{level}>"] if part.title else []
        for number, block in enumerate(part.blocks):
            if isinstance(block, Items):
                out.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in block.lines) + "</ul>")
            elif isinstance(block, Table):
                heads = "".join(f"<th>{escape(head)}</th>" for head in block.heads)
                rows = "".join(_of_html(row, block) for row in block.rows)
                out.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")
            else:
                out.append(f"<p>{escape(block)}</p>" if place or number else f"<p><b>{escape(block)}</b></p>")
    return Markup("\n".join(out))  # every text was escaped


def _of_html(row: tuple[str, ...], table: Table) -> str:
    """Return a row of a table as escaped HTML, with coloured verdicts."""
    if len(row) == 1:
        return f'<tr><th colspan="{len(table.heads)}"><i>{escape(row[0])}</i></th></tr>'
    cells = [f"<th>{escape(row[0])}</th>"]
    for head, cell in zip(table.heads[1:], row[1:], strict=True):
        colour = table.colours.get(cell, "")
        text = f'<span class="verdict {colour}">{escape(cell)}</span>' if colour else escape(cell)
        cells.append(f'<td data-head="{escape(head)}">{text}</td>')
    return f"<tr{' class=wanted' if row[0].startswith(MARK) else ''}>{''.join(cells)}</tr>"
