"""Checkpoints of a federation: journal and records in files next to them, and states that no noise covers.

The ledger's journal is stored next to the checkpoints, and the checkpoint contains its name. If no checkpoint
callback has a local folder, others may still save (`trainer.save_checkpoint`, Ray's callback). The first such
checkpoint opens a journal in `default_root_dir`, and without a checkpoint no file is written. A resumed run
goes on in the journal of its checkpoint. A journal in the checkpoint's own folder is preferred, so that the
folder can be moved. Charges of other runs of the same federation count as well. Their journals are searched
next to the checkpoint, where its journal was written, and in the folder of the checkpoints to come.

`SavedStates` checks states of a module that a checkpoint contains besides parameters and buffers: persistent
metrics, results of `get_extra_state`, and hyperparameters. It does not check callbacks or the data module.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torchmetrics import Metric

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.privacy.journal import OWN, Journal, list_ledgers, name_file_in_errors
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import RoundRecord


def keep_journal(trainer: pl.Trainer, ledger: Ledger, repeatable: bool) -> None:
    """Give the ledger the journal of its checkpoint, or a new one in the folder of the checkpoints to come.

    If keys are secret, also count the charges of other runs of the same federation, with a warning.

    Args:
        ledger: New ledger, or one restored from a checkpoint. A ledger that has a journal keeps it.
        repeatable: Do the keys come from a seed? See `Ledger.keep`.

    Raises:
        FileNotFoundError: If the checkpoint's journal is missing and keys are secret.
        ValueError: If the journal is of another federation, or damaged. Also if keys are secret and the
            checkpoint has charges but no journal.
    """
    if not trainer.is_global_zero:
        return
    folders = (_local_folder(getattr(one, "dirpath", None)) for one in trainer.checkpoint_callbacks)
    folder = next(filter(None, folders), None)
    if ledger.journal is None or not ledger.journal.path.is_file():
        _open_journal(trainer, ledger, folder, repeatable)
    if not repeatable:
        coming = folder or _local_folder(trainer.default_root_dir)
        ledger.folders |= journal_folders(ledger, trainer.ckpt_path, coming)
        count_other_runs(ledger)


def _open_journal(trainer: pl.Trainer, ledger: Ledger, folder: Path | None, repeatable: bool) -> None:
    if ledger.names_no_journal and not repeatable:
        raise ValueError(
            "The checkpoint has charged rounds but names no journal, so later charges are not known. "
            "Load only the weights, begin a new federation, and add the epsilons of both"
        )
    recorded, position = ledger.recorded
    found = find_journal(recorded, trainer.ckpt_path, ledger.recorded_names)
    if recorded and found is None and not repeatable:
        raise FileNotFoundError(
            f"The journal {recorded} of this checkpoint is missing or another run's. Put it next to the "
            "checkpoint, or load only the weights and begin a new federation"
        )
    if found is not None:
        ledger.keep(Journal(found, ledger.mechanism, ledger.num_clients, position), repeatable)
    elif folder is not None:
        _create_journal(folder, ledger, repeatable)


def keep_journal_of_checkpoint(trainer: pl.Trainer, ledger: Ledger) -> None:
    """Open a journal in `default_root_dir` when a checkpoint is saved and the ledger has none.

    Needed for secret keys only. Charges so far are in the checkpoint, and later ones in the journal.

    Args:
        trainer: Trainer in its fit, or after it.
        ledger: Ledger of the federation.
    """
    if ledger.journal is not None or not trainer.is_global_zero:
        return
    if (folder := _local_folder(trainer.default_root_dir)) is not None:
        _create_journal(folder, ledger, repeatable=False)
        return
    rank_zero_warn(
        f"No journal is kept, because default_root_dir={trainer.default_root_dir} is not a local folder. "
        "Such a checkpoint can't be resumed: set Trainer(default_root_dir=FOLDER)"
    )


def _create_journal(folder: Path, ledger: Ledger, repeatable: bool) -> None:
    path = folder / f"ledger-{secrets.token_hex(4)}.jsonl"
    ledger.keep(Journal(path, ledger.mechanism, ledger.num_clients), repeatable)


def journal_folders(ledger: Ledger, checkpoint: object, *more: Path | None) -> frozenset[Path]:
    """Return the folders to search for journals of these clients: the checkpoint's, its journal's, `more`."""
    loaded = [Path(str(path)).parent for path in (checkpoint, ledger.recorded[0]) if path]
    return frozenset(folder for folder in (*loaded, *more) if folder is not None)


def count_other_runs(ledger: Ledger) -> None:
    """Count the charges of other runs of the same federation, as far as their journals can be read."""
    for path, rounds in ledger.scan_journals().items():
        if isinstance(rounds, str):
            rank_zero_warn(f"{path} is of another run of this federation, but is not counted: {rounds}")
            continue
        rank_zero_warn(
            f"Another run of this federation charged {rounds} rounds ({path}), which also count for this "
            "run. Go on with trainer.fit(..., ckpt_path=...), or use another folder for other clients"
        )


def report_key_source(ledger: Ledger, seeded: bool, saved: dict[str, Any] | None = None) -> None:
    """Report where the keys of a new server come from, and the rounds that its clients were charged before.

    Args:
        seeded: Do the keys come from a seed?
        saved: State of the checkpoint's ledger, if the training resumes from one.
    """
    if seeded:
        rank_zero_info("Keys come from a seed: the run is reproducible, and nothing is private")
    else:
        rank_zero_info(
            "Keys come from the operating system: they are secret, and the run is not reproducible"
        )
    if ledger.rounds:
        rank_zero_info(
            f"Earlier trainings charged these clients for up to {ledger.max_charges} rounds. They also count "
            "for this training: use another Federated for other clients"
        )
    unknown = ledger.rounds and ledger.terms is None
    if unknown or (saved is not None and saved["rounds"] and saved.get("terms") is None):
        rank_zero_warn(
            "Rounds were charged without terms (cohort, secure aggregation, Byzantine clients), by hand or "
            "by an earlier version. They count as if charged under the present terms"
        )


def find_journal(recorded: str, checkpoint: object, names: Collection[str] | None = None) -> Path | None:
    """Find the journal of a checkpoint: in the checkpoint's own folder, else where it was written.

    Args:
        recorded: Path in the checkpoint. It is not trusted, because anybody may have written the checkpoint.
        names: Ledger names under which the run has charged. A journal outside of the checkpoint's folder that
            has charges of other names only is another run's. None accepts any journal.

    Returns:
        Path of the journal. None if it is not found.
    """
    if not recorded:
        return None
    if checkpoint is not None and (beside := Path(str(checkpoint)).parent / Path(recorded).name).is_file():
        return beside
    path = Path(recorded)
    if not path.is_file():
        return None
    charged = set() if names is None else list_ledgers(path)
    return None if charged and names is not None and charged.isdisjoint(names) else path


def _local_folder(folder: object) -> Path | None:
    return Path(str(folder)) if folder and "://" not in str(folder) else None


# ---- an unfinished round, and records ----------------------------------------------------------------------


def reset_unfinished_round(loops: dict[str, Any]) -> None:
    """Set the state of Lightning's loops as if an unfinished round had not begun."""
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    now = epochs["current"]
    if now["ready"] == now["processed"] or (now["started"] == now["ready"] and batches["is_last_batch"]):
        return
    for counts in (now, epochs["total"]):
        counts["ready"] = counts["started"] = counts["processed"]
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False


