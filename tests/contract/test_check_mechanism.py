"""Mechanisms that break one rule each are told which; the table of golden symbols changes by name only."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch

from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys
from lightning_fedq.mechanisms import LDPQ, GaussianNoise, SubtractiveDither
from lightning_fedq.mechanisms.contract_suite import RULES, BrokenContractError, check_mechanism, make_context
from lightning_fedq.mechanisms.interface import NO_SLACK, Mechanism, Message, single_message_claims
from tests.audit import input_plants, plants
from tests.contract.golden import names_the_change, updated


class GroupsOfTwo(LDPQ):
    def group_sizes(self, num_clients):
        return (2,) * ((num_clients + 1) // 2)


class SaysNothingOfOutsiders(LDPQ):
    def claims(self, context):
        return super().claims(context)[:-1]


class NoAssumptions(LDPQ):
    def claims(self, context):
        return tuple(replace(claim, assumptions=()) for claim in super().claims(context))


class FloatSymbols(LDPQ):
    def encode(self, update, context, rand):
        message = super().encode(update, context, rand)
        return replace(message, symbols=message.symbols.float())


class SaysShorter(LDPQ):
    def num_symbols(self, context):
        return context.dim - 1


class TwiceAsLong(LDPQ):
    def decode(self, symbols, clients, context, rand):
        return super().decode(symbols, clients, context, rand).repeat(2)


class DoublesWithoutAGrid(LDPQ):
    def decode(self, symbols, clients, context, rand):
        return super().decode(symbols, clients, context, rand).double()


CALLS, OWN_KEYS = itertools.count(), SeededKeys(7)


class DrawsElsewhere(LDPQ):
    def encode(self, update, context, rand):
        other = replace(context, attempt=next(CALLS))
        return super().encode(update, other, ClientRandomness(OWN_KEYS, rand.clients, 0, other.attempt))


class CoinsFromTheServer(LDPQ):
    def encode(self, update, context, rand):
        return super().encode(update, context, plants.shared_for_private(rand))


class SameCoinsForAll(LDPQ):
    """Every client's coins are those of client 0."""

    def encode(self, update, context, rand):
        same = ClientRandomness(OWN_KEYS, rand.clients, context.round, context.attempt)
        same._private_key = lambda client: bytes(32)
        same.private = lambda client, purpose: ClientRandomness.private(same, 0, purpose)
        return super().encode(update, context, same)


class FirstOfTheStack(LDPQ):
    """All rows of a stack are encoded as the first one's update."""

    def encode(self, update, context, rand):
        rows = update.reshape(len(rand.clients), -1)
        return super().encode(rows[:1].expand_as(rows).reshape(update.shape), context, rand)


class MeanInPlaceOfTheSum(LDPQ):
    def decode(self, symbols, clients, context, rand):
        return super().decode(symbols, clients, context, rand) / len(clients)


class ForgetsABit(LDPQ):
    def encode(self, update, context, rand):
        message = super().encode(update, context, rand)
        return replace(message, num_bits=message.num_bits - 1)


class ZeroesOnly(LDPQ):
    def symbol_range(self, context, rand):
        return 0, 0


class TenPercentTooLong(LDPQ):
    def decode(self, symbols, clients, context, rand):
        return 1.1 * super().decode(symbols, clients, context, rand)

    def noise_variance(self, context, clients):
        return None


class Offset(LDPQ):
    def decode(self, symbols, clients, context, rand):
        return super().decode(symbols, clients, context, rand) + 0.05 * len(clients)


class HalfTheVariance(LDPQ):
    def noise_variance(self, context, clients):
        return 0.5 * super().noise_variance(context, clients)


class DoublesAreOthers(LDPQ):
    def encode(self, update, context, rand):
        return super().encode(update + 0.3 * (update.dtype == torch.float64), context, rand)


class CountsNoClipping(LDPQ):
    def encode(self, update, context, rand):
        return replace(super().encode(update, context, rand), num_clipped=0)


class NoDifference(LDPQ):
    def worst_pair(self, client, context, public):
        high, _ = super().worst_pair(client, context, public)
        return high, high


class TinyLever(LDPQ):
    def influence(self, client, context):
        return 0.5


class StaysHere(LDPQ):
    def __reduce__(self):
        raise TypeError("can't leave this process")


