"""Features that a run over several ranks must agree with one process in: a table, and what each run found."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.data.models import FixedFeatures
from lightning_fedq.mechanisms.interface import Adversary
from tests.canary.test_canary import FEATURES as LIGHTNING, Model
from tests.contract.test_mechanisms import ROWS
from tests.digits_run import ManualSteps, make_trainer
from tests.training.test_constraints import Normaliser

CLIENTS, SIZE = 7, 4


def _plain_sgd():
    return Model(optimizer=torch.optim.SGD)


CORBIN = fedq.CorBin(epsilon_per_coordinate=4.0, shared_bits=5)


class Data(pl.LightningDataModule):
    """Clients that hold 4 to 10 samples each, in batches of 4."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def _set(self, seed, size):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(size, 6, generator=generator)
        return TensorDataset(inputs, torch.randint(3, (size,), generator=generator))

    def train_dataloader(self):
        return DataLoader(self._set(1, 49), **{"batch_size": SIZE, "shuffle": True, **self.options})

    def val_dataloader(self):
        return DataLoader(self._set(0, SIZE), batch_size=SIZE)


class Stream(IterableDataset[Any]):
    """Samples without end."""

    def __iter__(self):
        while True:
            yield torch.randn(6), torch.zeros((), dtype=torch.int64)


def _own(kind):
    whole = Data()._set(1, 49)
    parts = [torch.utils.data.Subset(whole, range(7 * c, 7 * c + 7)) for c in range(CLIENTS)]
    if kind is fedq.ClientData:  # opened by turn: its samples are those of `whole`
        own = [fedq.ClientData(lambda part=part: part, size=len(part)) for part in parts]
        return fedq.FederatedDataModule(clients=own, val=Data()._set(0, SIZE), batch_size=SIZE)
    sets = [
        Stream() if kind is Stream else DataLoader(part, batch_size=2 + c % 3) for c, part in enumerate(parts)
    ]
    return fedq.FederatedDataModule(clients=sets, val=Data()._set(0, SIZE), batch_size=SIZE)


class ByHand(ManualSteps, Model):
    """Optimises by hand, with a schedule that goes by the client's own weights."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9 + 0.01 * float(self.head.bias.detach().norm())


class Draws(Model):
    """Draws random numbers in training and in validation, from torch's own generator."""

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]], batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step([batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]], batch_idx)


class Drawing(torch.optim.SGD):
    """Steps with noise from torch's default generator."""

    def step(self, closure=None):
        found = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
        return found


class Normed(Model):
    """Normalises by a running variance of its own, which has to stay positive behind coins."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.insert(0, Normaliser("var", 6))


class Padded(Model):
    """Words, one of which is padding, in front of a layer some of whose weights are pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6, padding_idx=0)
        nn.utils.prune.l1_unstructured(self.head, "weight", amount=5)
        self.backbone.register_forward_pre_hook(
            lambda net, x: self.words((4 * x[0].abs()).long().clamp(max=8)).mean(1)
        )


class Pictured(Model):
    """Looks at pictures by a convolution in channels_last, which each client has to find so."""

    def __init__(self) -> None:
        super().__init__()
        look = nn.Conv2d(2, 2, 3, padding=1)
        self.backbone = nn.Sequential(nn.Unflatten(1, (2, 1, 3)), nn.Upsample((3, 3)), look, nn.Flatten())
        self.head = nn.Linear(18, 3)
        self.to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        assert self.backbone[2].weight.stride() == (18, 1, 6, 2)
        return super().training_step(batch, batch_idx)


