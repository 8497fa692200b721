"""`leakage-attack`: reconstruct samples from what mechanisms really send, and measure how often it works."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_fedq.commands.configs import find
from lightning_fedq.leakage.matching import Attack, Matching
from lightning_fedq.leakage.study import Study, StudyResult
from lightning_fedq.mechanisms import CPA, LDPQ, CorBin, FedAvg, LayeredGaussian
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.reports.runs import fresh_folder, save_figure, write_rows, write_summary
from reproductions.bench import Claim
from reproductions.leakage.calibration import calibrate
from reproductions.leakage.inversion import DLG, Analytic, InvertingGradients, iDLG
from reproductions.leakage.membership import membership_inference
from reproductions.leakage.pictures import picture_grid, ssim

ATTACKS: dict[str, type[Attack]] = {
    "idlg": iDLG,
    "dlg": DLG,
    "inverting": InvertingGradients,
    "analytic": Analytic,
}
NOTE = (
    "inverted: share of samples reconstructed; matched: share identified among the candidates, which takes "
    "far more noise to prevent; leakage: sqrt(JS) of the better of the two, with its 95% limits; tpr: "
    "membership inference in a batch of half the candidates at 0.1% false positives; relative error: squared "
    "error of one decoded update over its squared norm. Lower bounds, measured by these attacks; not "
    "differential privacy."
)


class Target(NamedTuple):
    """One row: what is attacked, and as whom."""

    name: str
    mechanism: Mechanism
    adversary: Adversary


def samples(data: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` training samples of a data module, or a module that has loaders, and their labels.

    Raises:
        ValueError: If it has fewer.
    """
    data.prepare_data()
    data.setup("fit")
    dataset = data.train_dataloader().dataset
    if len(dataset) < count:
        raise ValueError(f"{count} candidates wanted, the training set has {len(dataset)} samples")
    rows = [dataset[index] for index in range(count)]
    return torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])


class Setting(NamedTuple):
    """Setting of an attack: a model at its initial weights, data, the clients' learning rate, a mechanism."""

    model: nn.Module
    inputs: torch.Tensor
    labels: torch.Tensor
    learning_rate: float
    mechanism: Mechanism | None


def configured(config: str, candidates: int) -> Setting:
    """The setting of a LightningCLI configuration: its module, data module, optimiser and `Federated`.

    Raises:
        ValueError: If its module has not one optimiser.
    """
    from lightning_fedq._lightning import get_callbacks
    from lightning_fedq.callbacks import Federated
    from lightning_fedq.commands.run import FedqCLI  # imports Lightning's command line, and only needed here

    cli = FedqCLI(["--config", config], run=False)
    data = cli.model if cli.datamodule is None else cli.datamodule
    inputs, labels = samples(data, candidates)
    optimizer = cli.model.configure_optimizers()
    if isinstance(optimizer, dict):
        optimizer = optimizer["optimizer"]
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"configure_optimizers must return one optimiser to attack {config}")
    rate = optimizer.param_groups[0]["lr"]
    found = [callback.mechanism for callback in get_callbacks(cli.trainer) if isinstance(callback, Federated)]
    return Setting(cli.model.eval(), inputs, labels, rate, found[0] if found else None)


def built_in(data: str, model: str, candidates: int, seed: int) -> Setting:
    """The setting of the command line: digits or MNIST, and a small model."""
    from lightning_fedq.data.datasets import DigitsDataModule, MNISTDataModule

    module: Any = DigitsDataModule() if data == "digits" else MNISTDataModule()
    inputs, labels = samples(module, candidates)
    size = inputs[0].numel()
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        if model == "linear":
            layers = nn.Sequential(nn.Flatten(), nn.Linear(size, 10))
        else:
            layers = nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.Sigmoid(), nn.Linear(32, 10))
    return Setting(layers.eval(), inputs, labels, 0.1, None)


