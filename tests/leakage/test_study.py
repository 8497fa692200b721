"""Studies: reproducible, bounded in time; leakage falls with the noise."""

import copy
import dataclasses

import pytest
import torch

from lightning_fedq.leakage import observe, study as study_module
from lightning_fedq.leakage.study import in_order, psnr
from lightning_fedq.mechanisms import LDPQ, CorBin, FedAvg, NearOptimalUtility
from lightning_fedq.mechanisms.interface import Adversary
from tests.leakage.settings import candidates, generator, mlp, study

VIEW = Adversary.EAVESDROPPER


def distorted(setting, share):
    """Noise of `share` times the largest update's norm in every coordinate."""
    norm = setting.largest_norm
    return NearOptimalUtility(norm, 0.8, share * norm, 0.8)


def test_the_same_generator_gives_the_same_study():
    setting = study()
    one, other = (setting.run(LDPQ(epsilon_per_coordinate=4.0), VIEW, 20, generator(3)) for _ in range(2))
    assert one.estimate == other.estimate
    assert torch.equal(one.found, other.found)


def test_measured_leakage_falls_as_noise_grows_and_its_limits_with_it():
    setting = study()
    leaks = [
        setting.run(distorted(setting, s), VIEW, 60, generator()).estimate for s in (0.01, 0.3, 1.0, 30.0)
    ]
    values = [estimate.leakage for estimate in leaks]
    assert values == sorted(values, reverse=True)
    assert leaks[0].hit_rate == 1.0
    assert leaks[-1].hit_rate < 0.1
    assert leaks[-1].leakage_limits[1] < leaks[0].leakage_limits[0]


def test_a_partner_knows_more_than_an_uplink():
    """200 attempts each, fixed seed; the hit rates are .705 and .86, 3.9 standard errors apart."""
    setting, mechanism = study(), CorBin(epsilon_per_coordinate=2.5, shared_bits=None)
    one, two = (
        setting.run(mechanism, who, 200, generator(4)).estimate.hit_rate
        for who in (VIEW, Adversary.SERVER_AND_PARTNER)
    )
    assert two > one


def test_the_server_attacks_both_messages_of_a_pair_at_once(monkeypatch):
    """It says whose image is whose, which the pair's sum alone can't; 100 attempts each, fixed seed.

    Hit rates .90 for both messages, .77 for one, .81 for the sum, which is given the right order for free.
    """
    setting, mechanism = study(), CorBin(epsilon_per_coordinate=3.0, shared_bits=None)
    joint = setting.run(mechanism, Adversary.SERVER, 100, generator(4)).estimate
    one = setting.run(mechanism, VIEW, 100, generator(4)).estimate
    assert joint.hit_rate > one.hit_rate
    assert joint.num_candidates == one.num_candidates == 100
    monkeypatch.setattr(study_module, "observe", lambda *a: dataclasses.replace(observe(*a), shares=None))
    summed = setting.run(mechanism, Adversary.SERVER, 100, generator(4)).estimate
    assert summed.num_candidates == 50
    assert joint.leakage > summed.leakage


def test_several_samples_of_two_clients_are_matched_together():
    setting = study(batch_size=3)
    rows = torch.tensor([3, 8, 11, 40, 41, 42])
    shares = setting.gradients[rows].reshape(2, 3, -1).mean(1)
    problem = setting._problem(shares.mean(0), setting.labels[rows])
    found = setting.attack.invert(dataclasses.replace(problem, shares=shares, share_weight=0.2), generator())
    own = [{tuple(row.flatten().tolist()) for row in part} for part in found.chunk(2)]
    assert own == [{tuple(setting.inputs[i].flatten().tolist()) for i in part} for part in rows.chunk(2)]


# ---- several local steps ---------------------------------------------------------------------------------


def test_the_updates_of_several_steps_are_those_of_sgd():
    setting = study(model=mlp(), batch_size=4, learning_rate=0.5, local_steps=3)
    model = copy.deepcopy(setting.model)
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        setting.loss(model(setting.inputs[4:8]), setting.labels[4:8]).backward()
        optimizer.step()
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    chosen = torch.arange(8).reshape(2, 4)
    torch.testing.assert_close(setting._updates(chosen)[1], after - before)


def test_time_is_bounded():
    found = study().run(FedAvg(), VIEW, 10**6, generator(), seconds=0.3)
    assert 1 <= found.estimate.attempts < 10**6
    assert found.seconds < 1.0


def test_refusals():
    with pytest.raises(ValueError, match="need at least 120 candidates, got 100"):
        study(batch_size=30)
    with pytest.raises(ValueError, match=r"learning_rate must be > 0 and local_steps >= 1, got 0\.0 and 1"):
        study(learning_rate=0.0)
    with pytest.raises(ValueError, match=r"threshold must be > 0, got 0\.0"):
        study(threshold=0.0)
    with pytest.raises(ValueError, match=r"local_steps >= 1, got 0\.1 and 0"):
        study(local_steps=0)
    with pytest.raises(ValueError, match="evaluation mode"):
        study(model=study().model.train())
    with pytest.raises(ValueError, match="attempts must be >= 1"):
        study().run(FedAvg(), VIEW, 0, generator())


def test_psnr_by_hand():
    truth = torch.zeros(2, 1, 4, 4)
    found = truth + torch.tensor([0.2, 0.0]).reshape(2, 1, 1, 1)
    # range 2, error .04: 10 log10(4 / .04) = 20 dB
    assert psnr(found, truth, 2.0).tolist() == pytest.approx([20.0, 100.0], abs=1e-5)


def test_a_batch_is_put_in_order():
    truth, _ = candidates(6)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(in_order(truth[order] + 0.01, truth), truth + 0.01)
