"""He's uniform initial law, drawn from a generator of its own."""

import math

import torch
from torch import nn


def seeded(model: nn.Module, seed: int) -> nn.Module:
    """Draw all weights anew (He's uniform law, biases zero) from a generator of their own.

    Every run of a comparison so starts from the same model, and no global generator is touched. torch's
    default law, 2.4 times narrower, leaves a small VGG on a plateau for its first rounds.
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
