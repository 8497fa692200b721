"""Mechanisms, one paper or one idea per file. A class is imported at its first use.

`make tables` writes the names from the files of this folder. They are lists in code, not a search at import,
so that type checkers, editors and packagers see the same names as programs.
"""

from typing import TYPE_CHECKING

from lightning_fedq.imports import lazily

# made by `make tables`
if TYPE_CHECKING:
    from lightning_fedq.mechanisms.adaptive_clip import AdaptiveClip
    from lightning_fedq.mechanisms.aggregate_gaussian import AggregateGaussian
    from lightning_fedq.mechanisms.banded_gaussian import BandedGaussian
    from lightning_fedq.mechanisms.corbin import AugCorBin, CorBin
    from lightning_fedq.mechanisms.correlated import CorrelatedQuantization
    from lightning_fedq.mechanisms.cpa import CPA
    from lightning_fedq.mechanisms.csgm import CSGM
    from lightning_fedq.mechanisms.ddg import DistributedDiscreteGaussian
    from lightning_fedq.mechanisms.drive import DRIVE, EDEN
    from lightning_fedq.mechanisms.fedavg import FedAvg
    from lightning_fedq.mechanisms.gaussian import GaussianNoise, PerCoordinateGaussian
    from lightning_fedq.mechanisms.handed_on_gaussian import HandedOnGaussian
    from lightning_fedq.mechanisms.irwin_hall import IrwinHall
    from lightning_fedq.mechanisms.jopeq import JoPEQ
    from lightning_fedq.mechanisms.laplace import LaplaceNoise, PerCoordinateLaplace
    from lightning_fedq.mechanisms.layered import LayeredGaussian
    from lightning_fedq.mechanisms.ldpq import LDPQ
    from lightning_fedq.mechanisms.mvu import MVU
    from lightning_fedq.mechanisms.near_optimal_utility import NearOptimalUtility
    from lightning_fedq.mechanisms.paired_coins import PairedCoins
    from lightning_fedq.mechanisms.qsgd import QSGD, TernGrad
    from lightning_fedq.mechanisms.rotated_axes import RotatedAxes
    from lightning_fedq.mechanisms.rotated_coins import RotatedCoins
    from lightning_fedq.mechanisms.sigm import SIGM
    from lightning_fedq.mechanisms.sign_rr import SignRR
    from lightning_fedq.mechanisms.sparse import RandomK, TopK
    from lightning_fedq.mechanisms.subtractive_dither import SubtractiveDither

__all__ = [
    "CPA",
    "CSGM",
    "DRIVE",
    "EDEN",
    "LDPQ",
    "MVU",
    "QSGD",
    "SIGM",
    "AdaptiveClip",
    "AggregateGaussian",
    "AugCorBin",
    "BandedGaussian",
    "CorBin",
    "CorrelatedQuantization",
    "DistributedDiscreteGaussian",
    "FedAvg",
    "GaussianNoise",
    "HandedOnGaussian",
    "IrwinHall",
    "JoPEQ",
    "LaplaceNoise",
    "LayeredGaussian",
    "NearOptimalUtility",
    "PairedCoins",
    "PerCoordinateGaussian",
    "PerCoordinateLaplace",
    "RandomK",
    "RotatedAxes",
    "RotatedCoins",
    "SignRR",
    "SubtractiveDither",
    "TernGrad",
    "TopK",
]
# end

if not TYPE_CHECKING:  # a type checker reads the imports above, so it reports wrong names
    __getattr__, __dir__ = lazily(__name__)
