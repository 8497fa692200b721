"""The question before a run: which mechanism, at which setting, gives this epsilon against this adversary?

Every candidate is calibrated to the target (`privacy.target`) with the accountant, the claims and the
refusals of the report, and its error follows from its own noise bound. Errors are relative to the update: all
candidates see updates of l2 norm 1, the same clip for mechanisms that clip vectors; mechanisms that clip
coordinates get a range of 4.5 / sqrt(dim), which holds every coordinate of an update that is spread evenly,
as after a rotation. Dropouts are in the settings, that is in what is claimed, and not in the error.

What decides is R = E / (eta T): E the squared error of the mean of one round, summed over coordinates; T
rounds; eta = |mean|^2, how alike the clients' updates are. Noise over signal of the whole run: it hardly
depends on the number of rounds. The verdicts in words were read off trainings on MNIST: R 0.04 lost nothing,
0.4 five points, 1.5 fifteen, above 4 nearly everything.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.cohorts import CohortLaw, DisjointOnce, Everybody
from lightning_fedq.privacy.run import Run, Sampling, ThreatModel
from lightning_fedq.privacy.sampled import find_secrecy_obstacle
from lightning_fedq.privacy.target import PrivacyTarget, calibrate, check_law
from lightning_fedq.secagg import SecAgg
from lightning_fedq.wire.coding import FixedLength

KAPPA = 4.5
"""Range of a coordinate in standard deviations, for mechanisms that clip coordinates."""
HOMOGENEITY = 0.3
"""eta: |mean update|^2 over the mean |update|^2; 0.1 to 0.7 was measured on MNIST."""
NEARLY = 1.5
"""An option whose R is within this factor of the least is as good: bits decide among them. In the demo, half
of the coordinates (1.4 times the R, 0.6 of the bits) cost nothing that six seeds could tell."""
GOOD, COSTLY = 0.1, 0.7
"""R up to which no loss was visible, and up to which it cost points."""
SWAMPED = 4.0
"""R above which the noise is most of what a model learns."""
_VERDICTS = ((GOOD, "no visible loss"), (COSTLY, "costs points"), (SWAMPED, "poor"))
_MOST_ENCODED = 1 << 14
_MOST_CLIENTS = 20_000
"""Beyond, the number of clients that would be good is extrapolated only."""


@dataclass(frozen=True)
class Problem:
    """Resources of a federation, and the target that is asked of it.

    Args:
        clients: Clients in the federation, >= 1.
        params: Parameters of the model, >= 1.
        rounds: >= 1.
        target: Epsilon over the run, delta, against whom.
        secure_aggregation: How sums are masked if the target is about a server behind secure aggregation:
            who may collude (`max_corrupt`) and whether the server may lie (`active`).
        dropout_probability: Chance that a client does not answer.
        homogeneity: eta, in (0, 1].
        law: Law of cohorts.
        plain_sum: Does the model depend on the messages through their plain sum only? A mean with weights, or
            a robust rule, hides nobody. The error is that of a plain mean all the same.
        num_byzantine: Clients that lie, >= 0; they hide nobody, and what they do to the mean is not reckoned.
        may_be_silent: Is there a deadline, so that claims count on the fewest answers that open a sum?
        masked: Are sums masked whomever the target is about?

    Raises:
        ValueError: If a number is out of range.
    """

    clients: int
    params: int
    rounds: int
    target: PrivacyTarget
    secure_aggregation: SecAgg = SecAgg()  # noqa: RUF009 (frozen)
    dropout_probability: float = 0.0
    homogeneity: float = HOMOGENEITY
    law: CohortLaw = Everybody()  # noqa: RUF009 (frozen)
    plain_sum: bool = True
    num_byzantine: int = 0
    may_be_silent: bool = False
    masked: bool = False

    def __post_init__(self) -> None:
        if not (self.clients >= 1 and self.params >= 1 and self.rounds >= 1 and 0 < self.homogeneity <= 1):
            raise ValueError(
                "clients >= 1, params >= 1, rounds >= 1 and homogeneity in (0, 1] are needed, "
                f"got {self.clients}, {self.params}, {self.rounds} and {self.homogeneity}"
            )
        check_delta(self.target.delta, self.clients, "clients")
        check_law("target", self.target.against, self.target.over, self.law)
        self.law.check_rounds(self.rounds, self.clients)
        why = find_secrecy_obstacle(self.sampling(self.law), self.plain_sum, self.num_byzantine)
        if why and self.law.secret:
            raise ValueError(f"secret cohorts need {why}; or plan for known ones")

    @property
    def cohort(self) -> int:
        """Clients of a round."""
        return self.law.cohort_size(self.clients)

    def sampling(self, law: CohortLaw) -> Sampling:
        """Participation of clients by a law."""
        return Sampling(
            num_clients=self.clients,
            law=law,
            broken="",
            dropout_probability=self.dropout_probability,
            real_clients=False,
            may_be_silent=self.may_be_silent,
        )

    def run(self, mechanism: Mechanism, law: CohortLaw | None = None) -> Run:
        """The run that is asked about, by a mechanism and the problem's law of cohorts, or another one."""
        law = self.law if law is None else law
        cohort = law.cohort_size(self.clients)
        secagg = self.secure_aggregation if self.behind_masks else None
        byzantine = min(self.num_byzantine, cohort)
        sums = None if secagg is None else secagg.guarantee(self.clients, cohort, self.rounds, byzantine)
        return Run(
            mechanism=mechanism,
            context=make_plan_context(mechanism, cohort, self.params),
            rounds=self.rounds,
            sampling=self.sampling(law),
            threat=ThreatModel(
                secure_sum=sums, plain_sum=self.plain_sum, num_byzantine=byzantine, secure_keys=True
            ),
            charges=None,
            to_come=0,
        )

    @property
    def behind_masks(self) -> bool:
        """Are sums masked, by the target (a server behind them, or what one that lies releases) or anyway?"""
        lies = self.secure_aggregation.active and self.sees_sums
        return self.target.against is Adversary.SECAGG_SERVER or lies or self.masked

    @property
    def sees_sums(self) -> bool:
        """Does the adversary see aggregates only, so that other clients hide the victim?"""
        of_sums = (Adversary.SECAGG_SERVER, Adversary.OUTSIDER, Adversary.CLIENT)
        return self.plain_sum and self.target.against in of_sums