def standard_targets(
    study: Study,
    epsilon: float,
    budgets: Sequence[float],
    attempts: int,
    own: Mechanism | None,
    generator: torch.Generator,
) -> list[Target]:
    """The mechanisms of the papers, the near-optimal one at several budgets, calibrated here, and `own`."""
    one, norm = Adversary.EAVESDROPPER, study.largest_norm
    corbin = CorBin(epsilon_per_coordinate=epsilon, shared_bits=5)
    targets = [
        Target("vanilla", FedAvg(), one),
        Target(f"LDP-FL eps={epsilon:g}", LDPQ(epsilon_per_coordinate=epsilon), one),
        Target(f"CorBin eps={epsilon:g}, one uplink", corbin, one),
        Target(f"CorBin eps={epsilon:g}, pair", corbin, Adversary.SERVER),
        Target(f"CPA eps={epsilon:g}", CPA(epsilon=epsilon, epsilon_scope="bit"), one),
        Target("layered Gaussian 0.05", LayeredGaussian(clip_norm=norm, noise_multiplier=0.05), one),
    ]
    for budget in budgets:
        found = calibrate(study, budget, generator, attempts=max(attempts, 60), public=False)
        targets.append(Target(f"near-optimal tau={budget:g}", found.mechanism, one))
    if own is not None:
        targets.append(Target("as configured, one uplink", own, one))
        if own.group_sizes(study.cohort_size)[0] > 1:
            targets.append(Target("as configured, group", own, Adversary.SERVER))
    return targets


def relative_error(study: Study, mechanism: Mechanism) -> float:
    """Bound on one update's squared error over the mean squared norm of the updates. NaN if there is none."""
    context = study.context(mechanism)
    variance = mechanism.noise_variance(context, (0,))
    if variance is None:
        return float("nan")
    total = float((variance * torch.tensor(study.segments, dtype=variance.dtype)).sum())
    return total / float((study.learning_rate * study.gradients).square().sum(1).mean())


def attack_target(
    inversion: Study, matching: Study, target: Target, inversions: int, attempts: int, seed: int
) -> tuple[dict[str, Any], StudyResult]:
    """Attack one target with both studies. Return its row and the reconstructions."""

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed + 1)  # the same samples for every target

    mechanism, adversary = target.mechanism, target.adversary
    inverted = inversion.run(mechanism, adversary, inversions, generator())
    matched = matching.run(mechanism, adversary, attempts, generator())
    rounds = max(24, math.ceil(2200 / len(matching.inputs)))  # non-members enough for a rate of 0.1%
    member = membership_inference(matching, mechanism, adversary, generator(), rounds=rounds)
    worst = max(inverted.estimate, matched.estimate, key=lambda estimate: estimate.leakage)
    low, high = inverted.truth.min().item(), inversion.inputs.max().item()
    pictures = inverted.truth.dim() == 4 and inverted.truth.shape[1] in (1, 3)
    row = {
        "mechanism": target.name,
        "inverted": inverted.estimate.hit_rate,
        "psnr": inverted.psnr,
        "ssim": ssim(inverted.found, inverted.truth, low, high) if pictures else float("nan"),
        "matched": matched.estimate.hit_rate,
        "leakage": worst.leakage,
        "leakage_low": worst.leakage_limits[0],
        "leakage_high": worst.leakage_limits[1],
        "tpr": member.true_positive_rate,
        "relative_error": relative_error(matching, mechanism),
        "seconds": inverted.seconds + matched.seconds,
    }
    return row, inverted


_HEADS = {
    "relative_error": "error",
    "utility_loss": "loss",
    "unsound_bounds_refuted": "refuted",
    "sound_bounds_violated": "broken",
}
"""Columns whose names are too long for a screen of 80 columns."""


