"""Exact samplers of integer and grid noise."""
