"""Settings that both sides of a deployment must agree on, each from its own code."""

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from lightning_fedq import __version__
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.vector import num_coordinates
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import ClientBudget
from lightning_fedq.training.settings import Local

PROTOCOL = "9"
_LONGEST = 200
"""Characters of a setting that are shown."""
TRAVELS = "numbers that travel"
QUESTIONS = ("register", "ready", "evaluate", "shares", "masked", "confirm", "unmask")
"""What a client is asked beside training, each a message of Flower's type `query.NAME`."""
DECLINED = "declined"
"""All that a server hears of a client whose own budget is spent."""
MOST_ROUNDS, MOST_ATTEMPTS = 1 << 20, 1_000
"""Of one run, and at one round: no message goes beyond, whatever a server says."""
_OF_ONE_SIDE = (
    *("participation", "dropout_probability", "deadline", "aggregator", "partition", "batches", "held_out"),
)
"""Of a federation's identity, what only the server has to know, and what `evaluate_clients` says."""


def only_simulated(callback: object) -> bool:
    """Does a callback work on simulated clients, by its own word (`only_simulated = True`)?"""
    return bool(getattr(callback, "only_simulated", False))


class RefusedError(RuntimeError):
    """A refusal of a client, in words that the server is told, too: they say nothing of its data."""


def describe_model(module: pl.LightningModule) -> str:
    """Names, shapes and types of what a module trains, in short. Weights do not count."""
    state = hashlib.sha256()
    members = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, tensor in [*members, *module.named_buffers()]:
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return f"{sum(p.numel() for _, p in members)} parameters, {state.hexdigest()[:12]}"


def fingerprint(federated: Federated, module: pl.LightningModule, rounds: int | None) -> dict[str, str]:
    """In words, by name: versions, settings that a client's message follows from, and the model's shape.

    Args:
        rounds: Rounds of the run, on which a privacy target depends (`deployed_mechanism`).
    """
    mechanism = repr(deployed_mechanism(federated, module, rounds))
    local = federated.local
    dim = num_coordinates(module, local.buffers, local.patterns, local.shared)
    both = {name: value for name, value in federated.identity().items() if name not in _OF_ONE_SIDE}
    return {
        "lightning_fedq": __version__,
        "protocol": PROTOCOL,
        **both,
        "local_epochs": str(local.local_epochs),
        "local_steps": str(local.local_steps),
        "evaluate_clients": repr(local.evaluate_clients),
        "mechanism": mechanism,
        "model": describe_model(module),
        TRAVELS: str(dim),
    }


def deployed_mechanism(federated: Federated, module: pl.LightningModule, rounds: int | None) -> Mechanism:
    """The mechanism, which each side sets to the privacy target by itself, where there is one.

    Args:
        rounds: Rounds of the run; `max_epochs` of both sides' trainers.

    Raises:
        ValueError: If a target over the run has no number of rounds, or can't be met.
    """
    if (kept := federated.calibrated_target) is None:
        return federated.mechanism
    if kept.target.over == "run" and (rounds is None or rounds < 1):
        raise ValueError(
            "a privacy target over the run hangs on the number of rounds, which both sides must know: give "
            f'client_app and server_app trainer={{"max_epochs": ...}}, got {rounds}'
        )
    dim = num_coordinates(module, federated.local.buffers, federated.local.patterns, federated.local.shared)
    return with_real_clients(federated).calibrated(dim, rounds or 1, 0)


def with_real_clients(federated: Federated) -> Federated:
    """The same settings for clients that drop out by themselves, as claims about sums have to know."""
    settings = copy(federated)
    settings.planner = replace(federated.planner, real_clients=True)
    return settings


def count_rounds(trainer: Mapping[str, Any]) -> int:
    """Rounds that a server's run has at most, by its Trainer's arguments. Lightning's default is 1000.

    Raises:
        ValueError: If they are more than `MOST_ROUNDS`.
    """
    said, steps = trainer.get("max_epochs"), trainer.get("max_steps", -1)
    if said is None or said < 0:  # a round has a step at least
        said = steps if steps >= 0 else 1000 if said is None else MOST_ROUNDS
    if said > MOST_ROUNDS:
        raise ValueError(f"clients answer {MOST_ROUNDS:,} rounds at most, got {said:,}; say fewer max_epochs")
    return int(said)


def differences(own_settings: Mapping[str, Any], server_settings: Mapping[str, Any]) -> str:
    """Differing settings by name, or ""."""
    return ", ".join(
        f"{name} is {_short_setting(own_settings, name)} here and {_short_setting(server_settings, name)} "
        "there"
        for name in (*own_settings, *(set(server_settings) - set(own_settings)))
        if own_settings.get(name) != server_settings.get(name)
    )


def _short_setting(settings: Mapping[str, Any], name: str) -> str:
    return str(settings[name])[:_LONGEST] if name in settings else "not known"