def print_rows(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print rows as a table of 80 columns, leakage with its limits."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    hidden = ("leakage_low", "leakage_high", "seconds")
    for place, column in enumerate(column for column in rows[0] if column not in hidden):
        head = _HEADS.get(column, column)
        if place and column != "epsilon":  # which is words
            table.add_column(head, no_wrap=True, justify="right")
        else:
            table.add_column(head, overflow="fold", min_width=10)
    for row in rows:
        cells = {name: f"{v:.3g}" if isinstance(v, float) else str(v) for name, v in row.items()}
        cells["leakage"] = f"{row['leakage']:.2f} ({row['leakage_low']:.2f}-{row['leakage_high']:.2f})"
        table.add_row(*(cell for name, cell in cells.items() if name not in hidden))
    console = Console()
    console.width = max(console.width, 80)
    console.print(table)


def leakage_attack(
    configuration: str | None = None,
    data: Literal["digits", "mnist"] = "digits",
    model: Literal["linear", "mlp"] = "mlp",
    attack: Literal["idlg", "dlg", "inverting", "analytic"] = "idlg",
    batch_size: int = 1,
    epsilon: float = 5.0,
    budgets: Sequence[float] = (0.6, 0.4, 0.2),
    attempts: int = 200,
    inversions: int = 16,
    candidates: int = 100,
    learning_rate: float | None = None,
    local_steps: int = 1,
    seed: int = 0,
    out: str = "runs/leakage-attack",
) -> dict[str, Any]:
    """Samples reconstructed from what the papers' mechanisms send: one table, one picture.

    The updates are those of a small model, or a configuration's, as vanilla FedAvg, LDP-FL, CorBin, CPA,
    layered Gaussian, the near-optimal mechanism at several budgets and the configured mechanism send them.

    Args:
        configuration: File or name; its model, data and mechanism are attacked.
        data: Data set; MNIST is read from $FEDQ_DATA.
        model: Model; mlp has 32 sigmoid units.
        attack: Inversion to run.
        batch_size: Samples of each client.
        epsilon: Epsilon per coordinate, of LDP-FL, CorBin, CPA.
        budgets: Leakage budgets.
        attempts: Matching attempts a row.
        inversions: Inversions a row.
        candidates: Length of the attacker's list.
        learning_rate: Learning rate of clients (default: as configured, or 0.1).
        local_steps: Steps of each client, on one and the same batch.
        seed: Seed of everything (default: 0).
        out: Folder of table and picture.
    """
    folder, console = fresh_folder(Path(out)), Console(soft_wrap=True)
    if configuration is None:
        setting = built_in(data, model, candidates, seed)
    else:
        setting = configured(str(find(configuration)), candidates)
    inversion, matching = (
        Study(
            setting.model,
            nn.functional.cross_entropy,
            setting.inputs,
            setting.labels,
            setting.learning_rate if learning_rate is None else learning_rate,
            kind,
            batch_size=batch_size,
            local_steps=local_steps,
        )
        for kind in (ATTACKS[attack](), Matching())
    )
    start = torch.Generator().manual_seed(seed)
    targets = standard_targets(matching, epsilon, budgets, attempts, setting.mechanism, start)
    results, rows = {}, []
    for target in targets:
        row, results[target.name] = attack_target(inversion, matching, target, inversions, attempts, seed)
        rows.append(row)
    what = f"{data}, {model}" if configuration is None else Path(configuration).stem
    title = f"{what}, {attack}, batch {batch_size}, {local_steps} local steps"
    print_rows(rows, title)
    console.print(NOTE, highlight=False)
    for target in targets:
        console.print(f"  {target.name}: {target.mechanism!r}, {target.adversary.value}", highlight=False)
    write_rows(folder / "table.csv", rows)
    write_summary(folder / "table.json", {"title": title, "note": NOTE, "rows": rows})
    console.print(str(folder / "table.csv"), highlight=False)
    claims = [*_claims(rows, attack, budgets)]
    for claim in claims:
        console.print(claim.line, highlight=False, markup=False)
    settings = {"title": title, "epsilon": epsilon, "attempts": attempts, "inversions": inversions}
    summary = {"settings": settings, "claims": [claim.plain for claim in claims], "table": rows}
    first = next(iter(results.values()))
    low, high = first.truth.min().item(), inversion.inputs.max().item()
    try:
        grid = picture_grid(first.truth, {name: r.found for name, r in results.items()}, low, high)
    except ValueError as error:
        console.print(f"no pictures: {error}", highlight=False)
        return summary
    save_figure(grid, folder / "grid.png")
    console.print(str(folder / "grid.png"), highlight=False)
    return summary


def _claims(rows: Sequence[dict[str, Any]], attack: str, budgets: Sequence[float]) -> list[Claim]:
    """Plain updates are inverted, and each budget is kept, measured anew."""
    plain = rows[0]["inverted"]
    words = f"{attack}: {100 * plain:.0f}% of the samples from plain updates"
    says = "section 1: exposed gradients give private images away"
    claims = [Claim(says, words, plain > 0.5, (124,))]
    found = {row["mechanism"]: row for row in rows}
    for budget in budgets:
        row = found[f"near-optimal tau={budget:g}"]
        words = f"{row['leakage']:.2f}, at most {row['leakage_high']:.2f} (95%)"
        says = f"algorithm 1's promise by a measured calibration: leakage within tau = {budget:g}"
        claims.append(Claim(says, words, row["leakage"] <= budget, (125,)))
    return claims
