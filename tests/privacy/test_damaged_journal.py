"""A small log, cut at every byte, every bit flipped: refused, or every charge counts. No stream twice."""

import os

import pytest

from lightning_fedq.privacy.journal import Journal
from lightning_fedq.rounds import StreamLog, UsedStreamError

OWNER = "client 0 of f"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "streams.jsonl"


def used(path, rounds=3):
    log = StreamLog(path, OWNER)
    for number in range(rounds):
        log.use(number, 0, 8, "MVU(1e-05)", "")
    return path.read_bytes()


def test_a_log_with_any_bit_flipped_is_refused(path):
    """A `-` or `M` became CR: 0 of 5 charges were left, and nothing said so."""
    whole = used(path)
    for bit in range(8 * len(whole)):
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match="damaged"):
            StreamLog(path, OWNER)
        assert path.read_bytes() == spoiled


def test_a_log_cut_in_its_last_line_loses_that_line_at_most(path):
    whole = used(path)
    lines = whole.splitlines(keepends=True)
    for end in range(len(whole) - len(lines[-1]), len(whole) + 1):
        path.write_bytes(whole[:end])
        log = StreamLog(path, OWNER)
        complete = end >= len(whole) - 1  # with its newline missing, the line may have been paid for
        assert log.charges == 2 + complete
        for number in range(log.charges):
            with pytest.raises(UsedStreamError):
                log.use(number, 0, 8, "m", "")
        log.use(log.charges, 0, 8, "m", "")
        assert StreamLog(path, OWNER).charges == log.charges


def test_a_log_cut_in_its_header_is_refused_with_its_cure(path):
    whole = used(path)
    for end in range(whole.index(b"\n") + 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"has lost its first line.* Put the file back"):
            StreamLog(path, OWNER)
        assert path.read_bytes() == whole[:end]


@pytest.mark.parametrize("step", ["write", "fsync", "link"])
def test_a_log_that_never_got_its_header_begins_again(path, monkeypatch, step):
    """Killed, or without room, between the file's creation and its header: it was refused for ever."""

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(*((Journal, "_write") if step == "write" else (os, step)), killed)
        with pytest.raises(KeyboardInterrupt):
            StreamLog(path, OWNER)
    assert not path.exists()
    log = StreamLog(path, OWNER)
    log.use(0, 0, 8, "m", "")
    assert StreamLog(path, OWNER).charges == 1
