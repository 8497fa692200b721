"""Cures that another test runs, and cures that no test runs yet."""

_TARGET = "federation/test_privacy_target.py::"
_LEDGER = "callbacks/test_federated_ledger.py::"
_CONSTRAINTS = "federation/test_constraints.py::"
TESTED = {
    "samples, and training on it fails ({}); use drop_last=True": (
        "federation/test_smallest_batch.py::test_is_refused_by_name_with_the_cure"
    ),
    "which no update carries, because a client's first steps left it": (
        "federation/test_late_state.py::test_one_client_is_the_plain_training"
    ),
    "a constraint must return finite values of shape {}": _CONSTRAINTS + "test_one_s_own_constraint",
    "and is not finite before training, so that no difference": _CONSTRAINTS + "test_observers",
    "was taken to be {}, as it is before and after": _CONSTRAINTS
    + "test_what_was_read_off_and_is_not_so_is_named",
    "let max_epochs be the rounds that the first training was calibrated for less those": _TARGET
    + "test_a_ledger_of_other_settings_is_refused_when_the_mechanism_is_known_and_the_cure_works",
    "hangs on it; go on with the settings of the charged rounds": _LEDGER
    + "test_rounds_are_not_priced_by_the_terms_of_later_ones",
}
"""A piece of the error, and the test that runs its cure."""

NOT_RUN: tuple[str, ...] = ()
"""Beginnings of errors whose cures no test can run, with the reason beside each."""
