"""Clients of one open round in a real federation: their requests and their answers."""

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.flower.exchange import Exchange
from lightning_fedq.flower.records import Fields, bytes_in
from lightning_fedq.flower.roster import Roster
from lightning_fedq.flower.secure import RemoteSum
from lightning_fedq.flower.settings import DECLINED
from lightning_fedq.mechanisms.interface import AbortedRoundError
from lightning_fedq.rounds import RefusedMessageError, RoundServer


class Cohort:
    """Clients of one open round: their requests and their answers.

    Args:
        server: Server with an open round.
        exchange: Connection to the nodes.
        roster: Registry of the clients.
    """

    def __init__(self, server: RoundServer, exchange: Exchange, roster: Roster) -> None:
        assert server.plan is not None
        self._server, self._exchange, self._roster, self._plan = server, exchange, roster, server.plan
        self.group = f"round {server.plan.round + 1}"
        assert server.secure_sum is None or isinstance(server.secure_sum, RemoteSum)
        self._sum = server.secure_sum
        self._left_out = self._roster.left_out

    def client_requests(self) -> dict[int, Fields]:
        """Return the fields for each client that is asked, besides the model. Others are warned of."""
        self._roster.refresh()
        round_task = self._server.task()
        task, online = round_task.to_bytes(), set(self._exchange.online())
        requests: dict[int, Fields] = {}
        for members in self._plan.groups:
            for client in members:
                if self._roster.nodes.get(client) not in online:
                    rank_zero_warn(f"{self.group}: client {client} is not connected")
                    continue
                if client in self._left_out:
                    rank_zero_warn(
                        f"{self.group}: client {client} is left out, because it has broken a round"
                    )
                    continue
                why = self._roster.absence_reason(client)
                # a client that has declined is asked, but not counted on
                if why and not why.endswith(DECLINED):
                    rank_zero_warn(f"{self.group}: client {client} is away: {why}")
                    continue
                known = (*members, *round_task.neighbours(client))
                keys = self._roster.introduction(self._server.keys, client, known)
                requests[client] = {"task": task, "client": client, **keys}
        if self._sum is not None:
            for client, fields in requests.items():
                fields["invitation"] = self._sum.invitation(client)
        return requests

    def ask(self, kind: str, contents: dict[int, Fields]) -> dict[int, Fields]:
        """Ask clients, and return the answers that are no refusals.

        A client that refuses or does not answer is away until it reports that it is ready.

        Args:
            kind: Type of the message, such as "train".
            contents: Fields of the message for each client, by number.
        """
        nodes = self._roster.nodes
        sent = {nodes[client]: fields for client, fields in contents.items()}
        answers = self._exchange(kind, sent, self.group)
        for client, node in ((client, nodes[client]) for client in contents):
            if "refused" in (found := answers.get(node, {"refused": f"no answer to {kind}"})):
                self._roster.mark_failed(client, str(found["refused"]))
            else:
                self._roster.mark_present(client)
        clients = {node: client for client, node in nodes.items()}
        for node, fields in answers.items():
            self._note_accusations(clients[node], fields.get("accused"))
        return {clients[node]: fields for node, fields in answers.items() if "refused" not in fields}

    def _note_accusations(self, client: int, accused: object) -> None:
        """Note the disputes of a client with partners in secure aggregation whose shares did not open."""
        if self._sum is None or not isinstance(accused, list):
            return
        for other in accused:
            if other in self._sum.machine.partners(client) and other != client:
                text = f"client {client} could not open the shares that client {other} sealed for it"
                rank_zero_warn(f"{self.group}: {text}")
                self._roster.disputes.add_dispute(client, other)

    def conclude(self, answers: dict[int, Fields]) -> None:
        """Pass the answers to the server, after the further exchanges of secure aggregation."""
        if self._sum is None:
            # in the order of a simulation, so that sums of floats have the same last bits
            for client in filter(answers.__contains__, self._plan.survivors):
                try:
                    self._server.receive_message(bytes_in(answers[client], "answer"))
                except RefusedMessageError as error:
                    rank_zero_warn(f"The message of client {client} is refused: {error}")
                    self._roster.mark_failed(client, f"its message is refused: {error}")
        else:
            self._secure(self._sum, answers)
        if excluded := sorted(self._roster.left_out - self._left_out):
            rank_zero_warn(
                f"{self.group}: clients {excluded[:10]} are left out, after a broken round or two disputes. "
                "To ask a repaired client again, remove disputes.json from the server's folder and restart "
                "the server."
            )

    def _secure(self, secure: RemoteSum, answers: dict[int, Fields]) -> None:
        """Carry out secure aggregation, abort the round if it fails, and note disputes and broken clients."""

        def exchange(kind: str, messages: dict[int, bytes]) -> dict[int, bytes]:
            contents: dict[int, Fields] = {client: {"secagg": m} for client, m in messages.items()}
            return _accepted_answers(self.ask(kind, contents))

        try:
            self._server.set_answered(secure.run(_accepted_answers(answers), exchange, rank_zero_warn))
        except AbortedRoundError as error:
            self._server.abort(str(error))
        for holder, owner in secure.machine.wrong_shares:
            rank_zero_warn(f"{self.group}: client {holder} opened a wrong share of client {owner}")
            self._roster.disputes.add_dispute(holder, owner)
        for client in secure.machine.broken:
            self._roster.disputes.exclude(client)


def _accepted_answers(answers: dict[int, Fields]) -> dict[int, bytes]:
    """Return the secure aggregation message in each answer, by client."""
    return {client: bytes_in(fields, "secagg") for client, fields in answers.items()}
