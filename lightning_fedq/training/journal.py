"""Where the ledger's journal lies: beside the checkpoints, under a name that the checkpoint knows.

Where no checkpoint callback has a local folder, anybody may still save (`trainer.save_checkpoint`, Ray's
callback): the first checkpoint opens a journal in `default_root_dir`, and nothing is written where nobody
saves. A run that resumes goes on in the journal of its checkpoint; one that lies in the checkpoint's own
folder comes first, so that the folder can be moved. A run that begins beside the journal of another run of
the same federation says so, and its statements count both.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.privacy.journal import Journal, charged_under, is_of
from lightning_fedq.privacy.ledger import Ledger


def keep_journal(trainer: pl.Trainer, ledger: Ledger, repeatable: bool) -> None:
    """Give the ledger the journal of its checkpoint, or a new one in the folder of the checkpoints to come.

    Args:
        trainer: Set up for fitting.
        ledger: New, or restored from a checkpoint; one that has a journal keeps it.
        repeatable: Whether the keys come from a seed, see `Ledger.keep`.

    Raises:
        FileNotFoundError: If the checkpoint's journal is missing and the keys come from the system.
        ValueError: If the journal is of another federation, or damaged; or if the checkpoint names none,
            has charges, and the keys come from the system.
    """
    if not trainer.is_global_zero or (ledger.journal is not None and ledger.journal.path.is_file()):
        return
    if ledger.names_no_journal and not repeatable:
        raise ValueError(
            "the checkpoint has charged rounds and names no journal, so what was sent after it is not known; "
            "load only the weights, begin a new federation, and add up what both spend"
        )
    recorded, position = ledger.recorded
    found = find_journal(recorded, trainer.ckpt_path, ledger.recorded_names)
    if recorded and found is None and not repeatable:
        raise FileNotFoundError(
            f"the journal {recorded} of this checkpoint is missing, or another run's, so what was sent after "
            "the checkpoint is not known; put it beside the checkpoint, or load only the weights and begin a "
            "new federation"
        )
    if found is not None:
        ledger.keep(Journal(found, ledger.mechanism, ledger.num_clients, position), repeatable)
        return
    folder = _beside_checkpoints(trainer)
    if not repeatable and not recorded:
        _count_others(folder or _local(trainer.default_root_dir), ledger)
    if folder is not None:
        _begin(folder, ledger, repeatable)


def keep_journal_of_checkpoint(trainer: pl.Trainer, ledger: Ledger) -> None:
    """Open a journal in `default_root_dir` before a checkpoint is made, if the ledger has none. Secret keys.

    Args:
        trainer: In its fit, or after it.
        ledger: What it has charged until now stands in the checkpoint, and all that comes in the journal.
    """
    if ledger.journal is not None or not trainer.is_global_zero:
        return
    if (folder := _local(trainer.default_root_dir)) is not None:
        _begin(folder, ledger, repeatable=False)
        return
    rank_zero_warn(
        f"no journal is kept in default_root_dir={trainer.default_root_dir}, which is no local folder, so "
        "that a checkpoint with charges can't be resumed; set Trainer(default_root_dir=FOLDER)"
    )


def _begin(folder: Path, ledger: Ledger, repeatable: bool) -> None:
    path = folder / f"ledger-{secrets.token_hex(4)}.jsonl"
    ledger.keep(Journal(path, ledger.mechanism, ledger.num_clients), repeatable)


def _count_others(folder: Path | None, ledger: Ledger) -> None:
    """Let statements count what other runs of the same federation have charged in a folder."""
    for path in sorted(folder.glob("ledger-*.jsonl")) if folder is not None else ():
        if not is_of(path, ledger.mechanism, ledger.num_clients):
            continue
        try:
            rounds = ledger.count_beside(Journal(path, ledger.mechanism, ledger.num_clients))
        except ValueError as error:  # damaged, or charged on other terms
            rank_zero_warn(f"{path} is of another run of this federation, and is not counted: {error}")
            continue
        if rounds:
            rank_zero_warn(
                f"another run of this federation has charged {rounds} rounds, which stand in {path}. This "
                "one does not resume it, so the same clients pay for both, and statements count both; resume "
                "with trainer.fit(..., ckpt_path=...), or, where other clients train, take another folder"
            )


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


def _beside_checkpoints(trainer: pl.Trainer) -> Path | None:
    """The folder of the first checkpoint callback that has a local one."""
    folders = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    return next((found for folder in folders if (found := _local(folder)) is not None), None)


def _local(folder: object) -> Path | None:
    return Path(str(folder)) if folder and "://" not in str(folder) else None
