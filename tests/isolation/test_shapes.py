"""Nothing that a client keeps, in whatever shape, moves another client's update or what can be seen."""

import re

import pytest
import torch

from tests import forked
from tests.isolation.shapes import ROWS
from tests.isolation.worlds import (
    CLIENTS,
    ROUNDS,
    Records,
    Shape,
    difference,
    federate,
    is_plain,
    moved,
    share,
    together,
)
from tests.tried import take_as_tried, without_forks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FIRST_AND_LAST = (0, CLIENTS - 1)
TOGETHER = ("values", "objects", "functions", "layers")
CLIENTS_OWN = (*TOGETHER, "callbacks", "optimizers")
"""Kinds of rows that keep what they keep in a client's own world; others outlive it, or show it."""
SIDE_BY_SIDE = frozenset(
    """
    Buffer BatchNorm DatasetWithMemory CollateWithMemory AdamMoments
    StrategyOptimizersReplaced NormalisedByTheFirstSample
    """.split()  # noqa: SIM905
)
"""These train in stacks. The others take numbers out of tensors, so that one client trains at a time."""


def refused(row, clients_per_step, error):
    """Was this row allowed to be refused, in these words, and was nothing sent before?"""
    words = [row.refused] if row.refused else []
    if clients_per_step > 1:
        words.append("use clients_per_step=1")
    return not Records.updates and any(re.search(pattern, str(error)) for pattern in words)


def kind_of(row):
    """The module that it is in."""
    return row.__module__.rpartition(".")[2]


def cases():
    """All rows alone, those that may be refused with the trial, and others without it.

    Rows that differ in nothing but what a module keeps run in one module, and each by itself in the slow set.
    The others run there with the trial, too.
    """
    for row in ROWS:
        plain = not row.refused and kind_of(row) in TOGETHER and is_plain(row)
        yield pytest.param(row, bool(row.refused), id=row.__name__, marks=slow_unless(not plain))
        if not row.refused and not plain:
            yield pytest.param(row, True, id=f"{row.__name__}-tried", marks=pytest.mark.slow)


def stacks():
    """The rows that train in stacks, and the first of each kind of those that do not."""
    first = {kind_of(row): row for row in reversed(ROWS) if row.__name__ not in SIDE_BY_SIDE}
    for row in ROWS:
        quick = row.__name__ in SIDE_BY_SIDE | {"Float"}
        if quick or row is first[kind_of(row)]:
            yield pytest.param(row, id=row.__name__, marks=slow_unless(quick))


def slow_unless(quick):
    return () if quick else pytest.mark.slow


@pytest.fixture(autouse=True)
def _nothing_stays(request):
    """A hook of all modules, say, would keep later rows from training in stacks."""
    yield
    if hasattr(request.node, "callspec") and "row" in request.node.callspec.params:
        request.node.callspec.params["row"].forget()


def check(row, changed, clients_per_step, folder):
    """Only the client moves whose data are others, or the row is refused."""
    try:
        before = federate(row, None, clients_per_step, folder)
    except ValueError as error:
        if refused(row, clients_per_step, error):
            return
        raise
    assert len(before.updates) == ROUNDS * CLIENTS
    side_by_side = clients_per_step if row.__name__ in SIDE_BY_SIDE else 1
    assert before.side_by_side == side_by_side
    with pytest.MonkeyPatch.context() as patch:
        take_as_tried(patch)  # the trial let it pass; what follows looks for what it has missed
        for client in changed:
            after = federate(row, client, clients_per_step, folder)
            assert moved(before, after) == [client]
            assert difference(before.visible, after.visible) == ""


@pytest.mark.parametrize(("row", "tried"), list(cases()))
def test_one_client_s_data_move_nobody_else(row, tried, tmp_path, monkeypatch):
    if not tried:
        without_forks(monkeypatch)
    # who comes first meets all others; the last one's data reach them in the next round, by what outlives it
    check(row, FIRST_AND_LAST[: 1 if kind_of(row) in CLIENTS_OWN else 2], 1, tmp_path)


@pytest.mark.parametrize("kind", TOGETHER)
def test_nor_do_those_of_all_plain_rows_of_a_kind_in_one_module(kind, tmp_path):
    """Where it fails, the slow set says which row it is."""
    rows = [row for row in ROWS if kind_of(row) == kind and is_plain(row)]
    assert len(rows) >= 5
    check(together(rows), FIRST_AND_LAST, 1, tmp_path)


@pytest.mark.parametrize("row", list(stacks()))
def test_nor_does_it_in_stacks(row, tmp_path, monkeypatch):
    if not row.refused:  # the same trial as alone
        without_forks(monkeypatch)
    check(row, FIRST_AND_LAST[:1], 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_the_row_has_teeth(row, tmp_path):
    """Where nobody is isolated, the same module does let a client's data through.

    It says nothing about the package, and something about the table.
    """
    before, *after = (share(row, changed, tmp_path) for changed in (None, *FIRST_AND_LAST))
    moved_others = any(moved(before, world) != [c] for c, world in zip(FIRST_AND_LAST, after, strict=True))
    assert moved_others or any(difference(before.visible, world.visible) for world in after)


def test_a_module_without_memory_lets_nothing_through(tmp_path, monkeypatch):
    for train in (lambda *args: federate(*args[:2], 1, args[2]), share):
        before = train(Shape, None, tmp_path)
        take_as_tried(monkeypatch)
        for client in FIRST_AND_LAST:
            after = train(Shape, client, tmp_path)
            assert moved(before, after) == [client]
            assert difference(before.visible, after.visible) == ""


def test_names_are_no_two_rows_name():
    names = [row.__name__ for row in ROWS]
    assert len(names) == len(set(names)) >= 90


class DataAssigned(Shape):
    """In a stack, torch itself crashes where `.data` is replaced by a tensor of the map."""

    def begin(self):
        self.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)

    def scaled(self, loss):
        self.scale.data = 0.5 * (self.scale.data + loss.detach())
        return loss / self.scale


def test_data_assigned_in_a_stack_do_not_end_the_process(tmp_path):
    [code] = forked.end(forked.begin(federate, DataAssigned, None, 2, tmp_path))
    assert code >= 0, "the process was killed by a signal"
