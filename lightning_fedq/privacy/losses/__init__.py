"""Privacy losses of one composition, in the form that accountants need.

`Loss` is the interface. Accountants, reports and audits use a loss through it only, without knowing its
class. So a new kind of loss is one subclass in one file: it defines a privacy curve (`curve`), or derives
from `RenyiLoss` where only bounds on Renyi divergences are known. A subclass can override the defaults with
exact knowledge: closed forms over many compositions, infinite mass, a pure epsilon, the effect of dropouts.

The curve of a claim is the largest of the curves of its pairs of distributions, in both orders, at every
epsilon. A maximum of convex curves is again the curve of some pair, and that pair dominates every case.
"""

from lightning_fedq.privacy.losses.divergences import ConcentratedLoss, RenyiLoss, concentrated_epsilon
from lightning_fedq.privacy.losses.loss import Array, Law, Loss, NonPrivate, composed_mass
from lightning_fedq.privacy.losses.noise import (
    GaussianLoss,
    GaussianSumLoss,
    LaplaceLoss,
    PoissonGaussianLoss,
    SampledGaussianLoss,
)
from lightning_fedq.privacy.losses.pairs import CoinSum, HiddenPair, PmfPairs

__all__ = [
    "Array",
    "CoinSum",
    "ConcentratedLoss",
    "GaussianLoss",
    "GaussianSumLoss",
    "HiddenPair",
    "LaplaceLoss",
    "Law",
    "Loss",
    "NonPrivate",
    "PmfPairs",
    "PoissonGaussianLoss",
    "RenyiLoss",
    "SampledGaussianLoss",
    "composed_mass",
    "concentrated_epsilon",
]
