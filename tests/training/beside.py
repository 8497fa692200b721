"""A run that trains in a folder next to another process: python -m tests.training.beside FOLDER NAME OTHER.

After every round it waits until the other process has ended the same round. It prints, as JSON, the rounds
that its ledger counted in each round and at the end.
"""

import json
import sys
import time
from pathlib import Path

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.training.accounts import make_report
from tests.digits_run import Classifier, Digits, make_trainer

ROUNDS, CLIENTS, DELTA = 4, 4, 1e-3


class InStep(pl.Callback):
    """Counts the ledger's rounds in every round, and waits for the other process after it."""

    knows_clients, writes_in_rounds = True, False

    def __init__(self, folder, name, other, federated):
        self.folder, self.name, self.other, self.federated = folder, name, other, federated
        self.counted = []

    def wait(self, step):
        (self.folder / f"{self.name}-{step}").touch()
        for _ in range(1200):
            if (self.folder / f"{self.other}-{step}").exists():
                return
            time.sleep(0.05)
        raise TimeoutError(f"{self.other} did not reach {step}")

    def on_train_start(self, trainer, pl_module):
        self.wait("start")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.counted.append(self.federated.ledger.rounds)

    def on_train_epoch_end(self, trainer, pl_module):
        self.wait(trainer.current_epoch)


def main(folder, name, other):
    """Train, and print what was counted."""
    federated = fedq.Federated(fedq.GaussianNoise(1.0, 3.0), CLIENTS)
    private = fedq.DPSGD(2.0, 1.0, delta=DELTA)
    budget = fedq.PrivacyBudget(100.0, DELTA, "server", "stop", "client")
    keep = pl.callbacks.ModelCheckpoint(folder, filename=name)
    step = InStep(folder, name, other, federated)
    trainer = make_trainer(
        federated, private, budget, keep, step, max_epochs=ROUNDS, enable_checkpointing=True
    )
    trainer.fit(Classifier(), datamodule=Digits(60))
    page = make_report(federated, trainer, DELTA)
    return {
        "counted": step.counted,
        "rounds": page.rounds,
        "charges": federated.ledger.max_charges,
        "epsilon": page.row(Adversary.SERVER).epsilon,
        "budget": budget._current_spending(),
        "steps": private.statement().steps,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))
