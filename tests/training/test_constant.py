"""What a layer holds constant stays what it is behind every mechanism and in `DPSGD`'s own steps."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.mechanisms import LDPQ, AggregateGaussian, FedAvg
from tests.digits_run import Classifier, Digits, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*run can hardly learn"),
    pytest.mark.filterwarnings("ignore:Federated trains one client at a time"),  # pruned layers
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]
WORDS, PADDING = 12, 3


class Texts(Digits):
    """Rows of 6 words, padded behind the third to fifth."""

    def train_set(self):
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(4, WORDS, (self.num_train, 6), generator=generator)
        words[torch.arange(6) >= torch.randint(3, 6, (self.num_train, 1), generator=generator)] = PADDING
        return TensorDataset(words, words[:, 0] % 3)

    def val_dataloader(self):
        return DataLoader(self.train_set(), batch_size=40)


class Mean(nn.Module):
    """Mean of the words' vectors, the padding's included, so that it has gradients if anybody lets it."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 5, padding_idx=PADDING, **options)
        nn.init.constant_(self.words.weight[PADDING].detach(), 0.5)

    def forward(self, x):
        return self.words(x).mean(1)


class Tied(Mean):
    """The vectors of the words are the weights of the output, so that the padding's are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(super().forward(x))


def bag():
    layer = nn.EmbeddingBag(WORDS, 5, mode="mean", padding_idx=PADDING)
    nn.init.constant_(layer.weight[PADDING].detach(), 0.5)
    return layer


def pruned():
    layers = nn.Sequential(nn.Embedding(WORDS, 5), nn.Flatten(), nn.Linear(30, 5))
    prune.l1_unstructured(layers[2], "weight", amount=0.4)
    prune.random_unstructured(layers[2], "bias", amount=2)
    return layers


def pruned_padding():
    net = Mean()
    prune.ln_structured(net.words, "weight", amount=2, n=2, dim=1)
    return net


def dead(net, name):
    """Elements that have no gradient, whatever the batch."""
    layer = net.get_submodule(name.rpartition(".")[0])
    mask = torch.zeros_like(net.get_parameter(name), dtype=torch.bool)
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.padding_idx is not None:
        mask[layer.padding_idx] = True
    if name.endswith("_orig"):
        mask |= layer.get_buffer(name.rpartition(".")[2].replace("_orig", "_mask")) == 0
    return mask


KINDS = {
    "embedding": (Mean, ["backbone.0.words.weight"]),
    "bag": (bag, ["backbone.0.weight"]),
    "pruned": (pruned, ["backbone.0.2.weight_orig", "backbone.0.2.bias_orig"]),
    "pruned embedding": (pruned_padding, ["backbone.0.words.weight_orig"]),
}
MECHANISMS = {
    "coins": lambda: LDPQ(1.0),
    "Gaussian": lambda: AggregateGaussian(clip_norm=1.0, noise_multiplier=0.5),
}


def made(kind="embedding", **options):
    torch.manual_seed(0)
    net = KINDS[kind][0]() if isinstance(kind, str) else kind()
    return Classifier(nn.Sequential(net, nn.Linear(WORDS if kind is Tied else 5, 3)), **options)


def fit(net, *callbacks, rounds=2, size=80):
    make_trainer(*callbacks, max_epochs=rounds).fit(net, datamodule=Texts(size, 10))
    return net


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_gradient_stays_behind_noise(kind, mechanism):
    net = made(kind)
    before = {name: net.get_parameter(name).detach().clone() for name in KINDS[kind][1]}
    fit(net, Federated(MECHANISMS[mechanism](), 4, seed=1))
    for name, old in before.items():
        new, mask = net.get_parameter(name), dead(net, name)
        assert 0 < int(mask.sum()) < mask.numel()
        assert torch.equal(new[mask], old[mask]) and float((new != old)[~mask].float().mean()) > 0.5


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("around", [None, FedAvg(), LDPQ(4.0)], ids=["alone", "averaged", "coins"])
def test_a_padding_row_stays_in_steps_with_noise(around, kind):
    net = made(kind, optimizer=lambda params: torch.optim.AdamW(params, lr=0.1))
    before = {name: net.get_parameter(name).detach().clone() for name in KINDS[kind][1]}
    fit(net, *([] if around is None else [Federated(around, 4, seed=0)]), DPSGD(1.0, 1.0, delta=1e-3, seed=0))
    for name, old in before.items():
        new, mask = net.get_parameter(name), dead(net, name)
        assert torch.equal(new[mask], old[mask])
        assert float((new != old)[~mask].float().mean()) > 0.5


def test_pruned_layers_train_beside_a_frozen_norm_and_others_with_buffers_do_not():
    """Opacus refuses trained layers with buffers, which masks are not what it means."""
    from lightning_fedq.dpsgd.opacus import SampleGradientHooks

    net = nn.Sequential(pruned(), nn.BatchNorm1d(5).requires_grad_(False).eval())
    assert SampleGradientHooks.validate(net, strict=True) == []
    net[1].requires_grad_(True)
    with pytest.raises(NotImplementedError, match="BatchNorm1d"):
        SampleGradientHooks.validate(net, strict=True)
    assert len(SampleGradientHooks.validate(net)) == 1


def summed():
    return nn.EmbeddingBag(WORDS, 5, mode="sum")


@pytest.mark.parametrize("kind", [*KINDS, summed])
def test_what_has_no_gradient_takes_nothing_of_the_clipping_norm(kind):
    """Gradients of samples add up to torch's, which knows the padding, and how often a word is there."""
    from lightning_fedq.dpsgd.opacus import SampleGradientHooks

    net, batch = made(kind), next(iter(Texts(20, 20).train_dataloader()))
    hooks = SampleGradientHooks(net, loss_reduction="mean", strict=True)
    nn.functional.cross_entropy(net.backbone(batch[0]), batch[1]).backward()
    for parameter in net.parameters():
        torch.testing.assert_close(parameter.grad_sample.mean(0), parameter.grad)
    for name in KINDS[kind][1] if isinstance(kind, str) else ():
        assert not net.get_parameter(name).grad_sample[:, dead(net, name)].any()
    hooks.remove_hooks()


