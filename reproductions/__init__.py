"""The papers' experiments, one function each; `fedq reproduce` runs them by name."""

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
"""Module of each experiment in this folder; its function is called as the experiment, with underscores."""
