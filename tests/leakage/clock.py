"""Seconds of the CPU: what else the machine does takes none of them, so that a bound on them is no chance."""

import time


def cpu_clock(monkeypatch):
    """Has `time.perf_counter` count CPU seconds, and the seconds that are put into what it returns."""
    waited = []
    monkeypatch.setattr(time, "perf_counter", lambda: time.process_time() + sum(waited))
    return waited
