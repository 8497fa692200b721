"""Truncation in tensor code, for the compiled loops to be held to."""

import torch


def truncate_to_grid(values, bits):
    """Integers values * 2^bits of float64 in [-1, 1], rounded toward zero: no norm of a vector grows."""
    return (values * 2.0**bits).to(torch.int64)  # a cast cuts off; rounding or floor could lengthen
