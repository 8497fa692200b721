"""Noise that is correlated over rounds, audited over rounds; what a single round does not show is caught."""

from dataclasses import dataclass

import pytest

from lightning_fedq.mechanisms import BandedGaussian
from lightning_fedq.mechanisms.banded_gaussian import coefficients
from tests.audit.bands import audit_band


@pytest.mark.parametrize("band", [1, 2, 4])
def test_the_shipped_noise_keeps_the_claim(band):
    assert audit_band(BandedGaussian(1.0, 1.0, band), 1.0) == []


@dataclass(frozen=True)
class SensitivityOfOneRow(BandedGaussian):
    """What a participation moves in its own row counts, and not in those that follow."""

    @property
    def _length(self):
        return float(coefficients(self.band)[0])


@dataclass(frozen=True)
class NobodyIsEarly(BandedGaussian):
    """Clients that come back before the band is over get no new block."""

    @property
    def separation(self):
        return 1


@pytest.mark.parametrize("plant", [SensitivityOfOneRow, NobodyIsEarly])
def test_plants_are_caught(plant):
    assert audit_band(plant(1.0, 1.0, 4), 1.0)
    assert audit_band(plant(1.0, 1.0, 1), 1.0) == []
