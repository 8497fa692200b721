"""Checks of a fit on several ranks: what is refused there, and that all ranks begin alike."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.data.batches import Stack
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.training.rank_group import RankGroup
from lightning_fedq.training.ranks import NAME, DistributedClientsStrategy

WORTH = 60.0
"""Seconds of training from which on idle cores are worth a word."""


def check_for_ranks(rule: object | None) -> None:
    """Refuse what needs a client's memory in one place.

    Raises:
        ValueError: With the cure.
    """
    if rule is not None:
        raise ValueError(
            f"{type(rule).__name__} keeps every client's account in one process; train in one process "
            f'(devices=1), or leave it out with strategy="{NAME}"'
        )


def check_streams(held: Sequence[Tensor]) -> None:
    """Refuse clients whose data come in a stream, which goes on where it stopped on one rank only.

    Raises:
        ValueError: With the cure.
    """
    streams = [client for client, part in enumerate(held) if not len(part)]
    if streams:
        raise ValueError(
            f"the data of clients {streams[:10]} are streams, and every rank would read its own copy; "
            f'train in one process (devices=1), or use data sets with a length with strategy="{NAME}"'
        )


def check_same_on_all_ranks(group: RankGroup, facts: dict[str, str]) -> None:
    """Refuse ranks that were started with different settings.

    Args:
        group: Process group of the ranks.
        facts: What must be the same, in words.

    Raises:
        ValueError: On every rank that differs, naming what does.
    """
    theirs = group.broadcast(facts, "the comparison of settings")
    differing = [key for key in facts if facts[key] != theirs[key]]
    if differing:
        raise ValueError(
            f"rank {group.rank} was started with other settings than rank 0: "
            + ", ".join(f"{key} = {facts[key]} (on rank 0 {theirs[key]})" for key in differing)
            + "; start all ranks with the same program, arguments and data"
        )


def say_who_is_idle(stacks: Sequence[Stack], num_ranks: int) -> None:
    """Warn where a round has fewer stacks than there are ranks.

    Args:
        stacks: Stacks of all ranks in a round.
    """
    if len(stacks) < num_ranks:
        most = max(len(stack.clients) for stack in stacks)
        rank_zero_warn(
            f"a round has {len(stacks)} stacks of up to {most} clients, so only {len(stacks)} of {num_ranks} "
            "ranks have work; use a smaller clients_per_step, or fewer devices"
        )


def idle_cores(seconds: float, num_stacks: int) -> str | None:
    """Say what more ranks would have brought a fit in one process on a CPU, if that is worth a word.

    Args:
        seconds: For which its clients trained.
        num_stacks: Stacks of a round, which are what ranks share.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    ranks = min(cores // threads, num_stacks)
    if seconds < WORTH or ranks < 2:
        return None
    return (
        f"clients trained for {seconds:.0f} s on {threads} of {cores} cores; with {ranks} ranks, "
        f'Trainer(strategy="{NAME}", devices={ranks}), it is {seconds / ranks:.0f} s at best'
    )


def agree_on_start(
    ranks: DistributedClientsStrategy, facts: dict[str, str], held: Sequence[Tensor], ledger: Ledger
) -> None:
    """All ranks have the same federation and data, and rank 0, which keeps the journal, the ledger.

    Args:
        facts: Facts that must be the same, in words.
        held: Sample indices of each client.
        ledger: Ledger, which follows that of rank 0.

    Raises:
        ValueError: On every rank that differs, naming what does.
    """
    sizes = [len(part) for part in held]
    theirs = ranks.group.broadcast(sizes, "the sizes of clients")
    for client, (own, other) in enumerate(zip(sizes, theirs, strict=False)):
        if own != other:
            raise ValueError(
                f"rank {ranks.group.rank} has {own} samples of client {client}, and rank 0 has {other}; "
                "start all ranks with the same data"
            )
    dealt = hashlib.sha256(b"".join(part.numpy().tobytes() for part in held))
    check_same_on_all_ranks(ranks.group, {**facts, "who holds which samples": dealt.hexdigest()[:16]})
    first = ranks.group.broadcast(ledger.state_dict(), "the ledger at the start")
    if not ranks.is_global_zero:
        ledger.follow(first)
