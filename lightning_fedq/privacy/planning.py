"""Planning before a run: find mechanisms, calibrated to a target epsilon, and rank them by their error.

Every candidate is calibrated to the target (`privacy.target`) with the accountant and the claims of the
report. Its error follows from its own bound on the noise. Errors are relative to the update: all candidates
get updates of l2 norm 1, which is also the clipping norm of mechanisms that clip vectors. Mechanisms that
clip coordinates get a range of 4.5 / sqrt(dim). It holds every coordinate of an update that is spread evenly,
as after a rotation. Dropouts affect the claims, but not the error.

Options are ranked by the noise-to-signal ratio of the whole run, R = E / (eta T). E is the squared error of
the mean of one round, summed over coordinates. T is the number of rounds. eta = |mean|^2 measures how similar
the clients' updates are. R hardly depends on the number of rounds. The verdicts in words come from trainings
on MNIST: R 0.04 lost nothing, 0.4 five points, 1.5 fifteen, above 4 nearly everything.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext, group_clients
from lightning_fedq.privacy.account import OF_SUMS
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.cohorts import CohortLaw, DisjointOnce, Everybody
from lightning_fedq.privacy.run import Run, Sampling, ThreatModel
from lightning_fedq.privacy.sampled import find_secrecy_obstacle
from lightning_fedq.privacy.target import PrivacyTarget, calibrate, check_law
from lightning_fedq.secagg import SecAgg
from lightning_fedq.wire.coding import FixedLength

KAPPA = 4.5
"""Range of a coordinate for mechanisms that clip coordinates, in standard deviations."""
HOMOGENEITY = 0.3
"""eta: |mean update|^2 over the mean |update|^2. Values measured on MNIST were 0.1 to 0.7."""
NEARLY = 1.5
"""Factor on R. Options within this factor of the smallest R count as equally good, and bits decide among
them. In the demo, sending half of the coordinates (1.4 times the R, 0.6 of the bits) had no cost that six
seeds could show."""
GOOD, COSTLY = 0.1, 0.7
"""Largest R without a visible loss of accuracy, and largest R that cost only points of accuracy."""
SWAMPED = 4.0
"""R above which a model learns mostly noise."""
_VERDICTS = ((GOOD, "no visible loss"), (COSTLY, "costs points"), (SWAMPED, "poor"))
_MOST_ENCODED = 1 << 14
_MOST_CLIENTS = 20_000
"""Largest number of clients that is checked by calibration. Beyond it, `clients_needed` is extrapolated."""


@dataclass(frozen=True)
class Problem:
    """Resources of a federation and its privacy target.

    Args:
        clients: Number of clients in the federation, >= 1.
        params: Number of parameters of the model, >= 1.
        rounds: Number of rounds of the run, >= 1.
        target: Target epsilon, with delta and adversary.
        secure_aggregation: Settings of secure aggregation, used if the target is about a server behind it:
            how many clients may collude (`max_colluding_fraction`), and whether the server may lie
            (`active`).
        dropout_probability: Probability that a client does not answer.
        homogeneity: Similarity of the clients' updates, eta, in (0, 1].
        law: Law of cohorts.
        plain_sum: Whether the model depends on the messages only through their plain sum. A weighted mean or
            a robust rule hides nobody. The planned error is that of a plain mean in both cases.
        num_byzantine: Number of Byzantine clients, >= 0. They hide nobody, and their effect on the mean is
            not planned.
        may_be_silent: Whether there is a deadline, so that claims count only on the smallest number of
            answers that open a sum.
        masked: Whether sums are masked even if the target is about another adversary.

    Raises:
        ValueError: If a number is out of range, or a secret law does not fit the other settings.
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
                "Expected clients >= 1, params >= 1, rounds >= 1 and homogeneity in (0, 1], "
                f"got {self.clients}, {self.params}, {self.rounds} and {self.homogeneity}"
            )
        check_delta(self.target.delta, self.clients, "clients")
        check_law("target", self.target.against, self.target.over, self.law)
        self.law.check_rounds(self.rounds, self.clients)
        why = find_secrecy_obstacle(self.sampling(self.law), self.plain_sum, self.num_byzantine)
        if why and self.law.secret:
            raise ValueError(f"secret cohorts need {why}, or plan for known cohorts")

    @property
    def cohort(self) -> int:
        """Number of clients of a round."""
        return self.law.cohort_size(self.clients)

    def sampling(self, law: CohortLaw) -> Sampling:
        """Return how clients take part by a law."""
        return Sampling(
            num_clients=self.clients,
            law=law,
            broken="",
            dropout_probability=self.dropout_probability,
            real_clients=False,
            may_be_silent=self.may_be_silent,
        )

    def run(self, mechanism: Mechanism, law: CohortLaw | None = None) -> Run:
        """Return the planned run of a mechanism.

        Args:
            mechanism: Mechanism of the run.
            law: Law of cohorts. None is the problem's law.
        """
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
        """Whether sums are masked: by the target, because of a server that lies, or in any case."""
        lies = self.secure_aggregation.active and self.sees_sums
        return self.target.against is Adversary.SECAGG_SERVER or lies or self.masked

    @property
    def sees_sums(self) -> bool:
        """Whether the adversary sees aggregates only, so that other clients hide the victim."""
        return self.plain_sum and self.target.against in OF_SUMS


