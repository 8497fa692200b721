"""One hospital's rows per client: `python examples/hospitals.py`. A minute.

Ten hospitals hold 144 images each (scikit-learn's digits stand for records). Four trainings, with the same
model and rounds: without privacy; DP-SGD inside every hospital, which protects a patient's row; noise on the
release, which protects a whole hospital; and both. docs/guides/dp_sgd.md has the table and says which is
which.
"""

import argparse
import math

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import MLP, Classifier

HOSPITALS, DELTA = 10, 1e-4


def run(rounds: int, inside: bool, release: bool) -> tuple[float, float, float]:
    """Train once: accuracy, epsilon of a row against everybody, epsilon of a hospital against outsiders."""
    pl.seed_everything(0)
    mechanism = fedq.GaussianNoise(clip_norm=1.0, noise_multiplier=1.0) if release else fedq.FedAvg()
    target = fedq.PrivacyTarget(8.0, DELTA, adversary="outsider") if release else None
    federated = fedq.Federated(mechanism, HOSPITALS, local_epochs=2, privacy=target)
    sgd = fedq.DPSGD(noise_multiplier=1.5, max_grad_norm=1.0, delta=DELTA)
    trainer = pl.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[federated, sgd] if inside else [federated],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(MLP(in_features=64, hidden=[32]), lr=0.5, momentum=0.0)
    data = DigitsDataModule(batch_size=24)
    trainer.fit(model, datamodule=data)
    hospital = float(trainer.callback_metrics["fed/epsilon_outsider"]) if release else math.inf
    [found] = trainer.test(model, datamodule=data, verbose=False)
    return found["test_acc"], sgd.epsilon(DELTA) if inside else math.inf, hospital


def main() -> None:
    """Run the four, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split(".")[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each training (default: 10)")
    rounds = parser.parse_args().rounds
    print(f"{'':34} accuracy  epsilon of a row  of a hospital  (delta {DELTA:g}, {rounds} rounds)")
    for title, inside, release in (
        ("without privacy", False, False),
        ("DP-SGD inside hospitals", True, False),
        ("noise on the release", False, True),
        ("both", True, True),
    ):
        accuracy, row, hospital = run(rounds, inside, release)
        print(f"{title:34} {accuracy:8.3f}  {row:16.2f}  {hospital:13.2f}")


if __name__ == "__main__":
    main()
