"""One paper, or one idea, per file. A class is imported when it is first used.

`make tables` writes the names from the files of this folder: lists in code, and no search at import, so that
type checkers, editors and packers see what programs see.
"""

from typing import TYPE_CHECKING

from lightning_fedq.imports import lazily

# made by `make tables`
if TYPE_CHECKING:
    from lightning_fedq.mechanisms.adaptive_clip import AdaptiveClip as AdaptiveClip
    from lightning_fedq.mechanisms.aggregate_gaussian import AggregateGaussian as AggregateGaussian
    from lightning_fedq.mechanisms.banded_gaussian import BandedGaussian as BandedGaussian
    from lightning_fedq.mechanisms.corbin import AugCorBin as AugCorBin, CorBin as CorBin
    from lightning_fedq.mechanisms.correlated import CorrelatedQuantization as CorrelatedQuantization
    from lightning_fedq.mechanisms.cpa import CPA as CPA
    from lightning_fedq.mechanisms.csgm import CSGM as CSGM
    from lightning_fedq.mechanisms.ddg import DistributedDiscreteGaussian as DistributedDiscreteGaussian
    from lightning_fedq.mechanisms.drive import DRIVE as DRIVE, EDEN as EDEN
    from lightning_fedq.mechanisms.fedavg import FedAvg as FedAvg
    from lightning_fedq.mechanisms.gaussian import (
        GaussianNoise as GaussianNoise,
        PerCoordinateGaussian as PerCoordinateGaussian,
    )
    from lightning_fedq.mechanisms.handed_on_gaussian import HandedOnGaussian as HandedOnGaussian
    from lightning_fedq.mechanisms.imvu import IMVU as IMVU
    from lightning_fedq.mechanisms.irwin_hall import IrwinHall as IrwinHall
    from lightning_fedq.mechanisms.jopeq import JoPEQ as JoPEQ
    from lightning_fedq.mechanisms.laplace import (
        LaplaceNoise as LaplaceNoise,
        PerCoordinateLaplace as PerCoordinateLaplace,
    )
    from lightning_fedq.mechanisms.layered import LayeredGaussian as LayeredGaussian
    from lightning_fedq.mechanisms.ldpq import LDPQ as LDPQ
    from lightning_fedq.mechanisms.mvu import MVU as MVU
    from lightning_fedq.mechanisms.near_optimal_utility import NearOptimalUtility as NearOptimalUtility
    from lightning_fedq.mechanisms.paired_coins import PairedCoins as PairedCoins
    from lightning_fedq.mechanisms.priv_unit import (
        PrivUnit as PrivUnit,
        PrivUnitG as PrivUnitG,
        ProjUnit as ProjUnit,
    )
    from lightning_fedq.mechanisms.qsgd import QSGD as QSGD, TernGrad as TernGrad
    from lightning_fedq.mechanisms.rotated_axes import RotatedAxes as RotatedAxes
    from lightning_fedq.mechanisms.rotated_coins import RotatedCoins as RotatedCoins
    from lightning_fedq.mechanisms.rqm import RQM as RQM
    from lightning_fedq.mechanisms.sigm import SIGM as SIGM
    from lightning_fedq.mechanisms.sign_rr import SignRR as SignRR
    from lightning_fedq.mechanisms.skellam import Skellam as Skellam
    from lightning_fedq.mechanisms.sparse import RandomK as RandomK, TopK as TopK
    from lightning_fedq.mechanisms.stratified import StratifiedCorBin as StratifiedCorBin
    from lightning_fedq.mechanisms.subtractive_dither import SubtractiveDither as SubtractiveDither
# end

if not TYPE_CHECKING:  # a type checker knows the names from above, and a wrong one is an error to it
    __getattr__, __dir__, __all__ = lazily(__name__)
