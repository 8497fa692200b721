"""DP-SGD inside the clients of a federation: whose samples, whose steps, who pays, and what resumes."""

import math

import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated, PrivacyBudget
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import LDPQ, FedAvg
from lightning_fedq.mechanisms.interface import Adversary
from tests.by_hand import federated_averaging, plans_of
from tests.callbacks.steps import Saves
from tests.callbacks.test_federated_resume import Interrupted
from tests.digits_run import Classifier, Digits, digits, fitted, make_trainer, parts_of, weights_of

SIZES = (20, 40, 60)
STEPS = (2, 4, 6)


def parts():
    return parts_of(SIZES)


def federation(mechanism=None, **settings):
    return Federated(mechanism or FedAvg(), 3, **{"seed": 0, **settings})


def dpsgd(noise=1.0, seed=1, delta=0.001):
    return DPSGD(noise, 1.0, delta=delta, seed=seed)


def fit(*callbacks, model=None, clients=None, ckpt=None, **settings):
    model = model or Classifier()
    data = FederatedDataModule(Digits(120), clients=clients or parts())
    trainer = fitted(model, *callbacks, data=data, ckpt_path=ckpt, **settings)
    return model, trainer


def test_a_round_is_noisy_clipped_steps_on_samples_of_each_clients_own_data():
    """With noise of 1e-6 the round is computed here without Opacus, sample by sample."""
    private, fed, model = dpsgd(1e-6), federation(), Classifier()
    reference = Classifier()
    private_run = make_trainer(fed, private, max_epochs=1)
    private_run.fit(model, datamodule=FederatedDataModule(Digits(120), clients=parts()))
    x, y = digits()

    def train(client, plan):
        held, rate = parts()[client], 10 / SIZES[client]
        for step in range(STEPS[client]):
            coins = private._stream("batch", client, step).words(len(held)) < int(rate * 2**32)
            total = torch.zeros_like(weights_of(reference))
            for i in [index for index, coin in zip(held, coins, strict=True) if coin]:
                loss = nn.functional.cross_entropy(reference.backbone(x[i : i + 1]), y[i : i + 1])
                grads = torch.autograd.grad(loss, list(reference.parameters()))
                flat = torch.cat([g.reshape(-1) for g in grads])
                total += flat * min(1.0, 1.0 / flat.norm().item())
            weights = weights_of(reference) - 0.5 * total / 10
            nn.utils.vector_to_parameters(weights, reference.parameters())

    wanted = federated_averaging(reference, plans_of(fed, 1), train)
    torch.testing.assert_close(weights_of(model), wanted, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("dpsgd_first", [False, True])
def test_every_client_pays_for_its_own_steps_at_its_own_rate(dpsgd_first):
    private, fed = dpsgd(seed=None), federation(cohort=2, seed=4)
    both = (private, fed) if dpsgd_first else (fed, private)
    _, trainer = fit(*both, max_epochs=5)
    rounds = [sum(c in fed.planner.plan(r, fed.mechanism).cohort for r in range(5)) for c in range(3)]
    assert sum(rounds) == 10 and len(set(rounds)) > 1
    for client, account in private.accounts.items():
        (entry,) = account.accountant.history
        assert entry == (1.0, pytest.approx(10 / SIZES[client], abs=1e-9), rounds[client] * STEPS[client])
    spent = {c: account.epsilon(1e-3) for c, account in private.accounts.items()}
    assert private.epsilon(1e-3) == max(spent.values()) > min(spent.values())
    assert float(trainer.callback_metrics["dp/epsilon"]) == pytest.approx(max(spent.values()), rel=1e-6)
    assert fed.clients_per_step_chosen == 1
    assert not fed.batch_rule


def test_the_update_is_private_whatever_the_mechanism_and_empty_batches_are_noise():
    """Client 0 holds one sample, which is in no batch: its update is noise alone, with the stated std.

    650 weights, std 0.5 a step: 6 standard errors, false alarm below 1e-8.
    """
    private = DPSGD(1.0, 1.0, delta=1e-3, seed=None)
    fed = Federated(FedAvg(), 2, seed=0, local_steps=1)
    model, start = Classifier(), weights_of(Classifier()).clone()

    class Never(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            private._batches.thresholds = [0, 0]

    fit(fed, private, Never(), model=model, clients=[[0], list(range(1, 120))], max_epochs=1)
    noise = weights_of(model) - start  # mean of two: steps of lr 0.5, over expected sizes of 1 (at least)
    std = 0.5 * math.sqrt(0.5)
    assert abs(noise.std().item() / std - 1) < 6 / math.sqrt(2 * len(noise))
    assert [account.steps for account in private.accounts.values()] == [1, 1]


def test_a_round_of_nobody_costs_nothing():
    private, fed = dpsgd(), federation(dropout_probability=0.9, seed=2)
    fit(fed, private, max_epochs=6)
    received = [record.num_received for record in fed.records]
    assert 0 in received
    plans = [fed.planner.plan(r, fed.mechanism) for r in range(6)]
    for client, account in private.accounts.items():
        assert account.steps == STEPS[client] * sum(client in plan.survivors for plan in plans)


# ---- budget ------------------------------------------------------------------------------------------


def test_the_budget_stops_before_a_round_that_any_client_can_not_pay():
    private, fed = dpsgd(seed=None), federation(seed=None)
    budget = PrivacyBudget(6.0, 1e-3, Adversary.SERVER)
    fit(fed, private, budget, max_epochs=100)
    assert 1 <= len(fed.records) < 100
    assert private.epsilon(1e-3) <= 6.0
    assert budget.epsilon_spent == private.epsilon(1e-3)
    more = {c: a.steps + STEPS[c] > a.steps_within(6.0, 1e-3) for c, a in private.accounts.items()}
    assert any(more.values())
    with pytest.raises(RuntimeError, match="The privacy budget allows"):
        again = PrivacyBudget(6.0, 1e-3, "server")
        fit(federation(seed=None), dpsgd(seed=None), again, min_epochs=50, max_epochs=60)


def test_a_budget_beside_two_guarantees_asks_which_one_it_is_about():
    for unit, key in (("sample", "dp/epsilon"), ("client", "fed/epsilon")):
        budget = PrivacyBudget(50.0, 1e-3, "server", unit=unit)
        _, run = fit(federation(LDPQ(1e-5), seed=None), dpsgd(seed=None), budget, max_epochs=1)
        assert budget.epsilon_spent == pytest.approx(float(run.callback_metrics[key]), rel=1e-6)
    with pytest.warns(UserWarning, match="DPSGD draws from a seed, so nothing is private"):
        fit(federation(), dpsgd(seed=3), PrivacyBudget(50.0, 1e-3, "server"), max_epochs=1)
    with pytest.raises(ValueError, match="unit must be 'client', 'sample' or None, got 'step'"):
        PrivacyBudget(1.0, 1e-3, "server", unit="step")


# ---- resume ------------------------------------------------------------------------------------------


def saving(folder):
    """Checkpoints after every batch of a client, in a folder that holds the journal, too."""
    return Saves(folder, "on_train_batch_end"), pl.callbacks.ModelCheckpoint(
        folder, filename="{epoch}", save_top_k=-1
    )


def histories(private):
    return {client: account.accountant.history for client, account in private.accounts.items()}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_resumed_with_seeds_is_bit_identical_also_from_mid_round(tmp_path):
    private = dpsgd()
    whole, _ = fit(federation(cohort=2), private, Saves(tmp_path, "on_train_batch_end"), max_epochs=3)
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]))
    assert len(paths) >= 18
    for path in (paths[1], paths[8], paths[-2]):
        again = dpsgd()
        resumed, _ = fit(federation(cohort=2), again, ckpt=path, max_epochs=3)
        assert torch.equal(weights_of(resumed), weights_of(whole)), path.stem
        assert histories(again) == histories(private), path.stem


