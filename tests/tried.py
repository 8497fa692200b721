"""The trial of isolation, taken as passed: in forks it takes longer than most trainings of the tests."""

from __future__ import annotations

import sys

import pytest


def take_as_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, whether clients are isolated is taken as tried."""
    trial = sys.modules.get("lightning_fedq.training.isolation")
    if trial is not None:
        said = trial.said
        monkeypatch.setattr(
            trial.IsolationTrial, "check", lambda self, clients: said("forks" if len(clients) > 1 else None)
        )
