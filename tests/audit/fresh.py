"""Audit of freshness: of the keys that must be new, none may come twice or follow from the plan.

A number that protects nobody when it comes twice is a key: of masks, shares, noise, coins, rounding, dithers,
cohorts, handed-on noise, DP-SGD's draws. `KINDS` is the table of them. A `Watch` writes down all keys that a
process really draws from, wherever the library makes a stream (`Stream`), fills the default generators
(`seed_generators`) or masks (`secagg.Client`); the plays below go through real rounds: two rounds and a
repeated attempt, two fits with ONE seed of the plan, a resumed fit, another process, a folder that is set
back, all with `seed=None`. Then:

* a key belongs to one draw (who, what for) of one attempt at one round of one fit, and to nothing else;
* as all fits have the same plan, no key follows from the plan's seed;
* every draw is of a kind in the table: a new one has to be entered;
* every kind that a play promises was seen, so that the watch can't look away.
"""

import hashlib
import json
import logging
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.clients.evaluation import ClientEvaluation
from lightning_fedq.commands.mechanism_row import example
from lightning_fedq.data.generator_turns import seed_everywhere
from lightning_fedq.keys import randomness
from lightning_fedq.keys.party_keys import ClientSecrets, HeldClientKeys, HeldServerKeys, ServerSecrets
from lightning_fedq.keys.randomness import ClientRandomness, RootKeys, SeededKeys, Stream
from lightning_fedq.mechanisms import BandedGaussian, DistributedDiscreteGaussian, GaussianNoise
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.mechanisms.registry import mechanism_class
from lightning_fedq.privacy.cohorts import CohortLaw, Cyclic, FixedSize, Poisson
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.rounds.server import RoundServer
from lightning_fedq.secagg import Aggregation, SecAgg
from lightning_fedq.secagg.client import Client
from tests.digits_run import make_trainer

PLAN_SEED = 7
"""Of every fit: keys that follow from it come again in the next one."""
_CLIENTS, _DIM = 4, 8

KINDS: dict[str, str] = {
    "public": "public streams of a round: rotations, selections",
    "members": "what server and members know: dithers, selections",
    "shared_with_server": "what a client shares with the server: dithers",
    "peer": "what a group shares: coins, handed-on noise",
    "private": "a client's own: noise, coins, rounding, shares of noise",
    "server": "a trusted server's own noise",
    "pair mask": "masks of pairs",
    "self mask": "masks of one client",
    "share": "shares of secrets",
    "secret of a round": "secure aggregation's seeds and private keys",
    "order of the ring": "who is whose neighbour",
    "cohort": "the draw of secret cohorts",
    "DPSGD": "DP-SGD's batches and noise",
    "draws of a step": "dropout, transforms and noise layers in a step",
}
"""Everything that must be fresh, by kind. Words say what hangs on it."""
_PLAN = ("cohort", "disjoint cohorts", "dropouts", "late")
"""Streams of the plan, which follow from its seed: public by design, as are `RoundPlan.stream_seed`s, from
which partitions, the order of data, and draws of trainings without `DPSGD` come."""
_NAME = "name of a block"
"""Tells whether a server has begun a block of rounds, and stays as long as that."""
_KEYS_FILE = randomness.__file__


@dataclass(frozen=True)
class Draw:
    """Purpose that a key was drawn for.

    Args:
        fit: Play, and which of its fits.
        moment: Attempts that had begun, in this fit. What is drawn before the first is a trial that is
            thrown away, or the draw of a cohort, whose label has its round.
        kind: One of `KINDS`.
        label: For whom, and what for.
    """

    fit: str
    moment: int
    kind: str
    label: str


