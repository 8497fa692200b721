"""Nested lattices, random codewords and their compiled loops: a block of coordinates in a few bits."""
