import io

import pytest
from rich.console import Console

from lightning_fedq.callbacks import RoundProgressBar
from tests.callbacks.runs import small_run


def test_a_pipe_gets_few_whole_lines():
    file = io.StringIO()
    small_run(RoundProgressBar(interval=1000.0, file=file), rounds=4, enable_progress_bar=True)
    lines = file.getvalue().splitlines()
    assert len(lines) == 2  # the first round and the last
    assert lines[0].startswith("round 1/4: val_acc 0.") and lines[1].startswith("round 4/4: val_acc 0.")
    assert "4/4 clients, 0.000325 MB up this round" in lines[1] and "\x1b" not in file.getvalue()


def test_every_round_has_its_line_if_asked():
    file = io.StringIO()
    small_run(
        RoundProgressBar(monitor="nothing", interval=0.0, file=file), rounds=3, enable_progress_bar=True
    )
    lines = file.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["round 1/3", "round 2/3", "round 3/3"]
    assert "nothing" not in file.getvalue()


def test_a_terminal_gets_a_bar():
    file = io.StringIO()
    bar = RoundProgressBar(file=file)
    bar._console = Console(file=file, force_terminal=True, width=120)
    small_run(bar, rounds=2, enable_progress_bar=True)
    assert "round 2/2" in file.getvalue() and "4/4 clients" in file.getvalue()
    assert bar._progress is None  # closed


def test_disabled_it_says_nothing():
    file = io.StringIO()
    bar = RoundProgressBar(interval=0.0, file=file)
    bar.disable()
    small_run(bar, rounds=1, enable_progress_bar=True)
    assert file.getvalue() == ""


def test_interval_is_checked():
    with pytest.raises(ValueError, match=r"interval must be >= 0 seconds, got -1"):
        RoundProgressBar(interval=-1)
