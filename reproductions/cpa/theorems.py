"""CPA's propositions 1 and 2, corollary 1 and theorems 4.1 and 4.2, by number.

Theorem 4.1 is measured with the shipped mechanism, once with the paper's decoder and once with the unbiased
one; theorem 4.2's constant is held against the recursion that its proof rests on.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_fedq.functional.blocks.error import Decoder
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import CPA
from lightning_fedq.mechanisms.interface import Adversary, RoundContext
from reproductions.bench import Claim, settle
from reproductions.cpa.beyond import client_report
from reproductions.cpa.runs import NESTED_RATES, authors_cpa, stated_nested_cpa

DELTA, PARAMETERS = 1e-5, 7850


def anonymity(points: int, rounds: int) -> float:
    """Points of a codebook that stay possible when one point's bit is sent with `rounds` fresh words.

    A balanced word leaves half of the points, the true one among them; words are independent.

    Example:
        >>> [round(anonymity(8, t), 4) for t in (1, 2, 3, 4)]
        [4.0, 2.2857, 1.551, 1.2362]
    """
    return 1.0 + (points - 1) * ((points / 2 - 1) / (points - 1)) ** rounds


def proposition_1(epsilon: float, rounds: int) -> Claim:
    """CPA is epsilon-LDP a round, and rounds add up."""
    mechanism, _ = authors_cpa(epsilon)
    one, run = (client_report(mechanism, 1000, t, DELTA).row(Adversary.SERVER) for t in (1, rounds))
    return Claim(
        f"proposition 1: a round is epsilon-LDP for a user's data, hence T rounds cost T epsilon = "
        f"{rounds * epsilon:g}",
        f"epsilon {epsilon:g} is of one bit; {PARAMETERS} bits cost {PARAMETERS * epsilon:g} a round (pure), "
        f"{one.epsilon_run:,.0f} at delta {DELTA:g}; {rounds} rounds {run.epsilon_run:,.0f}",
        bool(run.epsilon_run <= rounds * epsilon),
    )


def proposition_2() -> list[Claim]:
    """k-anonymity, k = 2^(L R - 1), and k^M for the model."""
    plain = CPA(math.inf)
    kinds = {
        "1-bit CPA (R = 1)": plain,
        "the authors' code": authors_cpa(math.inf)[0],
        f"nested {NESTED_RATES[0]} x {NESTED_RATES[1]}": stated_nested_cpa(math.inf)[0],
        "the authors' nested code": authors_cpa(math.inf, nested=True)[0],
    }
    sizes = {name: kind.anonymity_set_size for name, kind in kinds.items()}
    words = ", ".join(f"{name} {size}" for name, size in sizes.items())
    eight = CPA(math.inf, levels=8).anonymity_set_size
    repeated = ", ".join(f"{anonymity(8, t):.2f}" for t in (1, 2, 3, 4))
    return [
        Claim(
            "proposition 2: a bit without a coin leaves k = 2^(LR-1) points possible",
            f"8 points: {eight}; R = 1: {plain.anonymity_set_size}",
            eight == 4 and plain.anonymity_set_size == 1,
        ),
        Claim(
            "section 5.1: the experiments are k-anonymous with k > 1, nested CPA with k = 4",
            f"{words}; of the 4 a coarse stage's bit names its own point: all lie in one cell",
            min(sizes.values()) > 1,
        ),
        Claim(
            "corollary 1: k^M-anonymity for the model, kept over rounds",
            f"1^M = 1 at R = 1; at 8 points a bit that repeats leaves {repeated} after 1 to 4 rounds",
            plain.anonymity_set_size > 1 and anonymity(8, 4) >= anonymity(8, 1),
        ),
    ]


def error_of_the_mean(mechanism: CPA, value: float, clients: int, dim: int, seed: int) -> float:
    """Squared error per parameter of the decoded mean of clients that all hold `value`, radius 1."""
    one = torch.ones(1, dtype=torch.float64)
    context = RoundContext(0, tuple((c,) for c in range(clients)), (dim,), 0.0 * one, one)
    keys, updates = SeededKeys(seed), torch.full((clients, dim), value)
    message = mechanism.encode(updates, context, ClientRandomness(keys, list(range(clients)), 0))
    total = mechanism.decode(message.symbols, range(clients), context, PublicRandomness(keys, 0))
    return float((total.double() / clients - value).square().mean())


def theorem_4_1(clients: int, seed: int) -> list[Claim]:
    """The error falls as (sum |q|^2 / c^2 + cell) / K, with the paper's decoder and with the unbiased one."""
    levels, value = 4, 0.7
    # the mechanism's radius is the range without overload: the outermost of the levels that tile 2 gamma
    gamma = levels / (levels - 1)
    step = 2.0 * gamma / levels
    bound = (step**2 * levels * (levels**2 - 1) / 12 + step**2 / 12) / clients
    claims = []
    decoders: dict[Decoder, str] = {"paper": "as printed", "unbiased": "repaired: times (N - 1) / N"}
    for decoder, words in decoders.items():
        mechanism = CPA(math.inf, levels=levels, words="balanced", decoder=decoder)
        found = error_of_the_mean(mechanism, value, clients, 400, seed)
        claims.append(
            Claim(
                f"theorem 4.1, its decoder {words}: the error of a round is at most the bound",
                f"{clients} clients, 4 levels, no coin, all updates {value}: {found:.2g} measured, bound "
                f"{bound:.2g}",
                found <= bound,
            )
        )
    return claims


