"""Interface of a mechanism: the names of `MechanismBasics`, and those that few mechanisms define."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lightning_fedq.mechanisms.interface.basics import MechanismBasics
from lightning_fedq.mechanisms.interface.claims import Adversary, Neighbours, PrivacyClaim
from lightning_fedq.mechanisms.interface.context import RoundContext, split_groups

if TYPE_CHECKING:
    from lightning_fedq.keys.randomness import PublicRandomness
    from lightning_fedq.mechanisms.interface.ranges import RangeRule
    from lightning_fedq.wire.coding import Code


class Mechanism(MechanismBasics):
    """Compression and privacy mechanism: updates become integers, and integers of many clients their sum.

    A new mechanism needs the names of `MechanismBasics`. All names here have defaults that are right for most
    mechanisms.
    """

    # ---- cohorts and rounds -----------------------------------------------------------------------------

    fixed_cohort: ClassVar[bool] = False
    """Whether the noise is divided among the whole cohort before the round.

    If so, a client that does not answer counts as a client that sent zeros, which keeps the distribution of
    the noise. Weights of clients are refused."""
    reuses_noise: ClassVar[bool] = False
    """Whether clients subtract noise that clients of the previous round added.

    If so, each client gets its predecessor and its successor (`RoundContext.hand_over`), and shares a key
    with each of the two."""
    has_exchangeable_clients: ClassVar[bool] = False
    """Whether the released sum depends on the members of the cohort through their updates only.

    If so, a secret draw of the cohort amplifies privacy. False if this is not proven, and if each client has
    its own public streams (codewords, dithers), because these streams reveal the members."""
    has_central_noise: ClassVar[bool] = False
    """Whether a trusted party adds all noise, Gaussian and isotropic, to a sum that determines `decode`.

    Neither the noise nor `decode` may depend on which clients sent messages. Clients may then draw for
    themselves whether they take part. The proof of `PoissonGaussianLoss` needs a claim whose sensitivity is
    twice the longest update."""
    clips_norm: ClassVar[bool] = False
    """Whether `encode` clips every update to the l2 norm `clip_norm`, so that `AdaptiveClip` may change it.

    Claims must rest on this bound alone, and the noise must be measured in units of it."""

    @property
    def joint(self) -> bool:
        """Whether `decode` needs the whole cohort at once, because it is not a sum (a vote, a threshold)."""
        return False

    @property
    def separation(self) -> int:
        """Fewest rounds between two participations of a client that the claims assume.

        It is above 1 for noise that is correlated over rounds. If a client comes back earlier, the server
        restarts with fresh noise (`RoundContext.since`).
        """
        return 1

    @property
    def range_rule(self) -> RangeRule | None:
        """Mechanism's own rule for the radius of a round, computed from the plain mean, or None."""
        return None

    def core(self, context: RoundContext) -> tuple[Mechanism, RoundContext, float]:
        """Return the decoder of a round's messages: its mechanism, the round as it sees it, and its unit.

        This is the mechanism itself, unless it wraps another mechanism. A wrapped mechanism may have more
        coordinates than an update, behind the update's, for `range_rule`. Its sum, rounded to its grid and
        multiplied by the unit, is in units of the update.
        """
        return self, context, 1.0

    def tolerated_dropouts(self, context: RoundContext) -> int | None:
        """Return how many clients may drop out before the claims about the sum are void.

        A round with more dropouts is aborted. None if no claim depends on the number of answers, or if the
        privacy report itself accounts for dropouts.
        """
        return None

    @property
    def order_free(self) -> bool:
        """Whether the decoded sum does not depend on how messages are grouped, as a sum of integers does not.

        Messages of clients that train one at a time are then decoded together.
        """
        return self.homomorphic

    @property
    def price_grows_with_dim(self) -> bool:
        """Whether a round for a longer vector costs at least as much privacy as one for a shorter vector.

        Accountants charge every round for the longest vector. If this does not cover shorter vectors, the
        length of the vector can't change during the life of a ledger.
        """
        return True

    def group_sizes(self, num_clients: int) -> tuple[int, ...]:
        """Return the sizes of the groups of a cohort that share peer randomness: pairs, and unpaired clients.

        The sizes sum to `num_clients`. Keys are agreed in pairs.

        Raises:
            ValueError: If the mechanism can't serve a cohort of this size.
        """
        return (1,) * num_clients

    # ---- messages ---------------------------------------------------------------------------------------

    def message_code(self, client: int, context: RoundContext, rand: PublicRandomness) -> Code:
        """Return the code of one client's message, which may depend on its randomness shared with the server.

        `Message.num_bits` is the length of this code's bitstreams. The default is `code`.
        """
        return self.code(context)

    def grid(self, context: RoundContext) -> float | None:
        """Return the public grid, in units of the update, to which the released sum is rounded.

        Rounding removes the low bits of floats, which could reveal updates. None if symbols are on a grid
        already.
        """
        return None

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        """Return whether one client's `encode` can give these symbols `(m,)` for any update.

        Servers refuse other symbols.

        The default compares with `symbol_range`. A mechanism can be stricter if it knows the client's shared
        randomness.
        """
        if (bounds := self.symbol_range(context, rand)) is None:
            return True
        low, high = (torch.as_tensor(bound) for bound in bounds)
        return not bool(((symbols < low) | (symbols > high)).any())

    def symbol_modulus(self, context: RoundContext) -> tuple[int, int] | None:
        """Return (modulus, `num_symbols`) if symbols are residues and `decode` takes their sum."""
        return None

    # ---- planning and calibration -----------------------------------------------------------------------

    def mean_error(self, context: RoundContext, num_clients: int, homogeneity: float) -> float | None:
        """Return the expected squared error of the decoded mean, summed over coordinates, for planning a run.

        Args:
            context: Public facts of a round.
            num_clients: Number of clients of the cohort that answer, >= 1.
            homogeneity: |mean update|^2 over the mean |update|^2, in (0, 1].

        Returns:
            Error in squared units of the update. The default is computed from `noise_variance`, and None
            without it.
        """
        variance = self.noise_variance(context, context.cohort[:num_clients])
        if variance is None:
            return None
        return float(variance @ torch.tensor(context.segments, dtype=torch.float64))

    def num_sent(self, dim: int) -> int | None:
        """Return how many of an update's largest coordinates clients send. None: all coordinates.

        Args:
            dim: Number of coordinates of an update.
        """
        return None

    @property
    def gaussian_error(self) -> bool:
        """Whether the decoded mean's error is exactly Gaussian (or zero) with variance `noise_variance`."""
        return False

    def with_level(self, level: float, context: RoundContext, max_dropped_clients: int) -> Mechanism:
        """Return the mechanism with its free privacy parameter set, for the search of a privacy target.

        Args:
            level: Epsilon of a unit, or one over a noise multiplier, > 0. Larger is less private.
            context: A round of the run, for cohort size and dimension.
            max_dropped_clients: Dropouts for which noise that is divided among the cohort has to allow.

        Raises:
            ValueError: If there is no such parameter, or it can't take this value.
        """
        if self.level is None:
            raise ValueError(
                f"{type(self).__name__} has no privacy parameter that a target could set. "
                "Leave the target out."
            )
        value = 1.0 / level if self.level == "noise_multiplier" else level
        return replace(self, **{self.level: value})  # type: ignore[type-var]

    @classmethod
    def example(cls) -> Mechanism | None:
        """Return the settings with which tables, audits and plans show the class. None takes usual values.

        Usual values are those of `fedq mechanisms` for parameters without a default, for example epsilon 1
        and clip_norm 1. A class with other parameters returns an instance.
        """
        return None

    # ---- attacks on the claims, and advice ------------------------------------------------------------

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        """Return two neighbouring updates of one client that are hard to protect, `(dim,)` float64 each.

        The default is far outside the range on both sides in every coordinate. If a claim is about zeroing
        out, the second update is zero. A mechanism that rotates by public randomness returns the updates that
        its rotation turns into its worst case. A mechanism that sends some coordinates only may leave the
        others equal.

        Args:
            client: Client whose update is replaced.
            context: Public facts of the round.
            public: Streams that the adversary of the claim knows. Other streams come from other keys, so a
                pair that is built on them has no effect.
        """
        neighbours = {claim.neighbours for claim in self.claims(context)}
        center, reach = context.expand(context.center), 4.0 * context.expand(context.radius)
        if neighbours == {Neighbours.SUBSTITUTION}:
            return center + reach, center - reach
        return center + reach, torch.zeros_like(reach)

    def influence(self, client: int, context: RoundContext) -> float | None:
        """Return the maximum influence of one client: the largest message over the largest unclipped update.

        It covers every message that a server accepts, including messages of Byzantine clients. An honest
        client has influence 1. It is measured per coordinate if coordinates are clipped, and in the clipped
        norm if whole updates are clipped.

        Returns:
            Influence, at least 1. Infinite if a message can encode any number. None if no bound is known
            before the round.
        """
        return None

    def without_noise(self, context: RoundContext) -> Mechanism:
        """Return the mechanism without the noise that makes messages private, as Byzantine clients run it.

        Raises:
            ValueError: If the noise can't be left out alone.
        """
        raise ValueError(
            f"{type(self).__name__} has no noise that a Byzantine client could leave out. "
            "Use the attack inverted."
        )

    def advice(self, claim: PrivacyClaim) -> str:
        """Return a few words for the privacy report: what would lower the loss of one of the claims."""
        single = (Adversary.EAVESDROPPER, Adversary.SERVER, Adversary.SERVER_AND_PARTNER)
        if self.homomorphic and claim.adversary in single:
            return (
                "more noise or fewer rounds, or secure aggregation, with which the row of its server counts"
            )
        return "more noise or fewer rounds"

    # ---- clients with different protection ------------------------------------------------------------

    def protection_groups(self, num_clients: int) -> tuple[tuple[int, ...], ...]:
        """Return the whole population, 0 to `num_clients` - 1, in groups that have the same `claims_about`.

        Raises:
            ValueError: If the mechanism can't serve such a population.
        """
        return (tuple(range(num_clients)),)

    def claims_about(self, client: int, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return exactly one claim per `Adversary`, for one round in which this client takes part.

        The default is `claims`, which holds for every client of the population.
        """
        return self.claims(context)


def group_clients(mechanism: Mechanism, clients: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Split the clients of a cohort into the groups in which a mechanism encodes, in their order."""
    return split_groups(clients, mechanism.group_sizes(len(clients)))
