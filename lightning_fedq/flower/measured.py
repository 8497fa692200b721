"""Evaluation by client over a network: after a round the server asks every client to measure the new model.

A client measures as a simulated one does, and lets out what its own settings say: exact values
(`client_metrics="shared"`, or nothing is claimed), one value with noise in a round of its own
(`ClientEvaluation(release=...)`), or nothing.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.flower.cohort import Cohort, wait_for_enough
from lightning_fedq.flower.exchange import Exchange
from lightning_fedq.flower.records import Fields
from lightning_fedq.flower.roster import Roster
from lightning_fedq.rounds import RoundServer
from lightning_fedq.training.client_evaluation import PREFIX, ClientEvaluator, EvaluatedClients, Model
from lightning_fedq.training.federation import Federation
from lightning_fedq.training.release import Releases

Row = dict[Model, dict[str, float]]


class RemoteEvaluator(ClientEvaluator):
    """Asks real clients to measure after rounds of one fit.

    Args:
        model: Returns what gives a client the model and all that belongs to it.
        remote: Makes the server of the releases, see `Releases`.
    """

    exact = True  # clients decide, and whatever comes is meant to be seen

    def __init__(
        self,
        federation: Federation,
        trainer: Any,
        exchange: Exchange,
        roster: Roster,
        model: Callable[[], Callable[[int], Fields]],
        remote: Callable[..., Any],
    ) -> None:
        assert federation.local.evaluate_clients is not None
        self._settings, self._trainer = federation.local.evaluate_clients, trainer
        self._exchange, self._roster, self._model = exchange, roster, model
        self._num, self._secagg = federation.clients.num_clients, federation.server.secure_aggregation
        self._releases = Releases.begin(federation, trainer, elsewhere=remote)
        if self._releases is not None:
            self._releases.engine.collect = self._collect
        self._answers: dict[int, Fields] | None = None

    def check(self, aside: Callable[[int, Callable[[], list[str]]], list[str]]) -> None:
        """Nothing: each client looks at the names when it registers."""

    def measure(self, round: int) -> EvaluatedClients:
        """Let every client measure the new model. Whoever is silent is left out."""
        self._round, self._answers, released = round, None, None
        if self._releases is not None and self._enough_for(self._releases.engine):
            released = self._releases.release(None, round)
        if self._answers is None:  # nothing is released, and clients measure all the same
            self._roster.refresh()
            online, out = set(self._exchange.online()), self._roster.left_out
            here = [c for c, node in self._roster.nodes.items() if node in online and c not in out]
            told = self._told({c: self._roster.introduction(self._roster.keys(), c, ()) for c in here})
            nodes = {self._roster.nodes[client]: client for client in here}
            contents = {self._roster.nodes[client]: fields for client, fields in told.items()}
            found = self._exchange("evaluate", contents, f"round {round + 1}")
            self._answers = {nodes[node]: fields for node, fields in found.items() if "refused" not in fields}
        if silent := sorted(set(range(self._num)).difference(self._answers)):
            rank_zero_warn(f"round {round + 1}: clients {silent[:10]} have measured nothing")
        rows = _rows(self._answers)
        values: dict[Model, dict[str, torch.Tensor]] = {
            model: {
                name: torch.tensor([row[model][name] for row in rows.values()], dtype=torch.float64)
                for name in found
            }
            for model, found in next(iter(rows.values()), {}).items()
        }
        return EvaluatedClients(round, values, released, None if len(rows) in (0, self._num) else tuple(rows))

    def _enough_for(self, engine: RoundServer) -> bool:
        """Whether enough clients are connected to release a mean. If not, nobody is charged."""
        engine.round = self._round
        try:
            wait_for_enough(
                engine, self._roster, self._secagg, f"the release after round {self._round + 1}", ""
            )
        except RuntimeError as error:
            rank_zero_warn(str(error))
            return False
        return True

    def _told(self, contents: dict[int, Fields]) -> dict[int, Fields]:
        """All that clients need to measure, beside what they are told of keys and of a release."""
        of, after = self._model(), {"round": self._round}
        return {c: {"client": c, **after, **of(c), **fields} for c, fields in contents.items()}

    def _collect(self) -> None:
        """Ask for a release. See `RemoteRoundServer`."""
        assert self._releases is not None
        cohort = Cohort(self._releases.engine, self._exchange, self._roster)
        self._answers = cohort.ask("evaluate", self._told(cohort.questions()))
        cohort.conclude(self._answers)


def _rows(answers: Mapping[int, Fields]) -> dict[int, Row]:
    """Exact values by client, in order. Unreadable words and other names of metrics are left out."""
    found: dict[int, Row] = {}
    for client, fields in sorted(answers.items()):
        try:
            row = json.loads(fields["measured"]) if "measured" in fields else {}
            known: Row = {
                model: {str(name): float(value) for name, value in row[model].items()}
                for model in PREFIX
                if model in row
            }
        except (TypeError, ValueError, AttributeError, OverflowError):
            known = {}
        if any(known.values()):
            found[client] = known
    names = {client: repr({model: sorted(row[model]) for model in row}) for client, row in found.items()}
    usual = Counter(names.values()).most_common(1)
    if odd := [client for client in found if names[client] != usual[0][0]]:
        rank_zero_warn(f"clients {odd[:10]} measure other metrics than most, and are left out")
    return {client: row for client, row in found.items() if client not in odd}
