"""`fedq privacy plan`: which mechanism, at which setting, can give this epsilon against this adversary?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.core import Adversary
from lightning_fedq.mechanisms import LDPQ, AugCorBin, CorBin, PerCoordinateLaplace, StratifiedCorBin
from lightning_fedq.privacy.page import format_epsilon
from lightning_fedq.privacy.plan import Family, plan
from lightning_fedq.secagg import SecAgg

CANDIDATES: dict[str, Family] = {
    "LDPQ(epsilon)": LDPQ,
    "CorBin(epsilon, shared_bits=5)": lambda epsilon: CorBin(epsilon, 5),
    "AugCorBin(epsilon, 5, 0.2)": lambda epsilon: AugCorBin(epsilon, 5, 0.2),
    "AugCorBin(epsilon, 5, 0.5)": lambda epsilon: AugCorBin(epsilon, 5, 0.5),
    "StratifiedCorBin(epsilon, 10)": lambda epsilon: StratifiedCorBin(epsilon, 10),
    "PerCoordinateLaplace(epsilon)": PerCoordinateLaplace,
}


def main(argv: Sequence[str]) -> int:
    """Print one line per candidate, smallest error first."""
    parser = argparse.ArgumentParser(
        prog="fedq privacy plan",
        description="Find, for each mechanism, the setting that spends a target epsilon over the whole run, "
        "and the error that it costs.",
    )
    parser.add_argument("--target-epsilon", type=float, required=True)
    parser.add_argument("--clients", type=int, required=True, help="clients in every round")
    parser.add_argument("--params", type=int, required=True, help="parameters of the model")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--adversary", choices=[who.name for who in Adversary], default="SERVER")
    parser.add_argument("--delta", type=float, default=1e-5, help="below 1 / clients (default: %(default)s)")
    parser.add_argument(
        "--active",
        action="store_true",
        help="the server behind secure aggregation may lie about who dropped out (SecAgg(active=True))",
    )
    options = parser.parse_args(argv)
    try:
        found = plan(
            options.target_epsilon,
            options.clients,
            options.params,
            options.rounds,
            Adversary[options.adversary],
            options.delta,
            CANDIDATES,
            SecAgg(active=True).fewest_survivors(options.clients) if options.active else None,
        )
    except ValueError as error:
        parser.error(str(error))
    table = Table("mechanism", "epsilon of a coordinate", "epsilon of the run", "error, in radii", box=SIMPLE)
    for option in found:
        if option.mechanism is None:
            table.add_row(option.name, "-", "-", f"not possible: {option.reason}")
            continue
        setting = f"{option.mechanism.epsilon:.3g}"  # type: ignore[attr-defined]
        std = "unknown" if option.noise_std is None else f"{option.noise_std:.3g}"
        table.add_row(option.name, setting, format_epsilon(option.epsilon), std)
    console = Console()
    console.width = max(console.width, 96)  # names are not cut; a narrower terminal wraps its lines
    console.print(f"against {Adversary[options.adversary].value}:", highlight=False)
    console.print(table)
    console.print(
        "The error is the std of one coordinate of the mean, at worst; above 1 it drowns the signal."
    )
    return 0
