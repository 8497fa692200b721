"""Tables of README and docs that repeat code, and lists of mechanisms in the package, made from it.

python docs/generate.py          # `make tables`: write them
python docs/generate.py --check  # say which are out of date, as a test does
python docs/generate.py --audit LDPQ  # attack a mechanism as `fedq audit` does by default, renew its row

A table stands between `<!-- made by `make tables`: NAME -->` and `<!-- end -->`, and is replaced as a whole.
In the package, the names in `mechanisms/__init__.py` come from the files beside it. The table of
`fedq mechanisms` (`commands/mechanisms.json`) comes from what the classes do on real messages. The texts of
`--help` (`commands/shown.json`) come from the parsers.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import lightning_fedq
from lightning_fedq import cli, mechanisms
from lightning_fedq.commands import mechanism_row
from lightning_fedq.commands.configs import configs, fragments
from lightning_fedq.commands.mechanisms import SHIPPED
from lightning_fedq.commands.shown import FLAGS, SETTINGS, SHIPPED as HELP, WRITERS, writers
from lightning_fedq.mechanisms.bases.wrapper import Wrapper, public_names
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.mechanisms.interface.basics import MechanismBasics
from lightning_fedq.privacy.assumptions import KINDS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = (ROOT / "README.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md")))
LISTS = Path(inspect.getfile(mechanisms))
PUBLIC: dict[str, tuple[str, ...]] = {
    "leakage": ("LeakageBudget", "LeakageMonitor"),
    "data.datasets": (),
    "data.models": (),
    "flower": ("client_app", "server_app"),
    "mechanisms.interface": ("Adversary", "Mechanism", "Message", "PrivacyClaim", "RoundContext", "Unit"),
    "privacy.losses": ("GaussianLoss", "Loss", "NonPrivate", "PmfPairs", "RenyiLoss"),
    "wire.coding": ("Code", "FixedLength"),
    "keys.randomness": ("ClientRandomness", "PublicRandomness"),
    "mechanisms.interface.ranges": ("RangeRule",),
    "comparison": ("Comparison",),
    "data": ("Partition",),
    "mechanisms.contract_suite": ("check_mechanism",),
}
"""Further public names by module: () is its `__all__`. `lightning_fedq` has callbacks and mechanisms."""

HOOKS = {
    "homomorphic": (
        "required",
        "always: can `decode` work on the sum of the messages? Secure aggregation needs it",
    ),
    "encode": ("required", "always"),
    "decode": ("required", "always"),
    "code": ("required", "always"),
    "claims": ("required", "always; return `NonPrivate` for adversaries without a guarantee"),
    "fixed_cohort": ("False", "clients divide the noise among the whole cohort in advance"),
    "clips_norm": (
        "False",
        "`encode` clips updates to the l2 norm `clip_norm`, and `AdaptiveClip` may change this norm",
    ),
    "unbiased": ("True", "the decoded sum is biased for updates inside the range"),
    "joint": ("False", "`decode` is not a sum, but a vote or a threshold"),
    "order_free": ("`homomorphic`", "floating-point sums do not depend on how messages are grouped"),
    "separation": ("1", "noise is correlated over rounds"),
    "reuses_noise": ("False", "clients subtract noise of the previous round"),
    "has_central_noise": (
        "False",
        "a trusted server adds all noise, so clients may decide at random whether to take part",
    ),
    "has_exchangeable_clients": (
        "False",
        "a release depends on participation through updates only (secret cohorts)",
    ),
    "range_rule": ("None", "the mechanism has its own rule for the range of a round"),
    "core": ("itself", "the mechanism wraps another mechanism"),
    "tolerated_dropouts": ("None", "claims about the sum fail if too few clients answer"),
    "message_code": ("`code`", "the code of a message depends on randomness that client and server share"),
    "grid": ("None", "the decoded sum is computed in floats, whose low bits must not be released"),
    "num_symbols": ("the dimension", "a message is longer or shorter than the update"),
    "symbol_range": ("None", "symbols have tighter bounds than a fixed-length code implies"),
    "can_send": (
        "from `symbol_range`",
        "a server that knows a client's shared randomness can validate its message more strictly",
    ),
    "symbol_modulus": ("None", "symbols are residues, and sums are modular"),
    "noise_variance": ("None", "the variance has a public bound; adaptive ranges and plans use it"),
    "mean_error": ("from `noise_variance`", "the error depends on how similar the updates are"),
    "num_sent": ("`None`", "only the largest coordinates of an update are sent"),
    "longest_update": ("`None`", "whole updates are clipped by their norm"),
    "clipping_range": (
        "the range, or a norm around 0",
        "values are clipped around another centre or distance",
    ),
    "price_grows_with_dim": ("True", "a round can cost less privacy for a longer vector"),
    "gaussian_error": ("False", "the error of the decoded mean is exactly Gaussian"),
    "group_sizes": ("no groups", "clients share randomness with each other"),
    "level": ("None", "a `PrivacyTarget` can set `epsilon` or `noise_multiplier`"),
    "with_level": ("from `level`", "a target sets more than this parameter"),
    "example": ("usual values", "parameters without a default have unusual names"),
    "worst_pair": ("far outside the range on both sides", "a rotation or a selection changes the worst case"),
    "influence": ("None", "the maximum influence of one client is known"),
    "without_noise": ("refused", "a Byzantine client can omit the randomised response"),
    "advice": ("more noise, fewer rounds", "another change helps more"),
    "protection_groups": ("one group", "clients have different guarantees"),
    "claims_about": ("`claims`", "clients have different guarantees"),
}
"""Default of each hook of `Mechanism`, and when to write it; `hooks` finds the examples."""


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]], align: str = "") -> str:
    lines = [heads, [{"r": "---:"}.get(side, "---") for side in align.ljust(len(heads), "l")], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _first_line(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split()).removesuffix(".")


@lru_cache
def _kinds() -> list[type[Mechanism]]:
    """The mechanisms that the files of `mechanisms/` define: those in capitals, then by name."""
    files = [module.name for module in pkgutil.iter_modules(mechanisms.__path__) if not module.ispkg]
    found = [
        value
        for name in files
        for value in vars(import_module(f"{mechanisms.__name__}.{name}")).values()
        if inspect.isclass(value) and value.__module__ == f"{mechanisms.__name__}.{name}"
        if issubclass(value, Mechanism) and not inspect.isabstract(value)
    ]
    return sorted(found, key=lambda kind: _order(kind.__name__))


def _order(name: str) -> tuple[bool, str]:
    return not name.isupper(), name


def _names() -> str:
    """Imports and names of the mechanisms, as `mechanisms/__init__.py` has them."""
    files = {kind.__name__: kind.__module__.rpartition(".")[2] for kind in _kinds()}
    by_file: dict[str, list[str]] = {}
    for name, file in sorted(files.items(), key=lambda item: item[1]):
        by_file.setdefault(file, []).append(name)
    return "\n".join(
        [
            "if TYPE_CHECKING:",
            *(f"    from {mechanisms.__name__}.{file} import {', '.join(by_file[file])}" for file in by_file),
            "",
            "__all__ = [",
            *(f'    "{name}",' for name in files),
            "]",
        ]
    )


@lru_cache
def _described() -> list[dict[str, str]]:
    return [mechanism_row.describe(kind) for kind in _kinds()]


def _uses(path: Path) -> set[str]:
    return set(re.findall(r"lightning_fedq\.mechanisms\.(\w+)", path.read_text()))


def mechanisms_table() -> str:
    """Each mechanism with its description, its bits, and the digits run that shows it."""
    runs = {path.stem: _uses(path) for path in configs().values() if path.stem.startswith("digits_")}
    shown = {f"digits_{name}" for name in fragments()}
    return _table(
        ["mechanism", "description", "bits", "aggregatable", "run it"],
        (
            [
                f"`{kind.__name__}`",
                _first_line(kind).replace("|", r"\|"),
                f"{float(row['bits']):.2g}",
                row["sum"],
                ", ".join(f"`{run}`" for run, used in runs.items() if kind.__name__ in used and run in shown),
            ]
            for kind, row in zip(_kinds(), _described(), strict=True)
        ),
        align="llrll",
    )


def claims_table() -> str:
    """Epsilon of a unit against each adversary, and how far one Byzantine client moves the sum.

    Mechanisms without a guarantee are left out.
    """
    adversaries = [who.name.lower() for who in Adversary]
    columns = ["mechanism", "unit", *adversaries, "influence"]
    heads = ["mechanism", "unit", *(f"`{name}`" for name in adversaries), "max. influence"]
    claiming = (row for row in _described() if row["unit"] != "-")
    return _table(heads, ([row[name].replace("*", r"\*") for name in columns] for row in claiming))


def adversaries_table() -> str:
    """The adversaries: their name in code, their name for readers, and what each of them sees."""
    rows = ([f"`{who.name.lower()}`", who.title, who.sees] for who in Adversary)
    return _table(["name in code and configurations", "name in tables and pictures", "sees"], rows)


def assumptions_table() -> str:
    """Kinds of assumptions, and who is responsible for each."""
    return _table(["assumption", "responsible party"], ([kind.term.rstrip(":"), kind.duty] for kind in KINDS))


def _example(hook: str) -> str:
    """The shortest file with a mechanism, or a base of one, that writes the hook."""
    files = {
        inspect.getfile(base)
        for kind in _kinds()
        for base in kind.__mro__
        if issubclass(base, Mechanism)
        and base not in (MechanismBasics, Mechanism, Wrapper)
        and hook in vars(base)
    }
    if not files:
        return "-"
    shortest = min(files, key=lambda name: (len(Path(name).read_text()), name))
    return f"`{Path(shortest).relative_to(ROOT / 'lightning_fedq')}`"


def basics_table() -> str:
    """The names that a new mechanism needs."""
    return _hooks(MechanismBasics)


def hooks_table() -> str:
    """The names besides the basics, which few mechanisms write."""
    return _hooks(Mechanism)


def _hooks(kind: type[MechanismBasics]) -> str:
    """The public names of one class of the interface.

    Raises:
        ValueError: If `HOOKS` has no line for a name, or one for a name that is gone.
    """
    if set(public_names()) != set(HOOKS):
        raise ValueError(
            f"HOOKS in docs/generate.py and Mechanism differ in {set(public_names()) ^ set(HOOKS)}"
        )
    declared = {*kind.__annotations__, *vars(kind)}
    return _table(
        ["hook", "default", "implement it if", "example"],
        (
            [f"`{name}`", *HOOKS[name], _example(name)]
            for name in HOOKS
            if name in declared and HOOKS[name][0] != "required"
        ),
    )


def _comment(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("# ").removesuffix(".")


_BARE = re.compile(
    r"[;:,]?(?: and| as it stands| at this little noise| with 20 clients)?(?: it)? protects nothing"
    r"(?: \(`fedq privacy`\))?$"
)


def _files(shipped: dict[str, Path]) -> str:
    """The description of each, and whether its first line says that it protects nothing."""
    rows = ((name, _comment(path)) for name, path in shipped.items())
    return _table(
        ["name", "description", "guarantee"],
        ([f"`{name}`", _BARE.sub("", said), "none" if _BARE.search(said) else ""] for name, said in rows),
    )


def configs_table() -> str:
    """The complete runs, without those of a mechanism on digits that protect nothing."""
    of_mechanisms = {f"digits_{name}" for name in fragments()}
    shown = configs().items()
    return _files(
        {name: path for name, path in shown if name not in of_mechanisms or not _BARE.search(_comment(path))}
    )


def fragments_table() -> str:
    """The fragments that are not a run on digits by the same first line."""
    runs = {_comment(path) for path in configs().values()}
    return _files({name: path for name, path in fragments().items() if _comment(path) not in runs})


def commands_table() -> str:
    """Commands of `fedq`, with their descriptions."""
    every = {**cli.TRAINING, **cli.OTHERS}
    return _table(["command", "description"], ([f"`fedq {name}`", text] for name, text in every.items()))


def _public() -> Iterator[tuple[str, list[str]]]:
    """Public names by module."""
    yield "lightning_fedq", ["__version__", *lightning_fedq.__all__]
    for short, names in PUBLIC.items():
        module = f"lightning_fedq.{short}"
        yield module, list(names or import_module(module).__all__)


def names_table() -> str:
    """Every public name, by module."""
    rows = ([f"`{module}`", ", ".join(f"`{name}`" for name in names)] for module, names in _public())
    return _table(["module", "names"], rows)


TABLES: dict[str, Callable[[], str]] = {
    name.removesuffix("_table"): value for name, value in list(vars().items()) if name.endswith("_table")
}
TABLES.pop("_table", None)
_REGION = re.compile(r"(<!-- made by `make tables`: (\w+) -->\n).*?(<!-- end -->)", re.S)
_LISTS = re.compile(r"(# made by `make tables`\n).*?(# end\n)", re.S)


def renewed(text: str) -> str:
    """The text of a page with its tables made anew.

    Raises:
        KeyError: If a page asks for a table that there is not.
    """
    return _REGION.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def _help(command: str) -> str:
    """Help of a command's own parser, 100 columns wide."""
    shown, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            cli.run(import_module(cli.command_module(command)).main, f"fedq {command}", ["--help"])
    finally:
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    return shown.getvalue()


