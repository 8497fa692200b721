"""Where what is tried before the first round is done: in forks that leave nothing behind, else here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_fedq.clients.forks import in_fork, why_no_forks

T = TypeVar("T")

_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}
_CHANGES |= {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "socket.connect", "shutil.rmtree"}


class Aside:
    """Does what is tried: in a fork where this process can be forked, else here.

    Args:
        trainer: The user's, in its fit.

    Attributes:
        why: Why it is not done in forks. "" if it is.
        failed: Why the rehearsal of a client ended early. "" if it did not.
        raised: Hooks that raised in it, see `stale_hooks`.
    """

    def __init__(self, trainer: Any) -> None:
        self.why, self.failed, self.raised = why_no_forks(trainer), "", list[str]()

    def do(self, work: Callable[[], T]) -> T:
        """Try something.

        Args:
            work: Returns what can be pickled.
        """
        return work() if self.why else in_fork(work)


def no_changes(event: str, args: Any) -> None:
    """Let Python change no file and reach nobody, as an audit hook of a fork."""
    if event == "open" and not isinstance(args[0], int):
        writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR) or any(sign in (args[1] or "") for sign in "wax+")
    else:
        writes = event in _CHANGES
    if writes:
        raise PermissionError("nothing can be written where hooks are tried")