@dataclass(frozen=True)
class Option:
    """One way to reach the target, or the reason why there is none.

    Args:
        mechanism: Set to the target, for updates of norm 1; or None.
        law: Law of cohorts: the problem's, or `DisjointOnce`, with the whole budget in one round.
        epsilon: What a client then spends over the run, at the target's delta.
        bits: Bits a parameter that one client puts on the wire in a round in which it takes part; behind
            masks those of the masked sum.
        error: E, in units of the squared norm of an update; None where the mechanism has no bound.
        ratio: R; None with `error`.
        clients_needed: About how many clients would bring R to 0.1; None where R is unknown.
        reason: Why not, where there is no mechanism.
    """

    name: str
    mechanism: Mechanism | None
    law: CohortLaw = Everybody()  # noqa: RUF009 (frozen)
    epsilon: float = math.inf
    bits: float = math.inf
    error: float | None = None
    ratio: float | None = None
    clients_needed: int | None = None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """R in words."""
        if self.mechanism is None:
            return "not possible"
        if self.ratio is None:
            return "error unknown"
        return verdict_on(self.ratio)


def plan(
    problem: Problem,
    candidates: Mapping[str, Mechanism],
    *,
    once: bool = True,
    on_option: Callable[[Option], None] = lambda option: None,
) -> tuple[Option, ...]:
    """Calibrate every candidate to the target, and rank them by error.

    Args:
        candidates: Mechanisms for updates of norm 1, by name; the value of the free parameter does not count.
        once: Is a participation in one round only tried, too, where no sum hides a client?
        on_option: Is given each option as it is found, in the order of the candidates.

    Returns:
        One option per candidate, best first; impossible ones last.
    """
    options = []
    for name, mechanism in candidates.items():
        options.append(_option(name, mechanism, problem, once))
        on_option(options[-1])
    return tuple(sorted(options, key=lambda option: (option.mechanism is None, _rank(option))))


