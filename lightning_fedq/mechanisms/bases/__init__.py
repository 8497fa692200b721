"""Bases, claims and calibration that several mechanisms share."""