def check_federation(identity: Mapping[str, str], saved_identity: Mapping[str, str]) -> None:
    """Refuse a checkpoint of another federation.

    Args:
        identity: Settings that the checkpoint must match, in words.
        saved_identity: Settings in the checkpoint.

    Raises:
        ValueError: If settings differ. The message names them.
    """
    keys = *identity, *(saved_identity.keys() - identity.keys())
    pairs = [(key, saved_identity.get(key), identity.get(key)) for key in keys]
    differing = [f"{key} = {saved} (here {here})" for key, saved, here in pairs if saved != here]
    if differing:
        raise ValueError(
            f"The checkpoint is of another federation: {', '.join(differing)}. Resume with its settings, or "
            "load only its weights into a new fit. The epsilons of both add up (fedq privacy RUN RUN)"
        )


def plain_records(records: Sequence[RoundRecord], private: bool, lengths: bool) -> list[dict[str, Any]]:
    """Convert records to types that a checkpoint may contain.

    Args:
        private: Leave out values that only a simulation knows?
        lengths: Keep the lengths of messages even then?
    """
    kept = [record.released() if private else record for record in records]
    hidden = {"uplink_bits": math.nan} if private and not lengths else {}
    return [{**vars(r), "non_finite_clients": list(r.non_finite_clients), **hidden} for r in kept]


