"""Bases, claims and calibration that several mechanisms share; no mechanism of its own."""
