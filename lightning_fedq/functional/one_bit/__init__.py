"""Unbiased quantisation to one bit or a few levels, and the exact privacy of its coins."""
