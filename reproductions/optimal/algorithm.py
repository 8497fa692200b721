"""Near-optimal utility, algorithm 1 as printed, end to end: how much it leaks and how well it learns.

Digits, a perceptron of 32 sigmoid units, clients of equal size, one step a round. Each round a client draws a
batch in which every sample is with chance p, by equation 19 (1/2 where no p exists), takes one step on its
mean gradient, and adds noise of variance 100 sigma^2 (C1 - tau) / sqrt(d), where sigma^2 is the variance of
its parameters by the sampling (lemma 6.8, algorithm 1). C1 is what the attack measures without noise, C6 the
largest squared distance of two clients' steps, as neither has a value in the paper.

Beside it stand the same training, with the same p, without noise and with `NearOptimalUtility`, whose noise
an attack has calibrated to the same budget. All three are attacked in the same way: a first update of one
sample, `Matching` among 100 candidates, which gives a lower bound on the leakage.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.functional.flatten import copy_into
from lightning_fedq.leakage.batch_sampling import GradientMoments, update_variance
from lightning_fedq.leakage.gradients import LocalSteps, sample_gradients
from lightning_fedq.leakage.matching import Matching
from lightning_fedq.leakage.study import Study
from lightning_fedq.mechanisms import FedAvg, NearOptimalUtility
from lightning_fedq.mechanisms.interface import Adversary
from reproductions.bench import Claim, Rows
from reproductions.leakage.attack import built_in, samples
from reproductions.leakage.calibration import calibrate
from reproductions.optimal.bounds import solve_quadratic

CLIENTS, EACH = 10, 100


def printed_variance(variance: float, c1: float, tau: float, dim: int) -> float:
    """Variance of the distortion by algorithm 1: 100 sigma^2 (C1 - tau) / sqrt(d).

    Example:
        >>> printed_variance(2.0, 0.8, 0.3, 10_000)
        1.0
    """
    return 100.0 * variance * (c1 - tau) / math.sqrt(dim)


def train(
    model: nn.Module,
    data: Sequence[tuple[Tensor, Tensor]],
    rate: float,
    rounds: int,
    tau: float,
    c1: float,
    std: float | None,
    generator: torch.Generator,
) -> tuple[nn.Module, float]:
    """Train by algorithms 1 to 3, and return the model and the mean p.

    Args:
        model: The global model at the start; it is left as it is.
        data: Inputs and labels of each client.
        rate: Of the one step.
        rounds: T.
        tau: The budget, which sets p.
        c1: Leakage without noise.
        std: Of the noise; None is as printed.
        generator: Draws batches and noise.
    """
    model, chances = copy.deepcopy(model), list[float]()
    loss, size = nn.functional.cross_entropy, len(data[0][0])
    for _ in range(rounds):
        sent = []
        for inputs, labels in data:
            gradients = sample_gradients(model, loss, inputs, labels, LocalSteps(rate, 1)).double()
            moments = GradientMoments.from_gradients(gradients, size)
            c6 = float((rate * gradients).square().sum(1).max()) * 4.0
            needed = c6 * (c1 - tau) / (rate**2 * moments.sum_squares)
            chance = solve_quadratic(needed, 1.0 / size).value
            chosen = torch.rand(size, generator=generator) < chance
            step = gradients[chosen].sum(0) / max(int(chosen.sum()), 1)
            scale, dim = std, gradients.shape[1]
            if scale is None:
                variance = update_variance(moments, chance, rate) / dim
                scale = math.sqrt(printed_variance(variance, c1, tau, dim))
            noise = torch.randn(len(step), generator=generator, dtype=torch.float64)
            sent.append(-rate * step + scale * noise)
            chances.append(chance)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        copy_into((weights + torch.stack(sent).mean(0)).float(), list(model.parameters()))
    return model, sum(chances) / len(chances)


def optimal_algorithm(
    budgets: Sequence[float] = (0.6, 0.4, 0.2),
    rounds: int = 40,
    learning_rate: float = 1.0,
    attempts: int = 100,
    seeds: Sequence[int] = (0, 1, 2),
    out: str = "runs/optimal-algorithm",
    resume: bool = False,
) -> dict[str, Any]:
    """Near-optimal utility, algorithm 1 as printed: leakage to an attack and accuracy, by budget.

    Args:
        budgets: tau.
        rounds: T of each training.
        learning_rate: Of the one step a round.
        attempts: Of each attack.
        seeds: Of batches and noise, one training each; the first one draws the attacks.
        out: Folder of the table.
        resume: Keep the rows that are in `out` already.
    """
    setting = built_in("digits", "mlp", CLIENTS * EACH, seeds[0])
    loss, held = nn.functional.cross_entropy, slice(CLIENTS * EACH, None)
    inputs, labels = samples(DigitsDataModule(), CLIENTS * EACH + 150)
    data = [(inputs[EACH * k : EACH * (k + 1)], labels[EACH * k : EACH * (k + 1)]) for k in range(CLIENTS)]
    study = Study(setting.model, loss, inputs[:EACH], labels[:EACH], learning_rate, Matching())
    eve = Adversary.EAVESDROPPER

    def attack(std: float, tau: float) -> Any:
        mechanism = NearOptimalUtility(study.largest_norm, tau, std, 0.0) if std else FedAvg()
        start = torch.Generator().manual_seed(seeds[0] + 1)
        return study.run(mechanism, eve, attempts, start, kept=1).estimate

    c1 = attack(0.0, 0.5).leakage
    dim = sum(p.numel() for p in setting.model.parameters())
    own = {"clients": CLIENTS, "samples_each": EACH, "rounds": rounds, "learning_rate": learning_rate}
    rows = Rows(out, {**own, "attempts": attempts, "seeds": list(seeds)}, resume)

    def columns(tau: float, std: float, noise: float | None) -> dict[str, Any]:
        found, accuracies, chance = attack(std, tau), list[float](), 0.0
        for seed in seeds:
            start = torch.Generator().manual_seed(seed)
            model, chance = train(setting.model, data, learning_rate, rounds, tau, c1, noise, start)
            right = model(inputs[held]).argmax(1) == labels[held]
            accuracies.append(100.0 * float(right.double().mean()))
        spread = torch.tensor(accuracies, dtype=torch.float64)
        return {
            "leakage": found.leakage,
            "leakage_low": found.leakage_limits[0],
            "leakage_high": found.leakage_limits[1],
            "noise_std": std,
            "chance": chance,
            "acc": float(spread.mean()),
            "acc_std_over_seeds": float(spread.std()),
        }

    # in the attack a batch is one sample of the candidates: the variance of its parameters
    one = float((learning_rate * study.gradients.double()).var(0, correction=0).mean())
    for tau in budgets:
        start = torch.Generator().manual_seed(seeds[0])
        best = calibrate(study, tau, start, attempts=attempts).mechanism.noise_std
        printed = math.sqrt(printed_variance(one, c1, tau, dim))
        for method, std, noise in (
            ("no noise", 0.0, 0.0),
            ("algorithm 1", printed, None),
            ("calibrated", best, best),
        ):
            rows.add({"method": method, "tau": tau}, partial(columns, tau, std, noise))
    return rows.finish([], "Algorithm 1", _claims(rows.rows))


def _claims(table: Sequence[dict[str, Any]]) -> list[Claim]:
    found = {(row["method"], row["tau"]): row for row in table}
    leaks, costs, kept, free = list[str](), list[str](), list[bool](), list[bool]()
    for tau in dict.fromkeys(row["tau"] for row in table):
        plain, ours, best = (found[name, tau] for name in ("no noise", "algorithm 1", "calibrated"))
        leaks.append(
            f"{ours['leakage']:.2f} at tau = {tau:g} (calibrated by an attack {best['leakage']:.2f})"
        )
        costs.append(f"{ours['acc']:.1f} for {plain['acc']:.1f} at {tau:g} (calibrated {best['acc']:.1f})")
        kept.append(ours["leakage_low"] <= tau)
        error = math.hypot(plain["acc_std_over_seeds"], ours["acc_std_over_seeds"]) / math.sqrt(3.0)
        free.append(plain["acc"] - ours["acc"] <= 2.0 * error)
    plain = table[0]["leakage"]
    return [
        Claim(
            "algorithm 1: the leakage is at most tau",
            f"{', '.join(leaks)}; without noise {plain:.2f}",
            all(kept),
            (140,),
        ),
        Claim("algorithm 1: the utility loss is 0", f"accuracy {', '.join(costs)}", all(free), (140,)),
    ]
