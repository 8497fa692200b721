"""Integers to bits on the wire and back: packing, entropy codes, range codes."""
