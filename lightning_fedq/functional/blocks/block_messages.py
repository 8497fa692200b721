"""Encoding of updates as bits, and decoding of bits to a sum of blocks.

Keys and random words are arguments, so the functions are deterministic. The caller also chooses the blocks of
a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.blocks.codeword import frequencies, threshold_frequencies
from lightning_fedq.functional.blocks.design import BlockDesign
from lightning_fedq.functional.blocks.error import Decoder, lift
from lightning_fedq.functional.blocks.lattice_loops import subtract_dithers, subtract_dithers_per_message
from lightning_fedq.functional.blocks.scalar_loops import (
    Floats,
    Keys,
    add_decoded,
    add_decoded_per_message,
    add_votes,
    encode_bits,
)

Fill = Callable[[NDArray[np.uint32]], None]
"""Function that overwrites an array with the next words of a message's private stream."""

_CHUNK = 1 << 13
"""Blocks of a message per chunk. Private words are drawn chunk by chunk and stage by stage."""
_BATCH = 1 << 15
"""Private words of several messages per call of the compiled loops."""


def encode_updates(
    design: BlockDesign,
    values: NDArray[Any],
    ranges: Floats,
    blocks: int,
    keys: Keys,
    coins: Sequence[Fill],
    flips_below: NDArray[np.uint32],
) -> tuple[Tensor, int]:
    """Code all blocks of a stack of updates.

    Args:
        design: The code.
        values: `(messages, dim)` float32 or float64, C-contiguous.
        ranges: `(3, segments)`: where each segment ends, its centre, one over its radius.
        blocks: Number of blocks, ceil(dim / L).
        keys: `(stages + 1, messages)`: of the words of every stage, and of the dithers.
        coins: One private stream a message.
        flips_below: `(messages,)`: a bit is flipped where its coin is below this.

    Returns:
        `(messages, stages, blocks)` uint8 bits, and how many blocks were out of range.
    """
    stages, clipped, chunk = len(design.tables), 0, min(_CHUNK, blocks)
    bits = np.empty((len(values), stages, blocks), np.uint8)
    most = max(_BATCH // (stages * chunk), 1)
    size = stages * min(most, len(values)) * chunk
    index_memory, coin_memory = np.empty(size, np.int32), np.empty(size, np.uint32)
    for start in range(0, len(values), most):
        batch = slice(start, start + most)
        for first in range(0, blocks, chunk):
            shape = stages, len(coins[batch]), min(chunk, blocks - first)
            index = index_memory[: math.prod(shape)].reshape(shape)
            drawn = coin_memory[: math.prod(shape)].reshape(shape)
            for row, fill in enumerate(coins[batch]):
                for stage in range(stages):
                    fill(drawn[stage, row])
            clipped += design.quantize(values[batch], ranges, keys[-1, batch], first, index)
            for stage, table in enumerate(design.tables):
                words = table.signs, table.num_rows, keys[stage, batch]
                coin = flips_below[batch], drawn[stage]
                encode_bits(index[stage], *words, first, *coin, stage, bits[batch])
    return torch.from_numpy(bits), clipped


def decode_messages(
    design: BlockDesign, bits: Tensor, keys: Keys, dithered: bool, keep: Floats, decoder: Decoder
) -> Tensor:
    """Return the decoded blocks of every message, `(messages, blocks, L)`.

    Arguments are those of `sum_messages`.
    """
    totals = np.zeros((len(bits), bits.shape[2] * design.block_dim))
    if dithered:
        subtract_dithers_per_message(design.name, keys[-1], design.step, totals)
    for stage, table in enumerate(design.tables):
        scales, offset = lift(table, keep, decoder)
        add_decoded_per_message(bits.numpy(), stage, table.weights, keys[stage], scales, offset, totals)
    return torch.from_numpy(totals).reshape(len(bits), bits.shape[2], -1)


def sum_messages(
    design: BlockDesign,
    bits: Tensor,
    keys: Keys,
    dithered: bool,
    keep: Floats,
    decoder: Decoder,
    threshold: bool,
) -> Tensor:
    """Return the sum of the decoded blocks of some messages.

    Args:
        design: The code.
        bits: `(messages, stages, blocks)` uint8, contiguous.
        keys: `(stages + 1, messages)`: of the words of every stage, and of the dithers.
        dithered: Whether to subtract the dithers.
        keep: tanh(epsilon / 2) of each message, `(messages,)`.
        decoder: Decoder, see `error.lift`.
        threshold: Whether to set negative frequencies of the histogram of all messages to zero.

    Returns:
        `(blocks, L)` float64, in units of the radius.
    """
    size, blocks, rows = len(bits), bits.shape[2], bits.numpy()
    total = np.zeros(blocks * design.block_dim)
    if dithered:
        subtract_dithers(design.name, keys[-1], design.step, total)
    decoded = torch.from_numpy(total).reshape(blocks, -1)
    for stage, table in enumerate(design.tables):
        scales, offset = lift(table, keep, decoder)
        if threshold:
            votes = np.zeros((blocks, table.num_rows))
            add_votes(rows, stage, keys[stage], scales / (table.gain * size), votes)
            shares = threshold_frequencies(frequencies(torch.from_numpy(votes), table))
            decoded += size * (shares @ torch.from_numpy(table.points).to(shares))
        else:
            add_decoded(rows, stage, table.weights, keys[stage], scales, offset, total)
    return decoded