@dataclass(frozen=True)
class Option:
    """A mechanism that reaches the target, or the reason why it can't.

    Args:
        name: Name of the candidate.
        mechanism: Mechanism calibrated to the target, for updates of norm 1, or None.
        law: Law of cohorts: that of the problem, or `DisjointOnce`, with the whole budget in one round.
        epsilon: Epsilon that a client then spends over the run, at the target's delta.
        bits: Bits per parameter that one client sends in a round in which it takes part. With masks, those of
            the masked message.
        error: Squared error E, in units of the squared norm of an update. None where the mechanism has no
            bound.
        ratio: Noise-to-signal ratio R. None where `error` is None.
        clients_needed: Approximate number of clients that would bring R to 0.1. None where R is unknown.
        reason: Reason why there is no mechanism.
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
        """The noise-to-signal ratio in words."""
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
        problem: Resources and target.
        candidates: Mechanisms for updates of norm 1, by name. The value of their free parameter is ignored.
        once: Whether to try cohorts that take part in one round only as well, if no sum hides a client.
        on_option: Function that is called with each option as it is found, in the order of the candidates.

    Returns:
        One option per candidate, best first and impossible ones last.
    """
    options = []
    for name, mechanism in candidates.items():
        option, level = best_option(name, mechanism, problem, once)
        if option.ratio is not None:
            needed = _estimate_clients_needed(mechanism, problem, option.law, option.ratio, level)
            option = replace(option, clients_needed=needed)
        options.append(option)
        on_option(option)
    return tuple(sorted(options, key=lambda option: (option.mechanism is None, _rank(option))))


def recommended(options: Sequence[Option]) -> Option | None:
    """Return the option with the fewest bits among those of nearly the smallest R.

    These are the options that lose nothing (R up to `GOOD`), or whose R is within `NEARLY` of the smallest
    one with the same verdict.

    Args:
        options: Options of `plan`, best first.

    Returns:
        The option, or None where no option is possible.

    Examples:
        >>> from lightning_fedq import FedAvg
        >>> cheap = Option("coins", FedAvg(), bits=4.1, ratio=0.55)
        >>> exact = Option("Gaussian", FedAvg(), bits=17.0, ratio=0.49)
        >>> recommended((exact, cheap)).name
        'coins'
    """
    possible = [option for option in options if option.mechanism is not None]
    if not possible or possible[0].ratio is None:
        return possible[0] if possible else None
    limit, verdict = max(GOOD, NEARLY * possible[0].ratio), possible[0].verdict
    near = [option for option in possible if _rank(option) <= limit and option.verdict == verdict]
    return min(near, key=lambda option: option.bits)


def _rank(option: Option) -> float:
    return math.inf if option.ratio is None else option.ratio


