"""What a party's folder holds when a call returns, also where the machine loses power then."""

import os
from pathlib import Path

import pytest

from lightning_fedq.flower.federated_server import _check_checkpoint, _RoundCheckpoint
from lightning_fedq.flower.store import Store
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.privacy.journal import Journal
from tests.flower.loop import LoopGrid, clients, deployment, federated

CHANGES = {
    "put": lambda store: store.put("round", {"list": "new"}),
    "put_tensors": lambda store: store.put_tensors("symbols", {}),
    "pop": lambda store: store.pop("round"),
    "drop": lambda store: store.drop("symbols"),
}
GONE = {"pop": {"round.json"}, "drop": {"symbols.pt"}}


@pytest.mark.skipif(os.name != "posix", reason="folders can be synced on POSIX only")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_names_is_on_the_disk_when_a_call_returns(change, tmp_path, monkeypatch):
    """Else a power cut brings the state before back: a client would sign, or open, a second list."""
    store = Store(tmp_path)
    store.put("round", {"list": "old"})
    store.put_tensors("symbols", {})
    synced = []
    sync = os.fsync

    def recording(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path.resolve():
            synced.append(set(os.listdir(tmp_path)))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    CHANGES[change](store)
    now = set(os.listdir(tmp_path))
    assert synced[0] == now == {"round.json", "symbols.pt"} - GONE.get(change, set())


@pytest.mark.skipif(os.name != "posix", reason="folders can be synced on POSIX only")
def test_a_server_s_checkpoint_is_on_the_disk_before_it_takes_the_old_one_s_place(tmp_path, monkeypatch):
    """Else a power cut leaves an empty file in the place of a whole one."""
    synced = []
    sync = os.fsync

    def recording(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tmp_path)))
        sync(descriptor)

    class Saving:
        def save_checkpoint(self, path):
            path.write_bytes(b"whole")

    monkeypatch.setattr(os, "fsync", recording)
    kept = _RoundCheckpoint(tmp_path)
    kept._save(Saving())
    assert synced == ["/last.new", ""] and kept.path.read_bytes() == b"whole"


def test_a_checkpoint_that_is_lost_or_damaged_is_named_with_its_cure(tmp_path):
    """A lost one began a new count beside the old one; of a cut one torch said "EOFError", or less."""

    def make():
        return federated(LDPQ(epsilon_per_coordinate=1.0), seed=None)

    apps, homes = clients(make, tmp_path)
    deployment(make(), 1, tmp_path).run(LoopGrid(apps, homes))
    last = tmp_path / "server" / "checkpoints" / "last.ckpt"
    (journal,) = last.parent.glob("ledger-*.jsonl")
    whole = last.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    cut = [whole[:size] for size in (0, 10, middle, len(whole) - 1)]
    for data in (*cut, flipped):
        last.write_bytes(data)
        with pytest.raises(ValueError, match=r"last\.ckpt is (cut off or )?damaged .*restore a copy"):
            deployment(make(), 2, tmp_path).run(LoopGrid(apps, homes))
    last.unlink()
    with pytest.raises(
        ValueError, match=rf"{journal.name} has charges, but .*last\.ckpt is missing: restore a copy"
    ):
        deployment(make(), 2, tmp_path).run(LoopGrid(apps, homes))
    fresh, others = clients(make, tmp_path / "new")  # without a whole copy: nobody's folder is used again
    deployment(make(), 2, tmp_path / "new").run(LoopGrid(fresh, others))
    last.write_bytes(whole)  # the cure
    _, server = deployment(make(), 2, tmp_path).run(LoopGrid(apps, homes))
    assert server.engine.ledger.charges.tolist() == [2] * 4


def test_a_journal_without_charges_is_begun_again(tmp_path):
    """Killed before the first checkpoint, a server has charged nobody."""
    folder = tmp_path / "checkpoints"
    Journal(folder / "ledger-0.jsonl", "LDPQ", 4)
    _check_checkpoint(tmp_path)


def test_a_folder_has_one_server_and_files_for_its_owner_alone(tmp_path):
    """Also where the folder itself can be read by everybody."""
    os.umask(0o022)  # which a command that ran here before may have narrowed for good
    store = Store(tmp_path)
    tmp_path.chmod(0o755)
    with store.lock():
        with pytest.raises(ValueError, match="Another server works in"), Store(tmp_path).lock():
            pass
        (tmp_path / "last.ckpt").write_text("")
    with Store(tmp_path).lock():  # gone with its holder
        pass
    (tmp_path / "beside").write_text("")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"lock": 0o600, "last.ckpt": 0o600, "beside": 0o644}
