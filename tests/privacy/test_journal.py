"""The journal is read back as it was written, survives a torn write, and refuses what it can't read."""

import json

import pytest

from lightning_fedq.privacy.journal import Entry, Journal, sign_entry


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "ledger.jsonl"


def test_entries_come_back_in_order(path):
    journal = Journal(path, "m", 3)
    journal.append(Entry(0, 0, "a", None, 8))
    journal.append(Entry(1, 2, "", (0, 2), 9))
    assert journal.unread() == []
    again = Journal(path, "m", 3)
    assert again.unread() == [Entry(0, 0, "a", None, 8), Entry(1, 2, "", (0, 2), 9)]
    assert again.position == journal.position == path.stat().st_size


def test_only_what_lies_beyond_the_position_is_unread(path):
    journal = Journal(path, "m", 3)
    journal.append(Entry(0, 0, "", None, 8))
    position = journal.position
    journal.append(Entry(1, 0, "", None, 8))
    assert [entry.round for entry in Journal(path, "m", 3, position).unread()] == [1]


UNSIGNED = '{"round": 0, "attempt": 0, "state": "m", "clients": null, "dim": 8}\n'


@pytest.mark.parametrize("line", ["\0\0\0\n", '{"round": 1}\n', "[]\n", UNSIGNED])
def test_a_damaged_line_is_refused(path, line):
    Journal(path, "m", 3)
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"is damaged at byte \d+.* Put the file back"):
        Journal(path, "m", 3).unread()


@pytest.mark.parametrize(("mechanism", "clients"), [("other", 3), ("m", 4)])
def test_another_federation_is_refused(path, mechanism, clients):
    Journal(path, "m", 3)
    with pytest.raises(ValueError, match="Resume with the federation of the checkpoint"):
        Journal(path, mechanism, clients)


def test_many_clients_are_written_in_bits(path):
    """Half of 10^6 took 3.95 MB a round as numbers."""
    chosen = tuple(range(0, 1_000_000, 2))
    journal = Journal(path, "m", 1_000_000)
    journal.append(Entry(0, 0, "a", chosen, 8))
    journal.append(Entry(1, 0, "a", (3, 999_999), 8))
    journal.append(Entry(2, 0, "a", (), 9))
    assert path.stat().st_size < 180_000
    found = Journal(path, "m", 1_000_000).unread()
    assert [entry.clients for entry in found] == [chosen, (3, 999_999), ()]


@pytest.mark.parametrize("bits", ['"!"', '"AAAA"', "3", "null"])
def test_damaged_bits_are_refused(path, bits):
    Journal(path, "m", 100).append(Entry(0, 0, "a", tuple(range(50)), 8))
    lines = path.read_text().splitlines()
    entry = json.loads(lines[1]) | {"clients": {"bits": json.loads(bits)}}
    path.write_bytes(lines[0].encode() + b"\n" + sign_entry(entry) + b"\n")
    with pytest.raises(ValueError, match="is damaged at byte"):
        Journal(path, "m", 100).unread()