class Scaled(nn.Module):
    """Subtracts and divides by constants."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("std", torch.ones(6))

    def forward(self, inputs):
        return (inputs - self.mean) / self.std


class OnFeatures(Model):
    """Takes a sample for a picture, whose fixed features stand in front."""

    def __init__(self) -> None:
        super().__init__()
        self.features = FixedFeatures(6, side=16, pictures=None)
        self.backbone.register_forward_pre_hook(lambda net, x: self.features(self.picture(x[0])))

    def picture(self, inputs: Tensor) -> Tensor:
        return inputs.sigmoid().repeat(1, 43)[:, :256].reshape(-1, 1, 16, 16)


class Surveyed(Model):
    """Normalises by statistics of all clients, and begins its head with one."""

    def __init__(self, *between: nn.Module, **settings: Any) -> None:
        super().__init__(*between, **settings)
        self.backbone.insert(0, Scaled())

    def client_statistics(self, batches):
        inputs = torch.cat([inputs for inputs, _ in batches])
        return torch.cat([inputs.mean(0), inputs.square().mean(0) - 1.0])

    def on_statistics(self, mean):
        scaled = self.backbone[0]
        scaled.mean.copy_(mean[:6])
        scaled.std.copy_((1.0 + mean[6:]).clamp(min=0.25).sqrt())
        self.head.bias += mean[:3]


class Numbered(Model):
    """Weighs its loss by who trains, and when."""

    def training_step(self, batch, batch_idx):
        weight = 1.0 + 0.1 * self.trainer.client + 0.5 * self.trainer.current_epoch
        assert self.trainer.clients == (self.trainer.client,)
        return weight * super().training_step(batch, batch_idx)


class Remembering(Model):
    """Each client keeps how often it has trained, the mean of its features, and a control variate."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Module()
        self.memory.register_buffer("rounds", torch.zeros(()))
        self.memory.register_buffer("prototype", torch.zeros(5))
        self.memory.register_buffer("control", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        features, memory = self.backbone(batch[0]), self.memory
        memory.prototype.lerp_(features.detach().mean(0), 0.5)
        pull = memory.rounds * (features.mean(0) - memory.prototype).square().sum()
        return super().training_step(batch, batch_idx) + 0.1 * pull + (memory.control * self.head.bias).sum()

    def on_after_backward(self):
        self.memory.control.lerp_(self.head.bias.grad, 0.1)

    def on_train_epoch_end(self):
        self.memory.rounds += 1


class Judged(Model):
    """Validates with metric objects, one of which counts."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.count = torchmetrics.SumMetric()

    def validation_step(self, batch, batch_idx):
        self.accuracy(self.head(self.backbone(batch[0])), batch[1])
        self.count(len(batch[1]))
        self.log("val_acc", self.accuracy)
        self.log("val_count", self.count)


class Partly(Model):
    """Logs a metric that some clients have, and one that is not defined for some."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if len(batch[1].unique()) > 1:
            self.log("val_area", batch[0].mean())
        self.log("val_ratio", 1.0 if bool((batch[1] == 0).any()) else float("nan"))


class Feature(NamedTuple):
    """One run. `refused` is a part of the error on several ranks, `raises` of that on one process too.

    `cure` is what the error on several ranks says to do.
    """

    module: Callable[[], Any] = Model
    mechanism: Any = CORBIN
    federated: dict[str, Any] = {}  # noqa: RUF012
    callbacks: Callable[[Path], list[Any]] = lambda folder: []
    before: Callable[[Path], list[Any]] = lambda folder: []
    trainer: Callable[[Path], dict[str, Any]] = lambda folder: {}
    data: Callable[[], Any] = Data
    refused: str = ""
    cure: str = "devices=1"
    raises: str = ""
    then: Callable[[Path], dict[str, Any]] | None = None
    within_rounds: bool = False  # it looks into rounds, in which each rank has its own clients
    stops: bool = False  # it stops in mid-round, which is elsewhere on several ranks


def _schedule(make, **options):
    def module():
        return Model(schedule=lambda optimizer: {"scheduler": make(optimizer), **options})

    return module


def _kept(folder):
    return pl.callbacks.ModelCheckpoint(
        folder / "kept", filename="{epoch}-{step}", save_top_k=-1, save_last=True
    )


def _folder(folder, **options):
    return fedq.RunFolder("run", str(folder), monitor="val_loss", mode="min", show=False, **options)


_STEPS = torch.optim.lr_scheduler
_WITHIN_ROUNDS = ("checkpoints every step", "checkpoints by time")
_REFUSED_ON_RANKS = {"a metric object": "metric object that clients update"}
TURNS = {"cohort": fedq.Cyclic(CLIENTS // 2)}
SURVEY = {"statistics": fedq.Statistics(12, 2.0)}
HANDED_ON = fedq.HandedOnGaussian(
    clip_norm=8.0, local_sigma=0.01, granularity=5e-4, max_dropped_clients=1, num_cohorts=2
)
FEATURES = {
    "nothing": Feature(),
    **{
        name: Feature(
            setting.module,
            callbacks=setting.after,
            before=setting.before,
            federated=setting.federated,
            trainer=setting.trainer,
            raises=setting.raises,
            then=setting.then,
            within_rounds=name in _WITHIN_ROUNDS,
            stops=name == "stopped in mid-round",
            refused=_REFUSED_ON_RANKS.get(name, ""),
        )
        for name, setting in LIGHTNING.items()
        if not name.startswith("interrupted") and name != "nothing"
    },
    **{f"{row!r}": Feature(mechanism=row, federated=TURNS if row.separation > 1 else {}) for row in ROWS},
    "a variance of one's own": Feature(Normed, fedq.LDPQ(2.0)),
    "padding and pruned weights": Feature(
        Padded, fedq.LDPQ(2.0), {"constraints": {"head.bias": "fixed", "backbone.0.weight": "unit"}}
    ),
    "fixed features": Feature(OnFeatures),
    "fixed features in stacks": Feature(OnFeatures, federated={"clients_per_step": 3}),
    "a model that is sent in few bits": Feature(federated={"broadcast_bits": 5}),
    "cohorts": Feature(federated={"cohort": 3}),
    "cohorts smaller than the ranks": Feature(federated={"cohort": 2}),
    "each client once": Feature(federated={"cohort": fedq.DisjointOnce(2)}),
    "dropouts": Feature(federated={"dropout_probability": 0.5}),
    "dropouts, one mean": Feature(mechanism=fedq.FedAvg(), federated={"dropout_probability": 0.5}),
    "weights by samples": Feature(federated={"weighting": "samples", "partition": fedq.Dirichlet(1.0)}),
    "inverse variances": Feature(federated={"weighting": "inverse_variance"}),
    "a median": Feature(federated={"aggregator": fedq.RobustAggregation("median")}),
    "secure aggregation": Feature(
        federated={"secure_aggregation": fedq.SecAgg(), "dropout_probability": 0.2}
    ),
    "quantised weights": Feature(federated={"sends": "weights", "server_lr": 0.5}),
    "a server optimiser": Feature(federated={"server_optimizer": lambda p: torch.optim.Adam(p, lr=0.01)}),
    "a server that draws": Feature(
        lambda: Model(nn.Dropout(0.5)), federated={"server_optimizer": lambda p: Drawing(p, lr=1.0)}
    ),
    "two passes in stacks": Feature(federated={"local_epochs": 2, "clients_per_step": 3}),
    "local steps": Feature(federated={"local_steps": 3, "clients_per_step": 2}),
    "dropped rests": Feature(data=lambda: Data(drop_last=True)),
    "loaders of their own": Feature(data=lambda: _own(DataLoader)),
    "data opened by turn": Feature(data=lambda: _own(fedq.ClientData)),
    "streams": Feature(data=lambda: _own(Stream), federated={"local_steps": 2}, refused="are streams"),
    "a schedule by batch": Feature(
        _schedule(lambda o: _STEPS.StepLR(o, 1, 0.9), interval="step", frequency=2)
    ),
    "a cycle": Feature(_schedule(lambda o: _STEPS.OneCycleLR(o, 1.0, 20), interval="step")),
    "a plateau of the validation": Feature(
        _schedule(lambda o: _STEPS.ReduceLROnPlateau(o, patience=0), monitor="val_loss")
    ),
    "a plateau of the training": Feature(
        _schedule(lambda o: _STEPS.ReduceLROnPlateau(o, patience=0), monitor="train_loss"),
        refused="watches 'train_loss'",
        cure="Watch a metric of the validation",
    ),
    "optimised by hand": Feature(ByHand),
    "random numbers": Feature(Draws, federated={"clients_per_step": 3}),
    "dropout layers": Feature(lambda: Model(nn.Dropout(0.5)), federated={"clients_per_step": 3}),
    "metric objects in the validation": Feature(Judged),
    "a run folder": Feature(callbacks=lambda f: [_folder(f)]),
    "metrics that stay with clients": Feature(
        federated={"client_metrics": "local"}, callbacks=lambda f: [_folder(f)]
    ),
    "metrics that nobody sees": Feature(
        federated={"client_metrics": "none"}, callbacks=lambda f: [_folder(f)]
    ),
    "checkpoints every round": Feature(
        callbacks=lambda f: [_kept(f)], trainer=lambda f: {"enable_checkpointing": True}
    ),
    "resumed": Feature(
        callbacks=lambda f: [_kept(f)],
        trainer=lambda f: {"enable_checkpointing": True},
        then=lambda f: {"ckpt_path": f / "kept" / "last.ckpt"},
    ),
    "a budget": Feature(callbacks=lambda f: [fedq.PrivacyBudget(700.0, 1e-5, Adversary.EAVESDROPPER)]),
    "a privacy target": Feature(
        federated={"privacy": fedq.PrivacyTarget(50.0, 1e-5, Adversary.OUTSIDER)},
        mechanism=fedq.AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05),
    ),
    "a moving average": Feature(callbacks=lambda f: [pl.callbacks.EMAWeightAveraging(decay=0.8)]),
    "back to the best": Feature(callbacks=lambda f: [fedq.ReloadBest("val_loss", 1, "min")]),
    "leakage": Feature(callbacks=lambda f: [fedq.LeakageMonitor(attempts=4, num_candidates=4)]),
    "Langevin": Feature(
        lambda: Model(optimizer=torch.optim.SGD, rate=0.07),
        mechanism=fedq.LayeredGaussian(clip_norm=8.0, noise_multiplier=1e-6),
        federated={"local_steps": 1},
        callbacks=lambda f: [fedq.Langevin(0.1 / CLIENTS)],
    ),
    "DPSGD": Feature(
        callbacks=lambda f: [fedq.DPSGD(1.0, 1.0, delta=0.01, seed=0)],
        refused="DPSGD keeps the accounts of all clients",
    ),
    "a layer of their own": Feature(federated={"personal_parameters": ["head.*"], "cohort": 4}),
    "a layer of their own, in stacks": Feature(
        federated={"personal_parameters": ["head.*"], "clients_per_step": 3}
    ),
    "FedProx": Feature(federated={"algorithm": fedq.FedProx(0.1)}),
    "FedDyn": Feature(federated={"algorithm": fedq.FedDyn(0.1), "cohort": 4}),
    "ErrorFeedback": Feature(federated={"algorithm": fedq.ErrorFeedback(0.1), "cohort": 4}),
    "SCAFFOLD": Feature(_plain_sgd, federated={"algorithm": fedq.SCAFFOLD(), "local_steps": 2}),
    "SCAFFOLD, some": Feature(
        _plain_sgd, federated={"algorithm": fedq.SCAFFOLD(), "local_steps": 2, "cohort": 4}
    ),
    "what clients measure": Feature(
        federated={
            "evaluate_clients": fedq.ClientEvaluation(0.3),
            "personal_parameters": ["head.*"],
            "client_metrics": "shared",
        }
    ),
    "clients that are available": Feature(
        federated={"cohort": fedq.Available(lambda round: range(round % 2, CLIENTS, 2), 3)}
    ),
    "the client's number": Feature(Numbered, federated={"cohort": 4}),
    "pictures in channels_last": Feature(Pictured, federated={"clients_per_step": 1}),
    "memory of its own": Feature(Remembering, federated={"personal_parameters": ["memory.*"], "cohort": 4}),
    "statistics": Feature(Surveyed, federated=SURVEY),
    "statistics of drawn cohorts behind masks, twice": Feature(
        Surveyed,
        fedq.RotatedCoins(clip_norm=8.0, epsilon_per_bit=4.0),
        {
            "statistics": fedq.Statistics(12, 2.0, rounds=2),
            "secure_aggregation": fedq.SecAgg(),
            "dropout_probability": 0.2,
            "cohort": 5,
        },
    ),
    "statistics to a target, of quantised weights": Feature(
        Surveyed,
        fedq.AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05),
        {**SURVEY, "privacy": fedq.PrivacyTarget(50.0, 1e-5, Adversary.OUTSIDER), "sends": "weights"},
    ),
    "statistics, and a clip that adapts": Feature(
        Surveyed, fedq.AdaptiveClip(fedq.GaussianNoise(clip_norm=4.0, noise_multiplier=0.1)), SURVEY
    ),
    "statistics before SCAFFOLD": Feature(
        lambda: Surveyed(nn.BatchNorm1d(5, momentum=None), optimizer=torch.optim.SGD),
        federated={**SURVEY, "algorithm": fedq.SCAFFOLD(), "local_steps": 2},
    ),
    "statistics, resumed": Feature(
        Surveyed,
        federated={**SURVEY, "personal_parameters": ["head.*"], "weighting": "samples"},
        callbacks=lambda f: [_kept(f)],
        trainer=lambda f: {"enable_checkpointing": True},
        then=lambda f: {"ckpt_path": f / "kept" / "last.ckpt"},
    ),
    "what some clients measure": Feature(
        Partly, federated={"evaluate_clients": fedq.ClientEvaluation(0.3), "client_metrics": "shared"}
    ),
    "a data set that is dealt out to be measured on": Feature(
        federated={
            "evaluate_clients": fedq.ClientEvaluation(Data()._set(2, 20)),
            "client_metrics": "shared",
            "partition": fedq.Dirichlet(1.0),
        }
    ),
    "secret cohorts": Feature(
        mechanism=fedq.GaussianNoise(clip_norm=8.0, noise_multiplier=0.5),
        federated={"cohort": fedq.FixedSize(3, secret=True), "seed": None, "diagnostics": False},
        refused="S1, a secret draw",
    ),
    "liars": Feature(
        callbacks=lambda f: [fedq.ByzantineClients(0.3, "sign_flip")], refused="Byzantine clients"
    ),
    "CPA over rounds": Feature(mechanism=fedq.CPA(epsilon=1.0, epsilon_scope="bit"), federated={"cohort": 3}),
    "noise over rounds": Feature(
        mechanism=fedq.BandedGaussian(clip_norm=8.0, noise_multiplier=0.05, band=2), federated=TURNS
    ),
    "noise that is handed on": Feature(mechanism=HANDED_ON, federated=TURNS),
    "noise that is handed on, behind masks": Feature(
        mechanism=HANDED_ON,
        federated={**TURNS, "secure_aggregation": fedq.SecAgg(), "dropout_probability": 0.2},
    ),
}


def _digest(value):
    if isinstance(value, Tensor):
        return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _plain(value):
    """Tensors by their bits, and everything else as it is, where it says the same in every process."""
    if isinstance(value, Tensor):
        return _digest(value)
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, int | float | str | bool | type(None)) else type(value).__name__


