"""What trains in a simulation trains the same on real clients, or is named before anybody is charged."""

import stat
from pathlib import Path

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.algorithms import SCAFFOLD, ErrorFeedback, FedDyn, FedProx
from lightning_fedq.callbacks import PrivacyBudget
from lightning_fedq.data.models import Classifier
from lightning_fedq.flower.persistent_state import PersistentState, check_names
from lightning_fedq.flower.remote_client import RefusedError
from lightning_fedq.flower.store import Store
from lightning_fedq.mechanisms import CorBin
from tests.flower.loop import LoopGrid, clients, deploy, deployment, federated, module, simulate

pytestmark = pytest.mark.filterwarnings(
    "ignore:node |register|round .* client|the message of client|the keys come:UserWarning"
)

COIN = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)


class Shrinks(pl.Callback):
    """Acts on gradients, with a number of its own."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor, self.steps = factor, 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad *= self.factor ** min(self.steps, 3)


class Watches(pl.Callback):
    """Acts on nothing that clients train."""

    def on_validation_end(self, trainer, pl_module):
        self.seen = True


ACTS = {
    "gradient_clip_val": lambda: {"gradient_clip_val": 0.05},
    "accumulate_grad_batches": lambda: {"accumulate_grad_batches": 2},
    "limit_train_batches": lambda: {"limit_train_batches": 1},
    "overfit_batches": lambda: {"overfit_batches": 2},
    "precision": lambda: {"precision": "bf16-true"},
    "callbacks": lambda: {"callbacks": [Shrinks()]},
}


def trained(theirs, ours, tmp_path, rounds=2, **settings):
    """The server of a deployment whose clients train by `theirs` and whose server's Trainer has `ours`."""
    make = lambda: federated(COIN, **settings)  # noqa: E731
    return deploy(make, rounds, tmp_path, theirs={"accelerator": "cpu", **theirs}, **ours)


@pytest.fixture(scope="module")
def plain():
    return simulate(federated(COIN), 1).engine.weights


@pytest.mark.parametrize("name", ACTS)
def test_what_acts_on_training_acts_on_real_clients_as_in_a_simulation(name, plain, tmp_path):
    expected = simulate(federated(COIN), 1, **ACTS[name]())
    server = trained(ACTS[name](), ACTS[name](), tmp_path, rounds=1)
    assert torch.equal(server.engine.weights, expected.engine.weights)
    assert not torch.equal(server.engine.weights, plain), "it acts"


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("on_server", [True, False])
def test_what_acts_on_one_side_only_is_named_before_anybody_is_charged(name, on_server, tmp_path):
    theirs, ours = ({}, ACTS[name]()) if on_server else (ACTS[name](), {})
    with pytest.raises(RuntimeError, match=f"{name} is .* here and .* there"):
        trained(theirs, ours, tmp_path)


def test_another_number_in_a_callback_is_named(tmp_path):
    words = r"factor=0\.25.* here and .*factor=0\.5"
    with pytest.raises(RuntimeError, match=f"callbacks is .*{words}"):
        trained({"callbacks": [Shrinks(0.25)]}, {"callbacks": [Shrinks(0.5)]}, tmp_path)


def test_another_rate_is_named(tmp_path, monkeypatch):
    make = lambda: federated(COIN)  # noqa: E731
    other = module()
    other.lr = 0.2
    grid = LoopGrid(*clients(make, tmp_path))
    with pytest.raises(RuntimeError, match=r"optimizer is .*lr=0\.1.* here and .*lr=0\.2.* there"):
        deployment(make(), 1, tmp_path, module=lambda: other).run(grid)
    assert {kind for kind, _ in grid.log} == {"register"}


def test_other_names_of_one_thing_and_what_does_not_act_are_no_difference(tmp_path):
    theirs = {"precision": 32, "log_every_n_steps": 3}
    server = trained(theirs, {"precision": "32-true", "callbacks": [Watches()]}, tmp_path)
    assert len(server.records) == 2


def test_callbacks_of_the_whole_fit_may_stand_on_both_sides(tmp_path):
    """Every round was charged and lost: none of them can work on a client's part of a fit."""

    def both(folder):
        stop = pl.callbacks.EarlyStopping("val_acc", patience=9)
        return [pl.callbacks.ModelCheckpoint(folder), pl.callbacks.EMAWeightAveraging(decay=0.5), stop]

    expected = simulate(federated(COIN), 2)
    server = trained({"callbacks": both(tmp_path)}, {"callbacks": both(tmp_path / "kept")}, tmp_path)
    assert torch.equal(server.engine.weights, expected.engine.weights)


# ---- what a client keeps, and what the server's fit decides ------------------------------------------


class Scaled(Classifier):
    """A layer of its own keeps a running scale, which enters training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), lr=0.1)
        self.register_buffer("scale", torch.ones(64))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * batch[0].flatten(1).abs().mean(0))
        return super().training_step([batch[0].flatten(1) / (self.scale + 0.1), batch[1]], batch_idx)


class ByCourse(Classifier):
    """One cycle over all steps of the fit, plain SGD."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), lr=0.1)
        self.kind = kind

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.kind == "plain":
            return optimizer
        if self.kind.startswith("plateau"):
            _, _, watched = self.kind.partition(" of ")
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": watched or "val_acc"},
            }
        steps = self.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def averaging():
    """BatchNorm's running statistics are the mean of all batches, so that their count enters."""
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8, momentum=None)
    return Classifier(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), norm, torch.nn.Linear(8, 10))
    )


