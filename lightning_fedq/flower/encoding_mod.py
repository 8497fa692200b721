"""A client mod for a Flower app of one's own: what its train function returns leaves as one packed message.

    app = ClientApp(mods=[encoding_mod(federated)])

The train function stays as it is, arrays in and arrays out. Nothing else of its reply leaves the client:
metrics, number of examples, configs and arrays that are not float32 would go round the mechanism, so they are
dropped, by name, in the client's own log. Other messages (evaluate, query) are refused for the same reason.
The server's half is `DecodingStrategy`.
"""

from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.flower.client_app import own_of
from lightning_fedq.flower.flat_arrays import Flat
from lightning_fedq.flower.records import Fields, from_record, to_record, without_fields
from lightning_fedq.flower.remote_client import Own, RemoteClient
from lightning_fedq.flower.settings import (
    RefusedError,
    check_identities,
    check_trained_elsewhere,
    common_settings,
    own_budget,
)
from lightning_fedq.keys.party_keys import Identities
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundTask

_REFUSED = 6
"""Flower's code of a mod that does not let a message pass."""


class _TrainFunction(RemoteClient):
    """A client that trains with a Flower app's own train function.

    Args:
        call: The train function; takes the message's own records, returns the reply's.
        content: The message's own records.
    """

    def __init__(self, own: Own, call: Callable[[RecordDict], RecordDict], content: RecordDict) -> None:
        super().__init__(own)
        self._call, self._content = call, content

    def settings(self) -> dict[str, str]:
        """Of the model nothing: its shape comes with the first arrays."""
        return common_settings(self._federated)

    def num_samples(self) -> int:
        """Never asked for: `check_trained_elsewhere` refuses weights."""
        raise NotImplementedError("a mean of updates that a mod encodes has equal weights")

    def arrays(self) -> Flat:
        """The model that the server sent.

        Raises:
            RefusedError: If that is not one record of arrays.
        """
        records = self._content.array_records
        if len(records) != 1:
            raise RefusedError(f"one record of arrays is wanted from the server, got {sorted(records)}")
        return Flat(next(iter(records.values())))

    def update(self, number: int, task: RoundTask, weights: Tensor) -> Tensor:
        sent = self.arrays()
        reply = self._call(self._content)
        records = reply.array_records
        if len(records) != 1:
            raise ValueError(f"the train function must return one record of arrays, got {sorted(records)}")
        ((name, arrays),) = records.items()
        if dropped := [*_others(reply, name), *(f"array {key}" for key in sent.others)]:
            rank_zero_warn(
                f"only the encoded update leaves this client; dropped: {', '.join(dropped)}. They would go "
                "round the mechanism; log them here, or evaluate on the server (evaluate_fn)"
            )
        return sent.vector_of(arrays) - weights


def _others(reply: RecordDict, arrays: str) -> list[str]:
    """Metrics and configs of a reply, by name."""
    named = [f"metric {key}" for record in reply.metric_records.values() for key in record]
    named += [f"config {key}" for record in reply.config_records.values() for key in record]
    return sorted(set(named))


def encoding_mod(
    federated: Federated,
    *,
    home: Callable[[Context], Path] | None = None,
    identities: Callable[[Context], Identities] | None = None,
    budget: Callable[[Context], PrivacyTarget] | PrivacyTarget | None = None,
) -> Mod:
    """Client mod that encodes what the train function returns, and lets nothing else leave.

    Args:
        federated: The federation's settings, the same as the server's: mechanism, number of clients, cohort,
            ranges, secure aggregation, seed. How a client trains is its train function's.
        home: The client's folder; None takes `fedq-home` of the node's configuration.
        identities: Signing key and verification keys, as for `client_app`.
        budget: Privacy budget of the client, as for `client_app`.

    Raises:
        ValueError: If a setting is the train function's business, or for simulations only, identities are
            missing, or the client can't know what its budget is about.
    """
    check_trained_elsewhere(federated)
    check_identities(federated, identities is not None, "encoding_mod(identities=...)")
    if isinstance(budget, PrivacyTarget):
        own_budget(federated, budget, identities is not None)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            fields: Fields = from_record(message.content)
            kind = str(fields.pop("asked"))
        except (ValueError, KeyError):
            reason = (
                f"encoding_mod lets no {message.metadata.message_type} message of another kind pass: the "
                "reply would go round the mechanism; evaluate on the server (evaluate_fn), and use "
                "DecodingStrategy there"
            )
            rank_zero_warn(reason)
            return Message(Error(_REFUSED, reason), reply_to=message)
        content = without_fields(message.content)

        def call(content: RecordDict) -> RecordDict:
            message.content = content
            reply = call_next(message, context)
            if reply.has_error():
                raise RuntimeError(f"the train function answers with an error: {reply.error.reason}")
            return reply.content

        client = _TrainFunction(own_of(context, federated, home, identities, budget), call, content)
        if kind == "train":
            fields["weights"], fields["dtype"] = b"", "float32"
            try:
                fields["weights"] = client.arrays().vector.numpy().tobytes()
            except RefusedError as error:
                return Message(to_record({"refused": str(error)}), reply_to=message)
        return Message(to_record(client.reply(kind, fields)), reply_to=message)

    return mod
