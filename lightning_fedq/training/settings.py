"""Settings of a federation in frozen groups, and the base class that all parts of a fit know.

`Federated` takes the settings as flat arguments with defaults, as a YAML file and a user write them. The
groups here check the type and range of each setting. State of a fit is in `training.fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_fedq.algorithms import LocalAlgorithm
from lightning_fedq.algorithms.byzantine.aggregation import (
    RobustAggregation,
    Weighting,
    inverse_variance_weights,
)
from lightning_fedq.clients.clock import count_rounds, round_steps
from lightning_fedq.clients.constraints import Constraint, check_constraints, format_constraints
from lightning_fedq.clients.evaluation import ClientEvaluation
from lightning_fedq.clients.personal import check_patterns
from lightning_fedq.clients.undo import Undo
from lightning_fedq.clients.vector import BufferMode, Vector, num_coordinates
from lightning_fedq.data.batches import BatchRule
from lightning_fedq.data.labels import Labels
from lightning_fedq.data.partition import Partition
from lightning_fedq.functional.checks import check_fields
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange, PreviousMinMax, RangeRule
from lightning_fedq.privacy.cohorts import CohortLaw, DisjointOnce, make_cohort_law
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.recorded_laws import describe_law
from lightning_fedq.privacy.run import check_colluders
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import (
    Broadcast,
    Deadline,
    OptimizerFactory,
    RoundEngine,
    RoundPlanner,
    RoundRecord,
    Statistics,
    check_aggregation,
)
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.client_metrics import ClientMetricsChoice

if TYPE_CHECKING:
    from lightning_fedq.training.client_evaluation import EvaluatedClients
    from lightning_fedq.training.client_metrics import ClientMetrics

Group = TypeVar("Group")


def group(kind: type[Group], arguments: Mapping[str, Any]) -> Group:
    """Build one of the groups below from the arguments of `Federated`, by name."""
    return kind(**{field.name: arguments[field.name] for field in fields(kind)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Protection:
    """Mechanism, keys, ledger and privacy target: the arguments of `Federated` with these names.

    Raises:
        TypeError: If a setting has another type.
    """

    mechanism: Annotated[Mechanism, "a mechanism, such as LDPQ(epsilon_per_coordinate=1.0)"]
    seed: Annotated[int | None, "an integer, or None for a private run"]
    ledger: Annotated[Ledger | None, "the ledger of another Federated: other.ledger"]
    privacy: Annotated[
        PrivacyTarget | None, "PrivacyTarget(epsilon=8.0, delta=1e-5, adversary='secagg_server')"
    ]

    def __post_init__(self) -> None:
        check_fields(self, named=False)


@dataclass(frozen=True)
class Clients:
    """Clients and their data: the arguments of `Federated` with these names.

    Raises:
        ValueError: If a string is not one of the possible values. `planner` checks the numbers.
        TypeError: If a setting has another type.
    """

    num_clients: Annotated[int, "an integer"]
    cohort: Annotated[CohortLaw | int | None, "a law such as Cyclic(10), an integer, or None for everybody"]
    dropout_probability: Annotated[float, "a number in [0, 1)"]
    partition: Annotated[Partition, "a partition, such as IID() or Dirichlet(0.5)"]
    labels: Labels
    deadline: Annotated[Deadline | None, "Deadline(seconds, durations=...), or None"]

    def __post_init__(self) -> None:
        check_fields(self, named=False)

    def planner(self, seed: int) -> RoundPlanner:
        """Return the planner of the rounds, which draws the cohorts.

        Args:
            seed: Seed of all public draws.

        Raises:
            ValueError: If a number is out of its range.
        """
        law = make_cohort_law(self.cohort)
        return RoundPlanner(self.num_clients, seed, law, self.dropout_probability, deadline=self.deadline)


@dataclass(frozen=True)
class Local:
    """Local training of a client: the arguments of `Federated` with these names.

    Args:
        personal_parameters: Patterns of personalised parameters' names.
        extra_buffers: Patterns of names of tensors that are sent although the first steps do not change them.
        constraints: Constraints on tensors, such as 'positive', by patterns of their names.

    Raises:
        ValueError: If a setting is out of its range.
        TypeError: If a setting has another type.
    """

    algorithm: Annotated[LocalAlgorithm | None, "a local algorithm, such as FedProx(mu=0.01), or None"]
    local_epochs: Annotated[int, "an integer"]
    local_steps: Annotated[int | None, "an integer, or None for local_epochs"]
    clients_per_step: Annotated[int | Literal["auto"], "an integer or 'auto'"]
    buffers: BufferMode
    personal_parameters: Sequence[str]
    client_metrics: ClientMetricsChoice | None
    check_isolation: Annotated[bool | None, "True or False, or None for where it matters"]
    evaluate_clients: Annotated[ClientEvaluation | None, "ClientEvaluation(held_out=0.2), or None"]
    extra_buffers: Sequence[str]
    constraints: Mapping[str, Constraint] | None
    statistics: Annotated[Statistics | None, "Statistics(size=6, clip_norm=0.5), or None"]

    def __post_init__(self) -> None:
        check_fields(self, named=False)
        stack = 1 if self.clients_per_step == "auto" else self.clients_per_step
        if self.local_epochs < 1:
            raise ValueError(f"local_epochs must be >= 1, got {self.local_epochs}")
        if self.local_steps is not None and self.local_steps < 1:
            raise ValueError(f"local_steps must be >= 1 or None, got {self.local_steps}")
        if stack < 1:
            raise ValueError(f"clients_per_step must be >= 1 or 'auto', got {stack}")
        object.__setattr__(self, "personal_parameters", check_patterns(self.personal_parameters))
        object.__setattr__(self, "extra_buffers", check_patterns(self.extra_buffers, "extra_buffers"))
        object.__setattr__(self, "constraints", check_constraints(self.constraints))

    def num_coordinates(self, module: torch.nn.Module) -> int:
        """Count the coordinates that clients with these settings will send (`clients.vector`)."""
        return num_coordinates(module, self.buffers, self.personal_parameters, self.extra_buffers)


@dataclass(frozen=True)
class Server:
    """Aggregation at the server: the arguments of `Federated` with these names.

    Raises:
        ValueError: If a setting is out of its range.
        TypeError: If a setting has another type.
    """

    sends: Literal["updates", "weights"]
    ranges: Annotated[RangeRule | None, "a rule, such as FixedRange(0.1) or AdaptiveRange()"]
    server_lr: Annotated[float, "a number in (0, 1]"]
    server_optimizer: Annotated[
        OptimizerFactory | None, "a function of the parameters, such as partial(torch.optim.Adam, lr=0.01)"
    ]
    weighting: Weighting
    aggregator: Annotated[RobustAggregation | None, "a robust rule, such as RobustAggregation('median')"]
    secure_aggregation: Annotated[SecAgg | None, "SecAgg(), with its settings"]
    diagnostics: bool
    broadcast_bits: Annotated[int | None, "an integer from 1 to 16, or None for floats as they are"]

    def __post_init__(self) -> None:
        check_fields(self, named=False)
        if self.broadcast_bits is not None:
            Broadcast(self.broadcast_bits)  # raises if out of range

    @cached_property
    def range_rule(self) -> RangeRule:
        """Rule for the range of the quantiser: `ranges`, or the default for `sends`."""
        return self.ranges or (AdaptiveRange() if self.sends == "updates" else PreviousMinMax())

    @property
    def plain_sum(self) -> bool:
        """Whether the model depends on the messages through their plain sum only."""
        return self.weighting == "uniform" and self.aggregator is None

    @property
    def plain_mean(self) -> bool:
        """Whether the server's step is the mean update itself."""
        return self.plain_sum and self.server_lr == 1.0 and self.server_optimizer is None

    def client_weights(
        self, mechanism: Mechanism, segments: Sequence[int], client_indices: list[int], num_clients: int
    ) -> Tensor | None:
        """Return the clients' weights in the mean, `(num_clients,)`. None if all are equal.

        Args:
            segments: Sizes of the vector's segments.
            client_indices: Number of samples of each client, used by weighting='samples'.
            num_clients: Number of clients, used by weighting='inverse_variance'.
        """
        if self.weighting == "samples":
            return torch.tensor(client_indices, dtype=torch.float32)
        if self.weighting == "inverse_variance":
            return inverse_variance_weights(mechanism, segments, num_clients)
        return None