def check_release(own_settings: Mapping[str, Any], server_settings: Mapping[str, Any]) -> None:
    """Refuse another protocol by itself: what else differs is how releases say it.

    Raises:
        RefusedError: With the release to install.
    """
    if own_settings.get("protocol") == (
        protocol := server_settings.get("protocol", own_settings.get("protocol"))
    ):
        return
    release, mine = (
        _short_setting(server_settings, "lightning_fedq"),
        _short_setting(own_settings, "lightning_fedq"),
    )
    cure = f"install release {release}" if release != mine else "both are called so: install the very wheel"
    raise RefusedError(
        f"the server speaks protocol {str(protocol)[:_LONGEST]} (lightning_fedq {release}), this client "
        f"protocol {own_settings.get('protocol')} ({mine}); {cure} that the server runs (its folder wheels), "
        "and start this client again: its folder stays as it is"
    )


def check_deployable(federated: Federated) -> None:
    """Refuse settings that are for simulations, or not carried over a network yet.

    Raises:
        ValueError: With the cure.
    """
    secagg, local = federated.server.secure_aggregation, federated.local
    if federated.planner.law.secret:
        raise ValueError(
            "secret cohorts are for simulations: a network shows which clients are asked, so anybody who "
            "watches it knows the cohorts; use secret=False, and no claim counts on hidden cohorts"
        )
    if federated.planner.dropout_probability:
        raise ValueError("real clients drop out by themselves; leave dropout_probability out")
    if local.algorithm is not None and local.algorithm.alike and local.local_steps is None:
        raise ValueError(
            f"{type(local.algorithm).__name__} takes as many steps of every client, and a server that does "
            "not see what they hold has to know how many; say local_steps=..."
        )
    if local.evaluate_clients is not None and local.evaluate_clients.fraction is None:
        raise ValueError(
            "held_out is data of all clients, and a real client has its own only; say which fraction of its "
            "samples it measures on: ClientEvaluation(held_out=0.2)"
        )
    if secagg is not None and secagg.run != "masked":
        raise ValueError(
            "between real machines secure aggregation runs masked; use SecAgg() without run='accounted'"
        )


def is_per_client(callback: object) -> bool:
    """Has a real client one of its own where a simulation has one for all (`is_per_client = True`)?"""
    return bool(getattr(callback, "of_each_client", False))


def keeps_state(local: Local, callbacks: Sequence[object]) -> bool:
    """Does a client keep anything of a training from round to round?"""
    remembers = local.algorithm is not None and local.algorithm.remembers
    accounts = any(map(is_per_client, callbacks))
    return bool(local.patterns) or local.buffers == "local" or remembers or accounts


def time_limit(federated: Federated, round_timeout: float | None) -> float:
    """Seconds in which a client has to answer.

    Args:
        federated: The settings, with a deadline or without.
        round_timeout: Seconds that are given to the server itself.

    Raises:
        ValueError: If both say it, and differently.
    """
    deadline = federated.clients.deadline
    if deadline is None:
        return 3600.0 if round_timeout is None else round_timeout
    if round_timeout not in (None, deadline.seconds):
        raise ValueError(
            f"round_timeout={round_timeout} and Federated(deadline={deadline!r}) say two limits; leave "
            "round_timeout out"
        )
    return deadline.seconds


def check_identities(federated: Federated, given: bool, where: str) -> None:
    """Refuse secure aggregation against an active server without identities that it does not control.

    Args:
        given: Whether this side has them.
        where: Place at which the settings are given.

    Raises:
        ValueError: With the cure.
    """
    secagg = federated.server.secure_aggregation
    if secagg is not None and secagg.active and not given:
        raise ValueError(
            "SecAgg(active=True) has clients sign their keys and the list of survivors, because the server "
            f"may lie about both: give {where}, Ed25519 keys from a source that the server does not control; "
            "or use SecAgg(), for a server that follows the protocol"
        )


def make_client_budget(
    federated: Federated, target: PrivacyTarget | None, signed: bool
) -> ClientBudget | None:
    """Budget that a client enforces by itself, or None.

    Args:
        target: Privacy target of this client, over all that it sends.
        signed: Whether peers' keys are accepted signed only.

    Raises:
        ValueError: If the client can't know what it is to enforce; with the cure.
    """
    if target is None:
        return None
    if federated.seed is not None:
        raise ValueError(
            "keys from a seed hide nothing, so there is no budget to keep to; leave out seed=, or budget="
        )
    secagg, size = federated.server.secure_aggregation, federated.planner.cohort_size
    paired = max(federated.mechanism.group_sizes(size)) > 1
    if target.against is Adversary.SERVER and paired and not signed:
        raise ValueError(
            f"{type(federated.mechanism).__name__} shares bits between clients, and a server that relays "
            "their keys could know them: give the client identities, so that its partner's key is signed, or "
            "a budget with adversary='server_and_partner'"
        )
    clients = federated.clients.num_clients
    sums = None if secagg is None else secagg.guarantee(clients, size, 1)
    return ClientBudget(target, clients, sums)


def check_client_callbacks(callbacks: Sequence[object], federated: Federated) -> None:
    """Refuse callbacks of a side's Trainer that only a simulation has a place for.

    Args:
        callbacks: Callbacks of its Trainer.

    Raises:
        ValueError: With the cure.
    """
    for callback in callbacks:
        if isinstance(callback, Federated) or only_simulated(callback):
            name = type(callback).__name__
            raise ValueError(
                f"{name} works on the clients of a simulation; a real client trains one round at a time and "
                "keeps nothing of it between two. Leave it out, and protect clients by the mechanism (LDPQ, "
                "CorBin, a privacy target)"
            )
