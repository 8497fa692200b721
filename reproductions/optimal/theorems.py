"""Near-optimal utility: lemmas 6.2 to 6.4, 6.9, B.1, B.3, Q.1, Q.2, theorems 6.10, 6.11, by number.

Zhang, Chen, Yang. The paper has no experiment, so its statements are judged by number: on random discrete
worlds, and where sampled batches have few samples by listing all of them. Lemmas 6.5 to 6.8 and theorems 6.1,
6.12 to 6.14 are held by the tests of `tests/leakage` and by `leakage-tradeoff`.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lightning_fedq.functional.trade_off import jensen_shannon, leakage_factor, recovery_leakage
from reproductions.bench import Claim, settle
from reproductions.optimal.bounds import solve_quadratic

Floats = NDArray[np.float64]


def batch_moments(gradients: Floats, probability: float, mean: bool) -> tuple[Floats, float]:
    """Mean and trace of the covariance of a sampled batch's step, over all 2^M batches.

    Args:
        gradients: `(M, d)`.
        probability: p.
        mean: Divide by the batch's size, as algorithm 2 does; a sum as lemma 6.9 has it otherwise.
    """
    size = len(gradients)
    chances, steps = [], []
    for chosen in product((0.0, 1.0), repeat=size):
        count = sum(chosen)
        chances.append(probability**count * (1 - probability) ** (size - count))
        steps.append(np.array(chosen) @ gradients / (max(count, 1.0) if mean else 1.0))
    weights, rows = np.array(chances), np.stack(steps)
    centre: Floats = weights @ rows
    return centre, float(weights @ ((rows - centre) ** 2).sum(1))


def lemmas_6_2_to_6_4(worlds: int, rng: np.random.Generator) -> list[Claim]:
    """Bias and variance of a parameter on a grid in [-1, 1], without and with independent noise of mean 0."""
    points, apart, excess = np.linspace(-1, 1, 9), 0.0, -math.inf
    for _ in range(worlds):
        plain, optimum = rng.dirichlet(np.full(5, 0.3)), rng.uniform(-1, 1)
        steps = rng.dirichlet(np.ones(3))
        noise = np.concatenate([steps[::-1], steps[1:]])
        noise /= noise.sum()
        laws = np.pad(plain, 2), np.convolve(plain, noise)
        variances = []
        for law in laws:
            mean = float(law @ points)
            variances.append(float(law @ (points - mean) ** 2))
            apart = max(
                apart, abs(float(law @ (points - optimum) ** 2) - variances[-1] - (mean - optimum) ** 2)
            )
        tv = 0.5 * float(np.abs(laws[0] - laws[1]).sum())
        excess = max(excess, variances[1] - variances[0] - 2 * tv)  # C3 = sup |W| = 1
    # the distortion -2 moves all mass from 1, where the optimum is, to -1
    moved, printed = 2.0, 1.0
    return [
        Claim(
            "lemma 6.2: squared distance = variance + squared bias",
            f"{worlds} random worlds, largest difference {apart:.1e}",
            apart < 1e-12,
            (116,),
        ),
        Claim(
            "lemma 6.3: a distortion moves the bias by at most C3 TV",
            f"a law moved from 1 to -1, C3 = TV = 1: the bias moves by {moved:g}; true with 2 C3 TV, and for "
            "noise of mean 0, which moves no bias",
            moved <= printed,
            (116,),
        ),
        Claim(
            "lemma 6.4: noise of mean 0 adds at most 2 sup|W| C3 TV of variance",
            f"{worlds} random worlds, largest excess {excess:.3f}; theorem 6.1 needs another quantity",
            excess <= 0.0,
            (116,),
        ),
    ]


def lemmas_b(worlds: int, rng: np.random.Generator) -> list[Claim]:
    """Beliefs about data from parameters: leakage against total variation."""
    below, above = math.inf, 0.0
    for _ in range(worlds):
        likely = rng.dirichlet(np.full(3, 2.0), 4)  # f(d | w) for four parameters
        law, moved = rng.dirichlet(np.ones(4), 2)
        prior = rng.dirichlet(np.full(3, 2.0))
        seen, blurred = law @ likely, moved @ likely
        c2 = leakage_factor(float(np.abs(np.log(likely / seen)).max()))
        tv = 0.5 * float(np.abs(law - moved).sum())
        c1, left, moved_by = (
            math.sqrt(jensen_shannon(list(a), list(b)))
            for a, b in ((seen, prior), (blurred, prior), (blurred, seen))
        )
        below = min(below, left - (c1 - c2 * tv))
        above = max(above, moved_by / (c2 * tv))
    return [
        Claim(
            "lemma B.1: leakage is at least C1 - C2 TV",
            f"{worlds} random worlds, smallest distance {below:.3f}",
            below >= 0.0,
            (122,),
        ),
        Claim(
            "lemma B.3: beliefs move by at most C2 TV",
            f"{worlds} random worlds, at most {above:.2f} of it",
            above <= 1.0,
            (122,),
        ),
    ]


def sampling(rng: np.random.Generator) -> list[Claim]:
    """Lemma 6.9, theorem 6.10: mean and variance of an update of a sampled batch, all batches listed."""
    gradients, p, repeats, noise = rng.normal(size=(8, 3)), 0.3, 5, 0.04
    squares = float((gradients**2).sum())
    centre, variance = batch_moments(gradients, p, mean=False)
    algorithm, _ = batch_moments(gradients, p, mean=True)
    off = float(np.abs(centre - p * gradients.sum(0)).max())
    real = variance / repeats + gradients.shape[1] * noise
    ratio = float(np.linalg.norm(algorithm) / np.linalg.norm(centre))
    return [
        Claim(
            "lemma 6.9: the mean step of a sampled batch is p times the sum of all gradients",
            f"all 256 batches of 8 samples, difference {off:.1e}, for a sum; algorithm 2 divides by the "
            f"batch's size, and its mean step is {ratio:.2f} times that",
            off < 1e-12,
            (118,),
        ),
        Claim(
            "theorem 6.10: the update's variance is p (1 - p) sum |g|^2",
            f"p = {p:g}, {repeats} sampled batches averaged, noise {noise:g} a coordinate: "
            f"{p * (1 - p) * squares:.3f} printed, {real:.3f} in truth: p (1 - p) sum |g|^2 / N + d sigma^2",
            abs(real - p * (1 - p) * squares) < 1e-9,
            (118,),
        ),
    ]


def theorem_6_11(samples: int, rng: np.random.Generator) -> list[Claim]:
    """The headline: p by equation 19 makes the utility loss 0. Measured as E |W~ - W*|^2 - E |W - W*|^2."""
    gradients, std, c6, needed_tv = rng.normal(size=(40, 5)), 0.03, 9.0, 0.2
    squares = float((gradients**2).sum())
    p = solve_quadratic(c6 * needed_tv / squares, 1 / 40)
    losses = {}
    for chance in (0.05, p.value, 0.5):
        chosen = rng.random((samples, 40)) < chance
        weights = rng.normal(size=5) - chosen @ gradients / 40
        noise = rng.normal(scale=std, size=weights.shape)
        gaps = ((weights + noise) ** 2).sum(1) - (weights**2).sum(1)
        losses[chance] = float(gaps.mean()), float(gaps.std() / math.sqrt(samples))
    words = ", ".join(f"{loss:.4f} +- {error:.4f} at p = {c:.3f}" for c, (loss, error) in losses.items())
    exact = 5 * std**2
    loss, error = losses[p.value]
    largest = solve_quadratic(0.3, 0.01)
    c1, budget, small = 0.25, 0.05, 100.0
    first = solve_quadratic(50 * (c1 - budget) / small, 0.001).value
    other = budget / small / (1 + math.sqrt(1 - 4 * budget / small)) * 2
    return [
        Claim(
            "theorem 6.11, the headline: sampling with p by equation 19 makes the utility loss 0",
            f"{words}; independent noise costs d sigma^2 = {exact:.4f} whatever p is (theorem 6.1, on which "
            "it rests, drops the variance that cancels)",
            loss - 3 * error <= 0.0,
            (119,),
        ),
        Claim(
            "theorem 6.11: such a p exists",
            f"only up to C6 (C1 - tau) / sum |g|^2 = 1/4: at 0.3 {'yes' if largest.feasible else 'none'}",
            largest.feasible,
            (119,),
        ),
        Claim(
            "equations 10 and 19 choose the same p",
            f"sum |g|^2 = 100, C6 = 50, C1 = 0.25, tau = 0.05: (19) wants p from {first:.4f} on, (10) up to "
            f"{other:.4f}; (19) is what the proof uses and what `NearOptimalUtility` runs",
            first <= other,
            (120,),
        ),
    ]


def appendix_q(hit_rate: float, candidates: int) -> Claim:
    """The estimator of C1 from how often an attack finds the truth, as printed and as sqrt(JS)."""
    other = (1 - hit_rate) / candidates
    belief = [hit_rate + other] + [other] * (candidates - 1)
    printed = jensen_shannon(belief, [1 / candidates] * candidates) / candidates
    ours = recovery_leakage(hit_rate, candidates)
    return Claim(
        "appendix Q: the printed estimator estimates C1 = sqrt(JS)",
        f"a certain hit among {candidates}: {printed:.4f} printed (no root, and divided by |D| once more), "
        f"{ours:.4f} is C1",
        abs(printed - ours) < 0.01,
        (123,),
    )


def lemmas_q(worlds: int, rng: np.random.Generator) -> list[Claim]:
    """Hit rates that are counted over rounds, and what their error does to the estimator.

    Q.1 by exact binomials, for errors below 1 as Q.2 needs them; Q.2 on random beliefs whose rates are all
    off by a share of at most epsilon, for the printed sums and for C1 = sqrt(JS).
    """
    worst = 0.0
    for rounds, rate, error in product((10, 100, 1000), (0.01, 0.1, 0.5, 0.9), (0.1, 0.5, 0.9)):
        hits = np.arange(rounds + 1)
        law = stats.binom.pmf(hits, rounds, rate)
        missed = float(law[np.abs(hits / rounds - rate) > error * rate].sum())
        worst = max(worst, missed / (2 * math.exp(-(error**2) * rounds * rate / 3)))
    shares, roots = [], []
    for _ in range(worlds):
        size, error = int(rng.integers(2, 100)), float(rng.uniform(0.05, 0.9))
        belief, prior = rng.dirichlet(np.full(size, 0.3), 2) + 1e-12
        counted = belief * (1 + error * rng.choice([-1.0, 1.0], size))
        apart = [
            0.5 * (a * np.log(2 * a / (a + prior)) + prior * np.log(2 * prior / (a + prior))).sum()
            for a in (belief, counted)
        ]
        bound = 0.5 * ((1 + error) * math.log((1 + error) / (1 - error)) + error - math.log1p(-error)) / size
        shares.append(abs(apart[1] - apart[0]) / size / bound)
        roots.append(abs(math.sqrt(max(apart[1], 0.0)) - math.sqrt(apart[0])) / bound)
    return [
        Claim(
            "lemma Q.1: a hit rate k is off by more than eps k with chance 2 exp(-eps^2 T k / 3) at most",
            f"exact binomials at 36 points, eps below 1: at most {worst:.2f} of it",
            worst <= 1.0,
            (137,),
        ),
        Claim(
            "lemma Q.2: the error of the printed estimator",
            f"{worlds} random beliefs: at most {max(shares):.2f} of the bound",
            max(shares) <= 1.0,
            (138,),
        ),
        Claim(
            "lemma Q.2: the same as an error of C1 = sqrt(JS), which the estimator is for",
            f"up to {max(roots):.0f} times the bound: it lacks the root and divides by |D|",
            max(roots) <= 1.0,
            (138,),
        ),
    ]


def optimal_theorems(
    worlds: int = 2000, samples: int = 400_000, seed: int = 0, out: str = "runs/optimal-theorems"
) -> dict[str, Any]:
    """Near-optimal utility: its lemmas and theorems 6.10 and 6.11, the headline, by number.

    Args:
        worlds: Random discrete worlds.
        samples: Sampled batches of theorem 6.11.
        seed: Of both.
        out: Folder of the summary.
    """
    rng = np.random.default_rng(seed)
    claims = [
        *lemmas_6_2_to_6_4(worlds, rng),
        *sampling(rng),
        *theorem_6_11(samples, rng),
        *lemmas_b(worlds, rng),
        appendix_q(1.0, 100),
        *lemmas_q(worlds, rng),
    ]
    return settle(out, {"worlds": worlds, "samples": samples, "seed": seed}, claims)
