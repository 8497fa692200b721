"""Estimates of a mean in one round: mechanisms at equal epsilon, a row a run in a CSV file.

    python benchmarks/mean_estimation.py means.csv --tasks mean-unit-1024 --mechanisms GaussianNoise LDPQ \\
        --epsilons 2 8 --seeds 3

The range of mechanisms that clip coordinates is that of the least error in one run each with a seed of its
own. Keys come from the seed, so that a row can be repeated bit for bit.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fedq import __version__
from lightning_fedq.commands.mechanism_text import parse_call
from lightning_fedq.commands.resolver import resolved
from lightning_fedq.comparison.cells import RANGES, TUNING_SEED
from lightning_fedq.comparison.comparison import MASKS
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.planning import HOMOGENEITY, KAPPA, Option, Problem, plan
from lightning_fedq.privacy.target import PrivacyTarget, adversary_named
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.secagg import Aggregation


class Cell(NamedTuple):
    """One run of a table: task, row, adversary in lower case, target over the run, seed."""

    task: str
    mechanism: str
    adversary: str
    epsilon: float
    seed: int

    @property
    def group(self) -> tuple[str, str, str, float]:
        """Task, mechanism, adversary and epsilon."""
        return self[:4]


@dataclass(frozen=True)
class Result:
    """Scores and costs of one run, as the columns of the reference have them.

    Args:
        score: Accuracy in the test, or the squared error of the mean over its squared length.
        validation: The same on what is tuned with.
        bits: Bits a parameter of one client's message, masks included, keys and shares not.
        all_bits: Bits a parameter of everything that a client sent in a round.
        planned: R as `fedq plan` has it before the run; None where it has no bound.
        seen: R as the run had it: noise over signal of all rounds.
        setting: The mechanism, as it was calibrated.
        seconds: Processor time.
    """

    score: float
    validation: float
    bits: float
    all_bits: float
    planned: float | None
    seen: float
    setting: str
    seconds: float


class Row(NamedTuple):
    """A cell and what came of it: a result, the range and rate that were chosen, or why there is none."""

    cell: Cell
    result: Result | None
    range: float = KAPPA
    rate: float | None = None
    reason: str = ""
    versions: str = f"{__version__}, torch {torch.__version__.partition('+')[0]}"


@dataclass(frozen=True)
class MeanEstimation:
    """Estimate in one round of the mean of vectors of norm 1, of whose energy 0.3 lies along the mean.

    Args:
        name: Name in tables.
        clients: Clients, a vector each.
        kind: "unit" is Gaussian, "sparse" has 1 in 100 coordinates, "heavy" has Student's t with 3 degrees.
        dim: Length of the vectors.
    """

    name: str
    clients: int
    kind: Literal["unit", "sparse", "heavy"]
    dim: int

    rounds, better, unit, delta = 1, "smaller", "squared error over squared mean", 1e-5

    def option(self, name: str, mechanism: Mechanism, epsilon: float, who: Adversary) -> Option:
        """Calibrate a mechanism for updates of norm 1.

        Raises:
            ValueError: If the target can't be met.
        """
        target = PrivacyTarget(epsilon, self.delta, who)
        problem = Problem(self.clients, self.dim, 1, target, MASKS, homogeneity=HOMOGENEITY)
        [option] = plan(problem, {name: mechanism})
        if option.mechanism is None:
            raise ValueError(option.reason)
        return option

    def run(self, option: Option, masked: bool, span: float, seed: int) -> Result:
        """Estimate once.

        Args:
            masked: Is the sum masked?
            span: Range of a coordinate, in units of norm / sqrt(dim).
        """
        start, mechanism = time.process_time(), option.mechanism
        assert mechanism is not None
        engine = RoundEngine(
            mechanism,
            RoundPlanner(self.clients, seed),
            SeededKeys(seed),
            torch.zeros(self.dim),
            (self.dim,),
            FixedRange(span / math.sqrt(self.dim)),
            secure_sums=partial(Aggregation, MASKS) if masked else None,
        )
        round_, step = engine.start(), max(1, 2**20 // self.dim)
        for first in range(0, len(round_.survivors), step):
            part = round_.survivors[first : first + step]
            engine.receive(part, self._vectors(part, seed))
        record = engine.finish()
        coordinates = record.num_received * self.dim
        error = 10.0 ** (-record.snr_db / 10.0) if record.mse else 0.0  # FedAvg's is exact
        return Result(
            error,
            error,
            (record.uplink_bits - record.protocol_bits) / coordinates,
            record.uplink_bits / coordinates,
            option.ratio,
            error,
            repr(mechanism),
            time.process_time() - start,
        )

    def _vectors(self, clients: tuple[int, ...], seed: int) -> Tensor:
        common = self._draw(torch.Generator().manual_seed(10**6 * seed + 999_999))
        own = torch.stack(
            [self._draw(torch.Generator().manual_seed(10**6 * seed + client)) for client in clients]
        )
        rows = math.sqrt(HOMOGENEITY) * common + math.sqrt(1.0 - HOMOGENEITY) * own
        return torch.nn.functional.normalize(rows, dim=1)

    def _draw(self, generator: torch.Generator) -> Tensor:
        values = torch.randn(self.dim, generator=generator)
        if self.kind == "heavy":
            squares = torch.randn(3, self.dim, generator=generator).square().sum(0)
            values = values / (squares / 3.0).sqrt()
        if self.kind == "sparse":
            values = values * (torch.rand(self.dim, generator=generator) < 0.01)
        return torch.nn.functional.normalize(values, dim=0)


TASKS = {
    f"mean-{kind}-{dim}": MeanEstimation(f"mean-{kind}-{dim}", 1000, kind, dim)  # type: ignore[arg-type]
    for dim in (2**10, 2**16)
    for kind in ("unit", "sparse", "heavy")
}


def rows_of(
    task: MeanEstimation,
    name: str,
    mechanism: Mechanism,
    who: Adversary,
    epsilon: float,
    seeds: Sequence[int],
    span: float | None = None,
) -> list[Row]:
    """Rows of a mechanism at a target, or the reason why it has none.

    Args:
        span: Range of a coordinate; None is the one of the least error.
    """
    cells = [Cell(task.name, name, who.name.lower(), epsilon, seed) for seed in seeds]
    masked = who is Adversary.SECAGG_SERVER and epsilon < math.inf
    try:
        plain = epsilon == math.inf
        option = Option(name, FedAvg()) if plain else task.option(name, mechanism, epsilon, who)
    except (ValueError, TypeError) as refused:
        return [Row(cell, None, reason=" ".join(str(refused).split())) for cell in cells]
    spans: Sequence[float] = RANGES if span is None else (span,)
    if isinstance(option.mechanism, FedAvg) or "clip_norm" in parse_call(repr(option.mechanism))[1]:
        spans = (KAPPA,)  # clips nothing, or whole vectors
    best = spans[0]
    if len(spans) > 1:
        best = min(spans, key=lambda span: task.run(option, masked, span, TUNING_SEED).validation)
    return [Row(cell, task.run(option, masked, best, cell.seed), best) for cell in cells]


_COLUMNS = (*Cell._fields, *(each.name for each in fields(Result)), "range", "rate", "reason", "versions")


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            line: dict[str, Any] = {**row.cell._asdict(), **(asdict(row.result) if row.result else {})}
            if row.result:
                line |= {"range": row.range, "rate": row.rate}
            writer.writerow({**line, "reason": row.reason, "versions": row.versions})


def read(path: Path) -> list[Row]:
    """Rows of a table."""
    with path.open(newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> Row:
    cell = Cell(line["task"], line["mechanism"], line["adversary"], float(line["epsilon"]), int(line["seed"]))
    if line["reason"]:
        return Row(cell, None, reason=line["reason"], versions=line["versions"])
    given: dict[str, Any] = {f.name: line[f.name] for f in fields(Result)}
    numbers = {k: float(v) if v else None for k, v in given.items() if k != "setting"}
    rate = float(line["rate"]) if line["rate"] else None
    result = Result(**numbers, setting=line["setting"])  # type: ignore[arg-type]
    return Row(cell, result, float(line["range"]), rate, versions=line["versions"])


def reference() -> list[Row]:
    """Results of versions 0.1 and 0.2."""
    return read(Path(__file__).parent / "results" / "reference.csv")


def score_of(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Mean and standard deviation over seeds, None without a result. Of one seed the latter is NaN."""
    scores = [row.result.score for row in rows if row.result is not None]
    if not scores:
        return None
    known = len(scores) > 1 and all(map(math.isfinite, scores))
    return mean(scores), stdev(scores) if known else math.nan


