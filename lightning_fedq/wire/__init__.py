"""Codes between integers and bits on the wire: packing, entropy codes, range codes."""