@dataclass(frozen=True)
class ForgetsItsSetting(LDPQ):
    """A parameter that no configuration can hold."""

    scale: complex = 1j


@dataclass(frozen=True, repr=False)
class OfAnotherName(LDPQ):
    def __repr__(self):
        return "<LDPQ with an epsilon>"


@dataclass(frozen=True)
class HoldsState(LDPQ):
    """A list can't be hashed."""

    seen: list[int] = field(default_factory=list)


class FirstRadiusForAll(LDPQ):
    """Encoder and decoder agree, so that all that lies beyond is clipped and nothing else shows."""

    def first(self, context):
        return replace(context, radius=context.radius[:1].expand_as(context.radius).clone())

    def encode(self, update, context, rand):
        return super().encode(update, self.first(context), rand)

    def decode(self, symbols, clients, context, rand):
        return super().decode(symbols, clients, self.first(context), rand)


class FirstCenterForAll(FirstRadiusForAll):
    def first(self, context):
        return replace(context, center=context.center[:1].expand_as(context.center).clone())


class SegmentsSwapped(FirstRadiusForAll):
    def first(self, context):
        return replace(context, radius=context.radius.flip(0))


class Counts(LDPQ):
    """A counter in a frozen mechanism: what the thousandth call does nobody knows."""

    def encode(self, update, context, rand):
        object.__setattr__(self, "calls", getattr(self, "calls", 0) + 1)
        return super().encode(update, context, rand)


class RoundsWithoutClaims(GaussianNoise):
    """Rounds every message further, and keeps what is said about sums."""

    def encode(self, update, context, rand):
        message = super().encode(update, context, rand)
        for row, client in zip(message.symbols.reshape(len(rand.clients), -1), rand.clients, strict=True):
            coins = torch.from_numpy(rand.private(client, "evens").words(context.dim).astype("int64") % 2)
            row[:] = (row + coins) // 2 * 2
        return message


class RoundsWithClaims(RoundsWithoutClaims):
    """The same, with the claim about one message for everybody."""

    def claims(self, context):
        return single_message_claims(super().claims(context))


class NoSlack(GaussianNoise):
    def claims(self, context):
        return tuple(replace(claim, slack=NO_SLACK) for claim in super().claims(context))


@dataclass(frozen=True)
class Remembers(LDPQ):
    """The same in a parameter, which changes nothing that one call shows."""

    seen: tuple[int, ...] = ()

    def decode(self, symbols, clients, context, rand):
        object.__setattr__(self, "seen", (*self.seen, len(clients)))
        return super().decode(symbols, clients, context, rand)


BROKEN = [
    (GroupsOfTwo(1.0), {"groups_cover_the_cohort"}),
    (SaysNothingOfOutsiders(1.0), {"single_claim_per_adversary"}),
    (NoAssumptions(1.0), {"single_claim_per_adversary"}),
    (FloatSymbols(1.0), {"integer_symbols"}),
    (SaysShorter(1.0), {"integer_symbols"}),
    (TwiceAsLong(1.0), {"decodes_to_the_sum"}),
    (DoublesWithoutAGrid(1.0), {"decodes_to_the_sum"}),
    (DrawsElsewhere(1.0), {"same_streams_same_message"}),
    (SameCoinsForAll(1.0), {"fresh_coins"}),
    (CoinsFromTheServer(1.0), {"streams_are_whose_they_are"}),
    (plants.SecretFromThePublicStream(1.0), {"streams_are_whose_they_are"}),
    (plants.HalfOfTheSecretPublic(1.0), {"streams_are_whose_they_are"}),
    (plants.RoundingFromThePublicStream(8.0, 1.0, paired=True), {"streams_are_whose_they_are"}),
    (FirstOfTheStack(1.0), {"stack_equals_rows"}),
    (MeanInPlaceOfTheSum(1.0), {"sum_decodes_like_its_parts"}),
    (ForgetsABit(1.0), {"integer_symbols", "bits_are_those_of_the_stream", "stack_equals_rows"}),
    (ZeroesOnly(1.0), {"symbols_lie_in_their_range"}),
    (TenPercentTooLong(1.0), {"unbiased"}),
    (Offset(1.0), {"unbiased"}),
    (HalfTheVariance(1.0), {"noise_bound_holds"}),
    (plants.PartnersSwapped(1.0), {"noise_bound_holds"}),
    (DoublesAreOthers(1.0), {"any_float_type"}),
    (CountsNoClipping(1.0), {"clips_and_counts"}),
    (NoDifference(1.0), {"two_neighbours"}),
    (TinyLever(1.0), {"influence_is_at_least_1"}),
    (StaysHere(1.0), {"pickles"}),
    (ForgetsItsSetting(1.0), {"builds_from_yaml"}),
    (OfAnotherName(1.0), {"reads_back_from_its_repr"}),
    (HoldsState(1.0), {"frozen_dataclass"}),
    (FirstRadiusForAll(1.0), {"each_segment_has_its_range"}),
    (FirstCenterForAll(1.0), {"each_segment_has_its_range"}),
    (SegmentsSwapped(1.0), {"each_segment_has_its_range"}),
    (RoundsWithoutClaims(1.0, 1.0), {"claims_go_with_encode"}),
    (NoSlack(1.0, 1.0), {"continuous_noise_has_slack"}),
    (Counts(1.0), {"keeps_no_state"}),
    (Remembers(1.0), {"keeps_no_state"}),
    (input_plants.NothingOnZero(1.0), {"noise_for_every_input"}),
    (input_plants.NoiseFromTheUpdate(1.0), {"noise_is_never_reused"}),
]


