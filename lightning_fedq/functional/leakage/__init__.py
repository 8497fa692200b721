"""Closed forms of leakage, total variation and the utility loss of a distorted update."""