def swa():
    return {"callbacks": [pl.callbacks.StochasticWeightAveraging(0.01, 1, annealing_epochs=1)]}


ROUNDS = 3  # two of four clients each: one comes back at the latest in the third
SOME = {"cohort": 2}
STEPS = {"local_steps": 3}
KEEPS = {
    "local biases, some": (module, {"personal_parameters": ["*.bias"], **SOME}, dict),
    "local buffers": (Scaled, {"buffers": "local"}, dict),
    "a mean of all batches, some": (averaging, {**STEPS, **SOME}, lambda: {"accumulate_grad_batches": 2}),
    "a mean of all batches, cut": (averaging, STEPS, lambda: {"max_steps": 8}),
    "a mean of all batches, kept": (averaging, {"buffers": "local", **SOME}, dict),
    "ErrorFeedback, some": (module, {"algorithm": ErrorFeedback(0.1), **SOME}, dict),
    "FedDyn, some": (module, {"algorithm": FedDyn(0.1), **SOME}, dict),
    "SCAFFOLD, some": (lambda: ByCourse("plain"), {"algorithm": SCAFFOLD(), **STEPS, **SOME}, dict),
    "StochasticWeightAveraging": (lambda: ByCourse("plain"), STEPS, swa),
    "a plateau": (lambda: ByCourse("plateau"), STEPS, dict),
    "a cycle": (lambda: ByCourse("cycle"), STEPS, lambda: {"max_epochs": ROUNDS}),
    "all together": (
        Scaled,
        {"algorithm": FedProx(0.1), "buffers": "local", "personal_parameters": ["*.bias"], "local_epochs": 2},
        lambda: {
            "gradient_clip_val": 0.3,
            "accumulate_grad_batches": 2,
            "callbacks": [
                Shrinks(),
                pl.callbacks.EMAWeightAveraging(decay=0.5),
                PrivacyBudget(1e7, 1e-5, "eavesdropper"),
            ],
        },
    ),
}
FIT_ONLY = (pl.callbacks.StochasticWeightAveraging, pl.callbacks.EMAWeightAveraging, PrivacyBudget)