def best_option(
    name: str, mechanism: Mechanism, problem: Problem, once_too: bool = True
) -> tuple[Option, float]:
    """Return the better option of a candidate: with the problem's law, or with one round per client.

    Where the adversary sees sums only, one round per client is not tried, because more clients in a round
    hide better.

    Returns:
        The option without `clients_needed`, and the level of its mechanism, NaN without one.
    """
    best = _solve(name, mechanism, problem, problem.law)
    dealt = problem.law.of_all and 1 < problem.rounds <= problem.clients
    if once_too and dealt and not problem.sees_sums:
        once = _solve(name, mechanism, problem, DisjointOnce(problem.clients // problem.rounds))
        if (once[0].mechanism is None, _rank(once[0])) < (best[0].mechanism is None, _rank(best[0])):
            best = once
    return best


def _solve(name: str, mechanism: Mechanism, problem: Problem, law: CohortLaw) -> tuple[Option, float]:
    """Return a candidate's option under a law, and its level. See `best_option`."""
    cohort = law.cohort_size(problem.clients)
    try:
        if problem.behind_masks:
            problem.secure_aggregation.check(mechanism)
        calibration = calibrate(problem.target, problem.run(mechanism, law))
    except (ValueError, TypeError) as refused:
        return Option(name, None, law, reason=str(refused)), math.nan
    context = make_plan_context(calibration.mechanism, cohort, problem.params)
    error = relative_error(calibration.mechanism, cohort, problem.params, problem.homogeneity)
    ratio = noise_ratio(error, problem.rounds, problem.homogeneity)
    secagg = problem.secure_aggregation if problem.behind_masks else None
    bits, _ = bits_behind(calibration.mechanism, context, secagg)
    option = Option(name, calibration.mechanism, law, calibration.epsilon, bits, error, ratio)
    return option, calibration.level


def make_plan_context(mechanism: Mechanism, cohort: int, params: int) -> RoundContext:
    """Return a round for updates of norm 1, with one segment.

    Each coordinate has a range of 4.5 / sqrt(params). A mechanism with its own rule for the range gets a
    range of 1, into which every update fits.
    """
    groups = group_clients(mechanism, range(cohort))
    radius = torch.ones(1, dtype=torch.float64)
    if mechanism.range_rule is None:
        radius *= KAPPA / math.sqrt(params)
    return RoundContext(0, groups, (params,), 0.0 * radius, radius)


def relative_error(
    mechanism: Mechanism, cohort: int, params: int, homogeneity: float = HOMOGENEITY
) -> float | None:
    """Return the squared error E of the mean, relative to the squared norm of an update.

    The updates have the longest norm that is not clipped, and are spread evenly over the parameters.

    Args:
        mechanism: Mechanism of the run.
        cohort: Number of clients of a round.
        params: Number of parameters of the model.
        homogeneity: Similarity of the clients' updates, eta, in (0, 1].

    Returns:
        Relative error, or None where the mechanism has no bound.
    """
    context, norm = make_plan_context(mechanism, cohort, params), mechanism.longest_update(params) or 1.0
    scaled = replace(context, center=norm * context.center, radius=norm * context.radius)
    error = mechanism.mean_error(scaled, cohort, homogeneity)
    return None if error is None else error / norm**2


def planned_noise(
    mechanism: Mechanism,
    cohort: int,
    params: int,
    rounds: int,
    homogeneity: float = HOMOGENEITY,
    lengths: Sequence[float] = (),
) -> float | None:
    """Return the planned noise-to-signal ratio R of a run. None without a bound on E.

    It is E / (eta rounds) if all updates are equally long. With the lengths l of a schedule it is E rounds /
    (eta (sum l)^2), because the noise of a round does not depend on its length.

    Args:
        mechanism: Mechanism of the run.
        cohort: Number of clients of a round.
        params: Number of parameters of the model.
        rounds: Number of rounds of the run, >= 1.
        homogeneity: Similarity of the clients' updates, eta, in (0, 1].
        lengths: Length of the updates of each round, relative to the longest. Empty if all are equally long.
    """
    ratio = noise_ratio(relative_error(mechanism, cohort, params, homogeneity), rounds, homogeneity)
    if ratio is None or not lengths:
        return ratio
    signal = sum(lengths) / rounds
    return ratio / signal**2 if signal > 0.0 else math.inf


def noise_ratio(error: float | None, rounds: int, homogeneity: float) -> float | None:
    """Return R of an error E of `relative_error`: E / (eta rounds). None without a bound on E."""
    return None if error is None else error / (homogeneity * rounds)


def verdict_on(ratio: float) -> str:
    """Return the verdict on a noise-to-signal ratio R, in words.

    Examples:
        >>> verdict_on(0.05)
        'no visible loss'
        >>> verdict_on(5.0)
        'do not'
    """
    return next((words for limit, words in _VERDICTS if ratio <= limit), "do not")


def bits_behind(mechanism: Mechanism, context: RoundContext, secagg: SecAgg | None) -> tuple[float, float]:
    """Return bits per parameter of one client's message, with masks and without.

    For codes of variable length, the length is measured on the message of a random update of norm 1. At most
    16,384 coordinates are encoded, and stand for the others.

    Args:
        mechanism: Mechanism of the run.
        context: Round whose messages are measured.
        secagg: Settings of secure aggregation. None is no masks.
    """
    plain = fixed_bits(mechanism, context)
    if plain is None:
        dim = min(context.dim, _MOST_ENCODED)
        part = RoundContext(0, context.groups, (dim,), context.center, context.radius)
        update = torch.randn(dim, generator=torch.Generator().manual_seed(0)) / math.sqrt(context.dim)
        rand = ClientRandomness(SeededKeys(0), [context.cohort[0]], 0)
        plain = mechanism.encode(update[None], part, rand).num_bits / dim
    if secagg is None:
        return plain, plain
    layout = secagg.layout(mechanism, context, PublicRandomness(SeededKeys(0), 0))
    return 8.0 * layout.num_bytes / context.dim, plain


def fixed_bits(mechanism: Mechanism, context: RoundContext) -> float | None:
    """Return bits per parameter of every message without masks. None where messages differ in length."""
    # the cohort may be empty where clients draw for themselves
    code, first = mechanism.code(context), next(iter(context.cohort), 0)
    if not isinstance(code, FixedLength):
        return None
    code = mechanism.message_code(first, context, PublicRandomness(SeededKeys(0), context.round))
    if not isinstance(code, FixedLength):
        return None
    return code.bits_per_symbol * mechanism.num_symbols(context) / context.dim


def _estimate_clients_needed(
    mechanism: Mechanism, problem: Problem, law: CohortLaw, ratio: float, level: float
) -> int | None:
    """Return approximately how many clients bring R to 0.1. None if no number is found.

    The noise of a sum falls with n^2 and that of single messages with n. The returned number is that of
    clients of a round where cohorts are drawn, and of the federation where each client has one round. The
    fraction of Byzantine clients stays the same. With secret cohorts, the sampling probability stays the
    same.

    Args:
        mechanism: Candidate, not calibrated.
        problem: Resources and target.
        law: Law of cohorts of the option.
        ratio: R of the calibrated option.
        level: Level of the calibrated option, where the next search starts.
    """
    once = isinstance(law, DisjointOnce)
    here = problem.clients if once else law.cohort_size(problem.clients)
    power = 2.0 if problem.sees_sums else 1.0
    guess = float(here * (ratio / GOOD) ** (1.0 / power))
    if ratio <= GOOD or not guess <= _MOST_CLIENTS or problem.law.secret:
        return math.ceil(guess) if guess < 1e15 else None
    clients = max(math.ceil(guess), problem.rounds if once else 1)
    cohort = clients // problem.rounds if once else clients
    near = level * (clients / here) ** (0.5 * (power - 1.0))
    try:  # with more clients, the target may be out of reach, or its delta too large
        larger = replace(
            problem,
            clients=math.ceil(problem.clients * clients / here),
            law=law.with_size(cohort),
            num_byzantine=math.ceil(problem.num_byzantine * clients / here),
        )
        found = calibrate(problem.target, larger.run(mechanism), near).mechanism
    except ValueError:
        return clients
    error = found.mean_error(make_plan_context(found, cohort, problem.params), cohort, problem.homogeneity)
    reached = noise_ratio(error, problem.rounds, problem.homogeneity)
    if reached is None:
        return clients
    slope = math.log(ratio / reached) / math.log(clients / here)
    if not slope > 0.7:  # noise should fall with n or faster, so a slower fall never reaches R = 0.1
        return None
    better: float = clients * (reached / GOOD) ** (1.0 / slope)
    return math.ceil(better)
