"""A client that lives for one message at a time."""

import json

import numpy as np
import pytest

from lightning_fedq.secagg import StageError
from tests.secagg.play import Round, make_inputs, make_terms, total


def moved(played):
    """Every client ends, and another process goes on with what it has written."""
    for number, client in played.clients.items():
        fresh = played.client(number)
        fresh.resume(client.to_bytes())
        played.clients[number] = fresh


@pytest.mark.parametrize("active", [False, True])
def test_a_client_goes_on_in_another_process_after_every_message(active):
    terms = make_terms(active=active)
    played, inputs = Round(terms), make_inputs(terms)
    for stage in played.stages:
        played.step(stage, inputs)
        moved(played)
    assert np.array_equal(played.server.total, total(inputs, terms.cohort))


def test_after_the_last_message_no_secret_is_left():
    terms = make_terms()
    played = Round(terms).run(make_inputs(terms))
    left = json.loads(played.clients[0].to_bytes())
    assert not {"_held", "_seed", "_mask_root", "_channel_secret", "_channel_key", "_pair_keys"} & set(left)


def test_a_state_is_no_way_back():
    terms = make_terms()
    played = Round(terms)
    state = played.clients[0].to_bytes()
    played.clients[0].advertise(played.incoming[0])
    with pytest.raises(ValueError, match="only a client that has not begun"):
        played.clients[0].resume(state)
    played.clients[1].advertise(played.incoming[1])
    fresh = played.client(1)
    fresh.resume(played.clients[1].to_bytes())
    with pytest.raises(StageError, match="expects 'share_keys' now, not 'advertise'"):
        fresh.advertise(played.incoming[1])
