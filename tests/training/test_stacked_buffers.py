"""Buffers in a stack: running statistics and counters of every client, as one client at a time has them."""

import copy

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fedq._lightning import pl
from lightning_fedq.clients.stack import ClientStack, StackMemory
from lightning_fedq.functional.flatten import flatten
from tests.digits_run import make_trainer

NUM_CLIENTS, STEPS = 3, 4


class Normalised(pl.LightningModule):
    """BatchNorm, and two buffers of its own: one changed in place, one assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        self.seen.add_(len(labels))
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean((0, 1, 2))
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches():
    """One batch a step, `(clients, batch, ...)`."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(NUM_CLIENTS, 6, 1, 8, 8, generator=generator),
            torch.randint(5, (NUM_CLIENTS, 6), generator=generator),
        )
        for _ in range(STEPS)
    ]


def loader():
    return DataLoader(batches(), batch_size=None)


def members_of(module):
    """Parameters, then buffers."""
    return [*(p.detach() for p in module.parameters()), *module.buffers()]


def flat(module):
    return flatten([member.float() for member in members_of(module)])


def one_client(module, client):
    """The same steps as a loop would write them for one client; returns its flat vector."""
    module = copy.deepcopy(module)
    optimizer = module.configure_optimizers()
    for inputs, labels in batches():
        optimizer.zero_grad()
        module.training_step((inputs[client], labels[client]), 0).backward()
        optimizer.step()
    return flat(module)


class Stacks(pl.Callback):
    """Trains all clients as one stack, whose state at the end it keeps."""

    def __init__(self, buffers: Tensor | None = None) -> None:
        self.start = buffers

    def on_fit_start(self, trainer, module):
        self.weights = flat(module)
        names = [name for name, _ in module.named_parameters()]
        buffers = [name for name, _ in module.named_buffers()]
        memory = StackMemory.allocate(module, [*names, *buffers], NUM_CLIENTS)
        self.stack = ClientStack(trainer, names, buffers, memory, NUM_CLIENTS, self.weights, self.start)

    def on_train_end(self, trainer, module):
        self.updates, self.buffers = self.stack.updates().clone(), self.stack.client_values()


def test_buffers_of_a_stack_are_those_of_one_client_at_a_time():
    module, stacks = Normalised(), Stacks()
    before = copy.deepcopy(module)
    expected = torch.stack([one_client(module, client) for client in range(NUM_CLIENTS)])
    make_trainer(stacks, max_epochs=1).fit(module, train_dataloaders=loader())
    torch.testing.assert_close(stacks.weights + stacks.updates, expected, atol=2e-6, rtol=1e-5)
    dim = sum(p.numel() for p in module.parameters())
    torch.testing.assert_close(stacks.buffers, expected[:, dim:], atol=1e-6, rtol=1e-5)
    assert (stacks.buffers[:, 0] == 6.0 * STEPS).all(), "the counter of every client's own samples"
    assert len(set(stacks.buffers[:, 1].tolist())) == NUM_CLIENTS
    for name, buffer in before.named_buffers():
        assert torch.equal(buffer, dict(module.named_buffers())[name]), "the module's own have not moved"


def test_every_client_starts_from_its_own_buffers():
    module = Normalised()
    dim = sum(p.numel() for p in module.parameters())
    own = torch.rand(NUM_CLIENTS, len(flat(module)) - dim, generator=torch.Generator().manual_seed(2)) + 0.5
    starts = []
    for client in range(NUM_CLIENTS):
        start, offset = copy.deepcopy(module), 0
        for buffer in start.buffers():
            part = own[client, offset : offset + buffer.numel()]
            buffer.copy_(part.view_as(buffer))
            offset += buffer.numel()
        starts.append(one_client(start, client))
    stacks = Stacks(own)
    make_trainer(stacks, max_epochs=1).fit(module, train_dataloaders=loader())
    expected = torch.stack(starts)
    torch.testing.assert_close(stacks.buffers, expected[:, dim:], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        stacks.weights[:dim] + stacks.updates[:, :dim], expected[:, :dim], atol=2e-6, rtol=1e-5
    )
