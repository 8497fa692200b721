"""The package of `examples/third_party` is installed, and its mechanism works wherever one of ours does."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fedq import mechanisms
from lightning_fedq.commands.mechanism_text import parse_mechanism
from lightning_fedq.mechanisms.registry import class_path, declared, installed, mechanism_class
from tests.contract.test_check_mechanism import TinyLever

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "examples" / "third_party"
CONFIG = PACKAGE / "digits_sqkr.yaml"
COMMANDS = """
import glob, sys
import pytest
from lightning_fedq.cli import main
tests, *lines = sys.stdin.read().splitlines()
assert pytest.main(["-q", "-p", "no:cacheprovider", tests]) == 0
for line in lines:
    print("$ fedq", line, flush=True)
    words = [found for word in line.split() for found in (glob.glob(word) or [word])]
    status = main(words)
    assert status == 0, (line, status)
"""
SMALL = "--trainer.max_epochs=1 --data.init_args.num_train=200"
Say = Callable[[dict[str, str]], dict[str, str]]
LINES = {
    "trained": f"fit {CONFIG} {SMALL}",
    "listed": "mechanisms SQKR LDPQ",
    "planned": f"privacy {CONFIG}",
    "spent": "privacy checkpoints/*.ckpt",
    "audited": "audit SQKR --draws 1e6",
    "compared": "compare --mechanisms SQKR --on digits --rounds 2 --epsilon 8 --adversary server "
    "--seeds 1 --bare --jobs 1",
}
MORE = {"ranked": "plan --epsilon 8 --clients 1000 --params 500 --rounds 1 --adversary server"}


@pytest.fixture(scope="module")
def say(tmp_path_factory):
    """Runs commands where the package is installed by pip, in one process; its own tests run first."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("work")
    here = {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "COLUMNS": "150"}

    def run(*command, lines=()):
        given = {"cwd": folder, "env": {**os.environ, **here}, "input": "\n".join(lines)}
        command = [sys.executable, *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    offline = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run("-m", "pip", "install", *offline, "--target", str(site), str(PACKAGE))

    def say(lines):
        said = run("-c", COMMANDS, lines=(str(PACKAGE / "tests"), *lines.values()))
        its_tests, *parts = said.split("$ fedq ")
        return {"tests": its_tests, **dict(zip(lines, parts, strict=True))}

    return say


@pytest.fixture(scope="module")
def printed(say):
    """What each command says."""
    return say(LINES)


def test_its_own_tests_pass(printed):
    assert " passed" in printed["tests"] and "skipped" not in printed["tests"]


def test_every_command_knows_it(printed):
    listed = printed["listed"]
    assert "SQKR" in listed and "message" in listed and "PairedCoins" not in listed
    for command in ("planned", "spent"):
        said = " ".join(printed[command].split())
        assert "mechanism SQKR;" in said and "settings clip_norm=1.0, epsilon=4.0, bits=3" in said, command
    assert "holds" in printed["audited"] and "refuted:" not in printed["audited"]


def test_it_is_compared_by_one_command(printed):
    """In its own row, below the estimate without privacy."""
    table = printed["compared"].partition("digits: test_acc")[2]
    rows = {line.strip().partition("  ")[0]: line for line in table.splitlines()}
    assert "FedAvg, no finite ε" in rows
    assert re.search(r"\d\.\d", rows["SQKR"]) and " ± " not in rows["SQKR"]  # one seed


@pytest.mark.slow
def test_the_longer_commands_know_it_too(say):
    printed = say(MORE)
    assert "SQKR" in printed["ranked"].partition("not possible")[0]


def declare(folder, name, **points):
    """Write the metadata of an installed package with entry points."""
    info = folder / f"{name}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"{key} = {value}" for key, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[lightning_fedq.mechanisms]", *lines]) + "\n")


@pytest.mark.parametrize(
    ("point", "told"),
    [
        ({"Lost": "not_there:Lost"}, r"mechanism Lost of other \(not_there:Lost\) is left out: ModuleNot"),
        ({"Lost": "json:Lost"}, "Lost of other .* is left out: AttributeError"),
        ({"dumps": "json:dumps"}, "must be a subclass of Mechanism"),
        ({"Lever": "tests.contract.test_check_mechanism:TinyLever"}, "must have the name of its class"),
        ({"LDPQ": "tests.contract.test_check_mechanism:LDPQ"}, None),
    ],
)
def test_what_does_not_import_is_named_and_left_out(point, told, tmp_path, monkeypatch):
    declare(tmp_path, "other", **point)
    monkeypatch.syspath_prepend(tmp_path)
    declared.cache_clear()
    try:
        if told is None:  # the very class of this package
            assert set(installed()) == set(mechanisms.__all__)
        else:
            with pytest.warns(UserWarning, match=told):
                assert set(installed()) == set(mechanisms.__all__)
    finally:
        declared.cache_clear()


def test_nobody_takes_the_name_of_ours(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(
        "from lightning_fedq.mechanisms import LDPQ as _LDPQ\nclass LDPQ(_LDPQ):\n    pass\n"
    )
    declare(tmp_path, "other", LDPQ="elsewhere:LDPQ")
    monkeypatch.syspath_prepend(tmp_path)
    declared.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"mechanisms\.ldpq has a mechanism of this name already"):
            assert installed()["LDPQ"] is mechanisms.LDPQ
    finally:
        declared.cache_clear()


def test_a_class_path_is_enough():
    path = "tests.contract.test_check_mechanism.TinyLever"
    assert mechanism_class(path) is TinyLever and class_path(TinyLever) == path
    assert class_path(mechanisms.LDPQ) == "lightning_fedq.mechanisms.LDPQ"
    for wrong, told in (("Nonsense", "there is no mechanism Nonsense"), ("no.such", "can't be imported")):
        with pytest.raises(ValueError, match=told):
            mechanism_class(wrong)
    with pytest.raises(ValueError, match=r"json\.dumps must be a subclass of Mechanism"):
        mechanism_class("json.dumps")


def test_a_checkpoint_imports_nothing_but_what_is_named():
    text = repr(TinyLever(1.0))
    with pytest.raises(ValueError, match=r"is not installed.* --mechanism PACKAGE\.CLASS"):
        parse_mechanism(text)
    assert parse_mechanism(text, TinyLever) == TinyLever(1.0)
    with pytest.raises(ValueError, match="Can't read the mechanism"):
        parse_mechanism("LDPQ(speed=3)")
