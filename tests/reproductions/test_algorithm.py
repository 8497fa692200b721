"""Algorithm 1 of the near-optimal paper: its variance, its probability, its steps."""

import torch
from torch import nn

from reproductions.optimal.algorithm import printed_variance, train


def test_the_noise_is_the_printed_one():
    assert printed_variance(0.5, 0.8, 0.3, 2500) == 100 * 0.5 * 0.5 / 50


def test_a_round_is_a_sampled_step_and_noise():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = [(torch.randn(20, 3), torch.randint(2, (20,))) for _ in range(2)]

    def trained(std, rounds=1):
        start = torch.Generator().manual_seed(1)
        found, chance = train(model, data, 0.5, rounds, 0.3, 0.8, std, start)
        assert 1 / 20 <= chance <= 0.5
        return torch.cat([p.detach().flatten() for p in found.parameters()])

    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    plain, noisy, printed = trained(0.0), trained(3.0), trained(None)
    assert 0 < (plain - before).norm() < 1 and (noisy - plain).norm() > 1  # the model itself stays
    assert 0 < (printed - plain).norm() < (noisy - plain).norm()
    assert torch.equal(trained(0.0), plain)


def test_jopeq_as_published_is_dithered_laplace_in_units_of_a_clients_spread():
    from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
    from lightning_fedq.mechanisms import JoPEQ
    from lightning_fedq.mechanisms.interface import NonPrivate, RoundContext
    from reproductions.cpa.baselines import AuthorsJoPEQ

    one, clients = torch.ones(1, dtype=torch.float64), list(range(4))
    context = RoundContext(0, tuple((c,) for c in clients), (20_000,), 0.0 * one, one)
    updates = 3.0 + 0.01 * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0))
    mechanism = AuthorsJoPEQ(4.0, levels=65)
    symbols = mechanism.encode(updates, context, ClientRandomness(SeededKeys(0), clients, 0)).symbols
    public = PublicRandomness(SeededKeys(0), 0)
    sent = torch.stack([mechanism.decode(symbols[c], [c], context, public) for c in clients])
    # the error has the variance of Laplace noise of scale 2 / epsilon, in units of three deviations
    error, law = (sent - updates).double(), JoPEQ(4.0, 65)
    units = error / (3.0 * updates.double().std(1, keepdim=True))
    assert abs(float(units.mean())) < 0.02
    # what leaves the quantiser's range is cut off, which takes a tenth of the variance here
    assert 0.75 * 8 / 16 < float(units.var()) < 1.02 * 8 / 16
    assert float(units.abs().max()) < law.support + 2.5
    assert isinstance(mechanism.claims(context)[0].loss, NonPrivate)
