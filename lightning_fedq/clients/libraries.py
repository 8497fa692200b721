"""Known libraries, whose code stores nothing of a training."""

import sys
from typing import Any

LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "torchvision", "torchmetrics", "numpy", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("lightning_fedq", "lightning_utilities", "jsonargparse", "pytest", "_pytest"),
} - {"__main__"}
"""Names of top-level packages."""


def is_library_code(value: Any) -> bool:
    """Return whether code belongs to Python or a known library, which stores nothing of a training."""
    return str(getattr(value, "__module__", "") or "").partition(".")[0] in LIBRARIES
