"""What was recorded in one run is of no use in the next: neither side's messages."""

import warnings

import pytest
from flwr.app import Message, RecordDict

from lightning_fedq.flower.records import from_record
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.secagg import SecAgg
from tests.flower.loop import LoopGrid, clients, deployment, federated

KINDS = ("train", "shares", "masked", "unmask")


class Recording(LoopGrid):
    """Keeps what the server asks of client 1, and what client 1 answers."""

    asked: list[tuple[str, RecordDict]]
    answered: dict[str, RecordDict]

    def push_messages(self, messages):
        listed = list(messages)
        self.asked = getattr(self, "asked", [])
        for message in listed:
            if message.metadata.dst_node_id == 101:
                self.asked.append((message.metadata.message_type, message.content))
        return super().push_messages(listed)


def make():
    return federated(
        CorBin(epsilon_per_coordinate=4.0, shared_bits=5), seed=None, secure_aggregation=SecAgg()
    )


def first_run(folder):
    """Two rounds, of which everything that goes between the server and client 1 is kept."""
    kept = {}

    def record(kind, client, reply):
        if client == 1:
            kept[kind] = reply.content
        return reply

    grid = Recording(*clients(make, folder), record)
    _, server = deployment(make(), 2, folder).run(grid)
    assert [record.num_received for record in server.records] == [4, 4]
    grid.answered = kept
    assert set(kept) == {"register", *KINDS}
    return grid


def test_answers_of_an_earlier_run_are_refused_and_named(tmp_path):
    """Whoever has recorded client 1 and sits between sends its answers of the first run in the next."""
    answered = first_run(tmp_path).answered
    for kind in KINDS:

        def replay(name, client, reply, kind=kind):
            if client == 1 and name == kind:
                reply.content = answered[kind]
            return reply

        rounds = 3 + KINDS.index(kind)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _, server = deployment(make(), rounds, tmp_path).run(LoopGrid(*clients(make, tmp_path), replay))
        [*_, last] = server.records
        assert len(server.records) == rounds
        named = [str(one.message) for one in said if "client 1" in str(one.message)]
        assert named, [str(one.message) for one in said]
        assert last.aborted or last.num_received == (4 if kind == "unmask" else 3)


def test_questions_of_an_earlier_run_are_refused_and_named_once(tmp_path):
    """Whoever may start runs sends client 1 what the server had sent it: it encodes nothing again."""
    asked = first_run(tmp_path).asked
    log, keys = (tmp_path / "client-1" / name for name in ("streams.jsonl", "keys.json"))
    before = log.read_bytes(), keys.read_bytes()
    grid = LoopGrid(*clients(make, tmp_path))
    for kind, content in asked:
        message = Message(content, dst_node_id=101, message_type=kind)
        message.metadata.__dict__["_message_id"] = "again"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            reply = grid.apps[1](message, grid.contexts[101])
        fields = from_record(reply.content)
        if kind == "query.register":  # a new proof for an old challenge, which no server asks again
            assert "proof" in fields
            continue
        assert set(fields) == {"refused"}, (kind, fields)
        assert len([one for one in said if str(fields["refused"]) in str(one.message)]) == 1
    assert (log.read_bytes(), keys.read_bytes()) == before


@pytest.mark.filterwarnings("ignore:round 3. client 1 is not connected:UserWarning")
def test_another_answer_in_place_of_a_registration_is_refused(tmp_path):
    answered = first_run(tmp_path).answered

    def replay(kind, client, reply):
        if client == 1 and kind == "register":
            reply.content = answered["train"]
        return reply

    refused = pytest.warns(UserWarning, match="Node 101 is no client of this federation")
    with refused, pytest.warns(UserWarning, match="continues with 3 of 4 clients"):
        one = deployment(make(), 3, tmp_path, patience=0.3)
        _, server = one.run(LoopGrid(*clients(make, tmp_path), replay))
    assert server.records[-1].num_received == 3
