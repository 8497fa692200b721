from pathlib import Path
from typing import Union, get_args

import yaml

from lightning_fedq.commands.run import _Parsed, int_before_float

CONFIG = Path(__file__).parents[2] / "configs" / "digits_corbin.yaml"


def test_int_before_float():
    assert get_args(int_before_float(Union[float, int, None])) == (int, float, type(None))  # noqa: UP007
    assert get_args(int_before_float(Union[str, float, int])) == (int, float, str)  # noqa: UP007
    for other in (int, float, Union[float, None], list[int]):  # noqa: UP007
        assert int_before_float(other) is other


def test_one_batch_is_not_all_batches():
    flags = ("limit_train_batches", "limit_val_batches", "val_check_interval")
    for value in (1, 1.0, 2, 0.5):
        arguments = ["--config", str(CONFIG), *(f"--trainer.{flag}={value}" for flag in flags)]
        trainer = yaml.safe_load(_Parsed(arguments, run=False).resolved())["trainer"]
        for flag in flags:
            assert (trainer[flag], type(trainer[flag])) == (value, type(value)), flag
