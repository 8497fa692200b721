"""From stacks of updates to bits and back to a sum of blocks: compiled on the CPU, tensor code elsewhere.

Both roads give the same bits. Keys and coins are arguments, so nothing here is random; which blocks a message
holds is the caller's business, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.blocks.codeword import (
    WordTable,
    frequencies,
    prf_rows,
    prf_words,
    threshold_frequencies,
)
from lightning_fedq.functional.blocks.design import BlockDesign
from lightning_fedq.functional.blocks.error import Decoder, lift
from lightning_fedq.functional.blocks.lattice_loops import subtract_dithers, subtract_own_dithers
from lightning_fedq.functional.blocks.scalar_loops import (
    Floats,
    Keys,
    add_decoded,
    add_own_decoded,
    add_votes,
    encode_bits,
)

Fill = Callable[[NDArray[np.uint32]], None]
"""Overwrites an array with the next words of a message's private stream."""

_CHUNK = 1 << 13
"""Blocks of a message that are worked on at once; coins are drawn chunk by chunk, stage by stage."""
_BATCH = 1 << 15
"""Coins of several messages that wait for the compiled loops."""


def encode_updates(
    design: BlockDesign,
    values: NDArray[Any],
    ranges: Floats,
    blocks: int,
    keys: Keys,
    coins: Sequence[Fill],
    flips_below: NDArray[np.uint32],
) -> tuple[Tensor, int]:
    """Code all blocks of a stack of updates on the CPU.

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
                encode_bits(
                    index[stage],
                    table.signs,
                    table.num_rows,
                    keys[stage, batch],
                    first,
                    flips_below[batch],
                    drawn[stage],
                    stage,
                    bits[batch],
                )
    return torch.from_numpy(bits), clipped


def encode_blocks(
    design: BlockDesign, scaled: Tensor, keys: Keys, coins: Sequence[Fill], flips_below: NDArray[np.uint32]
) -> Tensor:
    """Code blocks `(messages, blocks, L)`, float64 in units of the radius, on any device.

    Returns:
        `(messages, stages, blocks)` uint8 bits.
    """
    if scaled.device.type != "cpu":
        return _encode_tensor(design, scaled, keys, coins, flips_below)
    values = scaled.flatten(1).contiguous().numpy()
    unit = np.array([[values.shape[1]], [0.0], [1.0]])
    return encode_updates(design, values, unit, scaled.shape[1], keys, coins, flips_below)[0]


def _encode_tensor(
    design: BlockDesign, scaled: Tensor, keys: Keys, coins: Sequence[Fill], flips_below: NDArray[np.uint32]
) -> Tensor:
    """The same bits in tensor code."""
    (size, blocks, _), stages = scaled.shape, len(design.tables)
    bits = torch.empty(size, stages, blocks, dtype=torch.uint8, device=scaled.device)
    chunk = min(_CHUNK, blocks)
    for row, fill in enumerate(coins):
        index = design.quantize_tensor(scaled[row], int(keys[-1, row]))
        drawn = np.empty((stages, blocks), np.uint32)
        for first in range(0, blocks, chunk):
            for stage in range(stages):
                fill(drawn[stage, first : first + chunk])
        flips = torch.from_numpy(drawn.astype(np.int64)).to(scaled.device) < int(flips_below[row])
        for stage, table in enumerate(design.tables):
            which = prf_rows(prf_words(int(keys[stage, row]), 0, blocks, scaled.device), table.num_rows)
            bits[row, stage] = (table.signs_at(which, index[stage]) > 0) ^ flips[stage]
    return bits


def sum_messages(
    design: BlockDesign,
    bits: Tensor,
    keys: Keys,
    dithered: bool,
    keep: Floats,
    decoder: Decoder,
    threshold: bool,
) -> Tensor:
    """Sum of the decoded blocks of some messages.

    Args:
        design: The code.
        bits: `(messages, stages, blocks)` uint8, contiguous, on any device.
        keys: `(stages + 1, messages)`: of the words of every stage, and of the dithers.
        dithered: Is a dither to be subtracted?
        keep: `(messages,)`, tanh(epsilon / 2) of each.
        threshold: Set negative frequencies of the histogram of all messages to zero.

    Returns:
        `(blocks, L)` float64, in units of the radius.
    """
    add = _sum_on_cpu if bits.device.type == "cpu" else _sum_on_device
    return add(design, bits, keys, dithered, keep, decoder, threshold)


def decode_messages(
    design: BlockDesign, bits: Tensor, keys: Keys, dithered: bool, keep: Floats, decoder: Decoder
) -> Tensor:
    """Decoded blocks of every message, `(messages, blocks, L)`. Arguments as in `sum_messages`."""
    if bits.device.type != "cpu":
        every = [slice(row, row + 1) for row in range(len(bits))]
        ones = [
            _sum_on_device(design, bits[row], keys[:, row], dithered, keep[row], decoder, False)
            for row in every
        ]
        return torch.stack(ones)
    totals = np.zeros((len(bits), bits.shape[2] * design.block_dim))
    if dithered:
        subtract_own_dithers(design.name, keys[-1], design.step, totals)
    for stage, table in enumerate(design.tables):
        scales, offset = lift(table, keep, decoder)
        add_own_decoded(bits.numpy(), stage, table.weights, keys[stage], scales, offset, totals)
    return torch.from_numpy(totals).reshape(len(bits), bits.shape[2], -1)


def _sum_on_cpu(
    design: BlockDesign,
    bits: Tensor,
    keys: Keys,
    dithered: bool,
    keep: Floats,
    decoder: Decoder,
    threshold: bool,
) -> Tensor:
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
            decoded += size * _from_histogram(torch.from_numpy(votes), table)
        else:
            add_decoded(rows, stage, table.weights, keys[stage], scales, offset, total)
    return decoded


def _sum_on_device(
    design: BlockDesign,
    bits: Tensor,
    keys: Keys,
    dithered: bool,
    keep: Floats,
    decoder: Decoder,
    threshold: bool,
) -> Tensor:
    size, _, blocks = bits.shape
    total = torch.zeros(blocks, design.block_dim, dtype=torch.float64, device=bits.device)
    for stage, table in enumerate(design.tables):
        scales, offset = lift(table, keep, decoder)
        weights, constant = (torch.from_numpy(a).to(bits.device) for a in (table.weights, offset))
        votes = total.new_zeros(blocks, table.num_rows) if threshold else None
        for row, scale in enumerate(scales.tolist()):
            which = prf_rows(prf_words(int(keys[stage, row]), 0, blocks, bits.device), table.num_rows)
            signed = (2.0 * bits[row, stage].double() - 1.0)[:, None]
            if votes is None:
                total += constant + scale * signed * weights[which]
            else:
                votes.scatter_add_(1, which[:, None], scale / (table.gain * size) * signed)
        if votes is not None:
            total += size * _from_histogram(votes, table)
    for key in keys[-1].tolist() if dithered else ():
        total -= design.step * design.dither(key, blocks, bits.device)
    return total


def _from_histogram(votes: Tensor, table: WordTable) -> Tensor:
    """Mean point of every block, `(blocks, L)`, from the thresholded histogram."""
    kept = threshold_frequencies(frequencies(votes, table))
    return kept @ torch.from_numpy(table.points).to(kept)