def recommended(options: Sequence[Option]) -> Option | None:
    """The fewest bits among those that lose nothing, or whose R is within `NEARLY` of the least.

    Args:
        options: Options, best first.

    Returns:
        None where nothing is possible.

    Example:
        >>> from lightning_fedq import FedAvg
        >>> cheap = Option("coins", FedAvg(), bits=4.1, ratio=0.55)
        >>> exact = Option("Gaussian", FedAvg(), bits=17.0, ratio=0.49)
        >>> recommended((exact, cheap)).name
        'coins'
    """
    possible = [option for option in options if option.mechanism is not None]
    if not possible or possible[0].ratio is None:
        return possible[0] if possible else None
    limit = max(GOOD, NEARLY * possible[0].ratio)
    return min((option for option in possible if _rank(option) <= limit), key=lambda option: option.bits)


def _rank(option: Option) -> float:
    return math.inf if option.ratio is None else option.ratio


def _option(name: str, mechanism: Mechanism, problem: Problem, once_too: bool) -> Option:
    """The better participation. With sums, more clients a round always hide better."""
    best = _solve(name, mechanism, problem, problem.law)
    dealt = problem.law.of_all and 1 < problem.rounds <= problem.clients
    if once_too and dealt and not problem.sees_sums:
        once = _solve(name, mechanism, problem, DisjointOnce(problem.clients // problem.rounds))
        if (once.mechanism is None, _rank(once)) < (best.mechanism is None, _rank(best)):
            best = once
    return best


def _solve(name: str, mechanism: Mechanism, problem: Problem, law: CohortLaw) -> Option:
    cohort = law.cohort_size(problem.clients)
    try:
        if problem.behind_masks:
            problem.secure_aggregation.check(mechanism)
        found = calibrate(problem.target, problem.run(mechanism, law))
    except (ValueError, TypeError) as refused:
        return Option(name, None, law, reason=str(refused))
    context = make_plan_context(found.mechanism, cohort, problem.params)
    error = relative_error(found.mechanism, cohort, problem.params, problem.homogeneity)
    ratio = None if error is None else error / (problem.homogeneity * problem.rounds)
    secagg = problem.secure_aggregation if problem.behind_masks else None
    bits, _ = bits_behind(found.mechanism, context, secagg)
    needed = None if ratio is None else _estimate_clients_needed(mechanism, problem, law, ratio, found.level)
    return Option(name, found.mechanism, law, found.epsilon, bits, error, ratio, needed)


def make_plan_context(mechanism: Mechanism, cohort: int, params: int) -> RoundContext:
    """A round for updates of norm 1: one segment, each coordinate with a range of 4.5 / sqrt(params).

    A mechanism with a rule of its own for the radius has one that an update fits into.
    """
    groups, start = [], 0
    for size in mechanism.group_sizes(cohort):
        groups.append(tuple(range(start, start + size)))
        start += size
    radius = torch.ones(1, dtype=torch.float64)
    if mechanism.range_rule is None:
        radius *= KAPPA / math.sqrt(params)
    return RoundContext(0, tuple(groups), (params,), 0.0 * radius, radius)


def relative_error(
    mechanism: Mechanism, cohort: int, params: int, homogeneity: float = HOMOGENEITY
) -> float | None:
    """E for evenly spread updates of the longest norm that is not clipped, over its square."""
    context, norm = make_plan_context(mechanism, cohort, params), mechanism.longest_update(params) or 1.0
    scaled = replace(context, center=norm * context.center, radius=norm * context.radius)
    error = mechanism.mean_error(scaled, cohort, homogeneity)
    return None if error is None else error / norm**2


def verdict_on(ratio: float) -> str:
    """R in words.

    Example:
        >>> verdict_on(0.05)
        'no visible loss'
        >>> verdict_on(5.0)
        'do not'
    """
    return next((words for limit, words in _VERDICTS if ratio <= limit), "do not")


def bits_behind(mechanism: Mechanism, context: RoundContext, secagg: SecAgg | None) -> tuple[float, float]:
    """Bits a parameter of one client's message, behind masks and without.

    Where codes have variable length, measured on a message about a random update of norm 1, of no more than
    16,384 coordinates, whose share of the norm stands for the others.
    """
    plain = _unmasked(mechanism, context)
    if secagg is None:
        return plain, plain
    layout = secagg.layout(mechanism, context, PublicRandomness(SeededKeys(0), 0))
    return 8.0 * layout.num_bytes / context.dim, plain


def fixed_bits(mechanism: Mechanism, context: RoundContext) -> float | None:
    """Bits a parameter of every message without masks, None where they differ: by the code of messages."""
    code, first = mechanism.code(context), next(iter(context.cohort), 0)  # who draws alone may be nobody
    if not isinstance(code, FixedLength):
        return None
    code = mechanism.message_code(first, context, PublicRandomness(SeededKeys(0), context.round))
    if not isinstance(code, FixedLength):
        return None
    return code.bits_per_symbol * mechanism.num_symbols(context) / context.dim


def _unmasked(mechanism: Mechanism, context: RoundContext) -> float:
    keys = SeededKeys(0)
    if (fixed := fixed_bits(mechanism, context)) is not None:
        return fixed
    dim = min(context.dim, _MOST_ENCODED)
    part = RoundContext(0, context.groups, (dim,), context.center, context.radius)
    update = torch.randn(dim, generator=torch.Generator().manual_seed(0)) / math.sqrt(context.dim)
    message = mechanism.encode(update[None], part, ClientRandomness(keys, [context.cohort[0]], 0))
    return message.num_bits / dim


def _estimate_clients_needed(
    mechanism: Mechanism, problem: Problem, law: CohortLaw, ratio: float, level: float
) -> int | None:
    """About how many clients bring R to 0.1: a sum's noise falls with n^2, single messages' with n.

    Where cohorts are drawn, clients of a round; Byzantine clients stay as many in a hundred.
    With secret cohorts the same share of all clients is drawn.
    """
    once = isinstance(law, DisjointOnce)
    here = problem.clients if once else law.cohort_size(problem.clients)
    power = 2.0 if problem.sees_sums else 1.0
    guess = float(here * (ratio / GOOD) ** (1.0 / power))
    if ratio <= GOOD or not guess <= _MOST_CLIENTS or problem.law.secret:
        return math.ceil(guess) if guess < 1e15 else None
    clients = max(math.ceil(guess), problem.rounds if once else 1)
    cohort = clients // problem.rounds if once else clients
    byzantine = math.ceil(problem.num_byzantine * clients / here)
    try:  # a target may be out of reach there, or its delta too large for so many
        larger = replace(
            problem,
            clients=math.ceil(problem.clients * clients / here),
            law=law.with_size(cohort),
            num_byzantine=byzantine,
        )
        near = level * (clients / here) ** (0.5 * (power - 1.0))
        found = calibrate(problem.target, larger.run(mechanism), near).mechanism
    except ValueError:
        return clients
    context = make_plan_context(found, cohort, problem.params)
    error = found.mean_error(context, cohort, problem.homogeneity)
    if error is None:
        return clients
    reached = error / (problem.homogeneity * problem.rounds)
    slope = math.log(ratio / reached) / math.log(clients / here)
    if not slope > 0.7:  # noise falls with n at least: what falls slower does not get there
        return None
    better: float = clients * (reached / GOOD) ** (1.0 / slope)
    return math.ceil(better)
