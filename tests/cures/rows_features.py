"""Cures that personalisation, evaluation by client, splits, LEAF files and secret cohorts name."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

import lightning_fedq as fedq
from lightning_fedq.clients.personal import PersonalTensors
from lightning_fedq.flower.settings import check_deployable, time_limit
from lightning_fedq.privacy.planning import make_plan_context
from lightning_fedq.privacy.run import Run
from lightning_fedq.privacy.target import calibrate
from lightning_fedq.rounds.plan import RoundPlanner
from tests.cures.rows import dpsgd, fed, fit, row
from tests.cures.rows_data import Several, Stream, loader, of, on, part, parts, two
from tests.cures.rows_training import monitor
from tests.digits_run import Classifier, Digits, digits
from tests.leakage.test_monitor import Scores

HEAD = ["backbone.bias"]
LIMIT = fedq.Deadline(30.0, durations=1.0)
INPUTS, LABELS = digits()
SERVER = fedq.PrivacyTarget(80.0, delta=1e-3, adversary="server")
SECRET = fedq.PrivacyTarget(8.0, delta=1e-3, adversary="outsider")


def secret(**settings):
    given = {"cohort": fedq.FixedSize(2, secret=True), "diagnostics": False, "clients_per_step": 1}
    return fedq.Federated(fedq.GaussianNoise(1.0, 1.0), 8, **{**given, **settings})


def known(**settings):
    return fedq.Federated(fedq.GaussianNoise(1.0, 1.0), 8, cohort=2, clients_per_step=1, **settings)


def no_rounds():
    noise = fedq.GaussianNoise(1.0, 1.0)
    return Run.ideal(noise, make_plan_context(noise, 40, 20), 0, None)


def held_out(amount=0.5):
    return fedq.ClientEvaluation(held_out=amount)


def unreleased(**settings):
    return fed(evaluate_clients=held_out(), **settings)


def measured(amount=0.5, **settings):
    return fed(evaluate_clients=held_out(amount), **settings)


class Users(Dataset[Any]):
    """Samples with a user each, under a name."""

    def __init__(self, users: int, finite: bool = True) -> None:
        self.users, self.finite = users, finite

    def __len__(self):
        return 80

    def __getitem__(self, index):
        lightness = INPUTS[index].mean() if self.finite or index else torch.tensor(torch.nan)
        named = {"user": f"u{index % self.users}", "lightness": float(lightness)}
        return {"x": INPUTS[index], "y": LABELS[index], **named}


class OfUsers(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step((batch["x"], batch["y"]) if isinstance(batch, dict) else batch, batch_idx)


class Mute(Classifier):
    def validation_step(self, batch, batch_idx):
        pass


def by_index():
    clients = [list(range(20 * client, 20 * client + 20)) for client in range(4)]
    return fedq.FederatedDataModule(Digits(80), clients=clients)


def by(partition, users=4, finite=True, **settings):
    return on(loader(Users(users, finite)), federation=fed(partition=partition, **settings), module=OfUsers())


def resumed(whole):
    """A fit with secret cohorts, and a second one from its checkpoint or from its weights alone."""
    trainer, module = fit(secret(), max_epochs=1), Classifier()
    trainer.save_checkpoint("secret.ckpt")
    if not whole:
        module.load_state_dict(torch.load("secret.ckpt", weights_only=False)["state_dict"])
    fit(secret(), module=module, ckpt_path="secret.ckpt" if whole else None, max_epochs=2)


def owned(name):
    """What clients keep of a tensor of this name."""
    own = PersonalTensors()
    own.names = (name,)
    return own


row(
    "The name of a run must be a folder below root, such as 'digits', got {}. Set",
    lambda: fedq.RunFolder("/runs/digits"),
    lambda: fedq.RunFolder("digits"),
    lambda: fedq.RunFolder("digits", root="/runs"),
)
row(
    "needs all trained parameters, but personal_parameters={} keeps some with the clients. Leave one out",
    lambda: fit(fed(personal_parameters=HEAD), dpsgd()),
    lambda: fit(fed(personal_parameters=HEAD)),
    lambda: fit(fed(), dpsgd()),
)
row(
    "LeakageMonitor attacks gradients of the whole model, but personal_parameters={} keeps parameters "
    "at the clients",
    lambda: fit(fed(personal_parameters=["backbone.2.*"]), monitor(), module=Scores()),
    lambda: fit(fed(), monitor(), module=Scores()),
    lambda: fit(fed(personal_parameters=["backbone.2.*"]), module=Scores()),
)
row(
    "so clients send nothing",
    lambda: fit(fed(personal_parameters=["backbone.*"])),
    lambda: fit(fed(personal_parameters=HEAD)),
)
row(
    "{} contains an empty pattern. Use",
    lambda: fed(personal_parameters=[""]),
    lambda: fit(fed(personal_parameters=["backbone.b*"])),
)
row(
    "held_out has no data of clients {}. Give every client a data set",
    lambda: fit(measured([part(), part(), None, part()])),
    lambda: fit(measured([part() for _ in range(4)])),
)
row(
    "evaluate_clients has nothing to measure on, because no client has a held-out sample. Use",
    lambda: fit(measured([Subset(part(), []) for _ in range(4)])),
    lambda: fit(measured([part(), *(Subset(part(), []) for _ in range(3))])),
    lambda: fit(measured(0.2)),
)
row(
    "Clients' samples are given by index, so held-out samples can't follow a partition. Use",
    lambda: fit(measured(part()), data=by_index()),
    lambda: fit(measured([part()] * 4), data=by_index()),
)
row(
    "held_out must have a length to be partitioned, got a stream ({}). Use a map-style data set, or a",
    lambda: measured(Stream()),
    lambda: fit(measured(part())),
    lambda: fit(measured([part()] * 4)),
)
row(
    "No client trains on {}, but there are held-out samples of them. Leave them out of the data set of",
    lambda: by(fedq.Natural("user"), evaluate_clients=held_out(Users(8))),
    lambda: by(fedq.Natural("user"), evaluate_clients=held_out(Users(4))),
)
row(
    "evaluate_clients needs a validation_step that logs metrics, but no client has logged any. Use",
    lambda: fit(measured(), module=Mute()),
    lambda: fit(measured()),
)
row(
    "client_metrics='none' drops the metrics of evaluate_clients. Use",
    lambda: fit(measured(client_metrics="none")),
    lambda: fit(measured(client_metrics="local")),
    lambda: fit(fed(client_metrics="none")),
)
row(
    "Samples can be held out of one data set with a length only, not of several loaders or streams. Use",
    lambda: on(two(), federation=measured(), module=Several()),
    lambda: fit(
        fed(local_steps=2, evaluate_clients=held_out([loader(one) for one in parts()])),
        data=of(*map(Stream, range(4)), batch_size=5),
    ),
)
row(
    "Clients {} have too few samples to hold out {} of them and train on {}. Use fewer clients, a larger",
    lambda: fit(measured(0.5, num_clients=70)),
    lambda: fit(measured(0.5, num_clients=4)),
    lambda: fit(measured([part() for _ in range(70)], num_clients=70)),
)
row(
    "found no item {} in the samples of {} ({}: {}). Give the index or key of an item, or a function of a",
    lambda: by(fedq.Natural("writer")),
    lambda: by(fedq.Natural("user")),
    lambda: by(fedq.Natural(lambda sample: sample["user"])),
)
row(
    "could number the users of several loaders differently. Give every client separate loaders:",
    lambda: on(two(), federation=fed(partition=fedq.Natural(1)), module=Several()),
    lambda: fit(fed(), data=of(*map(loader, parts()))),
)
row(
    "The samples are of {} users, but num_clients is {}. Use num_clients={}{}.",
    lambda: by(fedq.Natural("user"), users=8),
    lambda: by(fedq.Natural("user"), users=8, num_clients=8),
    lambda: by(fedq.Natural("user", merge_users=True), users=8),
)
row(
    "FeatureShards sorts by numbers, got {}. Use Natural for names.",
    lambda: by(fedq.FeatureShards(by="user")),
    lambda: by(fedq.Natural("user")),
)
row(
    "FeatureShards needs finite numbers, got NaN or infinity. Leave such samples out.",
    lambda: by(fedq.FeatureShards(by="lightness"), finite=False),
    lambda: by(fedq.FeatureShards(by="lightness")),
)
row(
    "A real client has only its own data, so held_out must be a fraction of its",
    lambda: check_deployable(measured([[]] * 4)),
    lambda: check_deployable(measured(0.5)),
)
# ---- deadlines --------------------------------------------------------------------------------------
row(
    "dropout_probability={} and a deadline both choose dropouts. Leave one out",
    lambda: fed(deadline=LIMIT, dropout_probability=0.1),
    lambda: fed(deadline=LIMIT),
)
row(
    "Deadline(durations=...) has {} entries for {} clients. Give one entry per client, or one number",
    lambda: fed(deadline=fedq.Deadline(30.0, [1.0])),
    lambda: fed(deadline=fedq.Deadline(30.0, 1.0)),
)
row("{} lacks the", lambda: fit(fed(deadline=fedq.Deadline(30.0))), lambda: fit(fed(deadline=LIMIT)))
row(
    "round_timeout={} and Federated(deadline={}) differ. Leave round_timeout out",
    lambda: time_limit(fed(deadline=LIMIT), 60.0),
    lambda: time_limit(fed(deadline=LIMIT), None),
)
# ---- secret cohorts ---------------------------------------------------------------------------------
row(
    "All epsilons of clients need the same delta, got {}. Give the target and the budget the same delta.",
    lambda: fit(known(privacy=SERVER), fedq.PrivacyBudget(99.0, 1e-4, "server")),
    lambda: fit(known(privacy=SERVER), fedq.PrivacyBudget(99.0, SERVER.delta, "server")),
)
row(
    "a privacy target over the run needs rounds >= 1, got {}. Set the number of rounds, or",
    lambda: calibrate(SERVER, no_rounds()),
    lambda: calibrate(SERVER, replace(no_rounds(), rounds=1)),
    lambda: calibrate(replace(SERVER, over="round"), no_rounds()),
)
row(
    "secret cohorts need S5, clients without a limit of their own, but a {} of a {} against {} limits",
    lambda: fit(secret(), fedq.PrivacyBudget(50.0, 1e-3, "server")),
    lambda: fit(secret(), fedq.PrivacyBudget(50.0, 1e-3, "outsider")),
    lambda: fit(known(), fedq.PrivacyBudget(50.0, 1e-3, "server")),
)
row(
    "secret cohorts need S5, clients without a limit of their own, but a {} of a {} against {} limits",
    lambda: secret(privacy=replace(SECRET, over="round")),
    lambda: fit(secret(privacy=SECRET)),
    lambda: fit(known(privacy=replace(SECRET, over="round"))),
)
row(
    "Secret cohorts need simulated clients, got real clients and {}. Use secret=False",
    lambda: RoundPlanner(8, 0, fedq.FixedSize(2, secret=True), real_clients=True),
    lambda: RoundPlanner(8, 0, fedq.FixedSize(2), real_clients=True),
)
row(
    "A federation with secret cohorts can't resume, since its checkpoint has no ledger. Load only the",
    lambda: resumed(whole=True),
    lambda: resumed(whole=False),
)
row(
    "The checkpoint's clients keep {}, these {}. Use the checkpoint's own model",
    lambda: owned("other").resume(None, owned("one").state_dict(), resumed=True),
    lambda: owned("one").resume(None, owned("one").state_dict(), resumed=True),
)
