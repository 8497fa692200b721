"""Cures that another test runs, and cures that no test runs yet."""

_TARGET = "federation/test_privacy_target.py::"
_LEDGER = "callbacks/test_federated_ledger.py::"
TESTED = {
    "let max_epochs be the rounds that the first training was calibrated for less those": _TARGET
    + "test_a_ledger_of_other_settings_is_refused_when_the_mechanism_is_known_and_the_cure_works",
    "hangs on it; go on with the settings of the charged rounds": _LEDGER
    + "test_rounds_are_not_priced_by_the_terms_of_later_ones",
}
"""A piece of the error, and the test that runs its cure."""

NOT_RUN = {
    # a checkpoint of other tensors is refused before, by the settings or by the names of the parameters
    "the checkpoint's clients keep {}, these {}; use the checkpoint's own model",
    "there is no result to write; run `fedq bench`, or name --data for tasks on images",
    "has no part to renew; put the lines {} and {} where it should be",
}
"""The beginnings of errors whose cures no test runs. This list gets shorter only."""
