"""Pages from templates that escape whatever is put into them: names of runs are anybody's words."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


@cache
def _environment() -> Environment:
    pages = FileSystemLoader(Path(__file__).parent / "pages")
    return Environment(
        loader=pages, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def render(name: str, **values: object) -> Markup:
    """A template of `pages/`, with values in it that can add no element and no attribute.

    Args:
        name: File of the template.
        values: What it names; all of them must be there.

    Example:
        >>> print(render("chart.html", label='"><script>', light="", dark="").splitlines()[2])
        <img alt="&#34;&gt;&lt;script&gt;" src="data:image/png;base64,">
    """
    return Markup(_environment().get_template(name).render(**values))
