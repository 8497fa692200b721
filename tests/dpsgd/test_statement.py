"""What is said of samples: worst account, unknown settings, and nothing too strong."""

import pytest

from lightning_fedq.dpsgd.opacus import SampledGaussianAccountant
from lightning_fedq.dpsgd.statement import SampleStatement


def epsilon_of(*history):
    accountant = SampledGaussianAccountant()
    accountant.history = list(history)
    return accountant.get_epsilon(1e-5)


def test_of_several_histories_the_one_that_spent_most_counts():
    changed = [(2.0, 0.1, 3), (1.0, 0.25, 2)]
    said = SampleStatement.of_histories({"0": [(1.0, 0.05, 9)], "1": changed, "2": []}, 1e-5, ("Why.",))
    assert said.epsilon == epsilon_of(*changed) > epsilon_of((1.0, 0.05, 9))
    assert (said.data_sets, said.steps, said.noise_multiplier, said.sample_rate) == (3, 5, 1.0, 0.25)
    assert said.verdict == "no guarantee"
    page = said.to_markdown()
    assert "| 3 | 5 | 1 | not known | 0.25 |" in page and "\nWhy.\n" in page


def test_before_the_first_step_nothing_is_spent():
    said = SampleStatement.of_histories({"0": [], "1": []}, 1e-5)
    assert (said.epsilon, said.steps, said.verdict) == (0.0, 0, "no guarantee")
    assert "| 2 | 0 | not known | not known | not known |" in said.to_markdown()


@pytest.mark.parametrize(
    ("secure", "epsilon", "verdict", "words"),
    [
        (True, 3.0, "good", "good, epsilon 3 over the run at delta 1e-05"),
        (True, 21.0, "vacuous", "vacuous, epsilon 21 over"),
        (False, 3.0, "no guarantee", "come from a seed; with DPSGD(seed=None) it would be epsilon 3"),
        (None, 3.0, "no guarantee", "came from a seed is not known; if they did not: epsilon 3"),
    ],
)
def test_only_noise_that_surely_has_no_seed_guarantees_anything(secure, epsilon, verdict, words):
    said = SampleStatement(1, 1, epsilon, 1e-5, 1.0, 1.0, 0.1, secure)
    assert said.verdict == verdict and words in said.line
