import pytest

from lightning_fedq.commands.errors import nearest, suggest

KEYS = ["trainer.max_epochs", "trainer.max_steps", "model", "data", "seed_everything"]


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("Subcommand 'fit' does not accept option 'trainer.max_epoch'", "'trainer.max_epochs'"),
        ("Subcommand 'fit' does not accept option 'dta.class_path'", "'data'"),
        (
            "... class_path 'lightning_fedq.data.models.MLP':\n Option 'infeatures' is not accepted",
            "'in_features'",
        ),
        ("module 'lightning_fedq.data.models' has no attribute 'MPL'", "'MLP'"),
        (
            "... class_path 'lightning_fedq.mechanisms.LDPQ':\n Option 'zzz' is not accepted",
            "It accepts: epsilon.",
        ),
    ],
)
def test_the_nearest_right_one_is_named(message, hint):
    assert hint in suggest(message, KEYS)


def test_what_is_not_understood_gets_no_hint():
    assert suggest("something else", KEYS) == ""
    assert nearest("qqq", KEYS) == ""


def test_a_class_that_is_of_neither_package_gets_no_hint():
    message = "- Import path collections.Counter does not correspond to a subclass of LightningModule"
    assert suggest(message, KEYS) == ""
