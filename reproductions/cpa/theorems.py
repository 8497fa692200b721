"""CPA's claim 1, propositions 1 and 2, corollary 1, theorems 4.1 and 4.2 and their lemmas, by number.

Theorem 4.1 is measured with the shipped mechanism, once with the paper's decoder and once with the unbiased
one; theorem 4.2's constant is held against the recursion that its proof rests on, its lattice, which shrinks
with the step size, against one that does not, on a quadratic problem.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
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
        (83, 90),
    )


def claim_1(epsilon: float, values: int = 4) -> Claim:
    """Randomised response of any function to one bit is epsilon-LDP: all functions, all pairs."""
    law = np.array([[1.0, math.exp(epsilon)], [math.exp(epsilon), 1.0]]) / (1.0 + math.exp(epsilon))
    losses = [
        float(np.abs(np.log(law[f[a]] / law[f[b]])).max())
        for f in product((0, 1), repeat=values)
        for a, b in product(range(values), repeat=2)
    ]
    return Claim(
        "claim 1: randomised response of any function to one bit is epsilon-LDP",
        f"all {2**values} functions of {values} values: at most {max(losses):g} at epsilon {epsilon:g}",
        max(losses) <= epsilon * (1 + 1e-12),
        (131,),
    )


def proposition_2() -> list[Claim]:
    """k-anonymity, k = 2^(L R - 1), and k^M for the model."""
    plain = CPA(math.inf, epsilon_scope="bit")
    kinds = {
        "1-bit CPA (R = 1)": plain,
        "the authors' code": authors_cpa(math.inf)[0],
        f"nested {NESTED_RATES[0]} x {NESTED_RATES[1]}": stated_nested_cpa(math.inf)[0],
        "the authors' nested code": authors_cpa(math.inf, nested=True)[0],
    }
    sizes = {name: kind.anonymity_set_size for name, kind in kinds.items()}
    words = ", ".join(f"{name} {size}" for name, size in sizes.items())
    eight = CPA(math.inf, levels=8, epsilon_scope="bit").anonymity_set_size
    repeated = ", ".join(f"{anonymity(8, t):.2f}" for t in (1, 2, 3, 4))
    return [
        Claim(
            "proposition 2: a bit without a coin leaves k = 2^(LR-1) points possible",
            f"8 points: {eight}; R = 1: {plain.anonymity_set_size}",
            eight == 4 and plain.anonymity_set_size == 1,
            (84,),
        ),
        Claim(
            "section 5.1: the experiments are k-anonymous with k > 1, nested CPA with k = 4",
            f"{words}; of the 4 a coarse stage's bit names its own point: all lie in one cell",
            min(sizes.values()) > 1,
            (84,),
        ),
        Claim(
            "corollary 1: k^M-anonymity for the model, in a round",
            f"a count: 1^M = 1 at R = 1, {eight}^M at 8 points, where a bit that repeats leaves {repeated} a "
            "block after 1 to 4 rounds",
            anonymity(8, 1) == eight,
            (85,),
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
    claims = [*lemma_4_2_1(levels)]
    decoders: dict[Decoder, str] = {"paper": "as printed", "unbiased": "repaired: times (N - 1) / N"}
    for decoder, words in decoders.items():
        mechanism = CPA(math.inf, levels=levels, words="balanced", decoder=decoder, epsilon_scope="bit")
        found = error_of_the_mean(mechanism, value, clients, 400, seed)
        claims.append(
            Claim(
                f"theorem 4.1, its decoder {words}: the error of a round is at most the bound",
                f"{clients} clients, 4 levels, no coin, all updates {value}: {found:.2g} measured, bound "
                f"{bound:.2g}",
                found <= bound,
                (86, 132),
            )
        )
    return claims


def lemma_4_2_1(points: int) -> list[Claim]:
    """The recovered histogram has mean e_l and uncorrelated entries: all words of both kinds, point 0."""
    claims, wanted = [], np.eye(points)[0]
    words = np.array(list(product((-1.0, 1.0), repeat=points)))
    for kind, rows in (
        ("balanced words, as printed", words[words.sum(1) == 0]),
        ("independent words", words),
    ):
        histogram = rows[:, :1] * rows  # without a coin: the bit times the word
        mean, other = histogram.mean(0), histogram[:, 1:]
        apart = other - other.mean(0)
        covariance = apart.T @ apart / len(rows)
        largest = float(covariance[~np.eye(points - 1, dtype=bool)].min() / covariance[0, 0])
        right = bool(np.allclose(mean, wanted)) and abs(largest) < 1e-12
        claims.append(
            Claim(
                f"lemma 4.2.1, {kind}: errors have mean zero and are uncorrelated",
                f"N = {points}, point 0: the histogram's mean is ({', '.join(f'{m:.3g}' for m in mean)}), "
                f"entries correlate by {largest:.2f}",
                right,
                (87,),
            )
        )
    return claims


def lemmas_4_3(worlds: int, seed: int) -> list[Claim]:
    """The second term of lemma 4.3.1, over all draws of samples; lemma 4.3.2 in worlds of bounded gradients.

    xi_r^2 bounds the squared norm of a sample's gradient (assumption 3), steps are beta / (t + phi).
    """
    rng, terms, drifts = np.random.default_rng(seed), [], []
    for _ in range(worlds):
        gradients = rng.normal(size=(3, 4, 2)) * rng.uniform(0.1, 3.0, (3, 1, 1))  # users, samples, entries
        bounds = (gradients**2).sum(2).max(1)
        means = [gradients[range(3), list(draw)].mean(0) for draw in product(range(4), repeat=3)]
        terms.append(np.var(means, axis=0).sum() * 9 / bounds.sum())
        tau, start = int(rng.integers(2, 8)), int(rng.integers(0, 20))
        steps = 1.0 / (start + np.arange(tau) + max(4, tau))
        drawn = gradients[np.arange(3)[:, None], rng.integers(0, 4, (3, tau - 1))]
        local = (steps[: tau - 1, None] * drawn).sum(1)
        drift = ((local - local.mean(0)) ** 2).sum(1).mean()
        drifts.append(drift / (4 * (tau - 1) ** 2 * steps[-1] ** 2 * bounds.mean()))
    return [
        Claim(
            "lemma 4.3.1, its term of sampled gradients: at most the sum of xi_r^2 over K^2",
            f"{worlds} worlds, all draws: at most {max(terms):.3f} of it; the other term is theorem 4.1's",
            max(terms) <= 1.0,
            (132,),
        ),
        Claim(
            "lemma 4.3.2: local models are at most 4 (tau - 1)^2 eta^2 mean xi_r^2 from their mean",
            f"{worlds} worlds: at most {max(drifts):.3f} of it; no strongly convex F has bounded gradients "
            "everywhere, so assumptions 3 and 4 exclude each other",
            max(drifts) <= 1.0,
            (133,),
        ),
    ]


def shrinking_lattice(epsilon: float, rounds: int, seed: int) -> Claim:
    """Theorem 4.2's lattice shrinks like the step size: F_r = |w - a_r|^2 / 2, one noisy step a round.

    Squared distance to the optimum, averaged over the last tenth of `rounds / 10` and of `rounds`, with a
    range that shrinks as phi / (phi + t) and with one that does not.
    """
    clients, dim, phi = 50, 200, 8.0
    generator = torch.Generator().manual_seed(seed)
    targets = 0.5 * torch.rand(clients, dim, generator=generator, dtype=torch.float64) - 0.25
    optimum, one = targets.mean(0), torch.ones(1, dtype=torch.float64)
    keys, found, members = SeededKeys(seed), list[float](), list(range(clients))
    for decay in (phi, None):
        mechanism, weights = (
            CPA(epsilon, decay_rounds=decay, epsilon_scope="bit"),
            torch.zeros(dim, dtype=torch.float64),
        )
        gaps = list[float]()
        for t in range(rounds):
            eta = 2.0 / (t + phi)
            noise = 0.1 * torch.randn(clients, dim, generator=generator, dtype=torch.float64)
            updates = -eta * (weights - targets + noise)
            context = RoundContext(t, tuple((c,) for c in members), (dim,), 0.0 * one, 0.25 * one)
            message = mechanism.encode(updates.float(), context, ClientRandomness(keys, members, t))
            total = mechanism.decode(message.symbols, members, context, PublicRandomness(keys, t))
            weights = weights + total.double() / clients
            gaps.append(float((weights - optimum).square().mean()))
        ends = [float(np.mean(gaps[9 * n // 10 : n])) for n in (rounds // 10, rounds)]
        found += [ends[0], ends[1]]
    fall, rise = found[0] / found[1], found[3] / found[2]
    return Claim(
        "theorem 4.2: with a lattice that shrinks like the step size CPA converges like 1 / t",
        f"epsilon {epsilon:g}, {clients} users: the squared error falls {fall:.1f} times from round "
        f"{rounds // 10} to {rounds} (`decay_rounds`); with a lattice that stays it rises {rise:.1f} times",
        fall > 8.0 and rise > 0.5,
        (130,),
    )


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
                (88,),
            )
        )
    slow = recursion(2, b, steps // 10)
    claims.append(
        Claim(
            "theorem 4.2: the rate is O(1 / t)",
            f"2 local steps: delta_t (t + phi) is {slow:.1f} after {steps // 10:,} steps and {found[2]:.1f} "
            f"after {steps:,}",
            abs(found[2] / slow - 1.0) < 0.01,
            (88,),
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
    """CPA's claim, propositions, corollary, theorems and lemmas by number: privacy, anonymity, bounds.

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
        claim_1(epsilon),
        *lemmas_4_3(400, seed),
        shrinking_lattice(2.0, 2000, seed),
    ]
    settings = {"epsilon": epsilon, "rounds": rounds, "clients": clients, "steps": steps, "seed": seed}
    return settle(out, settings, claims)
