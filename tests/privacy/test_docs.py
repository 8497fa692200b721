"""The code in docs/threat_model.md runs, and docs/bench.md has the accountant's figures."""

import ast
import re
from pathlib import Path

import pytest
import torch

import lightning_fedq.privacy
from lightning_fedq.mechanisms import LDPQ, AugCorBin
from lightning_fedq.mechanisms.contract_suite import make_context
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, RoundContext
from lightning_fedq.privacy import account, report, run, secret_row
from lightning_fedq.privacy.assumptions import kinds
from lightning_fedq.secagg import SecAgg, terms
from tests.contract.test_mechanisms import ROWS
from tests.described import Setting

DOCS = Path(__file__).parents[2] / "docs"


def test_every_block_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "threat_model.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        exec(block, {})
    assert "# What this run will protect, and from whom" in capsys.readouterr().out


@pytest.mark.slow  # the same functions as `test_accounting.test_table_of_the_specification`, 3 s
def test_the_tables_numbers_are_ours():
    """Every cell of the table beside the specification."""
    checked = 0
    for line in (DOCS / "bench.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").replace("\\|", "").split(" | ")]
        if len(cells) != 10 or not re.fullmatch(r"[\d.e]+", cells[0]):
            continue
        clients, gamma, alone, epsilon, dim, rounds = (float(cell) for cell in cells[:6])
        assert behind(LDPQ(epsilon), int(alone), int(dim), int(rounds)) == pytest.approx(
            float(cells[7]), rel=2e-3
        )
        if cells[9][0] not in "-∞":
            found = behind(AugCorBin(epsilon, 5, gamma), int(clients), int(dim), int(rounds))
            assert found == pytest.approx(float(cells[9]), rel=2e-3)
        if re.match(r"[.\d]", cells[6]):
            assert float(cells[7]) == pytest.approx(float(cells[6]), rel=5e-3)
        checked += 1
    assert checked == 6


def behind(mechanism, clients, dim, rounds):
    groups, start = [], 0
    for size in mechanism.group_sizes(clients):
        groups.append(tuple(range(start, start + size)))
        start += size
    one = torch.ones(1).double()
    setting = Setting(
        RoundContext(0, tuple(groups), (dim,), 0 * one, one), rounds, 1e-5, secure_aggregation=True
    )
    return setting.spent(setting.claims(mechanism)[Adversary.SECAGG_SERVER], rounds).epsilon


# ---- SECURITY.md names every assumption of a privacy report, and no others -----------------------------
PAGE = (Path(lightning_fedq.privacy.__file__).parents[2] / "SECURITY.md").read_text()


def table():
    """Words of assumptions, and who sees to them, row by row."""
    section = PAGE.split("## What has to hold")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return [(set(re.findall(r"`([^`]+)`", words)), who.strip()) for words, who in rows]


def of_mechanisms():
    claims = [claim for row in ROWS for claim in row.claims(make_context(row, tuple(range(12))))]
    return {text for claim in claims if not isinstance(claim.loss, NonPrivate) for text in claim.assumptions}


def of_account():
    """What `Account` adds: texts of its source, or their names, that are handed to what adds assumptions."""
    tree, found = ast.parse(Path(account.__file__).read_text()), set()
    named = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named.setdefault(node.targets[0].id, []).append(node.value)
    added = {
        "_add_assumption": {1: ""},
        "_claim_of_wider": {2: account._WIDER},
        "_reduced": {2: "", 4: account._WIDER},
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in added:
            for place, behind in added[node.func.id].items():
                one = node.args[place]
                for value in named.get(one.id, []) if isinstance(one, ast.Name) else [one]:
                    found |= {f"{_text(value)}, {behind}" if behind else _text(value)}
        if isinstance(node, ast.FunctionDef) and node.name == "_colluders":
            found |= {
                _text(one.value)
                for one in ast.walk(node)
                if isinstance(one, ast.Return) and isinstance(one.value, ast.JoinedStr)
            }
    return {text for text in found if text.strip(", ") and "set max_dropped_clients" not in text}


def _text(value):
    parts = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)]
    return "".join(part for part in parts if isinstance(part, str))


def of_protocols():
    kinds = [SecAgg(), SecAgg(simulation="counted"), SecAgg(active=True)]
    sparse = SecAgg(degree=58, max_colluding_fraction=0.05, max_dropped_fraction=0.1)
    assert isinstance(sparse, terms.SecAgg)
    said = {kind.statement for kind in kinds} | {
        sparse.guarantee(1000, 1000, 10).statement,
        SecAgg(max_colluding_fraction=0.3).guarantee(1000, 100, 10).statement,
    }
    return said | {run.ASSUMED.statement, "masks run"}


SENTENCES = sorted(
    of_mechanisms() | of_account() | of_protocols() | set(secret_row.CONDITIONS) | {report.OWN_CODE}
)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_assumption_has_its_row(sentence):
    assert any(words in sentence for known, _ in table() for words in known), sentence


def test_a_report_names_the_same_words_and_who_sees_to_them():
    """`assumptions.json`, of which the short documents are drawn, beside the table of SECURITY.md."""
    said = {frozenset(known): who for known, who in table()}
    assert {frozenset(kind.words) for kind in kinds()} == set(said)
    for kind in kinds():
        who = said[frozenset(kind.words)]
        parts = {"library": "Library", "you": "You", "nobody": "Nobody"}
        assert (kind.who == "") == who.startswith("Nothing")
        for short, long in parts.items():
            if re.search(rf"\b{short}\b", kind.who.partition(";")[0]):
                assert who.startswith(long), kind


def test_each_row_is_of_an_assumption_and_says_who():
    for known, who in table():
        assert re.search(r"You|Library|Nobody|Nothing", who)
        for words in known:
            assert any(words in sentence for sentence in SENTENCES), words
