"""LeakageBudget: the noise and the batches that it decides on are those of the round."""

import math

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.leakage import LeakageBudget
from lightning_fedq.mechanisms import FedAvg, NearOptimalUtility
from tests.callbacks.steps import Saves
from tests.digits_run import Classifier, Digits, make_trainer, weights_of

CLIENTS = 4


def mechanism(budget=0.5, **changes):
    settings = {"clip_norm": 20.0, "leakage_budget": budget, "noise_std": 1e-3, "measured_leakage": 0.0}
    return NearOptimalUtility(**{**settings, **changes})


def federation(budget=0.5, **settings):
    return Federated(mechanism(budget), CLIENTS, **{"seed": 0, **settings})


def fit(*callbacks, ckpt=None, model=None, **settings):
    model = model or Classifier()
    trainer = make_trainer(*callbacks, **settings)
    trainer.fit(model, Digits(160), ckpt_path=ckpt)
    return model, trainer


class Seen(pl.Callback):
    """Writes down what every round really had."""

    is_shared_by_clients = True

    def __init__(self, federated: Federated) -> None:
        self.federated = federated
        self.noise = []
        self.sizes = []
        self.moved = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0 and self.federated.engine.round == len(self.noise):
            self.noise.append(self.federated.engine.mechanism.noise_std)
            self.sizes += [stack.batch_sizes for stack in self.federated.fit.next_stacks()]
        stack, number = self.federated.fit.present_batch(batch_idx)
        self.empty = not stack.batch_sizes[number]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.empty:
            self.moved.append(not torch.equal(pl_module.before, weights_of(pl_module)))


class Snapshot(Classifier):
    """Remembers its weights before every step, when all callbacks have had their say."""

    def on_train_batch_start(self, batch, batch_idx):
        self.before = weights_of(self).clone()


def test_noise_and_probability_are_applied_and_logged():
    budget, fed = LeakageBudget(probe_size=16, attempts=400, every_n_rounds=2), federation()
    seen = Seen(fed)
    _, trainer = fit(seen, fed, budget, max_epochs=6)
    assert len(set(seen.noise)) > 1, "it follows the rounds"
    assert seen.noise[-1] == fed.engine.mechanism.noise_std == max(s.std for s in budget.settings.values())
    assert all(0.0 < s.leakage <= 0.5 < s.unprotected for s in budget.settings.values())
    assert all(0 < s.probability < 1 and 0 < s.tv <= 1 for s in budget.settings.values())
    # 650 coordinates, nothing clipped: 6 standard errors, false alarm below 1e-8
    for noise, record in zip(seen.noise, fed.records, strict=True):
        assert record.mse == pytest.approx(noise**2 / CLIENTS, rel=6 * math.sqrt(2 / 650))
        assert record.clip_rate == 0.0
    logged = trainer.callback_metrics
    assert float(logged["leak/noise_std"]) == pytest.approx(seen.noise[-1])
    assert float(logged["leak/limit"]) <= 0.5
    probabilities = [s.probability for s in budget.settings.values()]
    assert float(logged["leak/sampling_probability"]) == pytest.approx(sum(probabilities) / 4)
    assert logged["leak/budget_seconds"] > 0 and budget.seconds > 0
    assert fed.clients_per_step_chosen == 1


def test_batches_are_poisson_samples_with_the_clients_own_probability():
    """40 rounds of 4 steps on 40 samples: 6,400 coins a client, 6 standard errors, false alarm below 1e-8."""
    budget, fed = LeakageBudget(probe_size=16, attempts=200, every_n_rounds=100), federation()
    fit(fed, budget, max_epochs=1)
    counts = {client: torch.zeros(160) for client in range(CLIENTS)}
    for round in range(40):
        plan = fed.planner.plan(round, fed.mechanism)
        for client in range(CLIENTS):
            for batch in budget._sample(plan, client):
                counts[client][batch] += 1
    for client, setting in budget.settings.items():
        held, p = fed.client_indices[client], setting.probability
        assert counts[client].sum() == counts[client][held].sum()
        coins = 40 * 4 * len(held)
        assert abs(counts[client].sum().item() - p * coins) < 6 * math.sqrt(p * (1 - p) * coins)


@pytest.mark.filterwarnings("ignore:training left tensors in the attribute before:UserWarning")  # of Snapshot
@pytest.mark.filterwarnings("ignore:LeakageBudget uses the best sampling probability:UserWarning")
def test_an_empty_batch_is_no_step_and_a_client_without_any_still_answers():
    budget, fed = (
        LeakageBudget(probe_size=8, attempts=200, max_squared_distance=1e9),
        federation(local_steps=1),
    )
    seen = Seen(fed)

    def decaying(parameters):
        return torch.optim.SGD(parameters, lr=0.5, weight_decay=0.1)

    fit(seen, fed, budget, max_epochs=12, model=Snapshot(optimizer=decaying))
    assert (0,) in seen.sizes
    assert seen.moved and not any(seen.moved)
    assert [record.num_received for record in fed.records] == [CLIENTS] * 12
    assert {size for (size,) in seen.sizes} > {0}


