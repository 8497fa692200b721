"""Privacy losses: what a claim says about one composition, as accountants need it.

`Loss` is the interface. Every accountant, report and audit asks a loss through it and knows no kind by name,
so that a new kind is one class in one file, anywhere: a subclass with a privacy curve (`curve`), or a
`RenyiLoss` where a bound on Renyi divergences is all that is known. What a kind knows better than the
defaults it overrides: closed forms over many compositions, infinite mass, a pure epsilon, what dropouts
change.

The curve of a claim is the largest of the curves of its pairs, in both orders, at every epsilon; a maximum of
convex curves is the curve of some pair again, and that pair dominates every case.
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