def _flags(check: bool) -> dict[str, str]:
    """Help of Lightning's parser for `fedq fit NAME`. Other packages than it is from can't check it."""
    kept: dict[str, str] = json.loads(HELP.read_text())
    if check and kept[WRITERS] != writers():
        return {name: kept[name] for name in (FLAGS, WRITERS)}
    # in a process of its own: `typing` writes a union as it was written first
    code = "from lightning_fedq.commands.run import FedqCLI; FedqCLI(['fit', '--help'])"
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return {FLAGS: done.stdout, WRITERS: writers()}


def _settings() -> dict[str, str]:
    """Arguments of every public class by its name, with spaces between them."""
    kinds = {name: getattr(lightning_fedq, name) for name in sorted(lightning_fedq.__all__)}
    return {
        name: " ".join(inspect.signature(kind).parameters)
        for name, kind in kinds.items()
        if inspect.isclass(kind)
        and not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind).parameters.values())
    }


def made(check: bool) -> Iterator[tuple[Path, str]]:
    """Every file with something that is made here, and what it should hold."""
    yield LISTS, _LISTS.sub(lambda found: f"{found[1]}{_names()}\n{found[2]}", LISTS.read_text())
    shown = {**mechanism_row.SETTING, "mechanisms": _described()}
    yield SHIPPED, json.dumps(shown, indent=1, ensure_ascii=False) + "\n"
    shown = {**{name: _help(name) for name in cli.OTHERS}, **_flags(check), SETTINGS: _settings()}
    yield HELP, json.dumps(shown, indent=1, ensure_ascii=False) + "\n"
    for page in PAGES:
        yield page, renewed(page.read_text())


