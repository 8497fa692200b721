"""Initial weights from He's uniform distribution, drawn from a separate generator."""

import math

import torch
from torch import nn


def seeded(model: nn.Module, seed: int) -> nn.Module:
    """Draw all weights of linear and convolutional layers from He's uniform distribution. Set biases to zero.

    A separate generator makes every run of a comparison start from the same model, without using a global
    generator. torch's default distribution is 2.4 times narrower, and leaves a small VGG on a plateau for its
    first rounds.

    Args:
        model: Model, whose weights are changed in place.
        seed: Seed of the generator.

    Returns:
        The same model.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                bound = math.sqrt(6.0 / module.weight[0].numel())
                module.weight.uniform_(-bound, bound, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
    return model
