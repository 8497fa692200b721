"""The journal is read back as it was written, survives a torn write, and refuses what it can't read."""

from io import FileIO

import pytest

from lightning_fedq.privacy.journal import Entry, Journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "ledger.jsonl"


def test_entries_come_back_in_order(path):
    journal = Journal(path, "m", 3)
    journal.append(0, 0, "a", None, 8)
    journal.append(1, 2, "", (0, 2), 9)
    assert journal.unread() == []
    again = Journal(path, "m", 3)
    assert again.unread() == [Entry(0, 0, "a", None, 8), Entry(1, 2, "", (0, 2), 9)]
    assert again.position == journal.position == path.stat().st_size


def test_only_what_lies_beyond_the_position_is_unread(path):
    journal = Journal(path, "m", 3)
    journal.append(0, 0, "", None, 8)
    position = journal.position
    journal.append(1, 0, "", None, 8)
    assert [entry.round for entry in Journal(path, "m", 3, position).unread()] == [1]


@pytest.mark.parametrize("kept", [1, 20])
def test_a_torn_last_line_paid_for_nothing_and_is_cut_off(path, kept):
    journal = Journal(path, "m", 3)
    journal.append(0, 0, "", None, 8)
    whole = path.read_bytes()
    journal.append(1, 0, "", None, 8)
    path.write_bytes(path.read_bytes()[: len(whole) + kept])
    again = Journal(path, "m", 3)
    assert [entry.round for entry in again.unread()] == [0]
    again.append(7, 0, "", None, 8)
    assert [entry.round for entry in Journal(path, "m", 3).unread()] == [0, 7]


@pytest.mark.parametrize("line", ["\0\0\0\n", '{"round": 1}\n', "[]\n"])
def test_a_damaged_line_is_refused(path, line):
    Journal(path, "m", 3)
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"is damaged at byte \d+.* put the file back"):
        Journal(path, "m", 3).unread()


@pytest.mark.parametrize(("mechanism", "clients"), [("other", 3), ("m", 4)])
def test_another_federation_is_refused(path, mechanism, clients):
    Journal(path, "m", 3)
    with pytest.raises(ValueError, match="resume with the federation of the checkpoint"):
        Journal(path, mechanism, clients)


def test_a_file_that_lost_charges_is_refused(path):
    journal = Journal(path, "m", 3)
    position = journal.position
    journal.append(0, 0, "", None, 8)
    path.write_bytes(path.read_bytes()[:position])
    with pytest.raises(ValueError, match="charges are lost; put the whole file back"):
        Journal(path, "m", 3, journal.position)


def test_two_writers_at_once_are_refused(path):
    one, other = Journal(path, "m", 3), Journal(path, "m", 3)
    one.append(0, 0, "", None, 8)
    with pytest.raises(RuntimeError, match="let one run at a time go on from a checkpoint"):
        other.append(0, 0, "", None, 8)


def test_a_journal_of_an_older_version_is_refused(path):
    path.parent.mkdir()
    path.write_text('{"fedq ledger": 1, "mechanism": "m", "clients": 3}\n')
    with pytest.raises(ValueError, match=r"older version, whose lines have no checksum.* load only"):
        Journal(path, "m", 3)


def filled(path, number=3):
    """A journal of some charges, its bytes, and where each charge ends."""
    journal = Journal(path, "1e-05 MVU", 3)
    ends = [journal.position]
    for round in range(number):
        journal.append(round, 0, "s", (0, 2), 8, "1e-05")
        ends.append(journal.position)
    return path.read_bytes(), ends


def rounds_in(path):
    return [entry.round for entry in Journal(path, "1e-05 MVU", 3).unread()]


def test_cut_at_every_byte_it_holds_what_was_complete(path):
    """A header that was torn has charged nothing; a line that lacks its newline alone counts."""
    data, ends = filled(path)
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        complete = sum(end - 1 <= cut for end in ends[1:])
        assert rounds_in(path) == list(range(complete)), cut
        Journal(path, "1e-05 MVU", 3).unread()
        again = Journal(path, "1e-05 MVU", 3)
        again.unread()
        again.append(9, 0, "", None, 8)
        assert rounds_in(path) == [*range(complete), 9], "and it goes on"


def test_no_flipped_bit_forgets_a_charge(path):
    data, _ = filled(path)
    for place in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            with pytest.raises(ValueError, match=r"is damaged at byte|of another federation"):
                rounds_in(path)


def test_without_room_nothing_is_charged_and_the_reason_is_named(path, monkeypatch):
    journal = Journal(path, "m", 3)
    journal.append(0, 0, "", None, 8)
    before, whole = path.read_bytes(), FileIO.write
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.open", lambda self, *args, **kwargs: _Full(self, "ab"))
        with pytest.raises(OSError, match="no space left on the device, so nothing was charged"):
            journal.append(1, 0, "", None, 8)
    assert path.read_bytes() == before and FileIO.write is whole
    journal.append(1, 0, "", None, 8)
    assert [entry.round for entry in Journal(path, "m", 3).unread()] == [0, 1]


class _Full(FileIO):
    """A disk with room for ten bytes."""

    def write(self, data):
        return super().write(data[:10])