def audit_row(found: Sequence[Sequence[str]]) -> str:
    """One line of the audit's page of the lines that `fedq audit` prints for a mechanism: the first of them,
    and of all how many hold, saw nothing, or are refuted."""
    name, view, claim, bound, _, _, verdict, *_ = found[0]
    if verdict.startswith("nothing to refute"):
        return f"| {name} |  | {claim} |  |  |  |\n"
    verdicts = Counter(row[6].partition(":")[0].partition(" in ")[0] for row in found)
    holds = f"{verdicts['holds']}{', refuted: ' + str(verdicts['refuted']) if verdicts['refuted'] else ''}"
    return (
        f"| {name.partition(',')[0]} | {view} | {claim} | {bound} | {holds} | {verdicts['saw nothing']} |\n"
    )


def with_audit(text: str, name: str) -> str:
    """The page of the audit with the row of one mechanism made anew: ten seconds of CPU for every case."""
    from lightning_fedq.audit.commands.audit import ALPHA, KNOWLEDGE_SHARE, rows

    alpha = (1.0 - KNOWLEDGE_SHARE) * ALPHA / len(mechanisms.__all__)
    made = audit_row(list(rows(name, 1_000_000, alpha)))
    head, table, rest = re.split(
        r"(?<=\| --- \| --- \| --- \| ---: \| ---: \| ---: \|\n)((?:\|.*\n)+)", text, maxsplit=1
    )
    by_name = {line.split(" ", 2)[1]: line for line in table.splitlines(keepends=True)} | {name: made}
    return "".join([head, *(by_name[key] for key in sorted(by_name, key=_order)), rest])


def main(argv: Sequence[str]) -> int:
    """Write or check what is made here."""
    if "--audit" in argv:
        for name in argv[1:]:
            page = DOCS / "audit.md"
            page.write_text(with_audit(page.read_text(), name))
        return 0
    check = "--check" in argv
    old = [(path, text) for path, text in made(check) if not path.exists() or path.read_text() != text]
    for path, text in old:
        state = "out of date, run `make tables`" if check else "renewed"
        print(f"{path.relative_to(ROOT)}: {state}")
        if not check:
            path.write_text(text)
            if path == LISTS:  # the tables then speak of other names than this process has imported
                return subprocess.call([sys.executable, __file__])
    return int(bool(old) and check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
