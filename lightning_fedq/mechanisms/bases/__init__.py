"""Bases, claims and calibration that several mechanisms share. No mechanism of its own."""