def recursion(tau: int, b: float, steps: int) -> float:
    """delta_t (t + phi) after `steps` of delta_{t+1} = (1 - eta_t rho_c) delta_t + eta_t^2 b, all rho 1.

    It is what the proof of theorem 4.2 bounds by lambda; delta_0 = 0, eta_t = tau / (t + phi), phi = 4 tau.
    """
    delta, phi = 0.0, 4.0 * tau
    for t in range(steps):
        eta = tau / (t + phi)
        delta = (1.0 - eta) * delta + eta * eta * b
    return delta * (steps + phi)


def theorem_4_2(b: float, steps: int) -> list[Claim]:
    """O(1 / t) convergence, and the constant that is printed for it."""
    claims, found = [], {tau: recursion(tau, b, steps) for tau in (1, 2)}
    for tau, value in found.items():
        printed = (1 + tau**2 * b) / tau
        proven = f"{tau**2 * b / (tau - 1):g} is proven" if tau > 1 else "grows like log t"
        claims.append(
            Claim(
                f"theorem 4.2, {tau} local step(s): lambda = (rho_c^2 + tau^2 b) / (tau rho_c^2) bounds the "
                "recursion",
                f"b = {b:g}: printed {printed:g}, {value:.1f} after {steps:,} steps; {proven}",
                value <= printed,
            )
        )
    slow = recursion(2, b, steps // 10)
    claims.append(
        Claim(
            "theorem 4.2: the rate is O(1 / t)",
            f"2 local steps: delta_t (t + phi) is {slow:.1f} after {steps // 10:,} steps and {found[2]:.1f} "
            f"after {steps:,}",
            abs(found[2] / slow - 1.0) < 0.01,
        )
    )
    return claims


def cpa_theorems(
    epsilon: float = 0.5,
    rounds: int = 30,
    clients: int = 4000,
    steps: int = 200_000,
    seed: int = 0,
    out: str = "runs/cpa-theorems",
) -> dict[str, Any]:
    """CPA's propositions 1 and 2, corollary 1, theorems 4.1 and 4.2 by number: privacy, anonymity, bounds.

    Args:
        epsilon: Per bit, of proposition 1.
        rounds: Of proposition 1.
        clients: Of theorem 4.1.
        steps: Of theorem 4.2's recursion.
        seed: Of words and dithers.
        out: Folder of the summary.
    """
    claims = [
        proposition_1(epsilon, rounds),
        *proposition_2(),
        *theorem_4_1(clients, seed),
        *theorem_4_2(50.0, steps),
    ]
    settings = {"epsilon": epsilon, "rounds": rounds, "clients": clients, "steps": steps, "seed": seed}
    return settle(out, settings, claims)
