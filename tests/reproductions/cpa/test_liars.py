"""Liars of table VI beside those of `ByzantineClients`: what they send, and to whom."""

import pytest
import torch

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import CPA, MVU, FedAvg, JoPEQ
from reproductions.cpa.liars import Liars, alie_shift
from reproductions.cpa.table6 import break_even_fraction
from tests.callbacks.test_byzantine import CLIENTS, attacked_round, expected_mean, trainer_of
from tests.digits_run import Classifier, Digits


def lied(attack, *args, **settings):
    return attacked_round(attack, *args, kind=Liars, **settings)


@pytest.mark.parametrize("stack", [1, 4, 10])
@pytest.mark.parametrize(
    ("attack", "scale", "lie"),
    [
        ("constant", 0.7, lambda own, honest: torch.full_like(own, 0.7)),
        ("ipm", 1.5, lambda own, honest: -1.5 * honest.mean(0)),
        ("alie", 1.2, lambda own, honest: honest.mean(0) - 1.2 * honest.std(0, correction=0)),
        ("alie", 0.0, lambda own, honest: honest.mean(0) - alie_shift(10, 3) * honest.std(0, correction=0)),
        ("mimic", 1.0, lambda own, honest: honest[0]),
        ("sign_flip", 2.0, lambda own, honest: -2.0 * own),
    ],
)
def test_update_attacks_whatever_the_stacks(attack, scale, lie, stack):
    engine, liars, updates = lied(attack, scale=scale, stack=stack)
    assert len(liars.byzantine) == 3
    torch.testing.assert_close(engine.weights, expected_mean(liars, updates, lie), atol=1e-5, rtol=1e-4)


def test_noise_has_its_law():
    engine, liars, updates = lied("gaussian", scale=0.1)
    noise = (engine.weights - expected_mean(liars, updates, lambda own, honest: own)) * CLIENTS
    # the sum of three liars' noise, 2,000 draws: relative standard error of a variance about 3 %, 5 of them
    assert noise.var().item() == pytest.approx(0.03, rel=0.16)


@pytest.mark.parametrize(
    "mechanism",
    [
        CPA(epsilon=1.0, levels=4, epsilon_scope="bit"),
        CPA(epsilon=30.0, epsilon_scope="round"),
        MVU(epsilon_per_coordinate=0.5),  # its design has 2 outputs on a wire of 2 bits
        JoPEQ(epsilon_per_coordinate=1.0),
    ],
)
def test_garbage_is_of_the_right_length_and_decodes(mechanism):
    engine, _, _ = lied("garbage", mechanism)
    assert torch.isfinite(engine.weights).all() and engine.weights.any()


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_label_flip_changes_the_liars_labels_only(clients_per_step, monkeypatch):
    seen = {}
    flip = Liars.on_train_batch_start

    def flip_and_look(self, trainer, pl_module, batch, batch_idx):
        """In the hook itself: a callback with one of its own would rule stacks out."""
        flip(self, trainer, pl_module, batch, batch_idx)
        clients = trainer.home.callbacks[0].training_clients
        assert len(clients) <= clients_per_step
        labels = batch[1] if len(clients) > 1 else batch[1][None]
        for row, client in enumerate(clients):
            seen.setdefault(client, []).append(labels[row].clone())

    monkeypatch.setattr(Liars, "on_train_batch_start", flip_and_look)
    labels = {}
    for fraction in (0.0, 0.3):
        seen = {}
        torch.manual_seed(0)
        federated = Federated(FedAvg(), CLIENTS, seed=0, clients_per_step=clients_per_step)
        byzantine = Liars(fraction, "label_flip", num_classes=10)
        trainer_of(federated, byzantine, epochs=1).fit(Classifier(), datamodule=Digits())
        assert federated.clients_per_step_chosen == clients_per_step
        labels[fraction] = {client: torch.cat(parts) for client, parts in seen.items()}
    assert len(byzantine.byzantine) == 3 and set(labels[0.3]) == set(range(CLIENTS))
    for client, flipped in labels[0.3].items():
        plain = labels[0.0][client]
        assert torch.equal(flipped, 9 - plain if client in byzantine.byzantine else plain)


def test_alie_with_liars_in_the_majority_by_chance():
    for fraction in (0.5, 0.9):
        engine, _, _ = lied("alie", scale=0.0, fraction=fraction)
        assert torch.isfinite(engine.weights).all()


def test_alie_shift_is_the_paper_s():
    """Baruch et al.: n = 50, f = 12 (24 %): s = 26 - 12 = 14 of 38 honest, phi(z) < 24 / 38."""
    assert alie_shift(50, 12) == pytest.approx(0.336, abs=1e-3)
    assert alie_shift(50, 25) == alie_shift(50, 24) and alie_shift(2, 1) == 0.0


def test_what_does_not_fit_is_refused():
    for attack, more in (("label_flip", {}), ("ones", {"num_classes": 3})):
        with pytest.raises(ValueError, match="num_classes goes with label_flip"):
            Liars(0.1, attack, **more)


def test_the_break_even_share():
    shares = [break_even_fraction(epsilon) for epsilon in (0.5, 1, 2, 4)]
    assert shares == pytest.approx([0.19673, 0.31606, 0.43233, 0.49084], abs=1e-5)
