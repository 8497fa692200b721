"""The Lightning layer under either package; the tests of this process run under one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fedq._lightning import pl
from tests.changed import changed

PROGRAM = """
import sys
from lightning_fedq.cli import main
assert not any("lightning" in name.partition(".")[0] for name in sys.modules if "fedq" not in name)
assert main(["fit", "mine.yaml", "--with", "corbin"]) == 0
assert main(["privacy", "runs/corbin/config.yaml"]) == 0
import lightning.pytorch as pl
from lightning_fedq._lightning import pl as bound
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import CorBin
from tests.digits_run import Classifier, Digits
assert bound is pl, bound
assert "pytorch_lightning" not in sys.modules
for clients_per_step in (1, 5):
    fed = Federated(CorBin(epsilon_per_coordinate=5.0), 10, seed=0, clients_per_step=clients_per_step)
    trainer = pl.Trainer(max_epochs=3, callbacks=[fed], accelerator="cpu", logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Classifier(), datamodule=FederatedDataModule(Digits(300)))
    assert len(fed.records) == 3
    print("accuracy", float(trainer.callback_metrics["val_acc"]))
import pytest
assert pytest.main(["-q", "--assert=plain", "-p", "no:cacheprovider", "-k", FEW, FILE]) == 0
main(["fit", "mixed.yaml"])
"""
FILE = Path(__file__).parent / "training" / "test_around_a_fit.py"
FEW = "saved_model or resumes or validates_tests or between_fits"
"""Files, resumption, other stages and a second fit: what asks most of Lightning."""
MODULE = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Own(pl.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.net = torch.nn.Linear(width, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=2)
"""
CONFIG = """
model: {class_path: own_training.Own}
data: {class_path: own_training.Data}
trainer: {max_epochs: 1, accelerator: cpu, logger: false, enable_checkpointing: false}
"""


def run(program, **options):
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    pipes = {"capture_output": True, "text": True, "check": False}
    return subprocess.run([sys.executable, *program], env={**os.environ, **own}, **pipes, **options)


def test_the_other_package_from_the_command_to_the_fit(tmp_path):
    """All other tests run under `pytorch_lightning`. That nothing then imports `lightning`: `test_wheel`.

    The command takes the package of the classes it is given; in the same process everything else does, too.
    """
    assert pl.__name__ == "pytorch_lightning"
    (tmp_path / "own_training.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    mixed = changed(CONFIG, ("logger: false", "logger: {class_path: pytorch_lightning.loggers.CSVLogger}"))
    (tmp_path / "mixed.yaml").write_text(mixed)
    done = run(["-c", PROGRAM.replace("FEW", repr(FEW)).replace("FILE", repr(str(FILE)))], cwd=tmp_path)
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    assert "runs/corbin/: report.md, privacy.md" in done.stdout
    told = "CSVLogger is a class of pytorch_lightning, but this run uses lightning.pytorch"
    assert told in done.stderr
    accuracies = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("accuracy")]
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1]


ORDERS = {
    "a library, then Lightning, then this": "import library\n{mine}\n{ours}",
    "a library, then this, then Lightning": "import library\n{ours}\n{mine}",
    "Lightning, then a library, then this": "{mine}\nimport library\n{ours}",
    "this, then a library, then Lightning": "{ours}\nimport library\n{mine}",
    "this, then Lightning": "{ours}\n{mine}",
    "by a class of its own": "import library\nfrom own import Model\n{ours}\n{mine}",
    "in a function": "import library\ndef main():\n    {mine}\n    {ours}\n    run(pl, Federated)\n",
    "late": "import library\n{mine}\nimport lightning_fedq as fedq\n",
}
RUN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
def run(pl, Federated):
    class Own(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 2)
        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    from lightning_fedq.mechanisms import FedAvg
    fed = Federated(FedAvg(), 2, seed=0)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    trainer = pl.Trainer(max_epochs=1, callbacks=[fed], **quiet)
    trainer.fit(Own(), DataLoader(TensorDataset(torch.ones(8, 2)), 2))
    print("rounds", len(fed.records))
"""
ENDS = {"in a function": "main()", "late": "run(pl, fedq.Federated)"}


FORKS = """
import os, runpy, sys
import torchmetrics, lightning_fedq  # what either package imports, and neither of them
assert not {"lightning.pytorch", "pytorch_lightning"} & set(sys.modules)
for folder in sys.argv[1:]:
    if not (child := os.fork()):
        os.chdir(folder)
        sys.path[0] = folder
        for stream in (1, 2):
            os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        runpy.run_path("program.py", run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


def _programs():
    """Three are enough between releases."""
    quick = {("lightning.pytorch", order) for order in list(ORDERS)[1::3]}
    for mine in ("lightning.pytorch", "pytorch_lightning"):
        for order in ORDERS:
            marks = () if (mine, order) in quick else pytest.mark.slow
            yield pytest.param(mine, order, marks=marks, id=f"{mine}: {order}")


@pytest.fixture(scope="module")
def said(request, tmp_path_factory):
    """What each chosen program says: forks of one process, which has imported torch and not Lightning."""
    found = {}
    for item in request.session.items:
        if item.path == request.path and "order" in getattr(item, "fixturenames", ()):
            mine, order = (item.callspec.params[name] for name in ("mine", "order"))
            other = "lightning.pytorch" if mine == "pytorch_lightning" else "pytorch_lightning"
            folder = found[mine, order] = tmp_path_factory.mktemp("program")
            (folder / "library.py").write_text(f"import {other}\n")
            own = f"import {mine} as pl\nclass Model(pl.LightningModule):\n    pass\n"
            (folder / "own.py").write_text(own)
            given = {"mine": f"import {mine} as pl", "ours": "from lightning_fedq.callbacks import Federated"}
            program = RUN + ORDERS[order].format(**given) + "\n" + ENDS.get(order, "run(pl, Federated)")
            (folder / "program.py").write_text(program)
    run(["-c", FORKS, *map(str, found.values())])
    return {place: (folder / "said").read_text() for place, folder in found.items()}


@pytest.mark.parametrize(("mine", "order"), list(_programs()))
def test_the_package_of_the_program_s_trainer_whatever_a_library_imports(mine, order, said):
    assert "rounds 1" in said[mine, order], said[mine, order][-2000:]
