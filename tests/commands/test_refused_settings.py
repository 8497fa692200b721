"""A setting that a class refuses is answered in its own sentence, in a line, from the command line."""

import pytest

from lightning_fedq.cli import main

LEVEL = "error: epsilon_per_coordinate of CorBin"


@pytest.mark.parametrize(
    ("run", "change", "words"),
    [
        ("digits_corbin", "CorBin.epsilon_per_coordinate=-1", "error: epsilon must be > 0, got -1"),
        ("digits_corbin", "CorBin.epsilon_per_coordinate=abc", f"{LEVEL} must be a number, got 'abc'"),
        ("digits_corbin", "Federated.num_clients=0", "error: num_clients must be >= 1, got 0"),
        ("digits_private", "Federated.privacy.adversary=nobody", "error: adversary must be one of"),
    ],
)
def test_in_its_own_sentence(run, change, words, capsys):
    assert main(["fit", run, "--set", change]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said and len(said.splitlines()) <= 4
