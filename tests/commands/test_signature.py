"""A command is a typed function: its signature is the command line, its docstring the help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from lightning_fedq.commands.signature import run

CALLS: list[dict[str, Any]] = []


def paint(
    walls: Annotated[Sequence[str], "WALL"],
    *,
    set_: Annotated[Sequence[float], "LITRES"] = (),
    tints: Sequence[float] = (0.5, 0.25),
    colour: Literal["red", "blue"] = "red",
    at_most: int | None = None,
    dry: bool = False,
    out: Path = Path("house"),
) -> int:
    """Paint walls, 100% of them.

    Args:
        walls: Walls to paint,
            on the street's side.
        set_: Litres of paint.
        tints: Shares of white.
        colour: Colour of the paint.
        at_most: Limit on the coats.
        dry: Wait until it is dry.
        out: Folder of the house.

    Examples:
        paint north --colour blue
    """
    CALLS.append(dict(locals()))
    return 3


def tell(name: str = "nobody") -> None:
    """Tell a name.

    Args:
        name: Name to tell.
    """
    CALLS.append({"name": name})


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("north", {}),
        ("north east --dry --colour=blue", {"walls": ["north", "east"], "dry": True, "colour": "blue"}),
        ("north --set 1 2 --set 3", {"set_": [1.0, 2.0, 3.0]}),
        ("north --tints --at-most 4", {"tints": [], "at_most": 4}),
        ("north --at_most=4 --out=a_b", {"at_most": 4, "out": Path("a_b")}),
    ],
)
def test_words_are_arguments(words: str, changed: dict[str, Any]) -> None:
    CALLS.clear()
    assert run(paint, "paint", words.split()) == 3
    usual = {"walls": ["north"], "set_": [], "tints": (0.5, 0.25), "colour": "red"}
    assert [{**usual, "at_most": None, "dry": False, "out": Path("house"), **changed}] == CALLS


def test_the_docstring_is_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        run(paint, "paint", ["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for line in (
        "Paint walls, 100% of them.",
        "WALL Walls to paint, on the street's side.",
        "--set [LITRES ...] Litres of paint.",
        "Shares of white (default: 0.5 0.25).",
        "--at-most AT_MOST Limit on the coats.",
        "--out OUT Folder of the house (default: house).",
        "examples: paint north --colour blue",
    ):
        assert line in told, told


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("", "the following arguments are required: WALL. paint --help lists the options"),
        ("north --at-most many", "argument --at-most: invalid int value: 'many'. paint --help"),
        ("north --colour green", "invalid choice: 'green'"),
        ("north --wet", "unrecognized arguments: --wet"),
    ],
)
def test_what_does_not_fit_is_a_line(words: str, refused: str) -> None:
    with pytest.raises(ValueError, match=refused) as error:
        run(paint, "paint", words.split())
    assert "\n" not in str(error.value)


def test_the_first_of_several_is_chosen_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    CALLS.clear()
    assert run({"paint": paint, "tell": tell}, "house", ["tell", "mine"]) == 0
    assert run({"paint": paint, "tell": tell}, "house", ["tell"]) == 0
    assert CALLS == [{"name": "mine"}, {"name": "nobody"}]
    with pytest.raises(SystemExit, match="0"):
        run({"paint": paint, "tell": tell}, "house", ["--help"])
    assert "Tell a name." in capsys.readouterr().out
