"""Where the ledger's journal lies: beside the checkpoints, under a name that the checkpoint knows.

A run without a checkpoint callback has no journal, because there is nothing to resume from. A run that
resumes goes on in the journal of its checkpoint; one that lies in the checkpoint's own folder comes first, so
that the folder can be moved.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.privacy.journal import Journal, charged_under
from lightning_fedq.privacy.ledger import Ledger


def keep_journal(trainer: pl.Trainer, ledger: Ledger, repeatable: bool) -> None:
    """Give the ledger the journal of its checkpoint, or a new one beside the checkpoints to come.

    Args:
        trainer: Set up for fitting.
        ledger: New, or restored from a checkpoint; one that has a journal keeps it.
        repeatable: Whether the keys come from a seed, see `Ledger.keep`.

    Raises:
        FileNotFoundError: If the checkpoint's journal is missing and the keys come from the system.
        ValueError: If the journal is of another federation, or damaged.
    """
    if not trainer.is_global_zero or (ledger.journal is not None and ledger.journal.path.is_file()):
        return
    recorded, position = ledger.recorded
    found = find_journal(recorded, trainer.ckpt_path, ledger.recorded_names)
    if recorded and found is None and not repeatable:
        raise FileNotFoundError(
            f"the journal {recorded} of this checkpoint is missing, or another run's, so what was sent after "
            "the checkpoint is not known; put it beside the checkpoint, or load only the weights and begin a "
            "new federation"
        )
    path, position = (_new_path(trainer), 0) if found is None else (found, position)
    if path is not None:
        ledger.keep(Journal(path, ledger.mechanism, ledger.num_clients, position), repeatable)


def say_at_start(ledger: Ledger, seeded: bool, saved: dict[str, Any] | None = None) -> None:
    """Say where a new server's keys come from, and that clients who trained before have paid before.

    Args:
        ledger: Ledger of the clients.
        seeded: Whether the keys come from a seed.
        saved: State of the checkpoint's ledger, where the training resumes one.
    """
    if seeded:
        rank_zero_info("keys from a seed: reproducible, and nothing is private")
    else:
        rank_zero_info("keys from the operating system: secret, and not reproducible whatever is seeded")
    if ledger.rounds:
        rank_zero_info(
            f"these clients have paid for up to {ledger.most_charged} rounds before this training, which add "
            "up with those to come; other clients need another Federated"
        )
    unknown = ledger.rounds and ledger.terms is None
    if unknown or (saved is not None and saved["rounds"] and saved.get("terms") is None):
        rank_zero_warn(
            "rounds were charged before this training without a word on their terms (cohort, secure "
            "aggregation, lying clients), by hand or by an earlier version; they are priced like its own"
        )


def find_journal(recorded: str, checkpoint: object, names: Collection[str] | None = None) -> Path | None:
    """The journal that a checkpoint names: in the checkpoint's own folder, else where it was written.

    Args:
        recorded: Path in the checkpoint, which somebody else may have written.
        checkpoint: Path of the checkpoint.
        names: Names that the run has charged under; elsewhere than beside the checkpoint, a journal with
            charges of other names alone is another run's. None takes any.
    """
    if not recorded:
        return None
    if checkpoint is not None and (beside := Path(str(checkpoint)).parent / Path(recorded).name).is_file():
        return beside
    path = Path(recorded)
    if not path.is_file():
        return None
    charged = set() if names is None else charged_under(path)
    return None if charged and names is not None and charged.isdisjoint(names) else path


def _new_path(trainer: pl.Trainer) -> Path | None:
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    folder = next((str(folder) for folder in folders if folder), None)
    if folder is None:
        return None
    if "://" in folder:
        rank_zero_warn(
            f"no journal is kept beside checkpoints on {folder}: what a killed run had sent since its last "
            "checkpoint will not be known; let a ModelCheckpoint write to a local folder"
        )
        return None
    return Path(folder) / f"ledger-{secrets.token_hex(4)}.jsonl"
