"""Comparison of many runs on equal tasks, and their joint privacy cost. No other package imports it."""

from typing import TYPE_CHECKING

from lightning_fedq.imports import lazily

if TYPE_CHECKING:
    from lightning_fedq.comparison.comparison import Comparison

__all__ = ["Comparison"]
__getattr__, __dir__ = lazily(__name__)