@pytest.mark.parametrize(("mechanism", "rules"), BROKEN, ids=lambda value: type(value).__name__)
def test_a_broken_rule_is_named(mechanism, rules):
    with pytest.raises(BrokenContractError, match=f"{min(rules)}: ") as told:
        check_mechanism(mechanism)
    assert rules <= set(told.value.rule.split(", ")), told.value


def test_every_rule_can_be_broken():
    assert set().union(*(rules for _, rules in BROKEN)) == set(RULES)


@pytest.mark.parametrize(
    "mechanism", [LDPQ(1.0), SubtractiveDither(bits=4), GaussianNoise(1.0, 1.0)], ids=repr
)
def test_a_good_one_passes(mechanism):
    check_mechanism(mechanism)


def test_what_is_worked_on_further_is_claimed_as_one_message():
    mechanism = RoundsWithClaims(1.0, 1.0)
    check_mechanism(mechanism, rules=["claims_go_with_encode"])
    assert len({claim.loss for claim in mechanism.claims(make_context(mechanism, (0, 1, 2)))}) == 1


def test_one_rule_alone():
    check_mechanism(TenPercentTooLong(1.0), rules=["pickles"])
    with pytest.raises(ValueError, match=r"there is no rule tidy\. Choose from frozen_dataclass, "):
        check_mechanism(LDPQ(1.0), rules=["tidy"])


def test_an_error_of_the_mechanism_is_told_with_the_rule():
    class Fails(LDPQ):
        def claims(self, context):
            raise RuntimeError("not written yet")

    rule = "single_claim_per_adversary"
    with pytest.raises(BrokenContractError, match=f"{rule}: raised RuntimeError: not written"):
        check_mechanism(Fails(1.0), rules=[rule])


def test_a_class_without_dataclass_is_told():
    class Plain(Mechanism):
        homomorphic = False
        encode = lambda self, update, context, rand: Message(update, 0)  # noqa: E731
        decode = code = claims = encode

    with pytest.raises(BrokenContractError, match="Plain must be a dataclass with frozen=True"):
        RULES["frozen_dataclass"](Plain())


CHANGED = """# Changelog

## Unreleased

* The golden symbols of `LDPQ` changed.
* `CPA` is quicker.

## 0.1

* Golden symbols of `CPA`.
"""


def test_golden_symbols_change_by_name_and_with_a_line_in_the_changelog():
    rows, key = [LDPQ(1.0)], "LDPQ(epsilon_per_coordinate=1.0)"
    fresh, _ = updated({}, rows, [], "")
    assert updated(fresh, rows, [], "") == (fresh, [])
    stale = {key: "0" * 16, "Gone()": "1" * 16}
    for change, changelog, cure in (([], CHANGED, "--change"), (["LDPQ"], "", "say so under Unreleased")):
        table, refused = updated(stale, rows, change, changelog)
        assert table == {key: "0" * 16}
        assert len(refused) == 1 and cure in refused[0]
    assert updated(stale, rows, ["LDPQ"], CHANGED) == (fresh, [])
    assert not names_the_change(CHANGED, "CPA")
