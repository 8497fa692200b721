"""Tables of README and docs that repeat code, made from it.

python docs/generate.py          # `make tables`: write them
python docs/generate.py --check  # say which are out of date; a test does so

A table stands between `<!-- made by `make tables`: NAME -->` and `<!-- end -->`, and is replaced as a whole.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import lightning_fedq
from lightning_fedq import cli, mechanisms
from lightning_fedq.commands.configs import configs, fragments
from lightning_fedq.commands.mechanisms import HEADS, describe
from lightning_fedq.core import Mechanism

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
PUBLIC = (
    *("callbacks", "mechanisms", "data", "datasets", "models", "ranges", "rounds", "aggregation", "secagg"),
    *("privacy.target", "privacy.report", "core", "losses", "randomness", "wire.coding"),
    "testing",
)
"""Modules whose names are public, beside those of `lightning_fedq` itself."""

HOOKS = {
    "homomorphic": ("must be said", "may `decode` be given the sum of the messages? Secure aggregation asks"),
    "encode": ("must be written", "always"),
    "decode": ("must be written", "always"),
    "code": ("must be written", "always"),
    "claims": ("must be written", "always; `NonPrivate` where there is nothing to promise"),
    "fixed_cohort": ("False", "noise is shared out over the whole cohort in advance"),
    "unbiased": ("True", "the decoded sum is meant to be off on average, for updates inside the range"),
    "joint": ("False", "`decode` is no sum: a vote, a threshold"),
    "tolerated_dropouts": ("None", "claims about the sum are void with fewer answers"),
    "message_code": ("`code`", "a message's code conditions on what client and server share"),
    "grid": ("None", "the decoded sum comes from floats, whose low bits must not leave"),
    "num_symbols": ("the dimension", "a message is longer or shorter than the update"),
    "symbol_range": ("None", "symbols have tighter bounds than a fixed-length code says"),
    "symbol_modulus": ("None", "symbols are residues, and sums are modular"),
    "noise_variance": ("None", "there is a bound; adaptive ranges and plans use it"),
    "mean_error": ("from `noise_variance`", "the error depends on how alike the updates are"),
    "gaussian_error": ("False", "the error of the decoded mean is exactly Gaussian"),
    "group_sizes": ("all alone", "clients share randomness with each other"),
    "at_level": ("refused", "a `PrivacyTarget` could set a parameter"),
    "example": ("usual values", "parameters without a default have unusual names"),
    "audit_cases": ("itself", "a claim is about whole vectors, or one word decides a symbol"),
    "worst_pair": ("far outside on both sides", "a rotation or a selection turns the worst case round"),
    "lever": ("None", "a lying client's reach is known"),
    "without_noise": ("refused", "a liar can leave the coin out"),
    "advice": ("more noise, fewer rounds", "something else helps more"),
    "protection_groups": ("one group", "clients are protected differently"),
    "claims_about": ("`claims`", "clients are protected differently"),
}
"""Default of each hook of `Mechanism`, and when to write it; `hooks` finds the examples."""


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]], align: str = "") -> str:
    lines = [heads, [{"r": "---:"}.get(side, "---") for side in align.ljust(len(heads), "l")], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _first_line(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split()).removesuffix(".")


def _kinds() -> list[type[Mechanism]]:
    return [getattr(mechanisms, name) for name in mechanisms.__all__]


@lru_cache
def _described() -> list[dict[str, str]]:
    return [describe(kind) for kind in _kinds()]


def _uses(path: Path) -> set[str]:
    return set(re.findall(r"lightning_fedq\.mechanisms\.(\w+)", path.read_text()))


def mechanisms_table() -> str:
    """What each mechanism is, what it costs, and the digits run that shows it."""
    runs = {path.stem: _uses(path) for path in configs().values() if path.stem.startswith("digits_")}
    shown = {f"digits_{name}" for name in fragments()}
    return _table(
        ["mechanism", "what it is", "bits", "sum", "run it"],
        (
            [
                f"`{kind.__name__}`",
                _first_line(kind),
                f"{float(row['bits']):.2g}",
                row["sum"],
                ", ".join(f"`{run}`" for run, used in runs.items() if kind.__name__ in used and run in shown),
            ]
            for kind, row in zip(_kinds(), _described(), strict=True)
        ),
        align="llrll",
    )


def claims_table() -> str:
    """Epsilon of a unit against each adversary."""
    heads = ["mechanism", "bits", "sum", "unit", *HEADS.values()]
    return _table(
        heads, ([row[head].replace("*", r"\*") for head in heads] for row in _described()), align="lr"
    )


def adversaries_table() -> str:
    """Column heads of the table of claims, in words."""
    return _table(["column", "who"], ([head, adversary.value] for adversary, head in HEADS.items()))


def sources_table() -> str:
    """Where each mechanism comes from."""
    return _table(["mechanism", "source"], ([f"`{row['mechanism']}`", row["paper"]] for row in _described()))


def _example(hook: str) -> str:
    """The shortest file with a mechanism, or a base of one, that writes the hook."""
    files = {
        inspect.getfile(base)
        for kind in _kinds()
        for base in kind.__mro__
        if issubclass(base, Mechanism) and base is not Mechanism and hook in vars(base)
    }
    if not files:
        return "-"
    shortest = min(files, key=lambda name: (len(Path(name).read_text()), name))
    return f"`{Path(shortest).relative_to(ROOT / 'lightning_fedq')}`"


def hooks_table() -> str:
    """What a mechanism may write, in the order of `Mechanism`.

    Raises:
        ValueError: If `HOOKS` and the public names of `Mechanism` differ.
    """
    declared = dict.fromkeys([*Mechanism.__annotations__, *vars(Mechanism)])
    names = [name for name in declared if not name.startswith("_")]
    if set(names) != set(HOOKS):
        raise ValueError(f"HOOKS in docs/generate.py and Mechanism differ in {set(names) ^ set(HOOKS)}")
    return _table(
        ["hook", "default", "write it when", "example"],
        ([f"`{name}`", *HOOKS[name], _example(name)] for name in HOOKS),
    )


def _comment(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("# ").removesuffix(".")


def _files(shipped: dict[str, Path]) -> str:
    return _table(["name", "what it is"], ([f"`{name}`", _comment(path)] for name, path in shipped.items()))


def configs_table() -> str:
    """The complete runs."""
    return _files(configs())


def fragments_table() -> str:
    """The fragments."""
    return _files(fragments())


def commands_table() -> str:
    """What `fedq` can do."""
    every = {**cli.TRAINING, **cli.OTHERS}
    return _table(["command", "what it does"], ([f"`fedq {name}`", text] for name, text in every.items()))


def _public() -> Iterator[tuple[str, list[str]]]:
    """Public names by module: `__all__`, or else the public classes and functions that a module defines."""
    yield "lightning_fedq", ["__version__", *lightning_fedq.__all__]
    for short in PUBLIC:
        module = import_module(f"lightning_fedq.{short}")
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__ == module.__name__
        ]
        yield module.__name__, list(names)


def names_table() -> str:
    """Every public name, by module."""
    rows = ([f"`{module}`", ", ".join(f"`{name}`" for name in names)] for module, names in _public())
    return _table(["module", "names"], rows)


TABLES: dict[str, Callable[[], str]] = {
    name.removesuffix("_table"): value for name, value in list(vars().items()) if name.endswith("_table")
}
TABLES.pop("_table", None)
_REGION = re.compile(r"(<!-- made by `make tables`: (\w+) -->\n).*?(<!-- end -->)", re.S)


def renewed(text: str) -> str:
    """The text of a page with its tables made anew.

    Raises:
        KeyError: If a page asks for a table that there is not.
    """
    return _REGION.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def outdated() -> list[Path]:
    """Pages whose tables are not what the code says."""
    return [page for page in PAGES if renewed(text := page.read_text()) != text]


def main(argv: Sequence[str]) -> int:
    """Write or check the tables."""
    old = outdated()
    for page in old:
        state = "out of date, run `make tables`" if "--check" in argv else "renewed"
        print(f"{page.relative_to(ROOT)}: {state}")
        if "--check" not in argv:
            page.write_text(renewed(page.read_text()))
    return int(bool(old) and "--check" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
