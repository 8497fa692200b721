import pytest

from lightning_fedq.rounds import RoundRecord
from lightning_fedq.training.records import warn_of


def record(clients):
    return RoundRecord(3, 50, 50, 0, 0, 0, 0, 0.0, 1.0, 1.0, 0.0, non_finite_clients=tuple(clients))


def test_a_warning_names_ten_clients_and_counts_the_others():
    with pytest.warns(UserWarning, match=r"round 4: the updates of clients \[7, 8\] held a NaN"):
        warn_of(record([7, 8]))
    with pytest.warns(UserWarning, match=r"clients \[0, 1, 2, 3, 4, 5, 6, 7, 8, 9\] and 30 more held a NaN"):
        warn_of(record(range(40)))
