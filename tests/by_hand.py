"""Federated averaging written out, one client after the other, without Lightning, loaders or schedules."""

import torch
from torch import nn

from tests.digits_run import digits, weights_of


def federated_averaging(model, plans, train, weight_of=lambda client: 1.0):
    """Each plan's survivors train by `train(client, plan)` from the same weights; their weighted mean."""
    for plan in plans:
        start, total = weights_of(model).clone(), 0.0
        for client in plan.survivors:
            nn.utils.vector_to_parameters(start.clone(), model.parameters())
            train(client, plan)
            total = total + weight_of(client) * (weights_of(model) - start)
        mean = total / max(sum(map(weight_of, plan.survivors)), 1e-9)
        nn.utils.vector_to_parameters(start + mean, model.parameters())
    return weights_of(model)


def plans_of(fed, rounds):
    return [fed.planner.plan(round, fed.mechanism) for round in range(rounds)]


def data_order(plan, client):
    """The generator that a client's samples are shuffled by."""
    return torch.Generator().manual_seed(plan.stream_seed("data order", client))


def sgd_step(model, *batches, rate=0.5):
    """A step on the mean of the losses of these batches: indices into the digits, or inputs and labels."""
    pairs = [batch if isinstance(batch, tuple | list) else [x[batch] for x in digits()] for batch in batches]
    losses = [nn.functional.cross_entropy(model(inputs), labels) for inputs, labels in pairs]
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(sum(losses) / len(losses), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.data.sub_(rate * gradient)


def averaging_with_own(
    model, fed, rounds, stays, batch_size, begin=lambda model: None, mu=0.0, step=sgd_step
):
    """The papers' loop where clients keep what `stays(name)`: the state at the end, and theirs by client.

    Others are averaged, of integers the largest is taken; `mu` pulls what is averaged to the round's start.
    """
    own = {}
    for plan in plans_of(fed, rounds):
        start = {name: value.clone() for name, value in model.state_dict().items()}
        ends = []
        for client in plan.survivors:
            model.load_state_dict({**start, **own.get(client, {})})
            model.train()
            begin(model)
            held = fed.client_indices[client]
            for part in held[torch.randperm(len(held), generator=data_order(plan, client))].split(batch_size):
                pulls = {n: mu * (p.detach() - start[n]) for n, p in model.named_parameters() if not stays(n)}
                step(model, part)
                for name, p in model.named_parameters():
                    p.data.sub_(0.5 * pulls.get(name, 0.0))
            ends.append({name: value.clone() for name, value in model.state_dict().items()})
            own[client] = {name: ends[-1][name] for name in start if stays(name)}
        found = {name: torch.stack([end[name] for end in ends]) for name in start}
        mean = {n: v.mean(0) if v.is_floating_point() else v.amax(0) for n, v in found.items()}
        model.load_state_dict({n: v if stays(n) else mean[n] for n, v in start.items()})
    return model.state_dict(), own
