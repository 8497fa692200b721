"""Which claim fits a set-up: the mechanism's own, after dropouts and collusion, or that of a wider view.

Where a claim does not fit, it falls back on a view that sees at least as much (post-processing), or is
`NonPrivate` with the reason; nothing is guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_fedq.functional.drawn import num_marked
from lightning_fedq.mechanism import Adversary, Mechanism, Neighbours, NonPrivate, PrivacyClaim, RoundContext
from lightning_fedq.privacy.accounting import Spending, spent
from lightning_fedq.privacy.beside import Beside
from lightning_fedq.privacy.collusion import CHANCE, num_corrupt_in_cohort
from lightning_fedq.privacy.grid import SMALLEST_DELTA
from lightning_fedq.privacy.losses import GaussianLoss, Loss
from lightning_fedq.privacy.sampled import secret_epsilon

_WIDER_VIEW = {
    Adversary.SECAGG_SERVER: Adversary.SERVER,
    Adversary.OUTSIDER: Adversary.SERVER,
    Adversary.CLIENT: Adversary.SERVER_AND_PARTNER,
}
"""A view that sees at least as much and depends on no aggregation."""

_HONEST = "every other client runs its coins"


@dataclass(frozen=True)
class Setting:
    """Setting of a run, as far as claims hang on it.

    Args:
        context: A round: cohort, groups, dim; `num_corrupt` follows from `max_corrupt`.
        rounds: Rounds of the run, >= 0.
        delta: In (0, 1).
        participation: Chance that a client takes part in a round and answers.
        dropout_probability: Chance that a client of the cohort does not answer.
        secure_aggregation: Whether the server is handed sums only.
        equal_weights: Whether the model depends on the messages through their plain sum only.
        max_corrupt: Fraction of the clients that may collude with a server behind secure aggregation.
        num_byzantine: Clients, >= 0, that don't run the protocol; what they add to a sum hides nobody.
        fewest_survivors: Clients without whose confirmation no sum opens, where a server behind secure
            aggregation may lie about who dropped out (`SecAgg(active=True)`): it may leave out all others,
            and choose whom. None is a server that follows the protocol.
        fewest_answers: Answers that a sum is sure to hold, where real clients drop out as they like; whose is
            open. None where nobody is silent but with the stated chance.
        num_clients: Clients of the federation, from whom the cohort is drawn. None is the cohort.
        secret_cohorts: Whether nobody but the server learns who took part, under `Federated`'s conditions.
        beside: What every client has released beside the rounds; every epsilon counts it. None is nothing.

    Raises:
        ValueError: If a number makes no sense.
    """

    context: RoundContext
    rounds: int
    delta: float
    participation: float = 1.0
    dropout_probability: float = 0.0
    secure_aggregation: bool = False
    equal_weights: bool = True
    max_corrupt: float = 0.0
    num_byzantine: int = 0
    fewest_survivors: int | None = None
    fewest_answers: int | None = None
    num_clients: int | None = None
    secret_cohorts: bool = False
    beside: Beside | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout_probability < 1.0 or not 0.0 <= self.max_corrupt < 1.0 or self.rounds < 0:
            raise ValueError(
                "dropout_probability and max_corrupt in [0, 1) and rounds >= 0 are needed, "
                f"got {self.dropout_probability}, {self.max_corrupt} and {self.rounds}"
            )
        if self.num_byzantine < 0:
            raise ValueError(f"num_byzantine must be >= 0, got {self.num_byzantine}")
        size = len(self.context.cohort)
        if self.fewest_survivors is not None and not 1 <= self.fewest_survivors <= size:
            raise ValueError(
                f"fewest_survivors must be in [1, cohort = {size}], got {self.fewest_survivors}; "
                "SecAgg.fewest_survivors(cohort) knows it"
            )
        if self.fewest_answers is not None and not 1 <= self.fewest_answers <= size:
            raise ValueError(f"fewest_answers must be in [1, cohort = {size}], got {self.fewest_answers}")
        if self.num_clients is not None and self.num_clients < size:
            raise ValueError(f"num_clients must be >= the cohort, {size}, got {self.num_clients}")
        if self.secret_cohorts and self.beside is not None:
            raise ValueError("releases beside secret cohorts have no account; leave one of them out")

    @property
    def num_corrupt(self) -> int:
        """Clients of a cohort that may collude with the server, and those that lie.

        In a drawn cohort a quantile; see `privacy.collusion`.
        """
        size = len(self.context.cohort)
        clients = self.num_clients or size
        honest = self.fewest_survivors is None
        colluding = num_corrupt_in_cohort(self.max_corrupt, clients, size, self.delta, honest)
        return min(colluding + self.num_byzantine, size)

    @property
    def _bets_on_the_draw(self) -> bool:
        """May a cohort hold more colluders than are counted, with a small chance that delta pays for?"""
        drawn = self.num_clients is not None and self.num_clients > len(self.context.cohort)
        return drawn and self.max_corrupt > 0.0 and self.fewest_survivors is None

    def _known_to(self, adversary: Adversary) -> int:
        """Clients whose part of a sum hides nobody from an adversary, as far as it comes from the setting."""
        if adversary is Adversary.SECAGG_SERVER:
            return self.num_corrupt
        curious = adversary is Adversary.CLIENT and self.num_byzantine > 0
        return min(self.num_byzantine + curious, len(self.context.cohort))

    def available(self, claim: PrivacyClaim, rounds: int = 0) -> float:
        """Delta that is left for the mechanism.

        Dropouts of a sum take half, and every round in which more may collude than are counted `CHANCE`.
        """
        after_drops = claim.loss.counts_answers and self.dropout_probability > 0.0
        if claim.adversary in _WIDER_VIEW and self.fewest_survivors is not None:
            after_drops = False  # whoever is missing, so many are there
        share = 0.5 if after_drops else 1.0
        if claim.adversary is Adversary.SECAGG_SERVER and self._bets_on_the_draw:
            share -= CHANCE * max(rounds, self.rounds)
        return max(share, 0.0) * self.delta

    def spent(self, claim: PrivacyClaim, rounds: int, participation: float = 1.0) -> Spending:
        """Cost of `rounds` rounds of a claim and of what was released beside them, at what is left of delta.

        Raises:
            ValueError: If the claim is `NonPrivate`.
        """
        if self.beside is not None:
            return self.beside.spent(claim, self.available(claim, rounds), rounds)
        return spent(
            claim.loss,
            self.available(claim, rounds),
            compositions=claim.compositions,
            rounds=rounds,
            participation=participation,
            slack=claim.slack,
        )

    def between_any_two(self, claim: PrivacyClaim, rounds: int, participation: float = 1.0) -> float:
        """Epsilon between any two updates, also where the claim is about an update that is replaced by zero.

        From one update to zero and from zero to the other are two steps: P <= e^a P0 + d and P0 <= e^b Q + d'
        give P <= e^(a + b) Q + d + e^a d'. Two steps of a Gaussian loss are one of half the noise multiplier.
        What was released beside the rounds changes in one of the two steps.
        Infinite where what is left of delta is too small to account for.

        References:
            Dong, Roth, Su, Gaussian Differential Privacy, 2022, theorem 2.14 (groups).
        """
        if claim.neighbours is Neighbours.SUBSTITUTION:
            return self.spent(claim, rounds, participation).epsilon
        delta = self.available(claim, rounds)

        def one(loss: Loss, share: float, counted: bool = True) -> float:
            if counted and self.beside is not None:
                return self.beside.spent(replace(claim, loss=loss), share, rounds).epsilon
            return spent(
                loss,
                share,
                compositions=claim.compositions,
                rounds=rounds,
                participation=participation,
                slack=claim.slack,
            ).epsilon

        if isinstance(claim.loss, GaussianLoss):
            return one(replace(claim.loss, noise_multiplier=claim.loss.noise_multiplier / 2.0), delta)
        best = math.inf
        for share in (0.5, 0.9, 0.99, 0.999):
            first = one(claim.loss, share * delta)
            left = (1.0 - share) * delta * math.exp(-min(first, 700.0))
            if left >= SMALLEST_DELTA:
                best = min(best, first + one(claim.loss, left, counted=False))
        return best

    def secret(self, claim: PrivacyClaim, rounds: int) -> float:
        """Epsilon of `rounds` released rounds, each with a secret draw, between any two updates.

        The smaller of the amplified epsilon and that of a client that took part in every round: both hold.

        Raises:
            ValueError: If the claim is not about substitution.
        """
        size = len(self.context.cohort)
        amplified = secret_epsilon(
            claim.loss,
            self.available(claim, rounds),
            drawn=size,
            population=self.num_clients or size,
            rounds=rounds,
            neighbours=claim.neighbours,
            compositions=claim.compositions,
            slack=claim.slack,
        )
        return min(amplified, self.between_any_two(claim, rounds))

    def claims(self, mechanism: Mechanism, client: int | None = None) -> dict[Adversary, PrivacyClaim]:
        """The claim that fits, for every adversary: about every client, or about one."""
        context = replace(self.context, num_corrupt=self.num_corrupt)
        own = _claims(mechanism, client, context)
        if self.max_corrupt and (self.num_clients or 0) > len(self.context.cohort):
            behind = own[Adversary.SECAGG_SERVER]
            own[Adversary.SECAGG_SERVER] = replace(
                behind, assumptions=(*behind.assumptions, self._colluders())
            )
        if self.num_byzantine:
            own |= {who: self._among_byzantine(mechanism, client, own, who) for who in _WIDER_VIEW}
        return {who: self._fitting(own, who, mechanism) for who in Adversary}

    def _colluders(self) -> str:
        clients, size = self.num_clients or 0, len(self.context.cohort)
        known = num_marked(self.max_corrupt, clients)
        count = self.num_corrupt - self.num_byzantine
        if self.fewest_survivors is not None:
            return f"{known} of {clients} clients may collude, and a lying server may ask {count} at once"
        return (
            f"{known} of {clients} clients may collude; {count} count in a cohort of {size}, drawn at "
            f"random, and more are in it with chance {CHANCE:.0e} delta a round at most, for which delta pays"
        )

    def _among_byzantine(
        self,
        mechanism: Mechanism,
        client: int | None,
        own: dict[Adversary, PrivacyClaim],
        adversary: Adversary,
    ) -> PrivacyClaim:
        """A claim about a sum when some of its clients lie.

        They may tell everything, so the view is within that of a server behind secure aggregation with which
        they collude. Where the mechanism does not say what that one sees, the claim is of all messages.
        """
        wider, known = own[_WIDER_VIEW[adversary]], self._known_to(adversary)
        if own[adversary].loss == wider.loss:
            return own[adversary]
        count = self.num_byzantine
        lie = f"{count} clients lie and count as known to the adversary; all others run their coins"
        honest, colluding = (
            _claims(mechanism, client, replace(self.context, num_corrupt=n))[Adversary.SECAGG_SERVER]
            for n in (0, known)
        )
        if isinstance(colluding.loss, NonPrivate) or colluding.loss == honest.loss:
            return _as_wider(wider, adversary, f"{lie}, so this is the claim of a view of all messages")
        return replace(colluding, adversary=adversary, assumptions=(*colluding.assumptions, lie))

    def _fitting(
        self, claims: dict[Adversary, PrivacyClaim], adversary: Adversary, mechanism: Mechanism
    ) -> PrivacyClaim:
        claim = claims[adversary]
        wider = _WIDER_VIEW.get(adversary)
        if wider is None:
            return claim
        if adversary is Adversary.SECAGG_SERVER and not self.secure_aggregation:
            off = f"secure aggregation is off: see the row of {wider.value}"
            return replace(claim, loss=NonPrivate(off))
        if not self.equal_weights:
            return _as_wider(
                claims[wider],
                adversary,
                "the mean is weighted, or no mean, so this is the claim of a view of all messages; weights "
                "(sample counts) are public",
            )
        if claim.loss == claims[wider].loss:
            return claim
        if not self.num_byzantine and not isinstance(claim.loss, NonPrivate):
            claim = replace(claim, assumptions=(*claim.assumptions, _HONEST))
        zeros = mechanism.fixed_cohort and adversary is not Adversary.SECAGG_SERVER
        # what a Byzantine client releases has no more coins in it
        if self.fewest_survivors is not None and not zeros:
            return self._against_a_liar(claim, claims[wider], mechanism, self.fewest_survivors)
        if self.dropout_probability > 0.0:
            return self._after_dropouts(claim, claims[wider], mechanism)
        if self.fewest_answers is not None and not mechanism.fixed_cohort:
            return self._of_real_clients(claim, claims[wider], mechanism, self.fewest_answers)
        return claim

    def _against_a_liar(
        self, claim: PrivacyClaim, wider: PrivacyClaim, mechanism: Mechanism, survivors: int
    ) -> PrivacyClaim:
        """The claim of the worst cohort of survivors that a lying server can make the clients confirm."""
        if isinstance(claim.loss, NonPrivate) or claim.loss == wider.loss:
            return claim
        size = len(self.context.cohort)
        left_out = size - survivors
        tolerated = mechanism.tolerated_dropouts(self.context)
        confirmed = f"at least {survivors} of {size} clients confirm that they survived, whoever they are"
        if tolerated is not None and tolerated < left_out:
            lie = (
                f"a lying server may declare {left_out} of {size} clients dropped, and the noise of all but "
                f"{tolerated} is counted on; allow for max_dropped >= {left_out}"
            )
            return replace(claim, loss=NonPrivate(lie))
        if tolerated is not None:
            return replace(claim, assumptions=(*claim.assumptions, confirmed))
        loss = claim.loss.left_out(left_out)
        if loss is None:
            why = "a lying server may leave clients out, so this is the claim of a view of all messages"
            return _as_wider(wider, claim.adversary, why)
        return replace(claim, loss=loss, assumptions=(*claim.assumptions, confirmed))

    def _of_real_clients(
        self, claim: PrivacyClaim, wider: PrivacyClaim, mechanism: Mechanism, answers: int
    ) -> PrivacyClaim:
        """The claim of the worst clients that may be silent."""
        size, tolerated = len(self.context.cohort), mechanism.tolerated_dropouts(self.context)
        if isinstance(claim.loss, NonPrivate) or answers == size:
            return claim
        if tolerated is not None:
            enforced = f"a round with more than {tolerated} dropouts is aborted"
            return replace(claim, assumptions=(*claim.assumptions, enforced))
        loss = claim.loss.left_out(size - answers)
        if loss is None:
            why = "clients may be silent, so this is the claim of a view of all messages"
            return _as_wider(wider, claim.adversary, why)
        counted = f"no more than {answers} of {size} clients are sure to answer, whoever they are"
        return replace(claim, loss=loss, assumptions=(*claim.assumptions, counted))

    def _after_dropouts(self, claim: PrivacyClaim, wider: PrivacyClaim, mechanism: Mechanism) -> PrivacyClaim:
        if isinstance(claim.loss, NonPrivate):
            return claim
        if mechanism.fixed_cohort:
            zeros = (
                "a client that does not answer counts as one that sent zeros, so the noise stays what it was"
            )
            return replace(claim, assumptions=(*claim.assumptions, zeros))
        tolerated = mechanism.tolerated_dropouts(self.context)
        if tolerated is not None:
            enforced = f"a round with more than {tolerated} dropouts is aborted"
            return replace(claim, assumptions=(*claim.assumptions, enforced))
        failure = self.delta / (2 * max(self.rounds, 1))
        sizes = [len(group) for group in self.context.groups]
        corrupt = self._known_to(claim.adversary)
        loss = claim.loss.after_dropouts(sizes, self.dropout_probability, failure, corrupt)
        if loss is None:
            why = (
                "the aggregate claim needs every client to answer, so this is the claim of a view of all "
                "messages"
            )
            return _as_wider(wider, claim.adversary, why)
        independent = "clients drop out independently of data and adversary; half of delta pays for it"
        return replace(claim, loss=loss, assumptions=(*claim.assumptions, independent))


def _claims(mechanism: Mechanism, client: int | None, context: RoundContext) -> dict[Adversary, PrivacyClaim]:
    claims = mechanism.claims(context) if client is None else mechanism.claims_about(client, context)
    return {claim.adversary: claim for claim in claims}


def _as_wider(wider: PrivacyClaim, adversary: Adversary, why: str) -> PrivacyClaim:
    return replace(wider, adversary=adversary, assumptions=(*wider.assumptions, why))
