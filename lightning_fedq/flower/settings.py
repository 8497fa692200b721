"""Settings that both sides of a deployment must agree on, each from its own code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_fedq import __version__
from lightning_fedq._lightning import get_callbacks, pl, rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.clock import count_rounds
from lightning_fedq.flower.refusals import RefusedError
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import ClientBudget, RoundPlanner, RoundTask
from lightning_fedq.training.client_metrics import metric_forks
from lightning_fedq.training.settings import Local

if TYPE_CHECKING:
    from lightning_fedq.data.loader import ClientLoader
    from lightning_fedq.training.client_side import ClientSide

PROTOCOL = "9"
RELEASE = {"lightning_fedq": __version__, "protocol": PROTOCOL}
"""Names of this release, as both sides compare them and as folders keep them."""
_LONGEST = 200
"""Largest number of characters of a setting that are shown."""
TRAVELS = "numbers that travel"
QUESTIONS = ("register", "ready", "evaluate", "shares", "masked", "confirm", "unmask")
"""Kinds of messages to a client besides training, each with Flower's type `query.NAME`."""
DECLINED = "declined"
"""Text that the server receives from a client whose own budget is spent."""
MOST_ROUNDS, MOST_ATTEMPTS = 1 << 20, 1_000
"""Limits on rounds of a run and on attempts at a round. Clients refuse any message beyond them."""
_OF_ONE_SIDE = (
    *("participation", "dropout_probability", "deadline", "aggregator", "partition", "batches", "held_out"),
)
"""Names in a federation's identity that only the server needs, or that `evaluate_clients` repeats."""


def only_simulated(callback: object) -> bool:
    """Return whether a callback works on simulated clients only (`only_simulated = True`)."""
    return bool(getattr(callback, "only_simulated", False))


