"""One round by hand: context, streams, encode, decode. Used by the tests of mechanisms."""

import torch

from lightning_fedq.mechanisms.contract_suite import decode, encode, make_context

__all__ = ["decode", "encode", "make_context", "updates_for"]


def updates_for(num_clients, dim=64):
    """Inside every contract row's range: coordinates within +-0.9, rows shorter than the clipping norms."""
    generator = torch.Generator().manual_seed(5)
    values = torch.rand(num_clients, dim, generator=generator) * 2 - 1
    return values * min(0.9, 4.0 / dim)
