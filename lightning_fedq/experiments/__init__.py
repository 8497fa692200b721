"""The papers' experiments, one function each; `fedq reproduce` runs them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_fedq.experiments.corbin_exp7 import corbin_exp7
from lightning_fedq.experiments.corbin_exp8 import corbin_exp8

EXPERIMENTS: dict[str, Callable[..., Any]] = {"corbin-exp7": corbin_exp7, "corbin-exp8": corbin_exp8}
