"""A node that registers with a public key that is not its own: partners know each other's."""

from itertools import combinations, product

import numpy as np
import pytest
import torch

from lightning_fedq.flower.disputes import Disputes
from lightning_fedq.flower.remote_client import ClientConfig
from lightning_fedq.flower.secure import session_id
from lightning_fedq.flower.store import Store
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.rounds import RoundTask
from lightning_fedq.secagg import Client, SecAgg, model_digest
from tests.flower.halves import Fields, Halves, Still, identities
from tests.flower.loop import federated

COIN = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)
THIEF = 4


class Impersonator(Still):
    """A fifth node, which knows the public key of client 1 and none of its secrets.

    Behind secure aggregation it has all that a client needs there: keys of its own, and what is public.
    """

    stolen: Fields = {}  # noqa: RUF012
    machine: Client

    def register(self, fields):
        return {"partition": 1, **self.stolen}

    def train(self, fields):
        task, secagg = RoundTask.from_bytes(fields["task"]), self._federated.secure_aggregation
        weights = torch.frombuffer(bytearray(fields["weights"]), dtype=torch.float32)
        public = PublicRandomness(SeededKeys(0), task.round, task.attempt)
        session, clients = session_id(fields["federation"], task), self._federated.clients.num_clients
        terms = secagg.round_terms(COIN, task.context(), public, session, clients)
        type(self).machine = Client(fields["client"], terms, model_digest(weights))
        return {"secagg": self.machine.advertise(fields["invitation"])}

    def shares(self, fields):
        return {"secagg": self.machine.share_keys(fields["secagg"])}

    def masked(self, fields):
        self.machine.accept_shares(fields["secagg"])
        return {"secagg": self.machine.masked_input(np.ones(self.machine.terms.layout.size, np.int64))}

    def unmask(self, fields):
        return {"secagg": self.machine.unmask(fields["secagg"])}


def with_a_thief(played, folder):
    """Let a fifth node connect, which has heard client 1's registration, but for its proof."""
    Impersonator.stolen = {"key": played.line.answers["register", 1]["key"], "signature": bytes(64)}
    honest = played.client

    def client(number):
        if number != THIEF:
            return honest(number)
        return Impersonator(ClientConfig(played.federated, Store(folder / "thief"), 1))

    played.line.clients, played.line.nodes = client, 5


@pytest.mark.filterwarnings("ignore:node 4 is no client:UserWarning")
@pytest.mark.parametrize("proof", [None, b"", bytes(32), b"junk", 7])
def test_a_public_key_is_no_proof_of_who_sends_it(proof, tmp_path):
    """The thief's ones were in the sum in client 1's name, which is there, and was asked nothing."""
    played = Halves(federated(COIN, seed=None, secure_aggregation=SecAgg()), tmp_path)
    with_a_thief(played, tmp_path)
    Impersonator.stolen |= {} if proof is None else {"proof": proof}
    with pytest.warns(UserWarning, match=r"Node 4: .*client 1.* lacks the private key"):
        assert played.round().num_received == 4
    assert played.roster.nodes[1] == 1
    assert ("train", THIEF) not in played.line.answers


@pytest.mark.filterwarnings("ignore:node 4:UserWarning")
def test_nor_does_it_change_a_client_s_signature(tmp_path):
    """64 bytes of anything took the place of client 1's signature, for good: its partner refused its key."""
    played = Halves(federated(COIN, seed=None), tmp_path, identities())
    with_a_thief(played, tmp_path)
    assert [played.round().num_received for _ in range(2)] == [4, 4]


@pytest.mark.filterwarnings("ignore:node 4 is no client:UserWarning")
def test_a_recorded_registration_is_of_no_use(tmp_path):
    """The thief repeats all of client 1's registration: it took the client's place in every second round."""
    played = Halves(federated(COIN, seed=None), tmp_path)
    with_a_thief(played, tmp_path)
    Impersonator.stolen = dict(played.line.answers["register", 1])
    with pytest.warns(UserWarning, match=r"Node 4: .*repeats a recorded proof"):
        assert [played.round().num_received for _ in range(2)] == [4, 4]
    assert played.roster.nodes[1] == 1


def test_a_client_that_comes_back_has_its_proof(tmp_path):
    played = Halves(federated(COIN, seed=None), tmp_path)
    for name in list(played.line.answers):
        del played.line.answers[name]
    played.roster.nodes.pop(1)
    assert played.round().num_received == 4
    assert set(played.line.answers["register", 1]) >= {"key", "proof"}


# ---- who is left out, of those who may have lied -------------------------------------------------------
def disputes(*pairs):
    found = Disputes()
    for one, other in pairs:
        found.add_dispute(one, other)
    return found


def test_one_liar_never_has_an_honest_client_left_out():
    """Whomever it cheats or accuses: all its disputes have it on one side."""
    for count in range(6):
        for met in combinations(range(1, 6), count):
            found = disputes(*((0, other) for other in met)).left_out
            assert found == ({0} if count > 1 else set())


def test_liars_that_agree_have_few_honest_clients_left_out():
    """Any disputes of 2 liars with 5 honest clients: at most c^2 / 2 = 2 go, and only with two accusers."""
    pairs = list(product((0, 1), range(2, 7)))
    for chosen in product((False, True), repeat=len(pairs)):
        found = disputes(*(pair for pair, taken in zip(pairs, chosen, strict=True) if taken)).left_out
        assert len(found - {0, 1}) <= 2


def test_what_is_explained_counts_no_more_and_proofs_count_at_once():
    found = disputes((0, 1), (0, 2), (3, 1))
    assert found.left_out == {0}
    found.exclude(3)
    assert found.left_out == {0, 3}


def test_what_is_known_is_known_after_a_restart(tmp_path):
    before = Disputes(Store(tmp_path))
    before.add_dispute(0, 1)
    before.add_dispute(2, 0)
    before.exclude(4)
    after = Disputes(Store(tmp_path))
    assert after.left_out == before.left_out == {0, 4}
    after.add_dispute(1, 3)
    after.add_dispute(1, 2)
    assert Disputes(Store(tmp_path)).left_out == after.left_out and 1 in after.left_out
