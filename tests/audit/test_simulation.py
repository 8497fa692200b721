"""Layer B: what it looks at, how close it comes, planted sums and vectors (bits: `test_plants`)."""

import re
from pathlib import Path

import pytest

import lightning_fedq as fedq
from lightning_fedq import mechanisms
from lightning_fedq.audit import audit, bench
from lightning_fedq.audit.audit_case import AuditCase
from lightning_fedq.audit.cases import audit_cases
from lightning_fedq.audit.simulated import cohort_size
from lightning_fedq.audit.views import Finding
from lightning_fedq.privacy.account import Account
from tests.audit import plants


def found_in(mechanism, draws, **options):
    return {finding.view: finding for finding in audit(mechanism, draws, **options)}


@pytest.mark.parametrize("mechanism", plants.SPREAD, ids=lambda m: type(m).__name__)
def test_planted_bugs_in_sums_and_vectors_are_caught(mechanism):
    assert any(finding.alarm for finding in audit(mechanism, 60_000))


@pytest.mark.parametrize("mechanism", plants.CONCENTRATED, ids=lambda m: type(m).__name__)
def test_planted_clipping_is_caught_in_one_coordinate(mechanism):
    assert any(finding.alarm for finding in audit(mechanism, 600, concentrated=True))


def test_the_audit_is_not_vacuous():
    """With 10^6 draws, half of them to judge, the bound comes within 0.06 of the claim of two rounds."""
    found = found_in(fedq.LDPQ(1.0), 1_000_000)
    for view, copies in (
        ("one message", 1),
        ("one message, two rounds", 2),
        ("one message, two layers", 2),
        ("bits on the wire", 1),
        ("the sum of all messages", 1),
        ("a curious client", 1),
    ):
        assert copies - 0.06 < found[view].lower_bound <= found[view].claim + 1e-9


@pytest.mark.parametrize(
    ("mechanism", "draws", "options", "share"),
    [
        (fedq.LayeredGaussian(1.0, 1 / 32, entropy_code="elias"), 500_000, {}, 0.95),
        (fedq.GaussianNoise(1.0, 1 / 32), 400_000, {}, 0.95),
        (fedq.LayeredGaussian(1.0, 0.5, entropy_code="elias"), 1000, {"concentrated": True}, 0.7),
    ],
)
def test_claims_about_a_whole_vector_are_tested_closely(mechanism, draws, options, share):
    """The proven delta is a large share of what is claimed, and no more."""
    for finding in audit(mechanism, draws, **options):
        if finding.view in ("the released sum", "one message"):
            assert share * finding.claim < finding.lower_bound <= finding.claim
            assert finding.epsilon is not None


MISSING = [
    AuditCase(fedq.LDPQ(1.0), num_clients=8, only_sums=True, min_survivors=4),
    AuditCase(fedq.LDPQ(1.0), num_clients=8, only_sums=True, dropout_probability=0.6),
]


@pytest.mark.parametrize("case", MISSING, ids=["an active server", "clients drop out"])
def test_claims_that_count_on_clients_who_are_missing_are_refuted(case, monkeypatch):
    """And those of the report, which do not count on them, are not."""
    assert [finding for finding in audit(case, 100_000) if finding.alarm] == []

    class Trusting(Account):
        def claims(self, client=None):
            return {claim.adversary: claim for claim in self.run.mechanism.claims(self.run.context)}

    monkeypatch.setattr(bench, "Account", Trusting)
    refuted = {finding.view for finding in audit(case, 100_000) if finding.alarm}
    assert {"the sum of all messages", "a curious client"} & refuted


def test_a_share_of_a_rotated_sum_is_close_to_its_claim():
    """Every view of the case is looked at, and at least half of the claim is proven."""
    case = audit_cases(fedq.RotatedCoins(1.0, 1.0), 1024)[1]
    found = {finding.view: finding for finding in audit(case, 200_000)}
    assert set(found) == {
        "the sum of all messages",
        "the sum of all messages, two rounds",
        "a curious client",
        "a curious client, two rounds",
    }
    assert found["the sum of all messages"].verdict == found["a curious client"].verdict == "holds"


def test_a_claim_that_grants_everything_shows_nothing():
    assert Finding("sum", 1.0, 0.9, 1000, "", 0.0).verdict == "saw nothing"
    assert Finding("sum", 0.99, 0.9, 1000, "", 0.0).verdict == "holds"


def test_every_adversary_with_a_claim_is_looked_at():
    assert set(found_in(fedq.CorBin(1.0), 20_000)) == {
        "one message",
        "one message, two rounds",
        "one message, two layers",
        "bits on the wire",
        "all messages of a group",
        "the sum of all messages",
        "a curious client",
    }
    assert set(found_in(fedq.LayeredGaussian(1.0, 1.0), 20_000)) == {
        "the released sum",
        "the released sum, two rounds",
        "the released sum, two layers",
        "a curious client",
        "the grid of the released sum",
    }
    assert "the released sum" in found_in(fedq.DistributedDiscreteGaussian(1.0, 1.0, 0.1), 20_000)


def test_blocks_of_several_coordinates_have_a_claim_a_symbol():
    found = found_in(fedq.CPA(epsilon=1.0, lattice="A2", epsilon_scope="bit"), 20_000)
    assert found["one message"].claim == pytest.approx(1.0)
    assert not any(finding.alarm for finding in found.values())


@pytest.mark.parametrize(
    ("mechanism", "size"),
    [
        (fedq.LDPQ(1.0), 4),
        (fedq.CorBin(1.0), 4),
        (fedq.LayeredGaussian(1.0, 1.0), 3),
        (mechanisms.CorrelatedQuantization(), 4),  # one group, however many there are
    ],
    ids=repr,
)
def test_cohorts_have_no_group_or_two(mechanism, size):
    assert cohort_size(mechanism) == size


@pytest.mark.parametrize("mechanism", [fedq.FedAvg(), fedq.IrwinHall(1.0, 1.0)])
def test_nothing_claimed_is_nothing_audited(mechanism):
    assert audit(mechanism, 100_000) == ()


@pytest.mark.parametrize("options", [{"draws": 100}, {"draws": 63, "concentrated": True}])
def test_too_few_draws_are_refused(options):
    with pytest.raises(ValueError, match="draws must be >="):
        audit(fedq.LDPQ(1.0), **options)


def test_the_document_runs_and_its_table_has_every_mechanism(capsys):
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        exec(block, {})
    assert "the released sum" in capsys.readouterr().out
    for name in mechanisms.__all__:
        assert re.search(rf"^\| {name}(, one coordinate)? \|", text, re.M), name
