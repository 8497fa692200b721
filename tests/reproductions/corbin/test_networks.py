"""Networks of CorBin-FL's experiments."""

import pytest
import torch
from torch import nn

from reproductions.corbin.networks import VGG2, ResNet18


@pytest.mark.parametrize(
    ("model", "shape", "size"), [(VGG2(), (1, 28, 28), 12002), (ResNet18(), (3, 32, 32), 11173962)]
)
def test_scores_and_documented_size(model, shape, size):
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == size
    assert not list(model.buffers())


def test_resnet_has_groupnorm_where_the_original_has_batchnorm():
    kinds = [type(m) for m in ResNet18(num_classes=7).modules()]
    assert kinds.count(nn.GroupNorm) == 20 and nn.BatchNorm2d not in kinds


def test_resnet_as_published_keeps_batchnorm_and_its_statistics():
    model = ResNet18(norm="batch")
    kinds = [type(m) for m in model.modules()]
    assert kinds.count(nn.BatchNorm2d) == 20 and nn.GroupNorm not in kinds
    assert sum(p.numel() for p in model.parameters()) == 11173962
    assert sum(b.numel() for b in model.buffers() if b.is_floating_point()) == 9600
    with pytest.raises(ValueError, match="norm must be 'batch' or 'group', got 'layer'"):
        ResNet18(norm="layer")
