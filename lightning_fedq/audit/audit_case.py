"""One setting in which the audit attacks a mechanism. `cases` derives the settings of each mechanism."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_fedq.mechanisms.interface import Mechanism


@dataclass(frozen=True)
class AuditCase:
    """One setting in which the audit attacks the claims of a mechanism.

    Args:
        mechanism: Mechanism with the settings of this case.
        concentrated: Whether the whole difference is in one of very few coordinates, so that one encoding is
            one draw. Otherwise every coordinate is a draw.
        title: Name that distinguishes the case from others of the same mechanism, in a few words.
        num_clients: Size of the cohort. None takes three or four, or more if groups are larger.
        num_dropped: Number of clients at the end of the cohort that never answer.
        everybody: Whether every client is attacked at once, in a cohort of very few coordinates. For
            mechanisms that send one symbol and claim the same about each message, whatever the other clients
            do.
        to_center: Whether the pair is an end of the range and its centre instead of both ends. This is worse
            if values in the middle are coupled.
        only_sums: Whether only the claims about sums differ from the mechanism's other cases.
        dropout_probability: Probability that a client does not answer a round. The claims about sums are then
            those of the privacy report.
        min_survivors: Number of clients that confirm a sum with secure aggregation against an active server.
            All others, at the end of the cohort, are left out. The claims are those of the privacy report.
    """

    mechanism: Mechanism
    concentrated: bool = False
    title: str = ""
    num_clients: int | None = None
    num_dropped: int = 0
    everybody: bool = False
    to_center: bool = False
    only_sums: bool = False
    dropout_probability: float = 0.0
    min_survivors: int | None = None

    def without_clients(self) -> tuple[AuditCase, ...]:
        """Return cases with missing clients, which the privacy report includes in the claims about sums.

        In the first case each of eight clients drops out with probability 1/5. In the second case six of
        eight clients confirm. The two clients that a lying server leaves out are the last ones, which are
        unpaired if other clients are in groups.
        """
        among = replace(self, num_clients=8, only_sums=True)
        return (
            replace(among, title="clients drop out", dropout_probability=0.2),
            replace(among, title="an active server", min_survivors=6),
        )