@pytest.mark.filterwarnings("ignore:LeakageBudget uses the best sampling probability:UserWarning")
def test_momentum_survives_an_empty_batch():
    """Two steps around an empty one move as two steps without it."""
    moved = []
    for sizes in ([2, 0, 2], [2, 2]):

        class Fixed(LeakageBudget):
            def _sample(self, plan, client, sizes=sizes):
                held = self._work.client_indices[client]
                return tuple(held[:size] for size in sizes)

        fed = federation(local_steps=len(sizes), ranges=None)
        fed.mechanism = mechanism(noise_std=1e-4)
        budget = Fixed(probe_size=8, attempts=200)
        budget._apply = lambda clients: None
        model = Classifier(optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
        fit(fed, budget, model=model, max_epochs=1)
        moved.append(weights_of(model))
    torch.testing.assert_close(*moved, atol=1e-3, rtol=0)


def test_a_tighter_budget_gets_more_noise():
    noise = []
    for tau in (0.7, 0.4):
        fed = federation(tau)
        fit(fed, LeakageBudget(probe_size=16, attempts=400), max_epochs=1)
        noise.append(fed.engine.mechanism.noise_std)
    assert noise[0] < noise[1]


def test_what_no_probability_can_do_is_said_and_the_training_goes_on():
    budget, fed = LeakageBudget(probe_size=16, attempts=200, max_squared_distance=1e6), federation()
    with pytest.warns(UserWarning, match=r"best sampling probability\. round 1, client \d: the batches need"):
        _, trainer = fit(fed, budget, max_epochs=2)
    assert len(fed.records) == 2
    assert float(trainer.callback_metrics["leak/sampling_feasible"]) == 0.0
    with pytest.raises(ValueError, match="Lower the noise, clip to a smaller norm or allow more leakage"):
        fit(
            federation(),
            LeakageBudget(probe_size=16, attempts=200, max_squared_distance=1e6, on_infeasible="raise"),
        )


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_resumed_is_bit_identical_also_from_mid_round(tmp_path):
    def both():
        return federation(cohort=3), LeakageBudget(probe_size=8, attempts=200, every_n_rounds=2)

    fed, budget = both()
    whole, _ = fit(fed, budget, Saves(tmp_path, "on_train_batch_end"), max_epochs=4)
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]))
    assert len(paths) == 48, len(paths)
    for path in (paths[1], paths[8], paths[-2]):
        fed, again = both()
        resumed, _ = fit(fed, again, ckpt=path, max_epochs=4)
        assert torch.equal(weights_of(resumed), weights_of(whole)), path.stem
        assert again.settings == budget.settings, path.stem


def test_the_gradients_are_those_of_the_training_step():
    class Watch(LeakageBudget):
        def _gradients(self, plan, client):
            found = super()._gradients(plan, client)
            held = self._work.client_indices[client]
            seed = plan.stream_seed("probe", client)
            chosen = torch.randperm(len(held), generator=torch.Generator().manual_seed(seed))[:8]
            x, y = Digits(160).train_set()[held[chosen]]
            for row in range(8):
                loss = torch.nn.functional.cross_entropy(
                    self._module.backbone(x[row : row + 1]), y[row : row + 1]
                )
                own = torch.autograd.grad(loss, list(self._module.parameters()))
                torch.testing.assert_close(found[row], torch.cat([g.reshape(-1) for g in own]))
            return found

    fed = federation()
    fit(fed, Watch(probe_size=8, attempts=200), max_epochs=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probe_size": 3}, "probe_size must be >= 4, got 3"),
        ({"attempts": 0}, "attempts must be >= 1"),
        ({"every_n_rounds": 0}, "every_n_rounds must be >= 1"),
        ({"max_squared_distance": 0.0}, "max_squared_distance must be > 0 or None"),
        ({"on_infeasible": "half"}, "on_infeasible must be 'warn' or 'raise', got 'half'"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        LeakageBudget(**settings)


def test_what_is_refused():
    def refused(message, *callbacks, **settings):
        with pytest.raises(ValueError, match=message):
            fit(*callbacks, **settings)

    refused(
        "sets the noise of NearOptimalUtility, got FedAvg", Federated(FedAvg(), 4, seed=0), LeakageBudget()
    )
    refused("no Federated callback", LeakageBudget())
    refused(
        "can't train side by side, got clients_per_step=2", federation(clients_per_step=2), LeakageBudget()
    )
    both = DPSGD(1.0, 1.0, delta=1e-3), LeakageBudget()
    refused("DPSGD and LeakageBudget both choose the local batches", federation(), *both)
    refused("can't be shown with 5 attempts", federation(0.2), LeakageBudget(attempts=5))

    class Item(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() > 0 else 2 * loss

    refused("training_step can't be mapped over samples", federation(), LeakageBudget(), model=Item())
