"""Parameters that stay with the clients: FedPer and LG-FedAvg, written out, private, in stacks, resumed."""

import logging

import pytest
import torch
from torch import nn

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.clients.vector import num_coordinates
from tests.by_hand import averaging_with_own
from tests.digits_run import Classifier, Digits, fitted

CLIENTS, BATCH = 4, 5


def build(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)]
    if norm:
        layers.insert(2, nn.BatchNorm1d(8))
    return Classifier(nn.Sequential(*layers))


def federated(local=("backbone.2.*",), mechanism=None, **settings):
    return fedq.Federated(
        mechanism or fedq.FedAvg(),
        CLIENTS,
        personal_parameters=local,
        **{"seed": 1, "clients_per_step": 1, **settings},
    )


def fit(fed, module=None, rounds=3, **trainer):
    module = module or build()
    more = trainer.pop("more", ())
    ckpt_path = trainer.pop("ckpt_path", None)
    fitted(module, fed, *more, data=Digits(80, BATCH), ckpt_path=ckpt_path, max_epochs=rounds, **trainer)
    return module


def by_hand(fed, local, rounds, norm=False, mu=0.0):
    """Every client goes on with its own layers, by prefixes of names, and the server averages the others."""
    stays = lambda name: name.startswith(local)  # noqa: E731
    return averaging_with_own(build(norm).backbone, fed, rounds, stays, BATCH, mu=mu)


def agrees(fed, module, expected, local):
    common, own = expected
    for name, value in common.items():
        if not name.endswith("num_batches_tracked"):
            found = module.backbone.state_dict()[name]
            torch.testing.assert_close(found, value, atol=2e-6, rtol=1e-5, msg=name)
    for client in range(CLIENTS):
        found = fed.personal_state(client)
        assert set(found) == {f"backbone.{name}" for name in own.get(client, {})}, client
        for name, value in own.get(client, {}).items():
            kept = found[f"backbone.{name}"]
            torch.testing.assert_close(kept.to(value), value, atol=2e-6, rtol=1e-5, msg=f"{client} {name}")


WAYS = {
    "FedPer": (("backbone.2.*",), ("2.",), False),
    "LG-FedAvg": (("backbone.0.*",), ("0.",), False),
    "two patterns": (("backbone.0.bias", "*.2.bias"), ("0.bias", "2.bias"), False),
    "a head with BatchNorm": (("backbone.[23].*",), ("2.", "3."), True),
    "a local layer before a shared BatchNorm": (("backbone.0.*",), ("0.",), True),
}


