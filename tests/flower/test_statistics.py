"""Statistics of real clients: a hook that fails, and a mean that is none of theirs."""

from pathlib import Path

import pytest
import torch

from lightning_fedq.flower import client_app
from lightning_fedq.mechanisms import FedAvg, SubtractiveDither
from lightning_fedq.rounds import Statistics
from tests.flower.loop import CLIENTS, LoopGrid, Net, deployment, federated, module, own_digits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Surveys(Net):
    """Its statistics are 0.2, or an error once a file is there, which the first call writes."""

    def client_statistics(self, batches):
        list(batches)
        if self.fails is not None:
            if self.fails.exists():
                raise ValueError("HIV positive")
            self.fails.touch()
        return torch.full((3,), 0.2)

    def on_statistics(self, mean):
        pass


def surveys(fails=None):
    made = module()
    made.__class__, made.fails = Surveys, fails
    return made


def make(mechanism=None, **settings):
    mechanism = mechanism or SubtractiveDither(bits=16)
    return federated(mechanism, statistics=Statistics(3, 1.0), **settings)


def run(folder, modules, settings, tamper=lambda kind, client, reply: reply):
    apps = [client_app(made, own_digits, settings()) for made in modules]
    grid = LoopGrid(apps, [folder / f"client-{c}" for c in range(CLIENTS)], tamper)
    return deployment(settings(), 2, folder, module=surveys).run(grid)[1]


@pytest.mark.parametrize("target", ["updates", "weights"])
def test_a_client_whose_hook_fails_counts_as_zeros(target, tmp_path, monkeypatch):
    """As a training that fails: behind a claim the server hears nothing of it."""
    monkeypatch.setattr(
        "lightning_fedq.flower.remote_client.RemoteClient._is_unprotected", lambda *args: False
    )
    modules = [lambda: surveys(tmp_path / "registered")] + [surveys] * (CLIENTS - 1)
    with pytest.warns(UserWarning, match=r"HIV positive\. Training failed, so a zero update"):
        server = run(tmp_path, modules, lambda: make(sends=target))
    assert [record.num_received for record in server.records] == [CLIENTS, CLIENTS]
    expected = torch.full((3,), 0.2 * (CLIENTS - 1) / CLIENTS).double()
    torch.testing.assert_close(server.engine.statistic, expected, atol=1e-3, rtol=0.0)


def test_a_hook_that_fails_is_met_at_registration(tmp_path):
    replies = []

    def tamper(kind, client, reply):
        replies.append(repr(reply))
        return reply

    modules = [surveys] * (CLIENTS - 1) + [lambda: surveys(Path(__file__))]
    with pytest.raises(RuntimeError, match="The client's log has the reason"):
        run(tmp_path, modules, make, tamper)
    assert replies and not any("HIV" in reply for reply in replies)


def test_a_mean_of_another_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lightning_fedq.flower.round_inputs.pass_statistic_to_module", lambda module, mean: None
    )
    server = run(tmp_path, [surveys] * CLIENTS, lambda: make(FedAvg()))
    assert not server.records[-1].aborted
    half = property(lambda self: torch.zeros(2) if self.released else None)
    monkeypatch.setattr("lightning_fedq.rounds.server.RoundServer.statistic", half)
    with pytest.warns(UserWarning, match="a mean of 2 numbers"):
        server = run(tmp_path / "other", [surveys] * CLIENTS, lambda: make(FedAvg()))
    assert [record.num_received for record in server.records] == [CLIENTS, 0]