def fingerprint(federated: Federated, module: pl.LightningModule, rounds: int | None) -> dict[str, str]:
    """Return versions, settings that affect a client's message, and the model's shape, as text by name.

    Args:
        federated: Settings of the federation.
        module: Module of this side. Its weights do not count.
        rounds: Number of rounds of the run, on which a privacy target depends (`deployed_mechanism`).
    """
    mechanism, local = repr(deployed_mechanism(federated, module, rounds)), federated.local
    state, trained = hashlib.sha256(), [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    for name, tensor in [*trained, *module.named_buffers()]:
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    shared = {name: value for name, value in federated.identity().items() if name not in _OF_ONE_SIDE}
    return {
        **RELEASE,
        **shared,
        "local_epochs": str(local.local_epochs),
        "local_steps": str(local.local_steps),
        "evaluate_clients": repr(local.evaluate_clients),
        "mechanism": mechanism,
        "model": f"{sum(p.numel() for _, p in trained)} parameters, {state.hexdigest()[:12]}",
        TRAVELS: str(federated.local.num_coordinates(module)),
    }


def deployed_mechanism(federated: Federated, module: pl.LightningModule, rounds: int | None) -> Mechanism:
    """Return the mechanism, which each side calibrates to the privacy target by itself, if there is one.

    Args:
        federated: Settings of the federation.
        module: Module of this side.
        rounds: Number of rounds, from the limits of the side's trainer (`given_rounds`).

    Raises:
        ValueError: If the number of rounds is missing for a target over the run, or the target can't be met.
    """
    if (kept := federated.calibrated_target) is None:
        return federated.mechanism
    if kept.target.over == "run" and (rounds is None or rounds < 1):
        raise ValueError(
            f"A privacy target over the run needs the number of rounds, got {rounds}. Give client_app and "
            'server_app trainer={"max_epochs": ...}'
        )
    return with_real_clients(federated).calibrated(federated.local.num_coordinates(module), rounds or 1, 0)


def with_real_clients(federated: Federated) -> Federated:
    """Return settings in which clients may drop out by themselves, because claims about sums depend on it."""
    settings = copy(federated)
    settings.planner = replace(federated.planner, real_clients=True)
    return settings


def given_rounds(trainer: Mapping[str, Any], local_steps: int | None) -> int | None:
    """Return the largest number of rounds that a Trainer's arguments allow. None if they set no limit.

    Args:
        trainer: Arguments of one side's Trainer.
        local_steps: Batches of every client in a round. None if they follow from the data.
    """
    batches = 1 if local_steps is None else local_steps  # a round has at least one step
    steps = -(-batches // int(trainer.get("accumulate_grad_batches", 1)))
    return count_rounds(trainer.get("max_epochs"), trainer.get("max_steps", -1), [steps])


def server_rounds(trainer: Mapping[str, Any], local_steps: int | None = None) -> int:
    """Return the largest number of rounds of a server's run. Lightning's default is 1000.

    Args:
        trainer: Arguments of the server's Trainer.
        local_steps: Batches of every client in a round. None if they follow from the data.

    Raises:
        ValueError: If the number is above `MOST_ROUNDS`.
    """
    rounds = given_rounds(trainer, local_steps)
    if rounds is None:
        rounds = 1000 if trainer.get("max_epochs") is None else MOST_ROUNDS
    if rounds > MOST_ROUNDS:
        raise ValueError(
            f"Clients answer at most {MOST_ROUNDS:,} rounds, got {rounds:,}. Set a smaller max_epochs."
        )
    return rounds


def differences(own_settings: Mapping[str, Any], server_settings: Mapping[str, Any]) -> str:
    """Return the settings that differ between both sides as text, or "" if none does."""
    return ", ".join(
        f"{name} is {_short_setting(own_settings, name)} here and {_short_setting(server_settings, name)} "
        "there"
        for name in (*own_settings, *(set(server_settings) - set(own_settings)))
        if own_settings.get(name) != server_settings.get(name)
    )


def _short_setting(settings: Mapping[str, Any], name: str) -> str:
    """Return a setting as text of at most `_LONGEST` characters, or "not known"."""
    return str(settings[name])[:_LONGEST] if name in settings else "not known"


def check_release(own_settings: Mapping[str, Any], server_settings: Mapping[str, Any]) -> None:
    """Refuse a server with another protocol. Other differences may only be due to the release.

    Args:
        own_settings: Settings of this client.
        server_settings: Settings that the server sent.

    Raises:
        RefusedError: If the protocol differs. The message names the release to install.
    """
    own_protocol = own_settings.get("protocol")
    protocol = server_settings.get("protocol", own_protocol)
    if protocol == own_protocol:
        return
    release = _short_setting(server_settings, "lightning_fedq")
    own_release = _short_setting(own_settings, "lightning_fedq")
    cure = f"install release {release}"
    if release == own_release:
        cure = "install the same wheel (both releases have this name)"
    raise RefusedError(
        f"The server uses protocol {str(protocol)[:_LONGEST]} (lightning_fedq {release}), this client "
        f"{own_protocol} ({own_release}). First {cure} from the server's folder wheels, then "
        "restart this client with its old folder."
    )


def check_folder_release(folder: Path, kept: Mapping[str, Any]) -> None:
    """Refuse a folder that a release with a newer protocol has written.

    Args:
        folder: Folder of the client or the server.
        kept: Table in the folder, with the names of the release. A table without them is accepted.

    Raises:
        ValueError: If the protocol is newer. The message names the release to install.
    """
    written = str(kept.get("protocol", PROTOCOL))
    if written.isdigit() and int(written) > int(PROTOCOL):
        raise ValueError(
            f"{folder} was written by lightning_fedq {_short_setting(kept, 'lightning_fedq')} (protocol "
            f"{written}), this is {__version__} (protocol {PROTOCOL}). Install that release again."
        )


def check_deployable(federated: Federated) -> None:
    """Refuse settings that are for simulations only, or that a network does not support.

    Secret cohorts are refused because a network shows which clients are asked, so no claim may count on
    hidden cohorts.

    Args:
        federated: Settings of the federation.

    Raises:
        ValueError: If there is such a setting. The message has the cure.
    """
    secagg, local = federated.server.secure_aggregation, federated.local
    if federated.planner.law.secret:
        raise ValueError(
            "Secret cohorts are for simulations, because a network shows the cohort. Set secret=False"
        )
    if federated.planner.dropout_probability:
        raise ValueError("Real clients drop out by themselves. Leave dropout_probability out.")
    if local.algorithm is not None and local.algorithm.alike and local.local_steps is None:
        raise ValueError(
            f"{type(local.algorithm).__name__} needs the same number of steps from every client. Set "
            "local_steps=..."
        )
    if local.evaluate_clients is not None and local.evaluate_clients.fraction is None:
        raise ValueError(
            "A real client has only its own data, so held_out must be a fraction of its samples: "
            "ClientEvaluation(held_out=0.2)"
        )
    if secagg is not None and secagg.simulation != "masked":
        raise ValueError(
            "Secure aggregation must run masked between real machines. "
            "Use SecAgg() without simulation='counted'."
        )


def check_cohort(planner: RoundPlanner, mechanism: Mechanism, task: RoundTask) -> None:
    """Refuse a cohort other than the settings say, since noise and masks depend on its size.

    Args:
        planner: Planner of the client's own settings.
        mechanism: Mechanism of the client's own settings.
        task: Task that the server sent.

    Raises:
        ValueError: If the cohort, its groups, or the list of handed-on noise differ.
    """
    members = [client for group in task.groups for client in group]
    sizes, wanted = tuple(map(len, task.groups)), tuple(mechanism.group_sizes(planner.cohort_size))
    if sizes != wanted or len(set(members)) != len(members) or max(members) >= planner.num_clients:
        raise ValueError(
            f"The server asks {len(members)} clients in groups of {sizes[:10]}. Expected "
            f"{planner.cohort_size} of {planner.num_clients} in groups of {wanted[:10]}"
        )
    hand_over = task.hand_over
    if mechanism.reuses_noise != (hand_over is not None):
        raise ValueError(
            f"{type(mechanism).__name__} {'needs' if mechanism.reuses_noise else 'does not use'} a list of "
            "clients that take back noise. Run the same version on both sides."
        )
    pairs = () if hand_over is None else (*hand_over.before, *hand_over.after)
    if any(other >= planner.num_clients for _, other in pairs):
        raise ValueError(
            f"Noise is handed on among {planner.num_clients} clients, but the server names others"
        )


def is_per_client(callback: object) -> bool:
    """Return whether each real client has its own instance of a callback (`is_per_client = True`).

    A simulation has one instance for all clients.
    """
    return bool(getattr(callback, "is_per_client", False))


def keeps_state(local: Local, callbacks: Sequence[object]) -> bool:
    """Return whether a client keeps state of its training from round to round."""
    remembers = local.algorithm is not None and local.algorithm.remembers
    accounts = any(map(is_per_client, callbacks))
    return bool(local.personal_parameters) or local.buffers == "local" or remembers or accounts


def time_limit(federated: Federated, round_timeout: float | None) -> float:
    """Return the seconds in which a client has to answer.

    Args:
        federated: Settings of the federation, with or without a deadline.
        round_timeout: Seconds that the server itself was given, or None.

    Raises:
        ValueError: If both are given and differ.
    """
    deadline = federated.clients.deadline
    if deadline is None:
        return 3600.0 if round_timeout is None else round_timeout
    if round_timeout not in (None, deadline.seconds):
        raise ValueError(
            f"round_timeout={round_timeout} and Federated(deadline={deadline!r}) differ. Leave round_timeout "
            "out."
        )
    return deadline.seconds


def check_identities(federated: Federated, given: bool, where: str) -> None:
    """Refuse secure aggregation against an active server without identities that it does not control.

    Clients sign their keys and the list of survivors, because an active server may lie about both.

    Args:
        federated: Settings of the federation.
        given: Whether this side has identities.
        where: Argument that sets the identities, for the message.

    Raises:
        ValueError: If identities are missing.
    """
    secagg = federated.server.secure_aggregation
    if secagg is not None and secagg.active and not given:
        raise ValueError(
            f"SecAgg(active=True) needs signing identities: give {where}, Ed25519 keys from a source outside "
            "the server. For a server that follows the protocol, use SecAgg()."
        )


def make_client_budget(
    federated: Federated, target: PrivacyTarget | None, signed: bool
) -> ClientBudget | None:
    """Return the budget that a client enforces by itself, or None without a target.

    Args:
        federated: Settings of the federation.
        target: Privacy target of this client, over all that it sends.
        signed: Whether the client accepts only signed keys of its peers.

    Raises:
        ValueError: If keys come from a seed, or if a server that relays unsigned keys could know shared bits.
    """
    if target is None:
        return None
    if federated.seed is not None:
        raise ValueError(
            "A budget needs secret keys, but keys from a seed hide nothing. Leave out seed= or budget="
        )
    secagg, size = federated.server.secure_aggregation, federated.planner.cohort_size
    paired = max(federated.mechanism.group_sizes(size)) > 1
    if target.against is Adversary.SERVER and paired and not signed:
        raise ValueError(
            f"{type(federated.mechanism).__name__} shares bits between clients, and a server that relays "
            "unsigned keys could know them. Give the client identities, or a budget with "
            "adversary='server_and_partner'"
        )
    clients = federated.clients.num_clients
    sums = None if secagg is None else secagg.guarantee(clients, size, 1)
    return ClientBudget(target, clients, sums)


def check_client_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse callbacks of a client's Trainer that only work in a simulation.

    Raises:
        ValueError: If there is such a callback.
    """
    for callback in callbacks:
        if isinstance(callback, Federated) or only_simulated(callback):
            name = type(callback).__name__
            raise ValueError(
                f"{name} needs simulated clients, but a real client trains one round at a time. Leave it "
                "out, and protect clients by the mechanism (LDPQ, CorBin, a privacy target)."
            )


def check_schedules(trainer: pl.Trainer, local_steps: int | None) -> None:
    """Refuse schedules and checkpoints that count steps where no side knows the number of steps.

    Args:
        trainer: Trainer of the client or the server.
        local_steps: Steps of every client in a round, or None where they follow from the data.

    Raises:
        RefusedError: If one of them counts steps and `local_steps` is None. The client with the most steps
            then sets the pace, and no side knows that client over a network.
    """
    callbacks: Any = get_callbacks(trainer)
    if local_steps is None and any(getattr(one, "_every_n_train_steps", 0) for one in callbacks):
        raise RefusedError(
            "ModelCheckpoint(every_n_train_steps=...) counts steps, which are unknown over a network. Set "
            "Federated(local_steps=...), or every_n_epochs to save every n rounds."
        )
    if local_steps is None and any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise RefusedError(
            "A schedule has interval='step', but the longest client's steps are unknown over a network. Set "
            "Federated(local_steps=...), or interval='epoch' to step by rounds."
        )


def check_watched(trainer: Any, side: ClientSide, loader: ClientLoader, indices: Tensor) -> None:
    """Refuse schedules that watch a metric which clients log in training only.

    The server gets no training metrics from clients. Metrics of the validation are its own.

    Args:
        trainer: Trainer of the client.
        side: The client, after a trial of its training.
        loader: Loader of its training data.
        indices: Indices of its training samples.

    Raises:
        RefusedError: If there is such a schedule. The message names the schedule and the metric.
    """
    of_training = {fork for name in side.log.names for fork in metric_forks(name)}
    watched = {config.monitor: config for config in trainer.lr_scheduler_configs if config.monitor}
    for name in sorted(of_training.intersection(watched)):
        first = indices[: loader.batch_size]
        try:
            if name in side.worker.evaluate(0, iter([(loader.fetch(first), len(first))]), 0):
                continue
        # a training batch may not suit the validation, so the check has no result
        except Exception as error:
            rank_zero_warn(f"Could not check whether validation logs {name!r}: {error}")
            continue
        raise RefusedError(
            f"{type(watched[name].scheduler).__name__} watches {name!r}, which clients log only in training. "
            "Watch a metric of the server's validation."
        )
