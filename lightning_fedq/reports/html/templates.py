"""Templates of the HTML page. They escape all values, because names of runs are arbitrary text."""

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
    """Render a template of `pages/`. Values are escaped, so they can't add elements or attributes.

    Args:
        name: File of the template.
        values: All variables of the template.

    Examples:
        >>> print(render("chart.html", label='"><script>', light="", dark="").splitlines()[2])
        <img alt="&#34;&gt;&lt;script&gt;" src="data:image/png;base64,">
    """
    return Markup(_environment().get_template(name).render(**values))
