"""Which claim fits a set-up: the mechanism's own, after dropouts and collusion, or that of a wider view.

Where a claim does not fit, it falls back on a view that sees at least as much (post-processing), or is
`NonPrivate` with the reason; nothing is guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_fedq.mechanisms.interface import Adversary, Neighbours, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.accounting import Spending, spent
from lightning_fedq.privacy.collusion import CHANCE
from lightning_fedq.privacy.grid import SMALLEST_DELTA
from lightning_fedq.privacy.losses import GaussianLoss, Loss
from lightning_fedq.privacy.run import Run
from lightning_fedq.privacy.sampled import secret_epsilon

_OF_SUMS = (Adversary.SECAGG_SERVER, Adversary.OUTSIDER, Adversary.CLIENT)

_HONEST = "every other client runs its coins"


@dataclass(frozen=True)
class Account:
    """Claims about a run, and what they have spent, at one delta.

    Args:
        delta: In (0, 1).
    """

    run: Run
    delta: float

    @property
    def num_corrupt(self) -> int:
        """Clients of a cohort that may collude with the server, and those that lie.

        In a drawn cohort a quantile; see `privacy.collusion`.
        """
        return self.run.colluders.max_in_cohort(CHANCE * self.delta)

    @property
    def masks_hold(self) -> bool:
        """Can half of delta, or of what dropouts leave, pay for masks that open? Else they count as open."""
        share = 0.25 if self.run.sampling.dropout_probability else 0.5
        return max(self.run.horizon, 1) * self.run.masks_open <= share * self.delta

    def _count_known_clients(self, adversary: Adversary) -> int:
        """Clients whose part of a sum hides nobody from an adversary, as far as it comes from the setting."""
        if adversary is Adversary.SECAGG_SERVER:
            return self.num_corrupt
        curious = adversary is Adversary.CLIENT and self.run.threat.num_byzantine > 0
        return min(self.run.threat.num_byzantine + curious, len(self.run.context.cohort))

    def _wider_adversary(self, adversary: Adversary) -> Adversary | None:
        """A view that sees at least as much and depends on no aggregation. None: it depends on none itself.

        Whoever is known to the adversary may be the one that a client shares its bits with.
        """
        if adversary not in _OF_SUMS:
            return None
        alone = adversary is not Adversary.CLIENT and not self._count_known_clients(adversary)
        return Adversary.SERVER if alone else Adversary.SERVER_AND_PARTNER

    def available(self, claim: PrivacyClaim, rounds: int = 0) -> float:
        """Delta that is left for the mechanism.

        Dropouts of a sum take half, every round in which more may collude than are counted `CHANCE`, and
        every one in which masks may be opened the chance of that. Noise that is handed on is that of others'
        rounds, too.
        """
        run = self.run
        after_drops = claim.loss.counts_answers and run.sampling.dropout_probability > 0.0
        if claim.adversary in _OF_SUMS and run.min_survivors is not None:
            after_drops = False  # whoever is missing, so many are there
        share = 0.5 if after_drops else 1.0
        if claim.adversary is Adversary.SECAGG_SERVER and self.masks_hold:
            more = CHANCE * run.colluders.drawn + run.masks_open / self.delta
            share -= more * max(rounds, run.horizon, run.rounds if run.mechanism.hands_on else 0)
        return max(share, 0.0) * self.delta

    def spent(
        self,
        claim: PrivacyClaim,
        rounds: int,
        participation: float = 1.0,
        past: int = 0,
        delta: float | None = None,
    ) -> Spending:
        """Cost of `past` rounds of a claim and a lottery of `rounds`, at a delta or at what is left of it.

        Raises:
            ValueError: If the claim is `NonPrivate`.
        """
        return spent(
            claim.loss,
            self.available(claim, past + rounds) if delta is None else delta,
            compositions=claim.compositions,
            rounds=rounds,
            participation=participation,
            past=past,
            slack=claim.slack,
        )

    def epsilon_replace_one(
        self, claim: PrivacyClaim, rounds: int, participation: float = 1.0, past: int = 0
    ) -> float:
        """Epsilon between any two updates, also where the claim is about an update that is replaced by zero.

        From one update to zero and from zero to the other are two steps: P <= e^a P0 + d and P0 <= e^b Q + d'
        give P <= e^(a + b) Q + d + e^a d'. Two steps of a Gaussian loss are one of half the noise multiplier.
        Infinite where what is left of delta is too small to account for.

        References:
            Dong, Roth, Su, Gaussian Differential Privacy, 2022, theorem 2.14 (groups).
        """
        if claim.neighbours is Neighbours.SUBSTITUTION:
            return self.spent(claim, rounds, participation, past).epsilon
        delta = self.available(claim, past + rounds)

        def epsilon_for(claim: PrivacyClaim, share: float) -> float:
            return self.spent(claim, rounds, participation, past, share).epsilon

        if isinstance(claim.loss, GaussianLoss):
            # mu adds up over the two steps
            half = replace(claim.loss, noise_multiplier=claim.loss.noise_multiplier / 2.0)
            return epsilon_for(replace(claim, loss=half), delta)
        best = math.inf
        for share in (0.5, 0.9, 0.99, 0.999):  # any split holds, so the best of a few does
            first = epsilon_for(claim, share * delta)
            # d + e^a d' = delta, a of the first step
            left = (1.0 - share) * delta * math.exp(-min(first, 700.0))
            if left >= SMALLEST_DELTA:
                best = min(best, first + epsilon_for(claim, left))
        return best

    def secret(self, claim: PrivacyClaim, rounds: int) -> float:
        """Epsilon of `rounds` released rounds with secret draws, between any two updates.

        The smaller of the amplified epsilon and that of a client that took part as often as one can: both
        hold.

        Raises:
            ValueError: If the claim is not about substitution, or there is no account of the draw.
        """
        law, clients = self.run.sampling.law, self.run.num_clients
        amplified = secret_epsilon(
            claim.loss,
            self.available(claim, rounds),
            law=law,
            num_clients=clients,
            rounds=rounds,
            neighbours=claim.neighbours,
            compositions=claim.compositions,
            slack=claim.slack,
        )
        most = law.max_rounds(rounds, clients)
        return min(amplified, self.epsilon_replace_one(claim, rounds if most is None else most))

    def epsilon(
        self, adversary: Adversary, charges: int, *, secret: bool, client: int | None = None
    ) -> float:
        """Epsilon of some rounds of one client, between any two updates, infinite where nothing is claimed.

        Args:
            charges: Rounds of one client, or released rounds if `secret`.
            secret: Does the adversary never learn who took part?
            client: Client that it is about; None is every client.
        """
        claim = self.claims(client)[adversary]
        if isinstance(claim.loss, NonPrivate):
            return math.inf
        return self.secret(claim, charges) if secret else self.epsilon_replace_one(claim, charges)

    def claims(self, client: int | None = None) -> dict[Adversary, PrivacyClaim]:
        """The claim that fits, for every adversary: about every client, or about one."""
        own = self._claims(client, self.num_corrupt)
        if self.run.colluders.num_in_federation and self.run.num_clients > self.run.cohort_size:
            own[Adversary.SECAGG_SERVER] = _add_assumption(own[Adversary.SECAGG_SERVER], self._colluders())
        if self.run.threat.num_byzantine:
            own |= {who: self._claim_among_byzantine(client, own, who) for who in _OF_SUMS}
        return {who: self._fitting_claims(own, who) for who in Adversary}

    def _claims(self, client: int | None, num_corrupt: int) -> dict[Adversary, PrivacyClaim]:
        """The mechanism's own claims, about every client, or about one."""
        mechanism, context = self.run.mechanism, replace(self.run.context, num_corrupt=num_corrupt)
        claims = mechanism.claims(context) if client is None else mechanism.claims_about(client, context)
        return {claim.adversary: claim for claim in claims}

    def _colluders(self) -> str:
        clients, size, known = (
            self.run.num_clients,
            self.run.cohort_size,
            self.run.colluders.num_in_federation,
        )
        count = self.num_corrupt - self.run.threat.num_byzantine
        if not self.run.colluders.drawn:
            return f"{known} of {clients} clients may collude, and a lying server may ask {count} at once"
        return (
            f"{known} of {clients} clients may collude; {count} count in a cohort of {size}, drawn at "
            f"random, and more are in it with chance {CHANCE:.0e} delta a round at most, for which delta pays"
        )

    def _claim_among_byzantine(
        self, client: int | None, claim: dict[Adversary, PrivacyClaim], adversary: Adversary
    ) -> PrivacyClaim:
        """A claim about a sum when some of its clients lie.

        They may tell everything, so the view is within that of a server behind secure aggregation with which
        they collude. Where the mechanism does not say what that one sees, the claim is of all messages.
        """
        wider, known = claim[Adversary.SERVER_AND_PARTNER], self._count_known_clients(adversary)
        if claim[adversary].loss == wider.loss:
            return claim[adversary]
        count = self.run.threat.num_byzantine
        lie = f"{count} clients lie and count as known to the adversary; all others run their coins"
        honest, colluding = (self._claims(client, n)[Adversary.SECAGG_SERVER] for n in (0, known))
        # a claim that does not change with colluders does not say what they see
        if isinstance(colluding.loss, NonPrivate) or colluding.loss == honest.loss:
            return _claim_of_wider(wider, adversary, lie)
        return replace(_add_assumption(colluding, lie), adversary=adversary)

    def _fitting_claims(self, claims: dict[Adversary, PrivacyClaim], adversary: Adversary) -> PrivacyClaim:
        claim, run, wider_view = claims[adversary], self.run, self._wider_adversary(adversary)
        if wider_view is None:
            return claim
        wider = claims[wider_view]
        if adversary is Adversary.SECAGG_SERVER and run.threat.secure_sum is None:
            off = f"secure aggregation is off: see the row of {wider_view.value}"
            return replace(claim, loss=NonPrivate(off))
        if adversary is Adversary.SECAGG_SERVER and not self.masks_hold:
            power = math.ceil(10 * math.log2(run.masks_open)) / 10
            why = f"colluders open masks with chance up to 2^{power:g} a round, more than delta can pay"
            return _claim_of_wider(wider, adversary, why)
        if not run.threat.plain_sum:
            why = "the mean is weighted, or no mean"
            return _claim_of_wider(wider, adversary, why, "; weights (sample counts) are public")
        if claim.loss == wider.loss or isinstance(claim.loss, NonPrivate):
            return claim
        if not run.threat.num_byzantine:
            claim = _add_assumption(claim, _HONEST)
        fixed = run.mechanism.fixed_cohort
        # what a Byzantine client releases has no more coins in it
        if run.min_survivors is not None and (not fixed or adversary is Adversary.SECAGG_SERVER):
            return self._claim_against_active_server(claim, wider, run.min_survivors)
        if run.sampling.dropout_probability > 0.0:
            return self._claim_after_dropouts(claim, wider)
        if run.min_answers is not None and not fixed:
            return self._claim_with_silent_clients(claim, wider, run.min_answers)
        return claim

    def _claim_against_active_server(
        self, claim: PrivacyClaim, wider: PrivacyClaim, survivors: int
    ) -> PrivacyClaim:
        """The claim of the worst cohort of survivors that a lying server can make the clients confirm."""
        size = len(self.run.context.cohort)
        left_out, tolerated = size - survivors, self.run.mechanism.tolerated_dropouts(self.run.context)
        confirmed = f"at least {survivors} of {size} clients confirm that they survived, whoever they are"
        if tolerated is None:
            why = "a lying server may leave clients out"
            return _reduced(claim, claim.loss.left_out(left_out), confirmed, wider, why)
        if tolerated >= left_out:
            return _add_assumption(claim, confirmed)
        lie = (
            f"a lying server may declare {left_out} of {size} clients dropped, and the noise of all but "
            f"{tolerated} is counted on; allow for max_dropped >= {left_out}"
        )
        return replace(claim, loss=NonPrivate(lie))

    def _claim_with_silent_clients(
        self, claim: PrivacyClaim, wider: PrivacyClaim, answers: int
    ) -> PrivacyClaim:
        """The claim of the worst clients that may be silent."""
        size = len(self.run.context.cohort)
        if answers == size:
            return claim
        tolerated = self.run.mechanism.tolerated_dropouts(self.run.context)
        if tolerated is not None:
            return _add_assumption(claim, f"a round with more than {tolerated} dropouts is aborted")
        counted = f"no more than {answers} of {size} clients are sure to answer, whoever they are"
        return _reduced(claim, claim.loss.left_out(size - answers), counted, wider, "clients may be silent")

    def _claim_after_dropouts(self, claim: PrivacyClaim, wider: PrivacyClaim) -> PrivacyClaim:
        if self.run.mechanism.fixed_cohort:
            return _add_assumption(
                claim,
                "a client that does not answer counts as one that sent zeros, so the noise stays what it was",
            )
        tolerated = self.run.mechanism.tolerated_dropouts(self.run.context)
        if tolerated is not None:
            return _add_assumption(claim, f"a round with more than {tolerated} dropouts is aborted")
        failure = self.delta / (2 * max(self.run.horizon, 1))  # the half that `available` leaves out
        sizes = [len(group) for group in self.run.context.groups]
        corrupt = self._count_known_clients(claim.adversary)
        loss = claim.loss.after_dropouts(sizes, self.run.sampling.dropout_probability, failure, corrupt)
        independent = "clients drop out independently of data and adversary; half of delta pays for it"
        return _reduced(claim, loss, independent, wider, "the aggregate claim needs every client to answer")


_WIDER = "so this is the claim of a view of all messages"


def _add_assumption(claim: PrivacyClaim, assumption: str) -> PrivacyClaim:
    return replace(claim, assumptions=(*claim.assumptions, assumption))


def _claim_of_wider(wider: PrivacyClaim, adversary: Adversary, reason: str, cure: str = "") -> PrivacyClaim:
    return replace(_add_assumption(wider, f"{reason}, {_WIDER}{cure}"), adversary=adversary)


def _reduced(
    claim: PrivacyClaim, loss: Loss | None, assumption: str, wider: PrivacyClaim, reason: str
) -> PrivacyClaim:
    """The claim with a loss of fewer clients, or, where there is none, that of the wider view."""
    if loss is None:
        return _claim_of_wider(wider, claim.adversary, reason)
    return replace(_add_assumption(claim, assumption), loss=loss)
