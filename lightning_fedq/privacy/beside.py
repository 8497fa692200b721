"""Releases beside the rounds, from the same clients' data, which every epsilon of a run counts."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PrivacyClaim
from lightning_fedq.privacy.accounting import ClaimAccountant, Spending, spent
from lightning_fedq.privacy.losses import composed_mass


@dataclass(frozen=True)
class Beside:
    """Releases of one kind, in each of which every client takes part.

    Args:
        claims: Claim about one release for every adversary, between any two values of a client.
        times: Releases, >= 0.
        what: What is released, in a sentence.
    """

    claims: Mapping[Adversary, PrivacyClaim]
    times: int
    what: str

    def spent(self, claim: PrivacyClaim, delta: float, rounds: int) -> Spending:
        """Cost of so many rounds of a claim together with these releases.

        The rounds are taken as if the client had been in all of them: no lottery is averaged over.

        Args:
            claim: Claim about one round; not `NonPrivate`.
            delta: In (0, 1).
            rounds: >= 0.
        """
        own = self.claims[claim.adversary]
        alone = spent(claim.loss, delta, compositions=claim.compositions, rounds=rounds, slack=claim.slack)
        if not self.times:
            return alone
        if isinstance(own.loss, NonPrivate):
            return Spending(float("inf"), delta, 1.0, f"{self.what} {own.loss.reason}")
        accountant = ClaimAccountant()
        if rounds:
            accountant.step(claim.loss, claim.compositions, rounds, claim.slack)
        accountant.step(own.loss, own.compositions, self.times, own.slack)
        mass = composed_mass(composed_mass(own.loss.infinite_mass, own.compositions), self.times)
        mass += alone.infinite_mass
        if mass > delta:
            return Spending(float("inf"), delta, min(mass, 1.0), "infinite-loss mass above delta")
        method = f"{alone.method}, with {self.times} further releases" if rounds else "further releases alone"
        return Spending(accountant.get_epsilon(delta), delta, mass, method)
