"""Which errors are told in a line, and which with their trace."""

import linecache
from types import FunctionType

import pytest
from lightning_fabric.utilities.exceptions import MisconfigurationException

from lightning_fedq.commands.errors import complaint


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