@pytest.mark.parametrize("mode", ["max", "offsets"])
def test_bags_without_gradients_of_samples_are_refused(mode):
    from lightning_fedq.dpsgd.opacus import SampleGradientHooks

    bags = nn.EmbeddingBag(WORDS, 5, mode="max" if mode == "max" else "mean")
    hooks = SampleGradientHooks(bags, loss_reduction="mean", strict=True)
    words = torch.randint(WORDS, (4, 3))
    out = bags(words) if mode == "max" else bags(words.reshape(-1), torch.arange(0, 12, 3))
    with pytest.raises(RuntimeError, match="one row of words per sample"):
        out.sum().backward()
    hooks.remove_hooks()


@pytest.mark.parametrize("kind", [*KINDS, Tied])
def test_without_noise_it_is_the_plain_training(kind):
    """Weight decay moves a padding's row there, and the loss does where the row is an output's, too."""
    nets = [made(kind, optimizer=lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1)) for _ in range(2)]
    for net, callbacks in zip(nets, ([], [Federated(FedAvg(), 1, seed=0)]), strict=True):
        make_trainer(*callbacks).fit(net, datamodule=Texts(40, 10, shuffle=False))
    for one, other in zip(*(net.state_dict().values() for net in nets), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def test_a_row_that_another_layer_trains_moves():
    net = made(Tied)
    old = net.backbone[0].words.weight.detach().clone()
    fit(net, Federated(LDPQ(4.0), 4, seed=1))
    assert bool((net.backbone[0].words.weight != old)[PADDING].any())


def test_a_mask_that_changes_between_rounds_is_the_one_that_counts():
    class Prunes(Classifier):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                with torch.no_grad():
                    self.backbone[0][2].weight_mask.zero_()
                self.kept = self.backbone[0][2].weight_orig.detach().clone()

    torch.manual_seed(0)
    net = fit(Prunes(nn.Sequential(pruned(), nn.Linear(5, 3))), Federated(LDPQ(2.0), 4, seed=1), rounds=3)
    assert torch.equal(net.backbone[0][2].weight_orig, net.kept)


SAID = {
    "backbone.1.bias": "fixed",
    "backbone.1.weight": "unit",
    "*.words.weight": lambda value: value.clamp(-0.2, 0.2),
}


@pytest.mark.parametrize("inside", [(), (DPSGD(1.0, 1.0, delta=1e-3),)], ids=["plain", "DPSGD"])
@pytest.mark.parametrize("mechanism", [FedAvg(), LDPQ(2.0)], ids=["mean", "coins"])
def test_what_is_said_of_parameters_holds(mechanism, inside):
    net = made()
    old = net.state_dict()["backbone.1.bias"].clone()
    fit(net, Federated(mechanism, 4, seed=1, constraints=SAID), *inside)
    words, last = net.backbone[0].words.weight, net.backbone[1]
    assert torch.equal(last.bias, old)
    assert last.weight.norm(dim=-1).tolist() == pytest.approx([1.0] * 3, abs=1e-5)
    assert (
        float(words[:PADDING].detach().abs().max()) <= 0.2 + 1e-6
        and float(words[PADDING].detach().min()) == 0.5
    )


def test_in_a_step_it_holds_before_the_round_ends():
    """A client's own noisy steps keep it too, so that nothing of the noise is in what it trains on."""
    seen = []

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append((self.backbone[0].words.weight[PADDING].clone(), self.backbone[1].bias.clone()))
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    net = Looks(nn.Sequential(Mean(), nn.Linear(5, 3)))
    bias = net.backbone[1].bias.detach().clone()
    said = {"*.bias": "fixed"}
    fit(net, Federated(FedAvg(), 2, seed=0, constraints=said), DPSGD(1.0, 1.0, delta=1e-3))
    assert len(seen) > 10
    assert all(bool((row == 0.5).all()) and torch.equal(own, bias) for row, own in seen)


def test_a_frozen_parameter_may_be_named_and_a_name_of_nothing_may_not():
    net = made()
    net.backbone[1].bias.requires_grad_(False)
    fit(net, Federated(FedAvg(), 2, seed=0, constraints={"*.bias": "fixed"}))
    for pattern, local in (("*.bais", ()), ("backbone.1.*", ["backbone.1.*"])):
        with pytest.raises(ValueError, match=r"matches no sent tensor"):
            fit(
                made(),
                Federated(FedAvg(), 2, seed=0, personal_parameters=local, constraints={pattern: "fixed"}),
            )


def test_it_is_said_once(caplog):
    caplog.set_level(logging.INFO)
    fit(made(), Federated(LDPQ(1.0), 4, seed=None, check_isolation=False), rounds=2)
    told = "restored after every round: backbone.0.words.weight. They still travel with noise"
    assert caplog.text.count(told) == 1
