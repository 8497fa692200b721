"""Quantisers whose error has an exact law: subtractive dithering, layered quantisers, Irwin-Hall."""
