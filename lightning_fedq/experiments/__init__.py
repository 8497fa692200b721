"""The papers' experiments, one function each; `fedq reproduce` runs them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_fedq.experiments.corbin_exp7 import corbin_exp7
from lightning_fedq.experiments.corbin_exp8 import corbin_exp8
from lightning_fedq.experiments.cpa_beyond import cpa_beyond
from lightning_fedq.experiments.cpa_fig6 import cpa_fig6
from lightning_fedq.experiments.cpa_fig7 import cpa_fig7
from lightning_fedq.experiments.cpa_fig8 import cpa_fig8
from lightning_fedq.experiments.cpa_table2 import cpa_table2, cpa_table3
from lightning_fedq.experiments.cpa_table4 import cpa_table4
from lightning_fedq.experiments.cpa_table5 import cpa_table5
from lightning_fedq.experiments.cpa_table6 import cpa_table6
from lightning_fedq.experiments.exact_fig2 import exact_fig2
from lightning_fedq.experiments.exact_fig4 import exact_fig4
from lightning_fedq.experiments.exact_fig5 import exact_fig5
from lightning_fedq.experiments.exact_fig6 import exact_fig6, exact_fig8, exact_fig9
from lightning_fedq.experiments.exact_fig10 import exact_fig10
from lightning_fedq.experiments.exact_law import exact_law
from lightning_fedq.experiments.exact_mnist import exact_mnist
from lightning_fedq.experiments.exact_smoothing import exact_smoothing

EXPERIMENTS: dict[str, Callable[..., Any]] = {
    "corbin-exp7": corbin_exp7,
    "corbin-exp8": corbin_exp8,
    "exact-fig2": exact_fig2,
    "exact-fig4": exact_fig4,
    "exact-fig5": exact_fig5,
    "exact-fig6": exact_fig6,
    "exact-fig8": exact_fig8,
    "exact-fig9": exact_fig9,
    "exact-fig10": exact_fig10,
    "exact-law": exact_law,
    "exact-smoothing": exact_smoothing,
    "exact-mnist": exact_mnist,
    "cpa-beyond": cpa_beyond,
    "cpa-fig6": cpa_fig6,
    "cpa-fig7": cpa_fig7,
    "cpa-fig8": cpa_fig8,
    "cpa-table2": cpa_table2,
    "cpa-table3": cpa_table3,
    "cpa-table4": cpa_table4,
    "cpa-table5": cpa_table5,
    "cpa-table6": cpa_table6,
}
