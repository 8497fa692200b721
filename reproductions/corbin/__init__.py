"""Experiments of the CorBin-FL paper."""