def test_without_a_seed_an_interrupted_round_stays_paid_for(tmp_path):
    private, fed = dpsgd(seed=None), federation(seed=None)
    trainer = make_trainer(fed, private, Interrupted(12 + 5, RuntimeError("boom")), max_epochs=3)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(Classifier(), datamodule=FederatedDataModule(Digits(120), clients=parts()))
    paid = sum(account.steps for account in private.accounts.values())
    assert paid == 12 + 5
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    again = dpsgd(seed=None)
    fit(federation(seed=None), again, ckpt=tmp_path / "late.ckpt", max_epochs=3)
    assert sum(account.steps for account in again.accounts.values()) == 3 * 12 + 5


def test_a_round_that_has_not_begun_does_not_count(tmp_path):
    class KilledAtItsStart(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "open.ckpt")
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fit(federation(seed=None), dpsgd(seed=None), KilledAtItsStart(), max_epochs=2)
    again = dpsgd(seed=None)
    fit(federation(seed=None), again, ckpt=tmp_path / "open.ckpt", max_epochs=2)
    # nobody of the round that was to begin had sent anything
    assert [account.steps for account in again.accounts.values()] == [2 * own for own in STEPS]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_without_a_seed_a_killed_process_is_paid_for_from_the_journal(tmp_path):
    """Rounds without a checkpoint are in the journal; of a round with one in its middle, all of it counts."""

    def steps(private):
        return [account.steps for account in private.accounts.values()]

    fit(federation(seed=None), dpsgd(seed=None), *saving(tmp_path), max_epochs=3, enable_checkpointing=True)
    middle = tmp_path / "5.ckpt"  # in the second client's first round; later ones die with the process
    for path in tmp_path.glob("*.ckpt"):
        if path != middle:
            path.unlink()
    again = dpsgd(seed=None)
    with pytest.warns(UserWarning, match="DPSGD charges their whole cohorts"):
        fit(federation(seed=None), again, ckpt=middle, max_epochs=1)
    # one round of the checkpoint, two lost, one now
    assert steps(again) == [4 * own for own in STEPS]
    seeded = dpsgd()
    folder = tmp_path / "seeded"
    fit(federation(), dpsgd(), *saving(folder), max_epochs=3, enable_checkpointing=True)
    fit(federation(), seeded, ckpt=folder / "5.ckpt", max_epochs=1)
    assert steps(seeded) == list(STEPS)  # the same messages again


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_without_a_seed_rounds_must_cost_what_they_cost_in_the_checkpoint(tmp_path):
    """The journal counts lost rounds and does not price them: cheaper ones now would hide what was spent."""
    settings = {"enable_checkpointing": True, "max_epochs": 2}
    fit(federation(seed=None, local_epochs=2), dpsgd(seed=None), *saving(tmp_path), **settings)
    middle = tmp_path / "5.ckpt"
    message = (
        r"client 0 had noise multiplier 1, sampling rate 0.5 and 4 steps, and .* multiplier {}, "
        r"sampling rate 0.5 and {} steps. Keep the checkpoint's noise, batch_size, local_epochs"
    ).format
    for noise, fed, limit, said in (
        (1.0, federation(seed=None, local_epochs=1), 1.0, ("1", "2")),
        (1.0, federation(seed=None, local_epochs=2), 1, ("1", "2")),
        (2.0, federation(seed=None, local_epochs=2), 1.0, ("2", "4")),
    ):
        with pytest.raises(ValueError, match=message(*said)):
            fit(fed, dpsgd(noise, seed=None), ckpt=middle, limit_train_batches=limit, max_epochs=2)
    again = dpsgd(seed=None)
    with pytest.warns(UserWarning, match="DPSGD charges their whole cohorts"):
        fit(federation(seed=None, local_epochs=2), again, ckpt=middle, max_epochs=1)
    assert [account.steps for account in again.accounts.values()] == [3 * 2 * own for own in STEPS]


def test_a_checkpoint_without_dpsgd_is_of_another_federation(tmp_path):
    _, trainer = fit(federation(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=r"batches = passes \(here DPSGD\)"):
        fit(federation(), dpsgd(), ckpt=tmp_path / "plain.ckpt")


# ---- refusals ----------------------------------------------------------------------------------------


def test_a_later_fit_without_a_federation_charges_its_own_account():
    """It charged the account of the client that trained last, and ended after a step."""
    private = dpsgd()
    fit(federation(), private, max_epochs=1)
    before = {client: account.steps for client, account in private.accounts.items()}
    fitted(Classifier(), private, data=Digits(80), max_epochs=1)
    own = private.accounts.pop(0).steps
    assert own > before.pop(0)
    assert {client: account.steps for client, account in private.accounts.items()} == before
