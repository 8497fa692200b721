"""Parameters that no mechanism and no rule for ranges takes, each refused by name when it is made."""

import math
import re

import pytest

from lightning_fedq import mechanisms
from lightning_fedq.mechanisms.interface import ranges

REFUSED = r"""
AdaptiveClip(GaussianNoise(1.0, 1.0), quantile=0.0) | quantile must be in
AdaptiveClip(GaussianNoise(1.0, 1.0), quantile=1.0) | quantile must be in
AdaptiveClip(GaussianNoise(1.0, 1.0), rate=2.0) | rate must be in (0, 1]
AdaptiveClip(GaussianNoise(1.0, 1.0), fraction=0.6) | fraction in (0, 0.5]
AdaptiveClip(GaussianNoise(1.0, 1.0), floor=2.0) | must be between floor and ceiling
AdaptiveClip(GaussianNoise(1.0, 1.0), ceiling=0.5) | must be between floor and ceiling
AdaptiveClip(GaussianNoise(1.0, 1.0), floor=1e-09, ceiling=1000000000.0) | whose ratio must be at most 1e+12
BandedGaussian(1.0, 1.0, 0) | band must be in [1, 1024], got 0
BandedGaussian(0.0, 1.0, 1) | clip_norm
BandedGaussian(1.0, 100000.0, 1) | Loosen the budget for less noise
BandedGaussian(1.0, 1e-06, 1) | use FedAvg without noise
RandomK(1.5) | fraction must be in (0, 1]
NearOptimalUtility(clip_norm=-1.0, leakage_budget=0.3, noise_std=0.1, measured_leakage=0.25) | clip_norm must
QSGD(0) | levels must be in [1, 32767]
EDEN(5) | bits must be in [1, 4]
CPA(epsilon=0.0, epsilon_scope="bit") | epsilon must be > 0
CPA(epsilon=(1.0, -1.0), epsilon_scope="bit") | epsilon must be > 0
CPA(epsilon=(), epsilon_scope="bit") | a number, or a tuple with one number per client
CPA(epsilon=1.0, lattice='E7', epsilon_scope="bit") | lattice of CPA must be one of
CPA(epsilon=1.0, stages=0, epsilon_scope="bit") | stages must be >= 1
CPA(epsilon=1.0, levels=1, epsilon_scope="bit") | at least 2 levels
CPA(epsilon=1.0, levels=1000000000, epsilon_scope="bit") | at most 65536 levels a stage
CPA(epsilon=1.0, codebook_radius=1.0, epsilon_scope="bit") | Z takes levels
CPA(epsilon=1.0, lattice='A2', levels=3, epsilon_scope="bit") | A2 takes codebook_radius
CPA(epsilon=1.0, stages=2, nesting=1, epsilon_scope="bit") | at least 2 levels
CPA(epsilon=1.0, lattice='A2', stages=2, nesting=1, epsilon_scope="bit") | ratio must be >= 2
CPA(epsilon=1.0, lattice='A2', codebook_radius=0.1, epsilon_scope="bit") | needs a radius >=
CPA(epsilon=1.0, words='hash', epsilon_scope="bit") | words of CPA must be one of
CPA(epsilon=1.0, dither='some', epsilon_scope="bit") | dither of CPA must be one of
CPA(epsilon=1.0, decoder='best', epsilon_scope="bit") | decoder of CPA must be one of
CPA(epsilon=1.0, decay_rounds=0.0, epsilon_scope="bit") | decay_rounds must be > 0
CPA(epsilon=1.0, threshold=True, decoder='paper', epsilon_scope="bit") | needs decoder='unbiased'
CPA(epsilon=1.0, epsilon_scope='model') | epsilon_scope of CPA must be one of bit, round, total
CPA(epsilon=1.0, epsilon_scope='total') | set rounds and epsilon_scope='total' together
CPA(epsilon=1.0, epsilon_scope='round', rounds=3) | set rounds and epsilon_scope='total' together
CPA(epsilon=1.0, epsilon_scope='total', rounds=0) | rounds must be >= 1
CPA(epsilon=1.0, blocks_per_round=0, epsilon_scope="bit") | blocks_per_round must be >= 1
CPA(epsilon=1.0, blocks_per_round=3, decoder='paper', epsilon_scope='bit') | a message of some blocks needs
CPA(epsilon=1.0, epsilon_scope='round', threshold=True) | a message of some blocks needs decoder='unbiased'
DistributedDiscreteGaussian(1.0, 0.0, 0.1) | local_sigma must be > 0 and finite, got 0.0
DistributedDiscreteGaussian(1.0, 0.1, 0.1, bits=40) | bits must be in [2, 31], got 40
DistributedDiscreteGaussian(1.0, 0.1, 0.1, max_dropped_clients=-1) | max_dropped_clients must be >= 0, got -1
JoPEQ(epsilon_per_coordinate=0.0) | epsilon_per_coordinate must be > 0 and finite
JoPEQ(epsilon_per_coordinate=1.0, levels=1) | levels must be in [2, 65536]
MVU(epsilon_per_coordinate=1.0, input_bits=0) | must be in [1, 4]
MVU(epsilon_per_coordinate=0.0) | epsilon must be > 0
RotatedAxes(epsilon_per_message=0.0, clip_norm=1.0) | epsilon_per_message must be
RotatedAxes(epsilon_per_message=math.inf, clip_norm=1.0) | epsilon_per_message must be
RotatedAxes(epsilon_per_message=1.0, clip_norm=0.0) | clip_norm must be
RotatedAxes(epsilon_per_message=1.0, clip_norm=math.inf) | clip_norm must be
RotatedCoins(clip_norm=0.0) | clip_norm must be > 0
RotatedCoins(clip_norm=1.0, clip_stds=math.inf) | clip_stds must be > 0
RotatedCoins(clip_norm=1.0, epsilon_per_bit=-1.0) | epsilon must be > 0
RotatedCoins(clip_norm=1.0, bits_per_coordinate=0) | bits_per_coordinate must be in [1, 255], got 0
RotatedCoins(clip_norm=1.0, fraction=0.3) | fraction must be 1, 1/2, 1/4 or another power of 1/2, got 0.3
RotatedCoins(clip_norm=1.0, fraction=2.0) | fraction must be 1, 1/2
RotatedCoins(clip_norm=1.0, max_dropped_clients=-1) | max_dropped_clients must be >= 0
RotatedCoins(clip_norm=1.0, wrap_probability=0.5) | wrap_probability must be in [0, 0.01], got 0.5
SignRR(epsilon_per_coordinate=0.0) | epsilon must be > 0
SubtractiveDither(bits=1) | bits must be in [2, 16], got 1
FixedRange(0.0) | radius must be > 0 and finite, got 0.0
FixedRange(math.nan) | radius must be > 0 and finite, got nan
FixedRange(1.0, math.inf) | center must be finite, got inf
PreviousMinMax(margin=0.9) | margin must be >= 1, got 0.9
PreviousMinMax(floor=0.0) | floor must be > 0 and finite, got 0.0
AdaptiveRange(initial=-1.0) | initial must be > 0 and finite, got -1.0
AdaptiveRange(growth=0.9) | growth must be >= 1 and shrink <= 1, got 0.9 and 0.95
SIGM(0.0, 1.0) | clip_value must be > 0 and finite, got 0.0
SIGM(1.0, -1.0) | noise_multiplier must be > 0 and finite, got -1.0
SIGM(1.0, 1.0, 1.5) | sampling_probability must be in [2^-20, 1], got 1.5
CSGM(1.0, 1.0, 0.5, 17) | bits must be in [2, 16], or 1 with rounding='even'
GaussianNoise(0.0, 1.0) | clip_norm must be > 0 and finite, got 0.0
LaplaceNoise(math.inf, 1.0) | clip_norm must be > 0 and finite, got inf
GaussianNoise(1.0, -1.0) | noise_multiplier must be > 0 and finite, got -1.0
GaussianNoise(1.0, 1e-09) | between 1e-6 and 1e6 clipping bounds
PerCoordinateGaussian(-1.0, 1e-05) | epsilon_per_coordinate must be > 0 and finite, got -1.0
PerCoordinateGaussian(1.0, 0.0) | delta must be in (0, 1), got 0.0
PerCoordinateLaplace(math.nan) | epsilon_per_coordinate must be > 0 and finite, got nan
LayeredGaussian(0.0, 1.0) | clip_norm must be > 0 and finite, got 0.0
LayeredGaussian(1.0, 0.0) | noise_multiplier must be > 0 and finite, got 0.0
LayeredGaussian(1.0, 1.0, layering='up') | layering of LayeredGaussian must be one of direct, shifted
LayeredGaussian(1.0, 1.0, entropy_code='zip') | entropy_code of LayeredGaussian must be one of
AggregateGaussian(1.0, 1.0, error_law='cauchy') | error_law of AggregateGaussian must be one of
AggregateGaussian(1.0, 1.0, entropy_code='fixed') | needs a shortest step, which AggregateGaussian
LDPQ(0.0) | epsilon must be > 0, got 0.0
LDPQ(math.nan) | epsilon must be > 0, got nan
CorBin(1.0, 33) | shared_bits must be in [0, 32] or None, got 33
AugCorBin(1.0, 5, 1.5) | unpaired_fraction must be in [0, 1], got 1.5
HandedOnGaussian(1.0, 1.0, 0.01, num_cohorts=1) | must be >= 2, got 1. Use DistributedDiscreteGaussian
HandedOnGaussian(1.0, 0.1, 0.01, num_cohorts=3) | must be at least 20 times granularity, got 10. Use a smaller
HandedOnGaussian(1.0, 1.0, 1e-6, num_cohorts=3) | Use a larger granularity
HandedOnGaussian(0.0, 1.0, 0.01, num_cohorts=3) | clip_norm
NearOptimalUtility(2.0, 0.9, 0.1, 0.25) | leakage_budget must be in (0, 0.8326), the range of sqrt
CorrelatedQuantization(1) | levels must be in [2, 256]
CorrelatedQuantization(257) | levels must be in [2, 256]
PairedCoins(math.inf) | epsilon must be finite
PairedCoins(0.0) | epsilon
PairedCoins(2.0**-29) | epsilon
MVU(13.5) | epsilon must be at most 13, got 13.5
MVU(700.0) | epsilon must be at most 13, got 700.0
DistributedDiscreteGaussian(1.0, 1.0, 1e-200) | must be in [1e-100, 1e+100]
SignRR(1.0, 'sum') | aggregation of SignRR must be one of mean, plain_mean, majority, got 'sum'
CSGM(1.0, 1.0, 0.5, 1) | bits must be in [2, 16]
CSGM(1.0, 1.0, rounding='three') | rounding of CSGM must be one of odd, even, got 'three'
"""
"""What is made, and a part of what is said."""


@pytest.mark.parametrize(("made", "said"), [line.split(" | ") for line in REFUSED.strip().splitlines()])
def test_what_makes_no_sense_is_refused(made, said):
    known = {name: getattr(mechanisms, name) for name in mechanisms.__all__}
    with pytest.raises(ValueError, match=re.escape(said)):
        eval(made, {**known, **vars(ranges), "math": math})