@pytest.mark.parametrize("name", KEEPS)
def test_a_deployment_ends_with_the_weights_of_the_simulation(name, tmp_path):
    make, settings, options = KEEPS[name]
    new = lambda: federated(COIN, **settings)  # noqa: E731
    expected = simulate(new(), ROUNDS, module=make(), **options())
    theirs = {"max_epochs": ROUNDS, **options()}
    theirs["callbacks"] = [c for c in theirs.get("callbacks", []) if not isinstance(c, FIT_ONLY)]
    server = deploy(new, ROUNDS, tmp_path, module=make, theirs=theirs, **options())
    assert len(server.records) == len(expected.records)
    assert torch.equal(server.engine.weights, expected.engine.weights)
    for path in tmp_path.glob("client-*/state*.pt"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


class Counts(torch.nn.Module):
    """Counts what it has seen in an integer that is no counter of a normalisation layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return x


def normed(momentum=0.1):
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8, momentum=momentum)
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 8), Counts(), norm, torch.nn.Linear(8, 10)]
    return Classifier(torch.nn.Sequential(*layers))


@pytest.mark.filterwarnings("ignore:training changed backbone.2.seen:UserWarning")
@pytest.mark.parametrize("steps, most", [(3, None), (3, 8), (None, None)])
@pytest.mark.parametrize("buffers", ["share", "local"])
def test_every_integer_buffer_is_the_simulation_s_or_excluded_by_name(steps, most, buffers, tmp_path):
    """`num_batches_tracked` was 0 deployed, 12 and 90 simulated; where nobody knows it the guide says so."""
    new = lambda: federated(COIN, buffers=buffers, local_steps=steps)  # noqa: E731
    simulated, options = normed(), {} if most is None else {"max_steps": most}
    simulate(new(), ROUNDS, module=simulated, **options)
    theirs = {"accelerator": "cpu", **options}
    trainer = deploy(new, ROUNDS, tmp_path, module=normed, theirs=theirs, **options).trainer
    found, expected = trainer.lightning_module.state_dict(), simulated.state_dict()
    differ = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert differ == ([] if steps else ["backbone.3.num_batches_tracked"])
    guide = Path(__file__).parents[2] / "docs" / "deployment.md"
    assert "`num_batches_tracked`" in guide.read_text().partition("```")[0]


def test_a_lost_answer_is_forgotten_and_everybody_goes_on(tmp_path):
    new = lambda: federated(COIN, personal_parameters=["backbone.3.*"])  # noqa: E731

    def lose(kind, client, reply):
        return None if (kind, client, grid.log.count((kind, client))) == ("train", 1, 1) else reply

    grid = LoopGrid(*clients(new, tmp_path), lose)
    _, server = deployment(new(), 3, tmp_path).run(grid)
    assert [record.num_received for record in server.records] == [3, 4, 4]
    store = Store(tmp_path / "client-1")
    kept, open = store.get_tensors("state"), store.get_tensors("state-open")
    assert (kept["at"], open["at"]) == ([1, 0], [2, 0])


def test_a_server_that_comes_back_goes_on_with_what_clients_keep(tmp_path):
    new = lambda: federated(COIN, personal_parameters=["backbone.3.*"], algorithm=None)  # noqa: E731
    expected = simulate(new(), 2)
    grid = LoopGrid(*clients(new, tmp_path))
    deployment(new(), 1, tmp_path).run(grid)
    _, server = deployment(new(), 2, tmp_path).run(grid)
    assert torch.equal(server.engine.weights, expected.engine.weights)


@pytest.mark.parametrize("damage", ["cut", "another client's", "another model's"])
def test_a_state_file_that_is_not_the_client_s_is_named(damage, tmp_path):
    store = Store(tmp_path)
    PersistentState(store, "client 1 of a").keep((0, 0), {"own": torch.ones(3), "names": ["bias"]})
    path = tmp_path / "state-open.pt"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    if damage == "another model's":
        state = PersistentState(store, "client 1 of a").settle((0, 0))
        with pytest.raises(RefusedError, match=r"has bias, but the model needs weight\. Restore the model"):
            check_names(state, ["weight"])
        return
    owner = "client 1 of a" if damage == "cut" else "client 2 of a"
    with pytest.raises(RefusedError, match=r"state-open.pt .*delete it, which resets the client's own state"):
        PersistentState(store, owner).settle((0, 0))


def test_a_buffer_that_only_the_client_knows_of_is_named_at_registration(tmp_path):
    new = lambda: federated(COIN)  # noqa: E731
    grid = LoopGrid(*clients(new, tmp_path, module=Scaled))
    with pytest.raises(RuntimeError, match=r"numbers that travel is 714 here and 650 there.*buffers='local'"):
        deployment(new(), 1, tmp_path, module=Scaled).run(grid)
    assert {kind for kind, _ in grid.log} == {"register"}


@pytest.mark.parametrize("settings", [{}, SOME, {"local_epochs": 2}])
def test_a_mean_of_all_batches_needs_to_know_how_many(settings, tmp_path):
    """The server's count stood at 0 on each client, each round: other statistics, in silence."""
    new = lambda: federated(COIN, **settings)  # noqa: E731
    with pytest.raises(
        RefusedError, match=r"backbone.2 has momentum=None.*Set local_steps=..., or use moment"
    ):
        deploy(new, 2, tmp_path, module=averaging)


class Twice(Classifier):
    """Its layer counts each batch twice."""

    def __init__(self) -> None:
        super().__init__(averaging().backbone)

    def training_step(self, batch, batch_idx):
        self.backbone(batch[0])
        return super().training_step(batch, batch_idx)


def test_a_layer_that_counts_otherwise_is_named(tmp_path):
    new = lambda: federated(COIN, **STEPS)  # noqa: E731
    with pytest.warns(UserWarning, match="counted 6 batches, but this client trained on 3"):
        deploy(new, 1, tmp_path, module=Twice)


def test_max_steps_needs_to_know_the_steps_of_a_round(tmp_path):
    with pytest.raises(ValueError, match=r"max_steps counts client steps.*local_steps="):
        trained({"max_steps": 8}, {"max_steps": 8}, tmp_path)


def test_what_clients_keep_needs_a_folder(tmp_path):
    new = lambda: federated(COIN, personal_parameters=["backbone.3.*"])  # noqa: E731
    with pytest.warns(
        UserWarning,
        match=r"Local tensors \(personal_parameters=, .* need a client folder.*give client_app\(home=",
    ):
        server = deploy(new, 1, tmp_path, home=False)
    assert server.records[0].num_received == 0


class Logs(ByCourse):
    """Logs its loss in training, and one of the same name in validation if it is told so."""

    def __init__(self, both: bool) -> None:
        super().__init__("plateau of loss")
        self.both = both

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.both:
            self.log("loss", torch.ones(()))


def test_a_plateau_of_what_clients_log_is_refused_before_anybody_is_charged(tmp_path):
    """It ended with Lightning's error after one charged round. What validation logs, too, the server has."""
    make = lambda: federated(COIN)  # noqa: E731
    grid = LoopGrid(*clients(make, tmp_path / "one", module=lambda: Logs(False)))
    with pytest.raises(
        RuntimeError, match="ReduceLROnPlateau watches 'loss', which clients log only in training"
    ):
        deployment(make(), 1, tmp_path / "one", module=lambda: Logs(False)).run(grid)
    assert {kind for kind, _ in grid.log} == {"register"}
    both = lambda: Logs(True)  # noqa: E731
    server, expected = deploy(make, 2, tmp_path / "two", module=both), simulate(make(), 2, module=both())
    assert torch.equal(server.engine.weights, expected.engine.weights)
