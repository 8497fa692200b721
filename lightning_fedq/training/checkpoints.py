"""Checkpoints of a federation: the journal and the records beside them, and what a round that is open says.

The ledger's journal lies beside the checkpoints, under a name that the checkpoint knows. Where no checkpoint
callback has a local folder, anybody may still save (`trainer.save_checkpoint`, Ray's callback): the first
checkpoint opens a journal in `default_root_dir`, and nothing is written where nobody saves. A run that
resumes goes on in the journal of its checkpoint; one that lies in the checkpoint's own folder comes first, so
that the folder can be moved. What other runs of the same federation have charged in journals beside the
checkpoint, where its journal was written, or in the folder of the checkpoints to come, counts as well.

`SavedStates` looks at what a checkpoint holds of a module beside parameters and buffers: states of persistent
metrics, what `get_extra_state` gives, and hyperparameters; not at those of callbacks and of the data module.
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

    Count what other runs of the same federation have charged, and say so.

    Args:
        ledger: New, or restored from a checkpoint; one that has a journal keeps it.
        repeatable: Whether the keys come from a seed, see `Ledger.keep`.

    Raises:
        FileNotFoundError: If the checkpoint's journal is missing and the keys come from the system.
        ValueError: If the journal is of another federation, or damaged; or if the checkpoint names none,
            has charges, and the keys come from the system.
    """
    if not trainer.is_global_zero:
        return
    folder = _checkpoint_folder(trainer)
    if ledger.journal is None or not ledger.journal.path.is_file():
        _open_journal(trainer, ledger, folder, repeatable)
    if not repeatable:
        ledger.folders |= journal_folders(
            ledger, trainer.ckpt_path, folder or _local_folder(trainer.default_root_dir)
        )
        count_other_runs(ledger)


def _open_journal(trainer: pl.Trainer, ledger: Ledger, folder: Path | None, repeatable: bool) -> None:
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
    elif folder is not None:
        _create_journal(folder, ledger, repeatable)


def keep_journal_of_checkpoint(trainer: pl.Trainer, ledger: Ledger) -> None:
    """Open a journal in `default_root_dir` before a checkpoint is made, if the ledger has none. Secret keys.

    Args:
        trainer: In its fit, or after it.
        ledger: What it has charged until now stands in the checkpoint, and all that comes in the journal.
    """
    if ledger.journal is not None or not trainer.is_global_zero:
        return
    if (folder := _local_folder(trainer.default_root_dir)) is not None:
        _create_journal(folder, ledger, repeatable=False)
        return
    rank_zero_warn(
        f"no journal is kept in default_root_dir={trainer.default_root_dir}, which is no local folder, so "
        "that a checkpoint with charges can't be resumed; set Trainer(default_root_dir=FOLDER)"
    )


def _create_journal(folder: Path, ledger: Ledger, repeatable: bool) -> None:
    path = folder / f"ledger-{secrets.token_hex(4)}.jsonl"
    ledger.keep(Journal(path, ledger.mechanism, ledger.num_clients), repeatable)


def journal_folders(ledger: Ledger, checkpoint: object, *more: Path | None) -> frozenset[Path]:
    """Folders in which journals of the same clients may lie: of a checkpoint, of its journal, and more."""
    loaded = [Path(str(path)).parent for path in (checkpoint, ledger.recorded[0]) if path]
    return frozenset(folder for folder in (*loaded, *more) if folder is not None)


def count_other_runs(ledger: Ledger) -> None:
    """Count what other runs of the same federation have charged, as far as their journals can be seen."""
    for path, rounds in ledger.scan_journals().items():
        if isinstance(rounds, str):
            rank_zero_warn(f"{path} is of another run of this federation, and is not counted: {rounds}")
            continue
        rank_zero_warn(
            f"another run of this federation has charged {rounds} rounds, which stand in {path}. The same "
            "clients pay for both runs, so limits and statements count both; go on with "
            "trainer.fit(..., ckpt_path=...), or, where other clients train, take another folder"
        )


