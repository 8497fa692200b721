"""Undo: last in, first out, and only once."""

from types import SimpleNamespace

from lightning_fedq.clients.undo import Undo


class Owner:
    name = "of the class"


def test_attributes_come_back():
    undo, own, inherited = Undo(), SimpleNamespace(name="own"), Owner()
    for owner in (own, inherited, own):
        undo.replace(owner, "name", "new")
    assert own.name == inherited.name == "new"
    undo.close()
    assert own.name == "own"
    assert inherited.name == "of the class" and not vars(inherited)


def test_the_last_thing_is_undone_first_and_once():
    undo, seen = Undo(), []
    for number in range(3):
        undo.callback(lambda number=number: seen.append(number))
    undo.close()
    undo.close()
    assert seen == [2, 1, 0]
