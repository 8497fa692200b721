"""Every planted bug of the list (specification, section 3.2) is caught by its layer; clean twins are not.

`pytest tests/audit/test_plants.py -s -k caught` prints the table of docs/audit.md.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import fields
from unittest.mock import patch

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq.audit import audit
from lightning_fedq.audit.cases import audit_cases
from lightning_fedq.audit.commands import audit as command
from lightning_fedq.dpsgd.opacus import GridDPOptimizer
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys, Stream
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import RoundEngine, running_sum
from tests.audit import plants
from tests.audit.engine_plays import audit_not_finite, audit_resumption, play, server, unpaid
from tests.audit.enumeration import enumerate_coin, enumerate_pair
from tests.audit.enumeration_words import enumerate_words
from tests.one_round import encode, make_context

CLIPS = plants.ClipPassesNan(clip_norm=1.0, noise_multiplier=1.0)
ONE_NAN = torch.cat([torch.tensor([math.nan]), torch.full((199,), 1e3)])
"""Its norm is NaN, and all but one of its coordinates are as large as can be."""


TIMES = 4
"""Layers of either length in a round, as many as `fedq audit` plays with 10^6 draws."""


def simulated(mechanism, draws=200000, **options):
    finding = next((found for found in audit(mechanism, draws, times=TIMES, **options) if found.alarm), None)
    return f"{finding.view}: {finding.alarm}" if finding else ""


def enumerated(differs):
    return f"{len(differs)} counts differ, {differs[0]}" if differs else ""


def not_finite(engine, mechanism=CLIPS, update=ONE_NAN):
    finding = audit_not_finite(engine, mechanism, update)
    return f"the message of a client with NaN: {finding.alarm}" if finding.alarm else ""


def ledger(kind):
    play(engine := server(kind))
    return "streams were used that nobody was charged for" if unpaid(engine) else ""


def resumed(folder, plant):
    finding = audit_resumption(folder, plant)
    return f"a message before and one after the resumption: {finding.alarm}" if finding.alarm else ""


Case = tuple[str, str, Callable[..., str]]
ONE_PLACE = {"last coordinate in the clear": 1_000_000, "padding bits in the clear": 1_000_000}
"""Faults of one place only, which each round shows once: draws of `fedq audit` as it is."""
CASES = [
    *(
        (
            title,
            "B",
            lambda folder, title=title, kind=kind: simulated(kind(1.0), ONE_PLACE.get(title, 200_000)),
        )
        for title, kind in [
            ("alpha off by one", plants.AlphaOffByOne),
            ("wrong clipping", plants.WrongClipping),
            ("bits reused between rounds", plants.BitsReusedBetweenRounds),
            ("pair without private coins", plants.PairWithoutPrivateCoins),
            ("private coins from the shared stream", plants.PrivateCoinsFromTheSharedStream),
            ("response twice with the same bits", plants.ResponseTwiceWithTheSameBits),
            ("last coordinate in the clear", plants.LastCoordinateInTheClear),
            ("layer missing in the address", plants.LayerMissingInAddress),
            ("claim of the planned, not the actual cohort", plants.PlannedCohortClaimed),
            ("padding bits in the clear", plants.PaddingInTheClear),
        ]
    ),
    ("tie-break <= for <", "A", lambda folder: enumerated(enumerate_coin(1.0, 8, quantize=plants.tie_break))),
    (
        "antithetic 1 - U",
        "A",
        lambda folder: enumerated(enumerate_pair(1.0, 3, splice=plants.negative_instead_of_complement)),
    ),
    (
        "modulus 2^k - 1",
        "A",
        lambda folder: enumerated(enumerate_coin(1.0, 8, quantize=plants.modulus_minus_one)),
    ),
    ("resume restarts streams", "B, Trainer", lambda folder: resumed(folder, plants.restart_streams)),
    ("accountant skips the failed round", "ledger", lambda folder: ledger(plants.SkipsTheFailedRound)),
    ("a norm of NaN passes the clip", "B, engine", lambda folder: not_finite(plants.NanPasses)),
]


def skipped_grid():
    with patch.object(running_sum, "round_to_grid", plants.skip_the_grid):
        return simulated(fedq.LayeredGaussian(1.0, 1 / 32, entropy_code="elias"), 40_000)


def elsewhere(test, name):
    """A plant that is caught by a test of its own, which exists."""
    assert callable(getattr(importlib.import_module(test), name))
    return f"{test}.{name}"


KNOWLEDGE = "tests.audit.test_knowledge", "test_streams_that_the_adversary_holds_are_caught"
UNSEEN = "tests.audit.test_unseen", "test_an_engine_that_looks_at_exact_updates_is_caught"
TRAINING = "tests.audit.commands.test_audit_training"
LETTERS = [
    (
        "A private stream without the round, odd clients only",
        "B",
        lambda folder: simulated(plants.OddClientsReuseTheirBits(1.0)),
    ),
    (
        "C threshold + 2^-16, second layer only",
        "A",
        lambda folder: enumerated(enumerate_words(plants.SecondLayerOff(1.0))),
    ),
    ("D grid rounding of the sum skipped", "B, engine", lambda folder: skipped_grid()),
    ("E next range from the exact mean", "unseen", lambda folder: elsewhere(*UNSEEN)),
    ("F noise from the stream shared with the server", "knowledge", lambda folder: elsewhere(*KNOWLEDGE)),
    ("G selection from the public stream", "knowledge", lambda folder: elsewhere(*KNOWLEDGE)),
    ("H discrete noise from the shared stream", "knowledge", lambda folder: elsewhere(*KNOWLEDGE)),
    ("I scale and shift from the public stream", "knowledge", lambda folder: elsewhere(*KNOWLEDGE)),
    ("J noise of the mean from the public stream", "knowledge", lambda folder: elsewhere(*KNOWLEDGE)),
    (
        "K DP-SGD with a third of the noise",
        "C",
        lambda folder: elsewhere(TRAINING, "test_a_third_of_the_noise_is_caught"),
    ),
    (
        "L DP-SGD has two Poisson batches for ever",
        "C",
        lambda folder: elsewhere(TRAINING, "test_two_batches_for_ever_are_caught"),
    ),
]
"""The plants of an attack on the audit, which once missed most of them; C in all layers is caught as C is."""
CASES += LETTERS


def among_cases(mechanism, draws):
    """The first alarm in any of a mechanism's own cases."""
    found = (
        simulated(case, draws // command.EVERYBODY_SHARE if case.everybody else draws)
        for case in audit_cases(mechanism, TIMES * 1024)
    )
    return next((text for text in found if text), "")


USEFUL = [
    (
        "pair's secret flipped half as often",
        "B",
        lambda folder: among_cases(plants.TooFewFlips(1.0), 100_000),
    ),
    (
        "axes: any of 2 D in place of 2 D - k",
        "B",
        lambda folder: among_cases(plants.AnyAxisIsAnOther(1.0, 1.0), 500_000),
    ),
    (
        "rotated coins: range clipped, norm not",
        "B",
        lambda folder: among_cases(plants.NormIsNotClipped(1.0, 1.0), 500_000),
    ),
]
"""Of the mechanisms that `useful_privacy` specifies. Coupled groups beyond pairs are not built."""
CASES += USEFUL

QUIET = [
    ("a tenth of Gaussian noise missing", plants.GaussianATenthQuieter(1.0, 1.0), 60_000),
    (
        "an eighth of discrete Gaussian noise missing",
        plants.DiscreteGaussianAnEighthQuieter(1.0, 1.0, 0.01),
        100_000,
    ),
    ("rotated coins a fifth louder", plants.CoinsAFifthLouder(1.0, 1.0), 100_000),
    ("axes a third louder", plants.AxesAThirdLouder(1.0, 1.0), 5_000),
]
CASES += [
    (
        title,
        "B",
        lambda folder, quiet=quiet, draws=draws: simulated(audit_cases(quiet, TIMES * 1024)[0], draws),
    )
    for title, quiet, draws in QUIET
]


@pytest.mark.parametrize(("title", "quiet", "draws"), QUIET[:-1], ids=[title for title, _, _ in QUIET[:-1]])
def test_all_of_the_noise_is_silent(title, quiet, draws):
    """Of axes: `test_the_same_cases_without_the_plant_are_silent`."""
    whole = type(quiet).__bases__[-1](**vars(quiet))
    assert simulated(audit_cases(whole, TIMES * 1024)[0], draws) == ""


@pytest.mark.parametrize(
    "clean", [fedq.PairedCoins(1.0), fedq.RotatedAxes(1.0, 1.0), fedq.RotatedCoins(1.0, 1.0)], ids=repr
)
def test_the_same_cases_without_the_plant_are_silent(clean):
    assert among_cases(clean, 100_000) == ""


SETTINGS = {
    "epsilon": 1.0,
    "epsilon_scope": "bit",
    "epsilon_per_bit": 1.0,
    "epsilon_per_coordinate": 1.0,
    "epsilon_per_message": 1.0,
    "clip_norm": 1.0,
    "clip_value": 1.0,
    "noise_multiplier": 1.0,
    "paired": True,
    "local_sigma": 1.0,
    "granularity": 0.1,
    "sampling_probability": 0.5,
}
OF_MECHANISMS = [
    kind for kind in vars(plants).values() if isinstance(kind, type) and issubclass(kind, Mechanism)
]


def clean_twin(kind):
    """The class of the library that a plant is one of."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("lightning_fedq."))


@pytest.mark.parametrize("kind", OF_MECHANISMS, ids=lambda kind: kind.__name__)
def test_a_planted_mechanism_is_another_one(kind):
    """A hook that is no longer called would leave messages, their bytes, claims and sums as they were."""
    given = {f.name: SETTINGS[f.name] for f in fields(kind) if f.name in SETTINGS}
    if "noise_multiplier" in given:
        given.pop("epsilon", None)  # either
    plant, updates = kind(**given), torch.randn(8, 2**17 - 3, generator=torch.Generator().manual_seed(0))
    if kind is plants.ClipPassesNan:
        updates[0, 0] = math.nan

    def shown(mechanism):
        context = make_context(mechanism, range(8), (2**10, 2**17 - 2**10 - 3))
        message, public = encode(mechanism, updates, context), PublicRandomness(SeededKeys(0), 0)
        symbols = message.symbols
        codes = [mechanism.message_code(client, context, public) for client in range(8)]
        streams = [code.pack(row) for code, row in zip(codes, symbols, strict=True)]
        total = mechanism.decode(symbols, range(8), context, public)
        return symbols.tolist(), streams, total.tolist(), mechanism.claims(context)

    assert shown(plant) != shown(clean_twin(kind)(**vars(plant)))


@pytest.mark.parametrize(("title", "layer", "verdict"), CASES, ids=[title for title, _, _ in CASES])
def test_caught(title, layer, verdict, tmp_path):
    found = verdict(tmp_path)
    print(f"| {title} | {layer} | {found} |")
    assert found


# ---- the clean twins of what is tested end to end ----------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "mechanism",
    [CLIPS, fedq.GaussianNoise(1.0, 1.0), fedq.LDPQ(1.0), fedq.JoPEQ(1.0)],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_a_client_that_is_not_finite_is_hidden(mechanism, bad):
    """Even by a mechanism whose own clip would let it pass: the engine asks first."""
    update = torch.cat([torch.tensor([bad]), torch.full((199,), 1e3)])
    assert not_finite(RoundEngine, mechanism, update) == ""


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_an_engine_that_does_not_ask_exposes_a_client_whose_update_is_nan():
    """Jopeq casts NaN to an integer that no finite update gives."""
    assert not_finite(plants.NanPasses, fedq.JoPEQ(1.0), torch.full((200,), math.nan))


def test_a_clean_resumption_uses_fresh_coins(tmp_path):
    assert resumed(tmp_path, None) == ""


def test_streams_that_restart_are_refused_where_the_ledger_remembers(tmp_path):
    with pytest.raises(RuntimeError, match="was already charged for clients"):
        audit_resumption(tmp_path, plants.restart_streams_only)


def test_every_stream_is_paid_for():
    assert ledger(RoundEngine) == ""


def test_a_sample_that_is_not_finite_is_dropped_by_the_private_optimizer():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = GridDPOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
        words=lambda: Stream(bytes(32)).words64,
    )
    samples = torch.tensor([[math.nan, 0.0, 0.0], [math.inf, 1.0, 0.0], [3.0, 4.0, 0.0]])
    parameter.grad_sample = samples.clone()
    optimizer.clip_and_accumulate()
    clipped = parameter.summed_grad.double() * optimizer.grid
    assert clipped.norm() <= 1.0
    assert torch.allclose(clipped, torch.tensor([0.6, 0.8, 0.0]).double(), atol=1e-4)
    # what the check above would say to the planted clip
    leaked = (plants.nan_passes(1.0, samples.norm(dim=1))[:, None] * samples).sum(0)
    assert not leaked.norm() <= 1.0