def check_together(
    mechanism: Mechanism, clients: Clients, local: Local, server: Server, planner: RoundPlanner
) -> None:
    """Refuse settings that are valid one by one but do not work together.

    Raises:
        ValueError: If two settings conflict. The message names both.
        TypeError: If secure aggregation is combined with a mechanism that is not homomorphic.
    """
    planner.expected(0, mechanism)  # raises for a cohort that the mechanism can't serve at once
    planner.check_mechanism(mechanism)
    mechanism.protection_groups(clients.num_clients)  # raises for such a number of clients
    if mechanism.range_rule is not None and server.ranges is not None:
        raise ValueError(f"{type(mechanism).__name__} sets the range of a round itself. Leave ranges out")
    size, secagg = planner.cohort_size, server.secure_aggregation
    check_aggregation(mechanism, size, server.weighting != "uniform", server.aggregator, secagg is not None)
    if secagg is not None:
        secagg.check(mechanism)
        # raises if the cohort law does not allow so many colluders
        check_colluders(planner.law, secagg.guarantee(planner.num_clients, size, 1).colluders)
    _check_algorithm(local.algorithm, planner.law, server)


def _check_algorithm(algorithm: LocalAlgorithm | None, law: CohortLaw, server: Server) -> None:
    """Refuse settings that conflict with a local algorithm whose clients keep state between rounds."""
    if algorithm is None or not algorithm.remembers:
        return
    name = type(algorithm).__name__
    if isinstance(law, DisjointOnce):
        raise ValueError(
            f"{name} corrects a client by its earlier rounds, but {law} has none. Use "
            "FixedSize(...), Cyclic(...), or FedProx"
        )
    if not server.plain_mean or server.sends != "updates":
        raise ValueError(
            f"The server of {name} needs the plain mean update. Leave out server_lr, server_optimizer, "
            "aggregator, weighting and sends='weights', or use FedProx"
        )