class Watch:
    """Keys that were drawn from, as digests, and what for."""

    def __init__(self, fit: str = "") -> None:
        self.fit, self.moment = fit, 0
        self.found: dict[str, set[Draw]] = defaultdict(set)

    def saw(self, key: bytes, kind: str, label: str, ahead: bool = False) -> None:
        """Write down that a key was drawn from, and whether that may be before its round begins."""
        digest = hashlib.sha256(key).hexdigest()[:32]
        self.found[digest].add(Draw(self.fit, 0 if ahead else self.moment, kind, label))

    # ---- what a stream is for -----------------------------------------------------------------------

    def _stream(self, key: bytes, frame: FrameType) -> None:
        code, own = frame.f_code, frame.f_locals
        if code.co_filename == _KEYS_FILE and code.co_name == "_stream":
            assert frame.f_back is not None and frame.f_back.f_back is not None
            purpose, asks = own["purpose"], frame.f_back.f_back.f_code.co_qualname
            planned = purpose in _PLAN or asks == "RoundPlan.stream_seed"
            if purpose != _NAME and not (planned and isinstance(own["self"]._keys, SeededKeys)):
                self.saw(key, frame.f_back.f_code.co_name, f"{purpose} {own['who'].hex()}")
        elif code.co_name == "add_mask":
            assert frame.f_back is not None
            masking = frame.f_back
            if masking.f_code.co_name == "masked_input":  # not the server, which opens the same ones
                client, other = masking.f_locals["self"].client, masking.f_locals.get("other")
                pair = [client] if other is None else sorted((client, other))
                self.saw(key, "self mask" if other is None else "pair mask", f"{pair}")
        elif code.co_name == "ring_order":
            self.saw(key, "order of the ring", "everybody")
        elif code.co_qualname == "CohortKey.stream":
            self.saw(key, "cohort", f"{own['purpose']} {own['place']}", ahead=True)
        elif code.co_qualname == "DPSGD._stream":
            self.saw(key, "DPSGD", f"{own['purpose']} {own['client']} {own['step']}")
        else:
            self.saw(key, f"{code.co_qualname} in {Path(code.co_filename).name}", "unknown")

    def _secrets(self, client: Client) -> None:
        own = vars(client)
        roots = {"mask root": client._mask_root, "seed": client._seed}
        roots["channel"] = client._channel_secret.private_bytes_raw()
        for name, secret in roots.items():
            self.saw(secret, "secret of a round", f"{name} {client.client}")
        for owner, share in own["_held"].items():
            self.saw(share, "share", f"{owner} {client.client}")


@contextmanager
def watching(watch: Watch) -> Iterator[Watch]:
    """Write down all keys that this process draws from."""
    made, masked, began = Stream.__init__, Client.masked_input, RoundServer.start
    filled = sys.modules["lightning_fedq.data.generator_turns"].seed_generators

    def make(self: Stream, key: bytes) -> None:
        watch._stream(key, sys._getframe(1))
        made(self, key)

    def mask(self: Client, symbols: Any) -> bytes:
        watch._secrets(self)
        return masked(self, symbols)

    def begin(self: Any) -> Any:
        watch.moment += 1
        return began(self)

    def fill(key: bytes, *purpose: str | int) -> None:
        if key not in _TRIALS:
            watch.saw(key + repr(purpose).encode(), "draws of a step", repr(purpose))
        filled(key, *purpose)

    loaded = [module for name, module in sys.modules.items() if name.startswith("lightning_fedq")]
    users = [module for module in loaded if getattr(module, "seed_generators", None) is filled]
    classes: list[tuple[Any, str, Any, Any]] = [
        (Stream, "__init__", made, make),
        (Client, "masked_input", masked, mask),
        (RoundServer, "start", began, begin),
        *((module, "seed_generators", filled, fill) for module in users),
    ]
    for owner, name, _, ours in classes:
        setattr(owner, name, ours)
    try:
        yield watch
    finally:
        for owner, name, theirs, _ in classes:
            setattr(owner, name, theirs)


_TRIALS = bytes(32), bytes(31) + b"\1"
"""Keys of the trial before a fit (`dpsgd.draws`): nobody trains on what it draws."""


# ---- plays ----------------------------------------------------------------------------------------------


def play_rounds(mechanism: Mechanism, secagg: SecAgg | None, new_keys: Callable[[], Any], fit: str) -> Watch:
    """Two rounds through a real engine, the first of them after an attempt that was given up."""
    clients = _cohort_size(mechanism)
    handed = mechanism.separation
    law = Cyclic(clients) if handed > 1 else FixedSize(clients)
    planner = RoundPlanner(clients * handed, PLAN_SEED, law)
    engine = RoundEngine(
        mechanism,
        planner,
        new_keys(),
        torch.zeros(_DIM),
        (_DIM,),
        FixedRange(1.0),
        secure_sums=None if secagg is None else partial(Aggregation, secagg),
        diagnostics=False,
    )
    with watching(Watch(fit)) as watch:
        for given_up in (True, False, False):
            plan = engine.start()
            engine.receive(plan.survivors, torch.full((len(plan.survivors), _DIM), 0.01))
            if given_up:
                engine.abandon()
            else:
                engine.finish()
    return watch


