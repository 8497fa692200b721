"""The networks that CorBin-FL names: "two-layer VGG" (MNIST) and "ResNet18" (CIFAR-10), widths left open.

The widths here are our choice, and each class says how many parameters it has. ResNet18 has GroupNorm by
default where the original has BatchNorm: an average of quantised running variances can be negative, and
per-client batch statistics would be a release of their own.
"""

from typing import Literal

from torch import Tensor, nn

from lightning_fedq.imports import extra


class VGG2(nn.Sequential):
    """Two VGG blocks (two 3x3 convolutions with ReLU, a 2x2 maximum) and a linear layer.

    "Two-layer VGG" of CorBin-FL's experiment 7 is not described further there. This reading keeps
    VGG's block; 12,002 parameters on MNIST.

    Args:
        in_channels: 1 for grey, 3 for colour.
        image_size: Side of the square image.
        widths: Channels of the two blocks.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int = 28,
        num_classes: int = 10,
        widths: tuple[int, int] = (8, 16),
    ) -> None:
        layers: list[nn.Module] = []
        side = image_size
        for width in widths:
            layers += [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            in_channels, side = width, side // 2
        super().__init__(*layers, nn.Flatten(), nn.Linear(side * side * in_channels, num_classes))


class ResNet18(nn.Module):
    """torchvision's ResNet18 with a stem for 32 x 32 images, and GroupNorm unless BatchNorm is asked for.

    The stem is a 3x3 convolution of stride 1 without the 3x3 maximum, as usual for CIFAR-10; in all
    11,173,962 parameters. GroupNorm comes by Opacus's validator.

    Args:
        in_channels: 1 for grey, 3 for colour.
        norm: "group", or "batch" as published, whose running statistics are 9,600 more coordinates.

    Raises:
        ValueError: If `norm` is neither.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, norm: Literal["batch", "group"] = "group"
    ) -> None:
        super().__init__()
        if norm not in ("batch", "group"):
            raise ValueError(f"norm must be 'batch' or 'group', got {norm!r}")
        with extra("vision", "ResNet18"):  # slow to import, and only needed here
            import torchvision
            from opacus.validators import ModuleValidator

        net = torchvision.models.resnet18(num_classes=num_classes)
        net.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
        self.net = ModuleValidator.fix(net) if norm == "group" else net

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores `(batch, num_classes)` of images `(batch, channels, side, side)`."""
        scores: Tensor = self.net(images)
        return scores
