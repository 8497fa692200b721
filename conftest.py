"""Collection and speed of the tests.

What can't be imported here is not collected: the Flower adapter needs the extra `flower`. The files that take
longest come first, so that two workers (`--dist loadfile --no-loadscope-reorder`) end together. Torch has one
thread unless OMP_NUM_THREADS says otherwise: models here are small, and tests of killed processes fork, which
one with OpenMP threads can't.
"""

import functools
import gc
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.longest import long_functions
from tests.tried import without_forks

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch

collect_ignore_glob = [] if find_spec("flwr") else ["lightning_fedq/flower/*", "tests/flower/*"]
if not os.environ.get("FEDQ_ELSEWHERE"):
    # a second device in the process ends autograd in its forks, in which the trial of isolation runs
    collect_ignore_glob += ["*/test_elsewhere.py", "tests/elsewhere.py"]  # doctests are in all files
FIRST = ("test_loader.py",)
"""These fork, and a fork may hang once other tests have left threads behind."""
LONGEST = (
    "test_shapes.py",
    "test_cures.py",
    "test_published.py",
    "test_readme.py",
    "test_lightning_binding.py",
    "test_rank_processes.py",
    "test_halves.py",
    "test_knowledge.py",
    "test_comparison.py",
    "test_third_party.py",
    "test_cli.py",
    "test_configs.py",
    "test_wheel.py",
    "test_audit.py",
    "test_statistics.py",
    "test_plants.py",
    "test_own_draws.py",
    "test_mechanisms.py",
    "test_simulation.py",
    "test_audit_training.py",
    "test_plan.py",
    "test_attacks.py",
)
"""A minute of CPU and less each; the order of all others does not matter."""


@pytest.fixture(autouse=True)
def own_root(tmp_path_factory, monkeypatch):
    """Trainers that are told no folder write into one of the test's own, and not where pytest was started.

    Journals of charges lie there, and the next run of the same federation counts what they hold.
    """
    from lightning_fedq._lightning import pl

    real, here, folders = pl.Trainer.default_root_dir.fget, os.getcwd(), []

    def root(trainer):
        if real(trainer) != here:
            return real(trainer)
        folders or folders.append(str(tmp_path_factory.mktemp("root")))
        return folders[0]

    monkeypatch.setattr(pl.Trainer, "default_root_dir", property(root))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that fork and the longest ones first, and mark the tests of `tests/long.txt`."""
    long = long_functions()
    for item in items:
        if item.nodeid.partition("[")[0] in long:
            item.add_marker(pytest.mark.long)
    order = {name: place for place, name in enumerate((*FIRST, *LONGEST))}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again, 5% of the tests' time.

    Nor need every Trainer read the metadata of all installed packages for callbacks, another 5%.
    """
    if registry := sys.modules.get("lightning_fabric.utilities.registry"):
        registry.entry_points = functools.cache(registry.entry_points)
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give it back, so that it is freed in order."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _undrawn_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder's pictures take longer than a training of these sizes.

    They are made in every test, and drawn in those that are marked `pictures`.
    """
    drawing = sys.modules.get("lightning_fedq.callbacks.run_folder")
    if drawing is not None and "pictures" not in request.keywords:

        def write(figure: object, path: Path) -> None:
            path.write_bytes(b"\x89PNG, not drawn")

        monkeypatch.setattr(drawing, "save_figure", write)


TRIED = (
    "isolation",
    "canary",
    "flower/test_engines.py",
    "flower/test_smallest_batch.py",
    "training/test_third_corpus.py",
    "training/test_rehearsal.py",
)
"""Where the trial of isolation before the first round is a subject: folders and files of `tests`."""


@pytest.fixture(autouse=True)
def _untried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried before the first round, in forks, takes longer than most trainings here.

    Elsewhere than in `TRIED` and in tests that are marked `tried`, the rehearsal runs in the test's process,
    and whether clients are isolated is taken as tried.
    """
    path = request.path.as_posix()
    if "tried" not in request.keywords and not any(f"/tests/{part}" in path for part in TRIED):
        without_forks(monkeypatch)
