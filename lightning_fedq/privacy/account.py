"""Privacy claims that fit a run: the mechanism's own, adjusted for dropouts, collusion and setting.

Some claims do not fit the run, for example because the mean is weighted. Such a claim is replaced by that of
an adversary who sees at least as much (post-processing), or by `NonPrivate` with the reason. Nothing is
guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.mechanisms.interface import Adversary, Neighbours, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.accounting import Spending, spent
from lightning_fedq.privacy.collusion import CHANCE
from lightning_fedq.privacy.grid import SMALLEST_DELTA
from lightning_fedq.privacy.losses import GaussianLoss, Loss
from lightning_fedq.privacy.run import Run
from lightning_fedq.privacy.sampled import find_secrecy_obstacle, secret_epsilon

OF_SUMS = (Adversary.SECAGG_SERVER, Adversary.OUTSIDER, Adversary.CLIENT)
"""Adversaries that see aggregates only, so that other clients hide the victim."""
_HONEST = kind.HONEST_COINS("every other client runs its coins")


@dataclass(frozen=True)
class Account:
    """Privacy claims of a run and what they cost, at one delta.

    Args:
        run: Description of the run: mechanism, cohorts, trust in the parties, charges.
        delta: Delta of all statements, in (0, 1).
        rounds: Number of rounds of one client that statements are about. Delta covers dropouts and opened
            masks in as many rounds. None is the run's own number.
    """

    run: Run
    delta: float
    rounds: int | None = None

    @property
    def horizon(self) -> int:
        """Number of rounds of one client that are accounted for, >= 1."""
        return max(self.run.horizon if self.rounds is None else self.rounds, 1)

    @property
    def num_colluding(self) -> int:
        """Largest number of clients of a cohort that may collude with the server, Byzantine clients included.

        Where cohorts are drawn at random this is a quantile: a round has more with probability at most
        `CHANCE` times delta (see `privacy.collusion`).
        """
        return self.run.colluders.max_in_cohort(CHANCE * self.delta)

    @property
    def masks_hold(self) -> bool:
        """Whether half of delta covers the probability that masks open in some round.

        If not, masks count as open. Where clients may drop out, dropouts may use half of delta, so a quarter
        must cover it.
        """
        share = 0.25 if self.run.sampling.dropout_probability else 0.5
        return self.horizon * self.run.masks_open <= share * self.delta

    def _count_known_clients(self, adversary: Adversary) -> int:
        """Return the number of clients of a cohort whose contributions the adversary knows.

        The number follows from the setting alone. Such clients hide nobody in a sum. A curious client counts
        itself only if there are Byzantine clients.
        """
        if adversary is Adversary.SECAGG_SERVER:
            return self.num_colluding
        curious = adversary is Adversary.CLIENT and self.run.threat.num_byzantine > 0
        return min(self.run.threat.num_byzantine + curious, len(self.run.context.cohort))

    def available(self, claim: PrivacyClaim, rounds: int = 0) -> float:
        """Return the part of delta that is left for the mechanism.

        Dropouts take half, if the loss depends on the number of answers. In every round, `CHANCE` times delta
        pays for more colluders than are counted, and the probability that masks open is subtracted. A
        mechanism that hands noise on is charged for the rounds of all clients.

        Args:
            claim: Claim that is to be accounted for.
            rounds: Rounds of one client that are accounted for.
        """
        run = self.run
        # with a confirmed number of survivors in every sum, dropouts cost no delta
        confirmed = claim.adversary in OF_SUMS and run.min_survivors is not None
        depends_on_answers = claim.loss.counts_answers and run.sampling.dropout_probability > 0.0
        share = 0.5 if depends_on_answers and not confirmed else 1.0
        if claim.adversary is Adversary.SECAGG_SERVER and self.masks_hold:
            charged = max(rounds, self.horizon, run.rounds if run.mechanism.reuses_noise else 0)
            share_of_round = CHANCE * run.colluders.drawn + run.masks_open / self.delta
            share -= share_of_round * charged
        return max(share, 0.0) * self.delta

    def spent(
        self,
        claim: PrivacyClaim,
        rounds: int,
        participation: float = 1.0,
        past: int = 0,
        delta: float | None = None,
    ) -> Spending:
        """Return the cost of `past` certain rounds and of `rounds` more in which the client may take part.

        Args:
            claim: Claim of one round.
            rounds: Rounds in which the client takes part with probability `participation`.
            participation: Probability of taking part in one of `rounds`, in [0, 1].
            past: Rounds in which the client took part for certain.
            delta: Delta of the statement. None is the part of delta that is `available`.

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
        """Return epsilon under replace-one adjacency, also for a claim under zero-out adjacency.

        From one update to zero and from zero to another update are two steps: P <= e^a P0 + d and P0 <= e^b Q
        + d' give P <= e^(a + b) Q + d + e^a d'. For a Gaussian loss, the two steps equal one with half the
        noise multiplier. Infinite if the delta that is left for the second step is below `SMALLEST_DELTA`.

        Args:
            claim: Claim of one round.
            rounds: Rounds in which the client takes part with probability `participation`.
            participation: Probability of taking part in one of `rounds`, in [0, 1].
            past: Rounds in which the client took part for certain.

        References:
            Dong, Roth, Su, Gaussian Differential Privacy, 2022, theorem 2.14 (groups).
        """
        if claim.neighbours is Neighbours.SUBSTITUTION:
            return self.spent(claim, rounds, participation, past).epsilon
        delta = self.available(claim, past + rounds)

        def epsilon_for(claim: PrivacyClaim, share: float) -> float:
            return self.spent(claim, rounds, participation, past, share).epsilon

        if isinstance(claim.loss, GaussianLoss):
            # the two steps together have twice the mu
            half = replace(claim.loss, noise_multiplier=claim.loss.noise_multiplier / 2.0)
            return epsilon_for(replace(claim, loss=half), delta)
        best = math.inf
        for share in (0.5, 0.9, 0.99, 0.999):  # every split of delta is valid, so the best of a few is
            first = epsilon_for(claim, share * delta)
            # the second step gets d' with d + e^a d' = delta, where a is the epsilon of the first step
            left = (1.0 - share) * delta * math.exp(-min(first, 700.0))
            if left >= SMALLEST_DELTA:
                best = min(best, first + epsilon_for(claim, left))
        return best

    def secret(self, claim: PrivacyClaim, rounds: int) -> float:
        """Return epsilon of some released rounds with secret cohorts, under replace-one adjacency.

        Returns the smaller of two valid bounds: the epsilon amplified by the draw, and the epsilon of a
        client that takes part in as many rounds as the law of cohorts allows.

        Args:
            claim: Claim of one round.
            rounds: Released rounds of the run.

        Raises:
            ValueError: If the claim is not an outsider's, a condition of secret cohorts is not met, or there
                is no account of the draw.
        """
        if claim.adversary is not Adversary.OUTSIDER:
            raise ValueError(f"{claim.adversary.value} knows who took part. Use adversary='outsider'.")
        threat = self.run.threat
        if why := find_secrecy_obstacle(self.run.sampling, threat.plain_sum, threat.num_byzantine):
            raise ValueError(f"secret cohorts need {why}")
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
        """Return epsilon of some rounds of one client against an adversary, under replace-one adjacency.

        It is what the report of a run says that ends with these rounds.

        Args:
            adversary: Adversary of the statement.
            charges: Rounds of one client, or released rounds if `secret`.
            secret: Whether the adversary never learns which clients took part.
            client: Client of the statement. None is a statement about every client.

        Returns:
            Epsilon in nats, infinite where nothing is claimed.
        """
        account = replace(self, rounds=charges)
        claim = account.claims(client)[adversary]
        if isinstance(claim.loss, NonPrivate):
            return math.inf
        return account.secret(claim, charges) if secret else account.epsilon_replace_one(claim, charges)

    def claims(self, client: int | None = None) -> dict[Adversary, PrivacyClaim]:
        """Return the claim that fits the run for every adversary, about every client or about one.

        Args:
            client: Client that the claims are about. None is every client.
        """
        own = self._claims(client, self.num_colluding)
        if self.run.colluders.num_in_federation and self.run.num_clients > self.run.cohort_size:
            own[Adversary.SECAGG_SERVER] = _add_assumption(own[Adversary.SECAGG_SERVER], self._colluders())
        if self.run.threat.num_byzantine:
            own |= {who: self._claim_among_byzantine(client, own, who) for who in OF_SUMS}
        return {who: self._fitting_claims(own, who) for who in Adversary}

    def _claims(self, client: int | None, num_colluding: int) -> dict[Adversary, PrivacyClaim]:
        """Return the mechanism's own claims by adversary, about every client or about one."""
        mechanism, context = self.run.mechanism, replace(self.run.context, num_colluding=num_colluding)
        claims = mechanism.claims(context) if client is None else mechanism.claims_about(client, context)
        return {claim.adversary: claim for claim in claims}

    def _colluders(self) -> kind.Assumption:
        """Return the assumption on how many clients collude."""
        run, count = self.run, self.num_colluding - self.run.threat.num_byzantine
        known = f"{run.colluders.num_in_federation} of {run.num_clients} clients may collude"
        if not run.colluders.drawn:
            return kind.COLLUSION(f"{known}, and a lying server may ask {count} at once")
        return kind.COLLUSION(
            f"{known}: {count} are counted in a cohort of {run.cohort_size}, drawn at random, and more are "
            f"in it with probability {CHANCE:.0e} delta a round at most, which delta covers",
            kind.SETTLED_COLLUDERS,
        )

    def _claim_among_byzantine(
        self, client: int | None, claim: dict[Adversary, PrivacyClaim], adversary: Adversary
    ) -> PrivacyClaim:
        """Return the claim about a sum when some clients of the cohort are Byzantine.

        Byzantine clients may reveal all they know. The adversary's view is then within that of a server
        behind secure aggregation that colludes with them. If the mechanism's claim does not depend on
        colluders, the claim of a view of all messages is used instead.
        """
        wider, known = claim[Adversary.SERVER_AND_PARTNER], self._count_known_clients(adversary)
        if claim[adversary].loss == wider.loss:
            return claim[adversary]
        count = self.run.threat.num_byzantine
        lie = kind.HONEST_COINS(
            f"{count} clients lie and count as known to the adversary, and all others run their coins"
        )
        honest, colluding = (self._claims(client, n)[Adversary.SECAGG_SERVER] for n in (0, known))
        # a claim that does not depend on the number of colluders does not cover what they see
        if isinstance(colluding.loss, NonPrivate) or colluding.loss == honest.loss:
            return _claim_of_wider(wider, adversary, lie)
        return replace(_add_assumption(colluding, lie), adversary=adversary)

    def _fitting_claims(self, claims: dict[Adversary, PrivacyClaim], adversary: Adversary) -> PrivacyClaim:
        """Return the claim that holds against one adversary in this run, or `NonPrivate`.

        Another claim is that of a wider adversary, which depends on no aggregation. A client that is known
        to the adversary may be the partner with whom the victim shares bits. The wider view then includes the
        partner.
        """
        claim, run = claims[adversary], self.run
        if adversary not in OF_SUMS:
            return claim
        alone = adversary is not Adversary.CLIENT and not self._count_known_clients(adversary)
        wider = claims[Adversary.SERVER if alone else Adversary.SERVER_AND_PARTNER]
        if adversary is Adversary.SECAGG_SERVER:
            if run.threat.secure_sum is None:
                off = f"secure aggregation is off: see the row of {wider.adversary.value}"
                return replace(claim, loss=NonPrivate(off))
            if not self.masks_hold:
                power = math.ceil(10 * math.log2(run.masks_open)) / 10
                why = f"colluders open masks with probability up to 2^{power:g} a round"
                return _claim_of_wider(wider, adversary, f"{why}, more than delta covers")
            if claim.num_colluders < self.num_colluding:
                few = (
                    f"the mechanism's claim covers {claim.num_colluders:g} colluding clients, "
                    f"{self.num_colluding} may collude"
                )
                claim = replace(claim, loss=NonPrivate(few))
        if not run.threat.plain_sum:
            why = "the mean is weighted or replaced by a robust rule"
            return _claim_of_wider(wider, adversary, why, ", and weights (sample counts) are public")
        if claim.loss == wider.loss or isinstance(claim.loss, NonPrivate):
            return claim
        if not run.threat.num_byzantine:
            claim = _add_assumption(claim, _HONEST)
        return self._claim_about_answers(claim, wider)

    def _claim_about_answers(self, claim: PrivacyClaim, wider: PrivacyClaim) -> PrivacyClaim:
        """Return a claim about a sum for the clients that are sure to be in it."""
        run, fixed = self.run, self.run.mechanism.fixed_cohort
        # a model that a lying server releases holds the randomised bits of the survivors only
        if run.min_survivors is not None and (not fixed or claim.adversary is Adversary.SECAGG_SERVER):
            return self._claim_against_active_server(claim, wider, run.min_survivors)
        if run.sampling.dropout_probability > 0.0:
            return self._claim_after_dropouts(claim, wider)
        if run.min_answers is not None and not fixed:
            return self._claim_with_silent_clients(claim, wider, run.min_answers)
        return claim

    def _claim_against_active_server(
        self, claim: PrivacyClaim, wider: PrivacyClaim, survivors: int
    ) -> PrivacyClaim:
        """Return the claim for the worst survivors that a lying server can make clients confirm."""
        size = len(self.run.context.cohort)
        left_out, tolerated = size - survivors, self.run.mechanism.tolerated_dropouts(self.run.context)
        confirmed = kind.DROPOUTS(
            f"at least {survivors} of {size} clients confirm that they survived, whoever they are"
        )
        if tolerated is None:
            why = "a lying server may leave clients out"
            return _reduced(claim, claim.loss.left_out(left_out), confirmed, wider, why)
        if tolerated >= left_out:
            return _add_assumption(claim, confirmed)
        lie = (
            f"a lying server may declare {left_out} of {size} clients dropped, but the noise tolerates only "
            f"{tolerated}: set max_dropped_clients >= {left_out}"
        )
        return replace(claim, loss=NonPrivate(lie))

    def _claim_with_silent_clients(
        self, claim: PrivacyClaim, wider: PrivacyClaim, answers: int
    ) -> PrivacyClaim:
        """Return the claim for the worst set of clients that may be silent."""
        size = len(self.run.context.cohort)
        if answers == size:
            return claim
        tolerated = self.run.mechanism.tolerated_dropouts(self.run.context)
        if tolerated is not None:
            return _add_assumption(claim, _aborted(tolerated))
        counted = kind.DROPOUTS(
            f"no more than {answers} of {size} clients are sure to answer, whoever they are"
        )
        return _reduced(claim, claim.loss.left_out(size - answers), counted, wider, "clients may be silent")

    def _claim_after_dropouts(self, claim: PrivacyClaim, wider: PrivacyClaim) -> PrivacyClaim:
        """Return the claim when clients drop out independently with `dropout_probability`."""
        if self.run.mechanism.fixed_cohort:
            return _add_assumption(
                claim,
                kind.DROPOUTS(
                    "a client that does not answer counts as one that sent zeros, so the noise is unchanged"
                ),
            )
        tolerated = self.run.mechanism.tolerated_dropouts(self.run.context)
        if tolerated is not None:
            return _add_assumption(claim, _aborted(tolerated))
        failure = self.delta / (2 * self.horizon)  # the half of delta that `available` reserves
        sizes = [len(group) for group in self.run.context.groups]
        corrupt = self._count_known_clients(claim.adversary)
        loss = claim.loss.after_dropouts(sizes, self.run.sampling.dropout_probability, failure, corrupt)
        independent = kind.DROPOUTS(
            "clients drop out independently of data and adversary, and half of delta covers it"
        )
        return _reduced(claim, loss, independent, wider, "the aggregate claim needs every client to answer")


_WIDER = "so this is the claim of a view of all messages"


def _aborted(tolerated: int) -> kind.Assumption:
    return kind.DROPOUTS(f"a round with more than {tolerated} dropouts is aborted")


def _add_assumption(claim: PrivacyClaim, assumption: kind.Assumption) -> PrivacyClaim:
    return replace(claim, assumptions=(*claim.assumptions, assumption))


def _claim_of_wider(wider: PrivacyClaim, adversary: Adversary, reason: str, cure: str = "") -> PrivacyClaim:
    """Return the claim of a view of all messages, stated for `adversary` with the reason as an assumption."""
    stated = kind.VIEW(f"{reason}, {_WIDER}{cure}", *getattr(reason, "kinds", ()))
    return replace(_add_assumption(wider, stated), adversary=adversary)


def _reduced(
    claim: PrivacyClaim, loss: Loss | None, assumption: kind.Assumption, wider: PrivacyClaim, reason: str
) -> PrivacyClaim:
    """Return the claim with a loss of fewer clients, or of the wider view where there is no such loss."""
    if loss is None:
        return _claim_of_wider(wider, claim.adversary, reason)
    return replace(_add_assumption(claim, assumption), loss=loss)