def report_key_source(ledger: Ledger, seeded: bool, saved: dict[str, Any] | None = None) -> None:
    """Say where a new server's keys come from, and that clients who trained before have paid before.

    Args:
        saved: State of the checkpoint's ledger, where the training resumes one.
    """
    if seeded:
        rank_zero_info("keys from a seed: reproducible, and nothing is private")
    else:
        rank_zero_info("keys from the operating system: secret, and not reproducible whatever is seeded")
    if ledger.rounds:
        rank_zero_info(
            f"these clients have paid for up to {ledger.max_charges} rounds before this training, which add "
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
    charged = set() if names is None else list_ledgers(path)
    return None if charged and names is not None and charged.isdisjoint(names) else path


def _checkpoint_folder(trainer: pl.Trainer) -> Path | None:
    """The folder of the first checkpoint callback that has a local one."""
    folders = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    return next((found for folder in folders if (found := _local_folder(folder)) is not None), None)


def _local_folder(folder: object) -> Path | None:
    return Path(str(folder)) if folder and "://" not in str(folder) else None


# ---- an unfinished round, and records ----------------------------------------------------------------------


def reset_unfinished_round(loops: dict[str, Any]) -> None:
    """Let a state of Lightning's loops say that an unfinished round has not begun."""
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
        identity: Setting that the checkpoint must agree with, in words.
        saved_identity: The same of the checkpoint.

    Raises:
        ValueError: Naming what differs.
    """
    differing = [
        f"{key} = {saved_identity.get(key)} (here {identity.get(key)})"
        for key in (*identity, *(saved_identity.keys() - identity.keys()))
        if identity.get(key) != saved_identity.get(key)
    ]
    if differing:
        raise ValueError(
            f"the checkpoint is of another federation: {', '.join(differing)}; "
            "resume with its settings, or load only its weights"
        )


def plain_records(records: Sequence[RoundRecord], private: bool, lengths: bool) -> list[dict[str, Any]]:
    """Records in the types that a checkpoint may hold.

    Args:
        private: Whether what only a simulation knows is left out.
        lengths: Whether lengths of messages are kept then.
    """
    kept = [record.released() if private else record for record in records]
    hidden = {"uplink_bits": math.nan} if private and not lengths else {}
    return [{**vars(r), "non_finite_clients": list(r.non_finite_clients), **hidden} for r in kept]


class RecordFile:
    """Records in a file beside the ledger's journal, a line each, so that checkpoints do not grow.

    A checkpoint names the file and how much of it is its own. A file that has gone on without the checkpoint
    is left to others, and a new one begun.

    Attributes:
        rounds: Records that the file holds.
    """

    def __init__(self) -> None:
        self._path, self._bytes, self._crc, self.rounds = Path(), 0, 0, 0

    def add(self, folder: Path, plain: Callable[[int], list[dict[str, Any]]]) -> None:
        """Write records that the file lacks. When a round has ended: what is only tried ends none.

        Args:
            plain: Returns the records from one on, see `plain_records`.
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
        """File, length and checksum of so many records, for a checkpoint. None if they are not in it."""
        if not rounds or rounds != self.rounds:
            return None
        return {"file": str(self._path), "bytes": self._bytes, "crc": self._crc, "rounds": self.rounds}

    def records(
        self, saved: Sequence[dict[str, Any]] | Mapping[str, Any], checkpoint: object
    ) -> list[RoundRecord]:
        """Records of a checkpoint at this path: in it, or in the file that it names, see `load`."""
        plain = self.load(saved, checkpoint) if isinstance(saved, Mapping) else saved
        return [RoundRecord(**{**r, "non_finite_clients": tuple(r["non_finite_clients"])}) for r in plain]

    def load(self, saved: Mapping[str, Any], checkpoint: object) -> list[dict[str, Any]]:
        """Read what a checkpoint has `describe`, and go on there.

        Raises:
            FileNotFoundError: If the file is missing.
            ValueError: If it is damaged, or not the one.
        """
        path = find_journal(saved["file"], checkpoint)
        if path is None:
            raise FileNotFoundError(
                f"{saved['file']}, which holds the records of this checkpoint's {saved['rounds']} rounds, is "
                "missing; put it back beside the checkpoint, or load only the weights and begin a new "
                "federation"
            )
        with path.open("rb") as file:
            data = file.read(saved["bytes"])
        if zlib.crc32(data) != saved["crc"]:
            raise ValueError(
                f"{path} is damaged, or of another run: it is not what this checkpoint's {saved['rounds']} "
                "rounds have written; put a whole copy of it back beside the checkpoint, or load only the "
                "weights and begin a new federation"
            )
        self._path, self._bytes = path.resolve(), saved["bytes"]
        self._crc, self.rounds = saved["crc"], saved["rounds"]
        return [json.loads(line) for line in data.splitlines()]


# ---- states beside parameters and buffers ------------------------------------------------------------------


def clone_tensors(value: Any) -> Any:
    """A copy of containers and tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


class SavedStates:
    """States that checkpoints hold, that no noise covers, and that a training may have changed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before, self._settings = clone_tensors(_states(module)), dict(_hparams(module))

    def check(self) -> None:
        """Refuse to go on where they have changed, and put them back.

        Raises:
            ValueError: Naming them.
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
            f"training changed {', '.join(changed[:10])}, which checkpoints hold beside parameters and "
            "buffers, exactly and without noise; leave persistent(True) of metrics and get_extra_state out, "
            "and what follows from batches out of hyperparameters, or update them in validation"
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
    """Numbers and tensors among the hyperparameters."""
    named = dict(getattr(owner, "hparams", {}))
    return {
        name: clone_tensors(value) for name, value in named.items() if isinstance(value, int | float | Tensor)
    }


def _has_extra_state(part: nn.Module) -> bool:
    if isinstance(part, Metric):
        return any(part._persistent.values())
    return type(part).get_extra_state is not nn.Module.get_extra_state


def is_same_state(left: Any, right: Any) -> bool:
    """Do two states agree in every number, word and tensor, and in the keys of their dictionaries?"""
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
    if of_a_copy is object.__eq__:  # by identity, which no copy has
        return True
    return bool(left == right) or bool(left != left and right != right)  # NaN
