"""Plants in noise that is handed on: who knows a share, and how much of it there is."""

import pytest

from lightning_fedq.audit import audit
from lightning_fedq.audit.commands import audit as command
from lightning_fedq.audit.knowledge import audit_knowledge
from lightning_fedq.functional.noise.discrete_gaussian import discrete_gaussian
from lightning_fedq.mechanisms import HandedOnGaussian, handed_on_gaussian
from lightning_fedq.mechanisms.interface import Adversary

CASE = command.cases(HandedOnGaussian)[0]


def known_to_members(producer, successor, since, rand):
    return rand.members(f"{producer} {successor} {since}").words64


def known_to_everybody(producer, successor, since, rand):
    return rand.public(f"{producer} {successor} {since}").words64


def known_to_the_server(producer, successor, since, rand):
    return rand.shared_with_server(producer, f"{successor} {since}").words64


@pytest.mark.parametrize(
    ("share", "seen_by"),
    [
        (None, []),
        (known_to_the_server, ["secagg_server"]),
        (known_to_members, ["secagg_server", "client"]),
        (known_to_everybody, ["outsider", "secagg_server", "client"]),
    ],
)
def test_who_knows_a_share_is_found_out(share, seen_by, monkeypatch):
    if share is not None:
        monkeypatch.setattr(handed_on_gaussian, "_share", share)
    against = (Adversary.OUTSIDER, Adversary.SECAGG_SERVER, Adversary.CLIENT)
    found = audit_knowledge(CASE, 16, against=against)
    assert len(found) == 3
    assert [finding.view.rpartition(", ")[2] for finding in found if finding.alarm] == seen_by


class Quiet(HandedOnGaussian):
    """Shares of half the size that is claimed."""

    def _noise(self, count, words):
        return discrete_gaussian(0.5 * self.share_std, count, words)


def test_half_of_the_noise_is_refuted_and_the_whole_is_not():
    m = CASE.mechanism
    assert isinstance(m, HandedOnGaussian)
    assert not any(finding.alarm for finding in audit(m, 100_000))
    quiet = Quiet(m.clip_norm, m.local_sigma, m.granularity, m.bits, num_cohorts=m.num_cohorts)
    assert any(finding.alarm for finding in audit(quiet, 100_000))
