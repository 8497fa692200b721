"""Everything that must be fresh is, in real rounds and fits; faults that repeat a key are seen."""

from dataclasses import replace

import pytest

from lightning_fedq.commands.mechanism_row import example
from lightning_fedq.keys.randomness import RootKeys, Stream
from lightning_fedq.mechanisms.registry import installed, mechanism_class
from lightning_fedq.rounds import plan as plans
from lightning_fedq.secagg import SecAgg, client, messages
from tests.audit.fresh import (
    FITS,
    KINDS,
    Watch,
    judge,
    of_fits,
    of_mechanisms,
    play_fit,
    play_rounds,
    watching,
)


def test_every_mechanism_draws_afresh():
    table, wrong = judge(of_mechanisms(list(installed())))
    assert wrong == []
    of_fits_only = {"cohort", "DPSGD", "draws of a step"}
    assert {row.kind for row in table if not row.keys} == of_fits_only


def test_fits_of_two_kinds_draw_afresh():
    for name in (next(iter(FITS)), "DP-SGD alone"):
        assert judge([play_fit(name, which) for which in ("first fit", "second fit")])[1] == []


@pytest.mark.slow  # all kinds of fits, each resumed: 10 s
def test_every_fit_draws_afresh_and_every_kind_is_seen(tmp_path):
    watches, missing = of_fits(tmp_path)
    table, wrong = judge(watches)
    assert wrong == [] and missing == []
    assert {row.kind for row in table if not row.keys} == {"members", "shared_with_server", "peer"}
    assert len({watch.fit for watch in watches}) == len(watches)


def test_the_table_names_every_kind_once():
    assert len(set(KINDS.values())) == len(KINDS)


def test_a_watch_leaves_nothing_behind():
    before = Stream.__init__
    with watching(Watch()):
        assert Stream.__init__ is not before
    assert Stream.__init__ is before


# ---- faults, planted ------------------------------------------------------------------------------------


def masked():
    mechanism = example(mechanism_class("DistributedDiscreteGaussian"))
    return judge([play_rounds(mechanism, SecAgg(), lambda: RootKeys(), "masked")])[1]


def test_pairwise_mask_keys_that_ignore_the_round(monkeypatch):
    """Each client's mask key from its number alone, and no round in the pair's key."""
    whole = messages.mask_key

    secret = messages.mask_secret
    monkeypatch.setattr(messages, "mask_secret", lambda t, c, r: secret(_first(t), c, bytes([c + 1]) * 32))
    monkeypatch.setattr(messages, "mask_key", lambda s, o, context, *rest: whole(s, o, bytes(32), *rest))
    assert any("pair mask: a key comes again in another attempt" in text for text in masked())


def _first(terms):
    return replace(terms, round=0, attempt=0)


def test_self_masks_that_ignore_the_round(monkeypatch):
    monkeypatch.setattr(client, "self_mask_key", lambda context, client, seed: bytes([client]) * 32)
    assert any("self mask: a key comes again in another attempt" in text for text in masked())


def test_one_key_for_cohorts_of_all_rounds(monkeypatch):
    def stream(self, purpose, *place):
        return Stream(self._key)

    stream.__code__ = stream.__code__.replace(co_qualname="CohortKey.stream")
    monkeypatch.setattr(plans.CohortKey, "stream", stream)
    wrong = judge([play_fit("secret cohorts", "first fit")])[1]
    assert any(text.startswith("cohort: a key is used for two things") for text in wrong)


def test_dp_sgd_that_draws_by_its_step_alone(monkeypatch):
    """A key of the plan's seed in place of the operating system's."""
    from lightning_fedq.callbacks import dpsgd

    monkeypatch.setattr(dpsgd.os, "urandom", bytes)
    wrong = judge([play_fit("DP-SGD alone", "first fit"), play_fit("DP-SGD alone", "second fit")])[1]
    assert {text.partition(":")[0] for text in wrong} == {"DPSGD", "draws of a step"}


def test_a_stream_of_no_kind_is_refused():
    with watching(Watch("by hand")) as watch:
        Stream(bytes(32))
    assert "a stream of no kind in the table" in judge([watch])[1][0]


def test_noise_that_ignores_the_attempt(monkeypatch):
    from lightning_fedq.rounds import server

    whole = server.PublicRandomness
    monkeypatch.setattr(server, "PublicRandomness", lambda keys, round, attempt: whole(keys, round, 0))
    wrong = judge(of_mechanisms(["CSGM", "BandedGaussian", "AggregateGaussian"]))[1]
    assert any("another attempt or round" in text for text in wrong)