def check_broadcast(server: Server, vector: Vector) -> None:
    """Refuse a quantised downlink if buffers travel, because it would also round them.

    Raises:
        ValueError: If buffers travel.
    """
    if server.broadcast_bits is not None and sum(vector.segments) > vector.num_parameters:
        names = ", ".join(vector.buffer_names[:3])
        raise ValueError(
            f"broadcast_bits would also round buffers (here {names}) on the downlink. Use "
            "buffers='frozen' or 'local', or leave broadcast_bits out"
        )


def check_modulus(secagg: SecAgg, engine: RoundEngine) -> None:
    """Refuse a secure aggregation whose modulus is too small for the sum of a round.

    Raises:
        TypeError: If the mechanism has no bound on its symbols.
        ValueError: If the explicit modulus is too small.
    """
    context = engine.context(engine.next_plan())
    rand = PublicRandomness(engine.keys, context.round, context.attempt)
    secagg.layout(engine.mechanism, context, rand)


class Federation:
    """Base class of `Federated`: attributes that parts of a fit and other callbacks use.

    Attributes:
        privacy_target: Target epsilon and its adversary. None without a target.
        engine: Round engine. None before the first fit.
        records: One record for every finished round.
        client_log: Metrics that clients have logged in training, with their policy. None before the first
            fit.
        client_evaluations: Measurements on clients' held-out samples, of rounds in this process.
        clients_per_step_chosen: Number of clients that train in one step, from `on_fit_start` on. 0 before.
    """

    mechanism: Mechanism
    clients: Clients
    local: Local
    server: Server
    planner: RoundPlanner
    seed: int | None
    ledger: Ledger
    owns_ledger: bool
    privacy_target: PrivacyTarget | None
    batch_rule: BatchRule | None
    engine: RoundEngine | None
    records: list[RoundRecord]
    client_log: ClientMetrics | None
    client_evaluations: list[EvaluatedClients]
    clients_per_step_chosen: int
    _followers: list[Callable[[], None]]
    _undo: Undo

    @property
    def started_engine(self) -> RoundEngine:
        """Round engine of a fit that has started."""
        assert self.engine is not None
        return self.engine

    def when_vector_changes(self, call: Callable[[], None]) -> None:
        """Register a function to call when parameters join or leave. It may raise to stop the fit."""
        self._undo.replace(self, "_followers", [*self._followers, call])

    def vector_changed(self) -> None:
        """Call the registered functions, because parameters have joined or left."""
        for call in self._followers:
            call()

    @property
    def max_batches(self) -> int | None:
        """Number of batches of the longest client in a round. None if it is not known yet."""
        return self.local.local_steps

    def count_rounds(self, trainer: Any, module: Any = None) -> int | None:
        """Return the number of rounds of a fit, min(max_epochs, ceil(max_steps / steps of a round)).

        The steps are those of the longest client. An early stop can make the number smaller. None if it is
        not known, as with `max_time` alone.

        Args:
            module: Module of the fit. None takes the Trainer's.
        """
        module, batches = trainer.lightning_module if module is None else module, self.max_batches
        is_known = batches is not None and (module is None or module.automatic_optimization)
        steps = round_steps(trainer, batches) if batches is not None and is_known else []
        if trainer.max_steps >= 0 and module is not None and module.automatic_optimization and not steps:
            return None  # the data of the clients decide which limit comes first
        return count_rounds(trainer.max_epochs, trainer.max_steps, steps)

    def set_plan_seed(self, seed: int) -> None:
        """Set the seed of the plan, from which cohorts and the partition are drawn."""
        self.planner = replace(self.planner, seed=seed)

    def identity(self) -> dict[str, str]:
        """Return the settings that a checkpoint must match, in words."""
        clients, local, server = self.clients, self.local, self.server
        return {
            "mechanism": repr(self.mechanism),
            "num_clients": str(clients.num_clients),
            **describe_law(self.planner.law, clients.num_clients),
            "dropout_probability": str(clients.dropout_probability),
            **({} if clients.deadline is None else {"deadline": repr(clients.deadline)}),
            "weighting": server.weighting,
            "aggregator": repr(server.aggregator),
            "secure_aggregation": repr(server.secure_aggregation),
            "partition": repr(clients.partition),
            "target": server.sends,
            **({} if server.broadcast_bits is None else {"broadcast_bits": str(server.broadcast_bits)}),
            "buffers": local.buffers,
            **({"local": repr(local.personal_parameters)} if local.personal_parameters else {}),
            **({"shared": repr(local.extra_buffers)} if local.extra_buffers else {}),
            **({"constraints": format_constraints(local.constraints)} if local.constraints else {}),
            **({} if local.statistics is None else {"statistics": repr(local.statistics)}),
            "seed": str(self.seed),
            "batches": "passes" if self.batch_rule is None else type(self.batch_rule).__name__,
            **({} if local.algorithm is None else {"algorithm": repr(local.algorithm)}),
            **({} if local.evaluate_clients is None else local.evaluate_clients.identity()),
        }
