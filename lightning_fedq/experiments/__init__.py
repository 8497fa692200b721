"""The papers' experiments, one function each; `fedq reproduce` runs them by name."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

EXPERIMENTS = {
    "corbin-exp7": "corbin_exp7",
    "corbin-exp8": "corbin_exp8",
    "exact-fig2": "exact_fig2",
    "exact-fig4": "exact_fig4",
    "exact-fig5": "exact_fig5",
    "exact-fig6": "exact_fig6",
    "exact-fig8": "exact_fig6",
    "exact-fig9": "exact_fig6",
    "exact-fig10": "exact_fig10",
    "exact-law": "exact_law",
    "exact-smoothing": "exact_smoothing",
    "exact-mnist": "exact_mnist",
    "cpa-beyond": "cpa_beyond",
    "cpa-fig6": "cpa_fig6",
    "cpa-fig7": "cpa_fig7",
    "cpa-fig8": "cpa_fig8",
    "cpa-table2": "cpa_table2",
    "cpa-table3": "cpa_table2",
    "cpa-table4": "cpa_table4",
    "cpa-table5": "cpa_table5",
    "cpa-table6": "cpa_table6",
}
"""Module of each experiment; its function is called as the experiment, with underscores."""


def load(name: str) -> Callable[..., Any]:
    """Import the function of an experiment."""
    function: Callable[..., Any] = getattr(
        import_module(f"lightning_fedq.experiments.{EXPERIMENTS[name]}"), name.replace("-", "_")
    )
    return function


def title(name: str) -> str:
    """First line of an experiment's docstring, read without importing it, which takes seconds."""
    source = Path(__file__).with_name(f"{EXPERIMENTS[name]}.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name.replace("-", "_"):
            return (ast.get_docstring(node) or name).splitlines()[0]
    raise LookupError(f"{EXPERIMENTS[name]}.py has no function for {name!r}")
