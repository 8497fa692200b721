"""Trial of a client's training at its registration, on a few batches of its data. Its results are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.changed_tensors import has_other_state
from lightning_fedq.flower.batch_counters import check_counted
from lightning_fedq.flower.refusals import RefusedError, refuse_in_private
from lightning_fedq.flower.round_inputs import LaterRound
from lightning_fedq.flower.settings import TRAVELS, is_per_client
from lightning_fedq.flower.training_description import callbacks_in
from lightning_fedq.rounds import Statistics
from lightning_fedq.training.checks import check_hooks

if TYPE_CHECKING:
    from lightning_fedq.flower.local_round import LocalRound


Train = Callable[[pl.LightningModule, LaterRound | None], "LocalRound"]
"""Function that runs one trial on the client's data. Without a later round, it tries the smallest batch."""


def try_registration(
    federated: Federated, make_module: Callable[[], pl.LightningModule], trainer: dict[str, Any], train: Train
) -> dict[str, str]:
    """Try the first round's message and a later one, and return the count of numbers that travel, by name.

    A server has no data and counts by the layers alone, but a first step may reveal more state that travels.
    If the data are not available yet, the client counts nothing either.

    Args:
        federated: Settings of the federation.
        make_module: Function that makes the client's module.
        trainer: Arguments of the client's `Trainer`.
        train: Function that runs one trial.

    Raises:
        RefusedError: If training fails on this client's smallest batch, or a layer counts batches that no
            side knows.
    """
    module, local = make_module(), federated.local
    check_counted(module, local)
    check_hooks(module, local.statistics)
    counts = local.buffers == "share" and has_other_state(module)
    try:
        trial = train(module, None)
    except RefusedError:
        raise
    except Exception as error:  # the user's data failed, and the server learns nothing about the error
        needs = ["DPSGD"] if any(map(is_per_client, callbacks_in(trainer))) else []
        needs += [] if local.evaluate_clients is None else ["evaluate_clients"]
        if needs:
            raise refuse_in_private(f"{' and '.join(needs)} can't work here", error) from error
        if counts:
            rank_zero_warn(f"Could not try which buffers travel: {type(error).__name__}: {error}")
        return {}
    _try_a_later_message(make_module, local.statistics, train)
    return {TRAVELS: str(sum(trial.segments))} if counts else {}


def _try_a_later_message(
    make_module: Callable[[], pl.LightningModule], statistics: Statistics | None, train: Train
) -> None:
    """Try a message of the first round that trains on earlier state, on two batches.

    If it fails, the client tries again with zeros in place of the data, to learn whether the code alone
    fails.

    Raises:
        RefusedError: If the trial also fails on zeros.
    """
    round = max(1, 0 if statistics is None else statistics.rounds)  # the first round that trains
    try:
        train(make_module(), LaterRound(False, round))
    except RefusedError:  # the later message itself will raise this, with text for both sides
        return
    except Exception as error:
        what = f"this client's data: {type(error).__name__}: {error}"
        rank_zero_warn(f"A trial of a second-round message on two batches fails on {what}")
        try:
            train(make_module(), LaterRound(True, round))
        except RefusedError:
            return
        except Exception:
            raise RefusedError(
                "A second-round message fails here, whatever the data are. The client's log has the reason."
            ) from error
