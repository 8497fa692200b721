"""Names that were public before 0.3.0 and stand elsewhere now, or are gone: an import says what to use.

>>> import lightning_fedq as fedq
>>> fedq.Skellam
Traceback (most recent call last):
ImportError: lightning_fedq.Skellam is gone since 0.3.0; use DistributedDiscreteGaussian
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, NoReturn

MOVED = {
    "lightning_fedq.byzantine": "lightning_fedq.algorithms.byzantine",
    "lightning_fedq.callbacks.LeakageBudget": "lightning_fedq.leakage.LeakageBudget",
    "lightning_fedq.callbacks.LeakageMonitor": "lightning_fedq.leakage.LeakageMonitor",
    "lightning_fedq.datasets": "lightning_fedq.data.datasets",
    "lightning_fedq.lab": "lightning_fedq.leakage",
    "lightning_fedq.mechanism": "lightning_fedq.mechanisms.interface",
    "lightning_fedq.models": "lightning_fedq.data.models",
    "lightning_fedq.ranges": "lightning_fedq.mechanisms.interface.ranges",
}
"""Old names of modules and of what they hold, and the new ones."""
_AXES = "use RotatedAxes, which has its error at a hundredth of the work"
_APPS = "use client_app and server_app of lightning_fedq.flower, which carry any Lightning training"
GONE = {
    "lightning_fedq.mechanisms.PrivUnit": _AXES,
    "lightning_fedq.mechanisms.PrivUnitG": _AXES,
    "lightning_fedq.mechanisms.ProjUnit": _AXES,
    "lightning_fedq.mechanisms.Skellam": "use DistributedDiscreteGaussian",
    "lightning_fedq.mechanisms.StratifiedCorBin": "use PairedCoins, or LDPQ",
    "lightning_fedq.callbacks.TailAveraging": "use WeightAveraging (docs/guides/useful_epsilon.md)",
    "lightning_fedq.data.datasets.LEAFDataModule": "copy examples/leaf.py of the repository",
    "lightning_fedq.data.datasets.leaf_clients": "copy examples/leaf.py of the repository",
    "lightning_fedq.data.models.CNN3": "use a network of your own; that of CPA is in the repository",
    "lightning_fedq.data.models.ResNet18": "use torchvision.models.resnet18",
    "lightning_fedq.data.models.VGG2": "use a network of your own; that of CorBin-FL is in the repository",
    "lightning_fedq.flower.DecodingStrategy": _APPS,
    "lightning_fedq.flower.encoding_mod": _APPS,
    "lightning_fedq.keys.randomness.AgreedKeys": "use RootKeys(); real clients have keys.party_keys",
    "lightning_fedq.keys.randomness.group_key": "keys are agreed in pairs; use agree",
    "lightning_fedq.privacy.target.epsilon_of": "use privacy.account.Account(run, delta).spent",
    "lightning_fedq.mechanisms.contract_suite.devices_agree": "mechanisms are given tensors of the CPU",
}
"""What is gone, and what to use in its place."""
COMMANDS = {
    "bench": "fedq compare --mechanisms NAME --epsilon 2 8 --seeds 3 --on TASK",
    "attack": "python -m reproductions leakage-attack, in a clone of the repository",
    "tradeoff": "python -m reproductions leakage-tradeoff, in a clone of the repository",
    "reproduce": "python -m reproductions, in a clone of the repository",
}
"""Old commands of `fedq`, and the lines that do their work."""
GONE["lightning_fedq.TailAveraging"] = GONE["lightning_fedq.callbacks.TailAveraging"]
for _name in ("PrivUnit", "PrivUnitG", "ProjUnit", "Skellam", "StratifiedCorBin"):
    GONE[f"lightning_fedq.{_name}"] = GONE[f"lightning_fedq.mechanisms.{_name}"]


def words(name: str) -> str | None:
    """Say what became of a full name, or None if it was never public.

    Example:
        >>> words("lightning_fedq.ranges")
        'lightning_fedq.ranges is lightning_fedq.mechanisms.interface.ranges since 0.3.0'
    """
    if name in MOVED:
        return f"{name} is {MOVED[name]} since 0.3.0"
    return f"{name} is gone since 0.3.0; {GONE[name]}" if name in GONE else None


def refuse(module: str, name: str) -> NoReturn:
    """End the search for a name that a module does not have.

    Raises:
        ImportError: If it was public once. An AttributeError would be told without its words by
            `from module import name`.
        AttributeError: Else.
    """
    if (found := words(f"{module}.{name}")) is not None:
        raise ImportError(found, name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def names_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has lost public names.

    Args:
        module: Its `__name__`.
    """
    return lambda name: refuse(module, name)


class OldModules(MetaPathFinder):
    """Knows the old modules by name, and is asked first: a folder that was left behind is a package, too."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError with the new name of an old module. Any other is not found, as before."""
        if fullname in MOVED:
            raise ModuleNotFoundError(words(fullname), name=fullname)


if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
    sys.meta_path.insert(0, OldModules())