class RecordFile:
    """File of records next to the ledger's journal, one line each, so that checkpoints do not grow.

    A checkpoint contains the path, and the length and checksum of its part of the file. If another run has
    appended to the file since, a new file is begun.

    Attributes:
        rounds: Number of records in the file.
    """

    def __init__(self) -> None:
        self._path, self._bytes, self._crc, self.rounds = Path(), 0, 0, 0

    def add(self, folder: Path, plain: Callable[[int], list[dict[str, Any]]]) -> None:
        """Append the records that the file lacks. Called when a round has ended, so never in a dry round.

        Args:
            folder: Folder of the ledger's journal.
            plain: Returns the records from an index on, see `plain_records`.
        """
        same = self._path.parent == folder and self._path.is_file()
        if not same or self._path.stat().st_size != self._bytes:
            self._path = folder / f"records-{secrets.token_hex(4)}.jsonl"
            self._bytes = self._crc = self.rounds = 0
        lines = [json.dumps(record).encode() + b"\n" for record in plain(self.rounds)]
        data = b"".join(lines)
        with name_file_in_errors(self._path), open(self._path, "ab", opener=OWN) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._bytes, self._crc = self._bytes + len(data), zlib.crc32(data, self._crc)
        self.rounds += len(lines)

    def describe(self, rounds: int) -> dict[str, Any] | None:
        """Return path, length and checksum of the file for a checkpoint. None if it lacks some records."""
        if not rounds or rounds != self.rounds:
            return None
        return {"file": str(self._path), "bytes": self._bytes, "crc": self._crc, "rounds": self.rounds}

    def records(
        self, saved: Sequence[dict[str, Any]] | Mapping[str, Any], checkpoint: object
    ) -> list[RoundRecord]:
        """Return the records of a checkpoint: from the checkpoint itself, or from the file that it names."""
        plain = self.load(saved, checkpoint) if isinstance(saved, Mapping) else saved
        return [RoundRecord(**{**r, "non_finite_clients": tuple(r["non_finite_clients"])}) for r in plain]

    def load(self, saved: Mapping[str, Any], checkpoint: object) -> list[dict[str, Any]]:
        """Read the file that `describe` described in a checkpoint, and append to it from now on.

        Raises:
            FileNotFoundError: If the file is missing.
            ValueError: If the file is damaged, or another run's.
        """
        path = find_journal(saved["file"], checkpoint)
        if path is None:
            raise FileNotFoundError(
                f"{saved['file']} with the records of this checkpoint's {saved['rounds']} rounds is missing. "
                "Put it next to the checkpoint, or load only the weights and begin a new federation"
            )
        with path.open("rb") as file:
            data = file.read(saved["bytes"])
        if zlib.crc32(data) != saved["crc"]:
            raise ValueError(
                f"{path} is damaged or another run's: it differs from the records of this checkpoint's "
                f"{saved['rounds']} rounds. Put a whole copy next to the checkpoint, or load only the "
                "weights and begin a new federation"
            )
        self._path, self._bytes = path.resolve(), saved["bytes"]
        self._crc, self.rounds = saved["crc"], saved["rounds"]
        return [json.loads(line) for line in data.splitlines()]


# ---- states beside parameters and buffers ------------------------------------------------------------------


def clone_tensors(value: Any) -> Any:
    """Copy containers and tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


class SavedStates:
    """States that checkpoints contain, that no noise covers, and that training must not change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before, self._settings = clone_tensors(_states(module)), dict(_hparams(module))

    def check(self) -> None:
        """Refuse a training that has changed these states, after restoring them.

        Raises:
            ValueError: If states have changed. The message names them.
        """
        changed = self._changed()
        if not changed:
            return
        for part in self._module.modules():
            if isinstance(part, Metric):
                part.reset()
        self._module.load_state_dict(clone_tensors(self._before), strict=False)
        owner: Any = self._module
        for name in [name for name in _hparams(owner) if name not in self._settings]:
            del owner.hparams[name]
        if self._settings:
            owner.hparams.update(self._settings)
        raise ValueError(
            f"Training changed {', '.join(changed[:10])}, which checkpoints contain without noise. Leave out "
            "persistent(True) of metrics, get_extra_state, and hyperparameters that depend on batches, or "
            "update them in validation"
        )

    def _changed(self) -> list[str]:
        before, now = {**self._before}, {**_states(self._module)}
        before |= {f"hparams.{name}": value for name, value in self._settings.items()}
        now |= {f"hparams.{name}": value for name, value in _hparams(self._module).items()}
        return [name for name in {**before, **now} if not is_same_state(before.get(name), now.get(name))]


def _states(module: nn.Module) -> dict[str, Any]:
    if not any(_has_extra_state(part) for part in module.modules()):
        return {}
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name not in own}


def _hparams(owner: Any) -> dict[str, Any]:
    """Return numbers and tensors among the hyperparameters."""
    named = dict(getattr(owner, "hparams", {}))
    return {name: clone_tensors(v) for name, v in named.items() if isinstance(v, int | float | Tensor)}


def _has_extra_state(part: nn.Module) -> bool:
    if isinstance(part, Metric):
        return any(part._persistent.values())
    return type(part).get_extra_state is not nn.Module.get_extra_state


def is_same_state(left: Any, right: Any) -> bool:
    """Return whether two states have equal numbers, strings, tensors and dictionary keys."""
    (leaves, spec), (other_leaves, other_spec) = tree_flatten(left), tree_flatten(right)
    return bool(spec == other_spec) and all(map(_is_equal, leaves, other_leaves))


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.array_equal(left, right)
    if type(left) is not type(right):
        return False
    of_a_copy: Any = type(left).__eq__
    if of_a_copy is object.__eq__:  # compares identities, which differ for a copy
        return True
    return bool(left == right) or bool(left != left and right != right)  # NaN
