"""Evaluation by client over a network: after a round, every client measures the new model.

A client measures as a simulated client does. It sends what its own settings allow: exact values (if
`client_metrics="shared"` or there is no privacy claim), or nothing.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.flower.exchange import Exchange
from lightning_fedq.flower.records import Fields
from lightning_fedq.flower.roster import Roster
from lightning_fedq.training.client_evaluation import (
    PREFIX,
    ClientEvaluator,
    EvaluatedClients,
    Model,
    stack_metrics,
)
from lightning_fedq.training.settings import Federation

Row = dict[Model, dict[str, float]]


class RemoteEvaluator(ClientEvaluator):
    """Evaluator that asks real clients to measure after rounds of one fit.

    Args:
        federation: Settings of the federation.
        trainer: Trainer of the server.
        exchange: Connection to the nodes.
        roster: Registry of the clients.
        model: Function that returns another function, which gives the model's fields for a client.
    """

    exact = True  # clients decide which values they send, so all may be shown

    def __init__(
        self,
        federation: Federation,
        trainer: Any,
        exchange: Exchange,
        roster: Roster,
        model: Callable[[], Callable[[int], Fields]],
    ) -> None:
        assert federation.local.evaluate_clients is not None
        self._settings, self._trainer = federation.local.evaluate_clients, trainer
        self._exchange, self._roster, self._model = exchange, roster, model
        self._num = federation.clients.num_clients

    def measure(self, round: int) -> EvaluatedClients:
        """Ask every connected client to measure the new model, and return the values that arrive."""
        self._roster.refresh()
        online, left_out = set(self._exchange.online()), self._roster.left_out
        nodes = {n: c for c, n in self._roster.nodes.items() if n in online and c not in left_out}
        model_fields, keys = self._model(), self._roster.keys()
        contents: dict[int, Fields] = {
            node: {"client": c, "round": round, **model_fields(c), **self._roster.introduction(keys, c, ())}
            for node, c in nodes.items()
        }
        replies = self._exchange("evaluate", contents, f"round {round + 1}")
        answers = {nodes[node]: fields for node, fields in replies.items() if "refused" not in fields}
        if silent := sorted(set(range(self._num)).difference(answers)):
            rank_zero_warn(f"Round {round + 1}: clients {silent[:10]} have sent no metrics")
        rows = _rows(answers)
        values: dict[Model, dict[str, torch.Tensor]] = {
            model: stack_metrics([row.get(model, {}) for row in rows.values()])
            for model in PREFIX
            if any(model in row for row in rows.values())
        }
        return self._evaluated(round, values, None if len(rows) in (0, self._num) else tuple(rows))


def _rows(answers: Mapping[int, Fields]) -> dict[int, Row]:
    """Return exact values by client, in order, without unreadable answers and odd metric names.

    A client may lack metrics that others have, or have metrics that others lack. But its names must be a
    subset or a superset of the most common set of names.
    """
    rows: dict[int, Row] = {}
    for client, fields in sorted(answers.items()):
        try:
            row = json.loads(fields["measured"]) if "measured" in fields else {}
            known: Row = {
                model: {str(n): math.nan if v is None else float(v) for n, v in row[model].items()}
                for model in PREFIX
                if model in row
            }
        except (TypeError, ValueError, AttributeError, OverflowError):
            known = {}
        if any(known.values()):
            rows[client] = known
    names = {c: frozenset((model, name) for model in row for name in row[model]) for c, row in rows.items()}
    usual = Counter(names.values()).most_common(1)
    if odd := [c for c in rows if not (names[c] <= usual[0][0] or names[c] >= usual[0][0])]:
        rank_zero_warn(f"Clients {odd[:10]} measure other metrics than most clients, and are left out")
    return {client: row for client, row in rows.items() if client not in odd}