def _checkpoints(folder):
    found = {}
    for path in sorted(folder.rglob("*.ckpt")):
        state = torch.load(path, map_location="cpu", weights_only=False)
        kept = {
            name: state.get(name)
            for name in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")
        }
        found[str(path.relative_to(folder))] = _digest(json.dumps(_plain(kept), sort_keys=True))
    return found


def _files(folder):
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    kinds = {"ledger-": "a journal", "records-": "its records"}
    named = [next((kind for part, kind in kinds.items() if part in name), name) for name in names]
    return sorted(name for name in named if "out.tfevents" not in name)


RECORD = ("round", "cohort_size", "num_received", "num_dropped", "uplink_bits", "downlink_bits")
RECORD += ("clip_rate", "radius_max", "aborted")


def findings(fed, trainer, module, folder):
    """What every rank must find as one process does."""
    engine = fed.engine
    assert engine is not None
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    exact = {name: value for name, value in metrics.items() if name.startswith("val_")}
    rest = {
        n: v for n, v in metrics.items() if n not in exact and "seconds" not in n and not n.endswith("_step")
    }
    return {
        "weights": _digest(engine.weights),
        "module": {name: _digest(value) for name, value in module.state_dict().items()},
        "ranges": [_digest(engine.ranges.center), _digest(engine.ranges.radius)],
        "ledger": [engine.ledger.charges.tolist(), engine.ledger.rounds, engine.ledger.dim],
        "records": [[getattr(r, name) for name in RECORD] for r in fed.records],
        "validation": exact,
        "steps": [trainer.global_step, trainer.current_epoch, fed.fit.side.clock.steps_before_round],
        "optimizers": _plain([group for o in trainer.optimizers for group in o.state_dict()["param_groups"]]),
        "own": {client: _plain(fed.fit.vector.personal.get_tensors(client)) for client in range(CLIENTS)},
        "measured": [_plain(one.plain()) for one in fed.fit.client_evaluations],
        "generator": _digest(torch.default_generator.get_state()),
        "rounded": {k: v for k, v in rest.items() if not k.startswith("leak/")},
    }


def run(feature, folder, devices, nodes=1, rounds=3, **engine):
    """Train, and say what came of it, an error included."""
    folder.mkdir(parents=True, exist_ok=True)
    resume = {}
    for part in range(1 if feature.then is None else 2):
        pl.seed_everything(7, verbose=False)
        module = feature.module()
        settings = {"seed": 5, "clients_per_step": 1, **feature.federated}
        fed = fedq.Federated(feature.mechanism, CLIENTS, **settings)
        ranks = {"devices": devices, "num_nodes": nodes, "num_sanity_val_steps": 0}
        if devices * nodes > 1:
            ranks["strategy"] = "fedq_clients"
        trainer = make_trainer(
            *[*feature.before(folder), fed, *feature.callbacks(folder)],
            **{"max_epochs": rounds + part, **ranks, **engine, **feature.trainer(folder)},
        )
        try:
            trainer.fit(module, datamodule=feature.data(), **resume)
        except (ValueError, RuntimeError, TypeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        resume = {} if feature.then is None else feature.then(folder)
    found = findings(fed, trainer, module, folder)
    if trainer.is_global_zero:
        found |= {"files": _files(folder), "checkpoints": _checkpoints(folder)}
    return found
