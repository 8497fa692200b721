import math
import os

import pytest
import torch
from torch import nn

from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import RoundContext
from reproductions.cpa import fig7, fig8, table2, table4, table5
from reproductions.cpa.baselines import AuthorsLaplace
from reproductions.cpa.data import ClientImages
from reproductions.cpa.runs import Task, authors_cpa, ratio_of_variances, stated_nested_cpa, unbiased_cpa

FEDQ_DATA = os.environ.get("FEDQ_DATA", "")
needs_mnist = pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")


def test_decimal_logarithms_of_a_ratio_of_variances():
    signal = torch.tensor([1.0, -1.0, 3.0])
    assert ratio_of_variances(signal, signal / 10) == pytest.approx(100.0)
    assert ratio_of_variances(signal, torch.zeros(3)) == math.inf


def test_authors_levels_tile_gamma():
    """Delta = 2 gamma / N: 3 levels at -1/30, 0, 1/30; 9 at multiples of 1/90 up to 4/90."""
    one, nested = authors_cpa(0.5), authors_cpa(0.5, nested=True)
    assert one[1] == pytest.approx(1 / 30) and nested[1] == pytest.approx(4 / 90)
    assert one[0].bits_per_coordinate == 1 and nested[0].bits_per_coordinate == 2
    # gamma / 2 is where two levels with dither are free of overload
    assert unbiased_cpa(0.5)[1] == pytest.approx(0.025)


def test_authors_laplace_adds_the_stated_variance():
    """Noise 3 std 2 / epsilon wide: variance 2 (3 * 2 / 0.5)^2 = 288 of the tensor's own; 5 standard errors
    of a variance of 20,000 Laplace values (kurtosis 6): false alarm below 1e-6."""
    context = RoundContext(0, ((0,),), (20_000,), torch.zeros(1), torch.ones(1))
    update = torch.linspace(-1, 1, 20_000)[None]
    mechanism, keys = AuthorsLaplace(0.5), SeededKeys(3)
    message = mechanism.encode(update, context, ClientRandomness(keys, [0], 0))
    decoded = mechanism.decode(message.symbols, [0], context, PublicRandomness(keys, 0))
    noise = (decoded - update[0]) / update.std()
    assert float(noise.var()) == pytest.approx(288.0, rel=5 * math.sqrt(5 / 20_000))
    assert "not clipped" in mechanism.claims(context)[0].loss.reason


def test_authors_laplace_refuses_no_epsilon():
    with pytest.raises(ValueError, match="epsilon must be > 0, got 0"):
        AuthorsLaplace(0)


@needs_mnist
def test_momentum_is_kept_across_rounds():
    """Against SGD with momentum for every client, written out."""
    clients, rounds, lr = 3, 3, 0.1
    run = Task(FEDQ_DATA, False, rounds, 100, 4, 0.5).run(FedAvg(), clients, lr, 1.0, test_at=(1, 3))

    from lightning_fedq.callbacks import Federated
    from lightning_fedq.data.models import Classifier
    from reproductions.cpa.data import network
    from reproductions.cpa.runs import KeptMomentum
    from tests.digits_run import make_trainer

    data = ClientImages("mnist", FEDQ_DATA, False, clients, 5, 100, 4)
    federated = Federated(FedAvg(), clients, clients_per_step=3, seed=4)
    model = Classifier(network("linear", 4), lr)
    trainer = make_trainer(federated, KeptMomentum(federated, 0.5), max_epochs=rounds)
    trainer.fit(model, datamodule=data)
    inputs, labels = data.train_set.tensors
    weights = [p.detach().clone() for p in network("linear", 4).parameters()]
    locals_ = [network("linear", 4) for _ in range(clients)]
    optimizers = [torch.optim.SGD(m.parameters(), lr, momentum=0.5) for m in locals_]
    for _ in range(rounds):
        for mine, optimizer, part in zip(locals_, optimizers, federated.client_indices, strict=True):
            with torch.no_grad():
                for p, w in zip(mine.parameters(), weights, strict=True):
                    p.copy_(w)
            optimizer.zero_grad()
            nn.functional.cross_entropy(mine(inputs[part]), labels[part]).backward()
            optimizer.step()
        stacks = zip(*(m.parameters() for m in locals_), strict=True)
        weights = [torch.stack([p.detach() for p in stack]).mean(0) for stack in stacks]
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert torch.allclose(parameter, weight, atol=1e-5)
    outputs = data.test_set.tensors
    by_hand = nn.functional.linear(outputs[0].flatten(1), *weights).argmax(1) == outputs[1]
    assert run.last == pytest.approx(float(by_hand.double().mean()), abs=1e-3)
    assert run.tests[3] == run.last and set(run.tests) == {1, 3}
    assert torch.allclose(run.weights, torch.cat([weight.flatten() for weight in weights]), atol=1e-5)
    assert run.mse == 0.0 and run.snr_db10 == math.inf  # FedAvg sends the exact updates


def test_nothing_private_is_claimed_for_the_authors_laplace(tmp_path):
    context = RoundContext(0, ((0,),), (2,), torch.zeros(1), torch.ones(1))
    assert {type(claim.loss).__name__ for claim in AuthorsLaplace(1.0).claims(context)} == {"NonPrivate"}


def test_the_settings_of_a_task_are_those_that_its_rows_share():
    """Their names stand in the `settings.json` of runs that may be resumed."""
    expected = {"rounds": 7, "val_samples": 77, "seed": 9, "momentum": 0.25}
    assert Task("data", False, 7, 77, 9, 0.25).settings == expected


def test_the_parameters_that_the_paper_states():
    """Section 5.1: R = 1 for all but JoPEQ in table V, Rc = 1 and Rn = 3, 5 samples a user on MNIST."""
    for mechanism, _ in (stated_nested_cpa(0.5), unbiased_cpa(0.5, nested=True)):
        assert [len(table.points) for table in mechanism._design.tables] == [2, 8]
        assert mechanism.anonymity_by_stage == ((1, 2), (4, 8)) and mechanism.anonymity_set_size == 4
    for module, levels in ((table4, [3, 3]), (fig7, [3, 3]), (fig8, [3, 3, 2, 2]), (table5, [5, 5])):
        rows = [row for row in module._mechanisms(0.5) if row[0].startswith("JoPEQ")]
        assert [row[-2].levels for row in rows] == levels
    assert table2.CNN2Options().samples_per_client == 5
    assert Task("", False, 1, 0, 0).samples_per_client == 5
