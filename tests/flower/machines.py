"""The processes of `examples/deploy.py`, which is no package."""

from tests.loaded import loaded

example = loaded("examples/deploy.py")