WORTHLESS = "*"
"""Mark of an estimate that is worse than none."""
ABOUT_WORTHLESS = f"{WORTHLESS} worse than the estimate 0, whose error is 1"


def word_of(score: tuple[float, float] | None, about: Any = None) -> str:
    """A mean and its standard deviation in print, with a mark where an estimate is worse than none.

    Args:
        score: Both, as `score_of` gives them.
        about: The task, where it is known.
    """
    if score is None:
        return "-"
    value, spread = score
    text = f"{value:.3f}" if 0.001 <= value <= 10 else f"{value:.2g}"
    text = text if math.isnan(spread) else f"{text} ± {spread:.1g}"
    is_worthless = about is not None and about.better == "smaller" and value >= 1.0
    return f"{text} {WORTHLESS}" if is_worthless else text


def main(argv: Sequence[str] | None = None) -> int:
    """Write a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", nargs="*", default=["mean-unit-1024"], choices=TASKS)
    parser.add_argument("--mechanisms", nargs="*", default=[])
    parser.add_argument("--adversary", default="secagg_server")
    parser.add_argument("--epsilons", nargs="*", type=float, default=[2.0, 8.0])
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(argv)
    who, seeds, rows = adversary_named(asked.adversary), range(asked.seeds), []
    for task in (TASKS[name] for name in asked.tasks):
        rows += rows_of(task, "FedAvg", FedAvg(), Adversary.OUTSIDER, math.inf, seeds)
        for name, mechanism in resolved(asked.mechanisms, task.dim).rows.items():
            for epsilon in asked.epsilons:
                made = rows_of(task, name, mechanism, who, epsilon, seeds)
                found = made[0].reason or word_of(score_of(made), task)
                print(f"{task.name}, {name}, epsilon {epsilon:g}: {found}")
                rows += made
    write(asked.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