def _cohort_size(mechanism: Mechanism) -> int:
    return next(n for n in range(_CLIENTS, 64) if sum(mechanism.group_sizes(n)) == n)


class _Drops(pl.LightningModule):
    """A linear model with dropout, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(_DIM, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.layer(batch[0]).sigmoid().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(40, _DIM)), batch_size=5, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(10, _DIM)), batch_size=5)


def _masked() -> list[pl.Callback]:
    measured = ClientEvaluation(0.25, 1)
    mechanism = DistributedDiscreteGaussian(1.0, 2.0, 0.01, bits=16)
    return [Federated(mechanism, _CLIENTS, secure_aggregation=SecAgg(), evaluate_clients=measured)]


def _samples() -> list[pl.Callback]:
    fed = Federated(DistributedDiscreteGaussian(1.0, 2.0, 0.01, bits=16), _CLIENTS)
    return [DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-3), fed]


def _secret(mechanism: Mechanism, law: CohortLaw) -> list[pl.Callback]:
    return [Federated(mechanism, 8, cohort=law, diagnostics=False)]


FITS: dict[str, tuple[Callable[[], list[pl.Callback]], tuple[str, ...]]] = {
    "masks": (
        _masked,
        ("private", "public", "pair mask", "self mask", "share", "secret of a round", "order of the ring"),
    ),
    "DP-SGD of clients": (_samples, ("private", "DPSGD", "draws of a step")),
    "DP-SGD alone": (lambda: _samples()[:1], ("DPSGD", "draws of a step")),
    "secret cohorts": (
        lambda: _secret(GaussianNoise(1.0, 1.0), FixedSize(_CLIENTS, secret=True)),
        ("private", "cohort"),
    ),
    "clients that draw for themselves": (
        lambda: _secret(BandedGaussian(1.0, 1.0, band=1), Poisson(_CLIENTS)),
        ("server", "cohort"),
    ),
}
"""Fits by name: their callbacks, and the kinds that must be seen in each."""
_NOT_RESUMED = ("secret cohorts", "clients that draw for themselves")


def play_fit(name: str, which: str, resumed: Path | None = None, saved: Path | None = None) -> Watch:
    """One fit of two rounds, or of one more after a checkpoint.

    Args:
        name: One of `FITS`.
        resumed: Checkpoint to go on from.
        saved: Where to save one.
    """
    seed_everywhere(0)  # as a user's program does
    callbacks = FITS[name][0]()
    for callback in callbacks:
        if isinstance(callback, Federated):
            callback.set_plan_seed(PLAN_SEED)
    with warnings.catch_warnings(), _quiet(), watching(Watch(f"{name}, {which}")) as watch:
        warnings.simplefilter("ignore")
        epochs = 2 + (resumed is not None)
        trainer = make_trainer(*callbacks, max_epochs=epochs, num_sanity_val_steps=0, limit_val_batches=1)
        trainer.fit(_Drops(), ckpt_path=resumed, weights_only=None if resumed is None else False)
        if saved is not None:
            trainer.save_checkpoint(saved)
    return watch


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of Lightning's words on a trainer."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def play_folders(fit: str) -> list[Watch]:
    """Keys of two processes over a network that begin from one folder each: it was set back in between."""
    server = ServerSecrets.draw()
    own = [ClientSecrets.draw() for _ in range(2)]
    roster = {number: secrets.public_key for number, secrets in enumerate(own)}
    watches = []
    for turn in range(2):
        held = HeldServerKeys(server, roster)
        client = HeldClientKeys(0, own[0], server.federation, server.public_key, held.salt,
                                held.sealed_members(0), {1: roster[1]})  # fmt: skip
        with watching(Watch(f"{fit}, folder set back {turn} times")) as watch:
            ClientRandomness(client, (0,), 0).private(0, "noise")
            randomness.PublicRandomness(held, 0).server("noise")
        watches.append(watch)
    return watches


# ---- the table ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fresh:
    """One row of the table.

    Args:
        kind: One of `KINDS`.
        keys: Keys of the kind.
        fits: Fits in which they were drawn.
    """

    kind: str
    keys: int
    fits: int


def judge(watches: Sequence[Watch]) -> tuple[list[Fresh], list[str]]:
    """Compare all keys with each other. Return the table, and what is wrong."""
    draws: dict[str, set[Draw]] = defaultdict(set)
    for watch in watches:
        for key, seen in watch.found.items():
            draws[key] |= seen
    wrong: dict[str, None] = {}
    for seen in draws.values():
        kinds = sorted({draw.kind for draw in seen})
        if strange := [kind for kind in kinds if kind not in KINDS]:
            wrong[f"a stream of no kind in the table: {strange[0]}"] = None
        if len({draw.fit for draw in seen}) > 1:
            wrong[f"{kinds[0]}: a key comes again in another fit: {_words(seen)}"] = None
        elif len(moments := {draw.moment for draw in seen if draw.moment}) > 1 and not (
            # noise that cancels over rounds: drawn once more in the next one
            next(iter(seen)).fit.startswith(_OVER_ROUNDS) and max(moments) - min(moments) == 1
        ):
            wrong[f"{kinds[0]}: a key comes again in another attempt or round: {_words(seen)}"] = None
        elif len({(draw.kind, draw.label) for draw in seen}) > 1:
            wrong[f"{kinds[0]}: a key is used for two things: {_words(seen)}"] = None
    table = []
    for kind in KINDS:
        of_kind = [draw for seen in draws.values() for draw in seen if draw.kind == kind]
        keys = sum(any(draw.kind == kind for draw in seen) for seen in draws.values())
        table.append(Fresh(kind, keys, len({draw.fit for draw in of_kind})))
    return table, list(wrong)


def _words(seen: set[Draw]) -> str:
    return "; ".join(sorted({draw.fit for draw in seen})[:2])


_OVER_ROUNDS = "noise over rounds: "


def of_mechanisms(names: Sequence[str]) -> list[Watch]:
    """Two engines for every mechanism, with one plan. Masked where it can be."""
    found = []
    for name in names:
        mechanism = example(mechanism_class(name))
        word = _OVER_ROUNDS if mechanism.separation > 1 else ""
        for turn in range(2):
            found.append(play_rounds(mechanism, None, RootKeys, f"{word}{name}, engine {turn}"))
            if mechanism.homomorphic and turn == 0:
                found.append(play_rounds(mechanism, SecAgg(), RootKeys, f"{word}{name}, masked engine"))
    return found


def of_fits(folder: Path, processes: bool = True) -> tuple[list[Watch], list[str]]:
    """Fits, each twice and resumed, the first of them also in another process. And kinds that nobody saw."""
    found: list[Watch] = []
    missing: list[str] = []
    for name, (_, kinds) in FITS.items():
        saved = folder / f"{len(found)}.ckpt"
        plays = [play_fit(name, "first fit", saved=saved), play_fit(name, "second fit")]
        if name not in _NOT_RESUMED:
            plays.append(play_fit(name, "resumed", resumed=saved))
        seen = {draw.kind for draws in plays[0].found.values() for draw in draws}
        missing += [f"{name}: no key of the kind {kind!r} was seen" for kind in kinds if kind not in seen]
        found += plays
    if processes:
        found.append(_elsewhere(next(iter(FITS))))
    ranks = GaussianNoise(1.0, 1.0)
    for turn in range(2):
        found.append(play_rounds(ranks, None, RootKeys, f"ranks, {turn}"))
    return [*found, *play_folders("over a network")], missing


def _elsewhere(name: str) -> Watch:
    """A fit in another process."""
    command = [sys.executable, "-c", f"from {__name__} import tell; tell({name!r})"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    watch = Watch(f"{name}, another process")
    for key, draws in json.loads(said.splitlines()[-1]).items():
        watch.found[key] = {replace(Draw(*draw), fit=watch.fit) for draw in draws}
    return watch


def tell(name: str) -> None:
    """Print the keys of one fit, for the process that asked."""
    watch = play_fit(name, "another process")
    print(json.dumps({key: [list(vars(d).values()) for d in draws] for key, draws in watch.found.items()}))
