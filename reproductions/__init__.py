"""The papers' experiments, one function each; `fedq reproduce` runs them by name."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

EXPERIMENTS = {
    "corbin-exp7": "corbin.exp7",
    "corbin-exp8": "corbin.exp8",
    "exact-fig2": "exact.fig2",
    "exact-fig4": "exact.fig4",
    "exact-fig5": "exact.fig5",
    "exact-fig6": "exact.fig6",
    "exact-fig8": "exact.fig6",
    "exact-fig9": "exact.fig6",
    "exact-fig10": "exact.fig10",
    "exact-law": "exact.law",
    "exact-smoothing": "exact.smoothing",
    "exact-mnist": "exact.mnist",
    "cpa-beyond": "cpa.beyond",
    "cpa-fig6": "cpa.fig6",
    "cpa-fig7": "cpa.fig7",
    "cpa-fig8": "cpa.fig8",
    "cpa-table2": "cpa.table2",
    "cpa-table3": "cpa.table2",
    "cpa-table4": "cpa.table4",
    "cpa-table5": "cpa.table5",
    "cpa-table6": "cpa.table6",
}
"""Module of each experiment; its function is called as the experiment, with underscores."""


def load(name: str) -> Callable[..., Any]:
    """Import the function of an experiment."""
    function: Callable[..., Any] = getattr(
        import_module(f"reproductions.{EXPERIMENTS[name]}"), name.replace("-", "_")
    )
    return function


def title(name: str) -> str:
    """First line of an experiment's docstring, read without importing it, which takes seconds."""
    source = Path(__file__).parent.joinpath(*f"{EXPERIMENTS[name]}.py".split(".", 1)).read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name.replace("-", "_"):
            return (ast.get_docstring(node) or name).splitlines()[0]
    raise LookupError(f"{EXPERIMENTS[name]}.py has no function for {name!r}")
