"""Three ways to draw the parts of a document: Markdown, terminal, HTML. None of them knows what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from lightning_fedq.privacy.document import MARK, Items, Part, Table

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 5
"""Columns of a table on a terminal; one of more is written out, a row a line."""
_SHORT = 40
"""Letters of a cell that is not wrapped there."""
_STYLES = {"good": "green", "fair": "yellow", "bad": "red"}


def markdown(title: str, parts: Sequence[Part], level: int = 1) -> str:
    """As Markdown, the first sentences of all in bold.

    Args:
        level: Level of the title's heading; titles of parts are one below.
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
    cells = [cell.replace("|", "\\|") for cell in row]
    if len(cells) == 1:
        return [f"*{cells[0]}*", *[""] * (width - 1)]
    return [f"**{cell}**" if cell else "" for cell in cells] if row[0].startswith(MARK) else cells


def terminal(console: Console, title: str, parts: Sequence[Part]) -> None:
    """On a terminal, 80 columns or wider, the first sentences of all in bold."""
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
            if isinstance(block, Table) and len(block.heads) > _WIDE:  # no terminal has room for it
                block = Items(tuple(_in_words(block.heads, row) for row in block.rows))
            if isinstance(block, Items):
                for line in block.lines:
                    console.print(Text(f"- {line}"))
                continue
            whole = [row for row in (block.heads, *block.rows) if len(row) > 1]
            widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
            long = [width for width in widths if width > _SHORT]  # these share what the others leave
            room = console.width - 2 * (len(widths) - 1) - sum(widths) + sum(long)
            widths = [width if width <= _SHORT else room // len(long) for width in widths]
            for row in whole[:1] * bool(block.heads[-1]) + list(block.rows):
                if len(row) == 1:  # the head of a group may be longer than a column is wide
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
    said = (f"{head} {cell}" for head, cell in zip(heads[1:], row[1:], strict=True))
    return f"{row[0]}: {', '.join(said)}"


def html(parts: Sequence[Part], level: int = 2) -> Markup:
    """As elements of a page, which escapes all of it, the first sentences of all in bold."""
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
    if len(row) == 1:
        return f'<tr><th colspan="{len(table.heads)}"><i>{escape(row[0])}</i></th></tr>'
    cells = [f"<th>{escape(row[0])}</th>"]
    for head, cell in zip(table.heads[1:], row[1:], strict=True):
        colour = table.colours.get(cell, "")
        text = f'<span class="verdict {colour}">{escape(cell)}</span>' if colour else escape(cell)
        cells.append(f'<td data-head="{escape(head)}">{text}</td>')
    return f"<tr{' class=wanted' if row[0].startswith(MARK) else ''}>{''.join(cells)}</tr>"
