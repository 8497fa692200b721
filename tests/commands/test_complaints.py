"""Which errors are told in a line, and which with their trace."""

import copy
import linecache
from types import FunctionType

import pytest
from lightning_fabric.utilities.exceptions import MisconfigurationException

from lightning_fedq.commands.errors import complaint, nearest, suggest
from lightning_fedq.commands.options import change_setting


def of(package, code, **names):
    """The function as if it stood in another package."""
    assert isinstance(code, FunctionType)
    place = f"/venv/site-packages/{package}.py"
    linecache.cache[place] = (0, None, linecache.getlines(__file__), place)
    return FunctionType(
        code.__code__.replace(co_filename=place), {**code.__globals__, "__name__": f"{package}.part", **names}
    )


def fails(run):
    try:
        run()
    except Exception as error:
        # not the frame of this test
        return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    raise AssertionError("no error")


def refuse():
    raise ValueError("epsilon must be > 0, got 0")


def misconfigured():
    raise MisconfigurationException("No `test_step()` method")


def bug():
    _one, _two = (1,)


def silent():
    raise ValueError


def calls():
    inner()  # noqa: F821


def wraps():
    try:
        inner()  # noqa: F821
    except ValueError as error:
        raise ValueError("from below") from error


@pytest.mark.parametrize("package", ["lightning_fedq", "pytorch_lightning", "lightning"])
def test_what_is_refused_on_purpose_is_a_line(package, monkeypatch):
    error = fails(of(package, refuse))
    told = complaint(error)
    assert told is not None and told.startswith("error: epsilon must be > 0, got 0\n")
    monkeypatch.setenv("FEDQ_TRACE", "1")
    assert complaint(error) is None


def test_lightnings_own_kind_is_a_line():
    assert complaint(fails(of("pytorch_lightning", misconfigured))) is not None


def test_around_libraries_it_stays_a_line():
    ours = of("lightning_fedq", refuse)
    assert complaint(fails(of("jsonargparse", calls, inner=ours))) is not None
    assert complaint(fails(of("lightning_fedq", wraps, inner=of("torchvision", refuse)))) is not None


@pytest.mark.parametrize(
    "run",
    [
        refuse,  # a module of the user's
        of("torch", refuse),
        of("lightning_fedq", bug),
        of("lightning_fedq", silent),
        of("lightning_fedq", calls, inner=refuse),
        of("lightning_fedq", wraps, inner=refuse),
        lambda: of("lightning_fedq", refuse)(),
    ],
)
def test_what_somebody_has_to_look_into_keeps_its_trace(run):
    assert complaint(fails(run)) is None


# ---- suggestions ---------------------------------------------------------------------------------------
PATH = "... class_path 'lightning_fedq"
KEYS = ["trainer.max_epochs", "trainer.max_steps", "model", "data", "seed_everything"]


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("Subcommand 'fit' does not accept option 'trainer.max_epoch'", "'trainer.max_epochs'"),
        ("Subcommand 'fit' does not accept option 'dta.class_path'", "'data'"),
        (f"{PATH}.data.models.MLP':\n Option 'infeatures' is not accepted", "'in_features'"),
        ("module 'lightning_fedq.data.models' has no attribute 'MPL'", "'MLP'"),
        (f"{PATH}.mechanisms.LDPQ':\n Option 'zzz' is not accepted", "It accepts: epsilon_per_coordinate."),
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


# ---- settings ------------------------------------------------------------------------------------------
CORBIN = {"class_path": "CorBin", "init_args": {"epsilon_per_coordinate": 1.0}}
TWICE = {"class_path": "c.Twice", "init_args": {"x": 1}}
FEDERATED = {"class_path": "c.Federated", "init_args": {"server_lr": 1.0, "mechanism": CORBIN}}
CONFIG = {
    "model": {"class_path": "m.Classifier", "init_args": {"lr": 0.1, "backbone": {"class_path": "m.MLP"}}},
    "trainer": {"max_epochs": 3, "callbacks": [FEDERATED, TWICE, {**TWICE, "init_args": {"x": 1}}]},
}


def of_the_mechanism(config):
    return config["trainer"]["callbacks"][0]["init_args"]["mechanism"]["init_args"]["epsilon_per_coordinate"]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("trainer.max_epochs", lambda c: c["trainer"]["max_epochs"]),
        ("model.lr", lambda c: c["model"]["init_args"]["lr"]),
        ("Federated.server_lr", lambda c: c["trainer"]["callbacks"][0]["init_args"]["server_lr"]),
        ("CorBin.epsilon_per_coordinate", of_the_mechanism),
        ("Federated.mechanism.epsilon_per_coordinate", of_the_mechanism),
        ("trainer.callbacks.2.x", lambda c: c["trainer"]["callbacks"][2]["init_args"]["x"]),
    ],
)
def test_a_short_name_finds_its_setting(name, where):
    config = copy.deepcopy(CONFIG)
    change_setting(config, name, "new")
    assert where(config) == "new"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Federated.server_lt", "no setting 'server_lt'.* Did you mean 'server_lr'"),
        ("PrivacyTarget.epsilon", "an argument of Federated: Federated.privacy.epsilon"),
        ("SecAgg.simulation", "an argument of Federated: Federated.secure_aggregation.simulation"),
        ("Federatd.server_lr", "There is no Federatd.* Did you mean 'Federated'"),
        ("Twice.x", "Twice occurs 2 times"),
        ("trainer.callbacks.3.x", "no setting '3'.* It has: 0, 1, 2."),
        ("trainer.callbacks.x", "no setting 'x'"),
        ("server_lr", "a dotted name such as Federated.server_lr, got 'server_lr'"),
        ("trainer.max_epochs.x", "'max_epochs' holds no settings"),
    ],
)
def test_a_wrong_name_is_explained(name, message):
    with pytest.raises(ValueError, match=message):
        change_setting(copy.deepcopy(CONFIG), name, 1)
