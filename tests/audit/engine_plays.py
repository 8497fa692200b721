"""What the audit sees of real rounds: the victim's messages on their way through an engine or a Trainer."""

from collections import Counter
from typing import ClassVar

import numpy as np
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.audit.views import View
from lightning_fedq.callbacks import Federated
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner, Tampering
from tests.digits_run import Classifier, Digits, make_trainer

VICTIM, CLIENTS, ALPHA = 0, 4, 1e-3


class Uplink(Tampering):
    """Stands between encoder and wire, changes nothing, and keeps the victim's messages."""

    def __init__(self):
        self.messages = []

    def send(self, clients, values, message, context, rand):
        if VICTIM in clients:
            self.messages.append(message.symbols[list(clients).index(VICTIM)].numpy().astype(np.int64))
        return message


# ---- not a number -----------------------------------------------------------------------------------------


def audit_not_finite(engine_class, mechanism, bad, rounds=40):
    """Is a client with a non-finite update as hidden as the claim says, from a client that sends zeros?"""
    counted, dim = [], len(bad)
    for world, update in enumerate((bad, torch.zeros(dim))):
        engine = engine_class(
            mechanism, RoundPlanner(CLIENTS, 0), SeededKeys(world), torch.zeros(dim), [dim], FixedRange(1.0)
        )
        engine.tampering = uplink = Uplink()
        for _ in range(rounds):
            plan = engine.start()
            updates = torch.zeros(CLIENTS, dim)
            updates[list(plan.survivors).index(VICTIM)] = update
            engine.receive(plan.survivors, updates)
            engine.abandon()  # the message is what is looked at; every attempt has fresh coins
        counted.append(np.stack(uplink.messages))
    levels = np.unique(np.concatenate(counted))
    edges = levels[1:] if len(levels) <= 32 else np.unique(np.quantile(levels, np.arange(1, 32) / 32))
    context = engine.context(engine.planner.plan(0, mechanism))
    claim = mechanism.claims(context)[0]
    # in the one world all coordinates but one are alike, in the other they are zero: equal shares
    loss = claim.loss.spread(dim) if claim.compositions == 1 else claim.loss
    view = View("not finite", loss, 1, dim, len(edges) + 1)
    for label, messages in enumerate(counted):
        for round, message in enumerate(messages):
            outcomes = np.searchsorted(edges, message, side="right")
            view.add(int(2 * round >= rounds), np.full(dim, label), outcomes)
    return view.judge(ALPHA)


# ---- a resumed training ------------------------------------------------------------------------------------


class VictimSends(pl.Callback):
    """The victim's update is +1 or -1 in every coordinate: one sign before the resumption, one after."""

    def __init__(self, sign):
        self.sign, self.uplink = sign, Uplink()

    def on_train_start(self, trainer, pl_module):
        engine = next(c for c in trainer.callbacks if isinstance(c, Federated)).engine
        engine.tampering, engine.transform = self.uplink, self._transform

    def _transform(self, clients, updates):
        if VICTIM in clients:
            updates[list(clients).index(VICTIM)] = self.sign
        return updates


def audit_resumption(folder, plant=None, rounds=2):
    """Two worlds of a real training that is stopped and resumed, the victim's signs (+, -) and (-, +).

    The messages of a round before and its counterpart after the resumption are one outcome; independent
    coins keep them within twice the claim of one.
    """
    view, epsilon = None, 1.0
    for world, first in enumerate((1.0, -1.0)):
        messages = []
        for part, sign in enumerate((first, -first)):
            sends = VictimSends(sign)
            fed = Federated(
                LDPQ(epsilon), CLIENTS, seed=world, clients_per_step=1, ranges=FixedRange(1.0), local_steps=1
            )
            resume = folder / f"{world}.ckpt" if part else None
            trainer = make_trainer(fed, sends, max_epochs=(part + 1) * rounds)
            trainer.fit(Classifier(), datamodule=Digits(40), ckpt_path=resume)
            messages.append(sends.uplink.messages)
            if part == 0:
                trainer.save_checkpoint(folder / f"{world}.ckpt")
                if plant:
                    _rewrite(folder / f"{world}.ckpt", plant)
        for round, (before, after) in enumerate(zip(*messages, strict=True)):
            if view is None:
                context = fed.engine.context(fed.engine.planner.plan(0, fed.mechanism))
                view = View("resumed", fed.mechanism.claims(context)[0].loss, 2, len(before), 4)
            view.add(int(2 * round >= rounds), np.full(len(before), world), 2 * before + after)
    return view.judge(ALPHA)


def _rewrite(path, plant):
    checkpoint = torch.load(path, weights_only=True)
    state = next(s for name, s in checkpoint["callbacks"].items() if name.startswith("Federated"))
    state["engine"] = plant(state["engine"])
    torch.save(checkpoint, path)


# ---- the ledger -------------------------------------------------------------------------------------------


class Recorder(LDPQ):
    """Counts the streams that clients used."""

    used: ClassVar[Counter[tuple[int, int, int]]] = Counter()

    def encode(self, update, context, rand):
        self.used.update((client, context.round, context.attempt) for client in rand.clients)
        return super().encode(update, context, rand)


def server(kind=RoundEngine):
    Recorder.used.clear()
    return kind(Recorder(1.0), RoundPlanner(3, 0), SeededKeys(0), torch.zeros(4), [4], FixedRange(1.0))


def unpaid(engine):
    """Did a client use more streams than it was charged for, or one of them twice?"""
    streams = Counter(client for client, _, _ in Recorder.used)
    return any(n > 1 for n in Recorder.used.values()) or any(
        n > int(engine.ledger.charges[client]) for client, n in streams.items()
    )


def play(engine):
    """A round that is given up after its messages were sent, and its repetition."""
    plan = engine.start()
    engine.receive(plan.survivors, torch.zeros(3, 4))
    engine.abandon()
    plan = engine.start()
    engine.receive(plan.survivors, torch.zeros(3, 4))
    engine.finish()