@pytest.mark.parametrize("clients_per_step", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_is_the_papers_loop(way, clients_per_step):
    patterns, local, norm = WAYS[way]
    fed = federated(patterns, clients_per_step=clients_per_step)
    module = fit(fed, build(norm))
    assert fed.clients_per_step_chosen == clients_per_step
    agrees(fed, module, by_hand(fed, local, 3, norm), local)
    heads = [torch.cat([t.flatten() for t in fed.personal_state(c).values()]) for c in range(CLIENTS)]
    assert not torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("clients_per_step", [1, 2])
def test_in_drawn_cohorts_a_client_waits_with_its_own(clients_per_step):
    fed = federated(cohort=2, clients_per_step=clients_per_step)
    module = fit(fed, rounds=5)
    cohorts = [fed.planner.plan(r, fedq.FedAvg()).survivors for r in range(5)]
    assert len(set(cohorts)) > 2
    agrees(fed, module, by_hand(fed, ("2.",), 5), ("2.",))


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_a_local_algorithm_corrects_what_travels_only(clients_per_step):
    fed = federated(algorithm=fedq.FedProx(0.5), clients_per_step=clients_per_step)
    module = fit(fed)
    agrees(fed, module, by_hand(fed, ("2.",), 3, mu=0.5), ("2.",))


@pytest.mark.parametrize("buffers", ["share", "local", "frozen"])
def test_the_length_of_the_vector_and_its_bits(buffers):
    """What stays is in no message: 520 of 610 parameters travel, and shared statistics."""
    module = build(norm=True)
    if buffers == "frozen":
        module.backbone[2].requires_grad_(False)
    fed = federated(("backbone.3.*",), fedq.LDPQ(epsilon_per_coordinate=1.0), buffers=buffers)
    dim = {"share": 552, "local": 536, "frozen": 520}[buffers]
    assert num_coordinates(module, buffers, fed.local.personal_parameters) == dim
    fit(fed, module, rounds=1)
    assert fed.engine is not None and fed.engine.weights.numel() == dim
    assert fed.records[0].uplink_bits == CLIENTS * dim, "one bit each"
    assert fed.ledger.dim == dim


def test_a_private_run_without_a_seed_and_its_claim():
    coins = fedq.LDPQ(epsilon_per_coordinate=0.01)
    whole, part = (federated(local, coins, seed=None) for local in ((), ("backbone.2.*",)))
    fit(whole)
    fit(part)
    assert part.ledger.dim == 520 and whole.ledger.dim == 610
    assert "own" not in part.state_dict(), "a checkpoint is the server's"
    normed = federated((), coins, seed=None, buffers="local")
    fit(normed, build(norm=True))
    assert normed.personal_state(0) and "own" not in normed.state_dict()


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize("clients_per_step", [1, 4])
@pytest.mark.parametrize("norm", [False, True])
def test_resumed_as_if_never_stopped(norm, clients_per_step, tmp_path):
    settings = {"local": ("backbone.2.*",), "clients_per_step": clients_per_step}
    one = federated(**settings)
    whole = fit(one, build(norm), rounds=4)
    first = federated(**settings)
    fitted(build(norm), first, data=Digits(80, BATCH), max_epochs=2).save_checkpoint(tmp_path / "two.ckpt")
    second = federated(**settings)
    again = fit(second, build(norm), rounds=4, ckpt_path=tmp_path / "two.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    for client in range(CLIENTS):
        for name, value in one.personal_state(client).items():
            assert torch.equal(value, second.personal_state(client)[name]), name


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_a_checkpoint_of_a_private_run_holds_nobody_s(tmp_path):
    first = federated(mechanism=fedq.LDPQ(epsilon_per_coordinate=1.0), seed=None)
    fitted(build(), first, data=Digits(80, BATCH), max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    again = federated(mechanism=fedq.LDPQ(epsilon_per_coordinate=1.0), seed=None)
    with pytest.warns(UserWarning, match=r"has no personal tensors.*backbone\.2\.weight.*Set a seed"):
        fit(again, rounds=2, ckpt_path=tmp_path / "one.ckpt")


def test_a_second_fit_of_the_same_federation_goes_on():
    fed, module = federated(), build()
    fit(fed, module, rounds=2)
    fit(fed, module, rounds=2)
    whole = federated()
    straight = fit(whole, rounds=4)
    assert len(fed.records) == 4
    agrees(fed, module, by_hand(fed, ("2.",), 4), ("2.",))
    assert straight.state_dict().keys() == module.state_dict().keys()
    other = fit(fed, build(), rounds=1)  # another model is another training
    agrees(fed, other, by_hand(fed, ("2.",), 1), ("2.",))


def test_a_layer_that_joins_leaves_what_clients_keep():
    class Thaws(Classifier):
        def on_train_epoch_start(self):
            if self.current_epoch == 2:
                self.backbone[0].requires_grad_(True)

    torch.manual_seed(0)
    module = Thaws(build().backbone)
    module.backbone[0].requires_grad_(False)
    seen = {}
    fed = federated(("backbone.2.weight", "backbone.0.bias"))

    class Looks(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen[trainer.current_epoch] = {c: fed.personal_state(c) for c in range(CLIENTS)}

    fit(fed, module, rounds=3, more=[Looks()])
    assert list(seen[1][0]) == ["backbone.2.weight"]
    assert set(seen[2][0]) == {"backbone.0.bias", "backbone.2.weight"}
    moved = (seen[2][0]["backbone.2.weight"] - seen[1][0]["backbone.2.weight"]).norm()
    fresh = (seen[2][0]["backbone.2.weight"] - build().backbone[2].weight).norm()
    assert moved < fresh, "the client went on with its own"
    assert fed.engine is not None and fed.engine.weights.numel() == 10 + 512


def test_patterns_that_match_nothing():
    with pytest.raises(
        ValueError, match=r"'head\.\*' matches none of.*backbone\.0\.weight, backbone\.0\.bias"
    ):
        fit(federated(("backbone.2.*", "head.*")))


def test_one_name_of_a_tensor_with_two():
    module = build()
    module.tied = module.backbone[2].weight
    with pytest.raises(ValueError, match=r"are one tensor, but personal_parameters=.*Match both, or neither"):
        fit(federated(), module)
    fit(federated(("backbone.2.*", "tied")), module, rounds=1)


@pytest.mark.parametrize("wrong, said", [("head.*", "be a list"), (3, "be a list"), ([3], "contain name")])
def test_what_is_no_list_of_patterns(wrong, said):
    with pytest.raises(TypeError, match=f"personal_parameters must {said}"):
        federated(wrong)


def test_what_stays_is_said(caplog):
    with caplog.at_level(logging.INFO):
        fit(federated(), rounds=1)
    assert "backbone.2.weight, backbone.2.bias (90 parameters) stay with clients, 360 bytes" in caplog.text


def test_a_checkpoint_of_other_patterns_is_refused(tmp_path):
    fitted(build(), federated(), data=Digits(80, BATCH), max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=r"another federation: local = \('backbone\.2\.\*',\)"):
        fit(federated(()), ckpt_path=tmp_path / "one.ckpt")
