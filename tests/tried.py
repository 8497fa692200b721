"""The trial of isolation, taken as passed: in forks it takes longer than most trainings of the tests."""

import sys


def take_as_tried(monkeypatch):
    """From here on, whether clients are isolated is taken as tried."""
    trial = sys.modules.get("lightning_fedq.training.isolation")
    if trial is not None:
        describe = trial.describe_trial

        def check(self, clients):
            """Taken as tried."""
            return describe("forks" if len(clients) > 1 else None)

        monkeypatch.setattr(trial.IsolationTrial, "check", check)


def without_forks(monkeypatch):
    """From here on, what is tried before the first round is tried in this process, and isolation is taken."""
    files = sys.modules.get("lightning_fedq.training.fit")
    if files is not None:
        monkeypatch.setattr(files, "find_fork_obstacle", lambda trainer: "a test of something else")
        take_as_tried(monkeypatch)
