"""Hegazy et al., section 4.1: messages of a homomorphic mechanism added up on their way through a tree.

The paper's first gain of a homomorphic mechanism: each node adds what it receives and passes on the sum. Here
8, 64 or 512 clients are the leaves of a tree whose nodes have two children each, with inputs uniform on the
sphere of radius 10 in 75 dimensions as in its figures 6 to 9. Counted are Elias gamma bits a coordinate on
the link above every node: of the sum, of all messages below it passed on one by one (as the shifted
quantiser, which is not homomorphic, must, or the aggregate Gaussian where nobody adds), and of a residue
behind secure aggregation, which is as long at the root as at a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.reports.runs import Row, fresh_folder, plain_log
from lightning_fedq.wire.entropy_coding import Elias
from reproductions.bench import Claim
from reproductions.exact.claims import finish
from reproductions.exact.fig6 import exact_mechanism, masked_bits, round_context, sphere

CHILDREN = 2


def exact_network(
    leaves: Sequence[int] = (8, 64, 512),
    epsilon: float = 4.0,
    runs: int = 20,
    seed: int = 0,
    out: str = "runs/exact-network",
) -> dict[str, Any]:
    """Exact-error paper, section 4.1: bits at every node of a tree that adds messages up, masked and not.

    Args:
        leaves: Clients, powers of two from 4 on.
        epsilon: Budget under zero-out of one client.
        runs: Rounds a tree, whose bits are averaged.
        seed: Of inputs and streams.
        out: Folder of table and picture.
    """
    if any(n < 2 * CHILDREN or n & (n - 1) for n in leaves):
        raise ValueError(f"leaves must be powers of two from 4 on, got {list(leaves)}")
    folder, rows, apart = fresh_folder(Path(out)), list[Row](), 0.0
    for n in leaves:
        found, worst = _tree(n, epsilon, runs, seed)
        rows += found
        apart = max(apart, worst)
    settings = {"leaves": list(leaves), "children": CHILDREN, "epsilon": epsilon, "runs": runs, "seed": seed}
    return finish(folder, settings, rows, _claims(rows, apart), _draw(rows))


def _tree(n: int, epsilon: float, runs: int, seed: int) -> tuple[list[Row], float]:
    """A row a level of links, leaves first, and how far decoding the root's sum is from decoding all."""
    inputs, keys, members = sphere(n, seed), SeededKeys(seed), list(range(n))
    aggregate, shifted = exact_mechanism("aggregate", epsilon), exact_mechanism("shifted", epsilon)
    masked, levels, apart = masked_bits(n, epsilon, seed), list[list[float]](), 0.0
    for run in range(runs):
        context, rand = round_context(n, run), ClientRandomness(keys, members, run)
        symbols = aggregate.encode(inputs, context, rand).symbols
        one = shifted.encode(inputs, context, rand).num_bits / symbols.numel()
        sums, below, links = symbols.to(torch.int64), 1, list[float]()
        alone = Elias().num_bits(sums) / sums.numel()
        while True:
            links += [Elias().num_bits(sums) / sums.numel(), below * alone, below * one]
            if len(sums) == CHILDREN:
                break
            sums, below = sums.view(-1, CHILDREN, sums.shape[1]).sum(1), below * CHILDREN
        levels.append(links)
        server = PublicRandomness(keys, run)
        both = [aggregate.decode(part, members, context, server) for part in (symbols, sums.sum(0))]
        apart = max(apart, float((both[0].double() - both[1].double()).abs().max()))
    bits = np.mean(levels, 0).reshape(-1, 3)
    return [
        {
            "leaves": n,
            "level": level,
            "links": n // CHILDREN**level,
            "summed_bits": float(summed),
            "passed_on_bits": float(passed),
            "shifted_bits": float(other),
            "masked_bits": masked,
        }
        for level, (summed, passed, other) in enumerate(bits)
    ], apart


def _claims(rows: Sequence[Row], apart: float) -> list[Claim]:
    claims = [
        Claim(
            "proposition 3, definition 6: the aggregate mechanism is homomorphic",
            f"the root's sum and all messages decode to the same, within {apart:.1e}",
            apart < 1e-4,
            (47, 127),
        )
    ]
    for n in dict.fromkeys(row["leaves"] for row in rows):
        tree = [row for row in rows if row["leaves"] == n]
        total = {
            name: sum(row["links"] * row[f"{name}_bits"] for row in tree)
            for name in ("summed", "passed_on", "shifted", "masked")
        }
        each, top = ", ".join(f"{row['summed_bits']:.2f}" for row in tree), tree[-1]
        words = (
            f"{each} bits a coordinate on a link, from the leaves up; the whole tree {total['summed']:.0f}, "
            f"passed on one by one {total['passed_on']:.0f}, shifted {total['shifted']:.0f}"
        )
        says, where = "section 4.1: adding messages up in the network lowers the cost", f"{n:g} leaves"
        held = total["summed"] < min(total["passed_on"], total["shifted"])
        claims.append(Claim(says, words, held, (139,), where))
        words = (
            f"{top['masked_bits']:.1f} bits on every link, the whole tree {total['masked']:.0f}; shifted "
            f"messages passed on take {top['shifted_bits']:.1f} on the last link"
        )
        says = "section 4.1: behind secure aggregation, too, in the whole tree"
        claims.append(Claim(says, words, total["masked"] < total["shifted"], (139,), where))
    return claims


def _draw(rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for color, n in enumerate(dict.fromkeys(row["leaves"] for row in rows)):
        tree = [row for row in rows if row["leaves"] == n]
        for name, style in (("summed", "o-"), ("passed_on", "x--"), ("masked", ":")):
            label = f"{n:g} leaves, {name.replace('_', ' ')}"
            bits = [row[f"{name}_bits"] for row in tree]
            axes.plot([row["level"] for row in tree], bits, style, color=f"C{color}", label=label)
    plain_log(axes, "y")
    axes.set(xlabel="level of a link, leaves at 0", ylabel="bits a coordinate")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure
