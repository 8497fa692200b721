"""Configurations of short runs on digits, as `fedq fit` reads them."""


def written(name, **arguments):
    """A class of the package with its arguments."""
    return {"class_path": f"lightning_fedq.{name}", "init_args": arguments}


QUIET = {"enable_model_summary": False, "enable_checkpointing": False}


def linear_on_digits(num_train, max_epochs, **trainer):
    """A linear classifier of so many digits."""
    backbone = written("data.models.Linear", in_features=64)
    return {
        "seed_everything": 0,
        "model": written("data.models.Classifier", backbone=backbone),
        "data": written("data.datasets.DigitsDataModule", num_train=num_train),
        "trainer": {"max_epochs": max_epochs, "accelerator": "cpu", "logger": False, **QUIET, **trainer},
    }
