"""Backbones: images in, class scores out. None has stateful buffers unless BatchNorm is asked for.

The papers name "two-layer VGG" (MNIST) and "ResNet18" (CIFAR-10) and leave every width open; the
widths here are our choice, small enough for two CPU cores, and each class says how many parameters
it has. ResNet18 has GroupNorm by default where the original has BatchNorm: an average of quantised running
variances can be negative, and per-client batch statistics would be a release of their own.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from lightning_fedq.imports import extra

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")


class Linear(nn.Sequential):
    """Multinomial logistic regression. 650 parameters on digits, 7,850 on MNIST.

    Args:
        in_features: Numbers per sample; images are flattened.
    """

    def __init__(self, in_features: int = 784, num_classes: int = 10) -> None:
        _check_positive(in_features=in_features, num_classes=num_classes)
        super().__init__(nn.Flatten(), nn.Linear(in_features, num_classes))


class MLP(nn.Sequential):
    """Fully connected layers with an activation between them. 4,810 parameters on digits as they are.

    Args:
        in_features: Numbers per sample; images are flattened.
        hidden: Width of each hidden layer.
        activation: "relu", or "tanh", whose bounded outputs bear noisy weights better.

    Raises:
        ValueError: If a number is not positive, or the activation is another.
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden: Sequence[int] = (64,),
        num_classes: int = 10,
        activation: Literal["relu", "tanh"] = "relu",
    ) -> None:
        _check_positive(in_features=in_features, num_classes=num_classes)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(_ACTIVATIONS)}, got {activation!r}")
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            _check_positive(hidden=width)
            layers += [nn.Linear(in_features, width), _ACTIVATIONS[activation]()]
            in_features = width
        super().__init__(*layers, nn.Linear(in_features, num_classes))


def _stages(in_channels: int, widths: Sequence[int], convolutions: int) -> list[nn.Module]:
    """Per width: `convolutions` 3x3 convolutions with ReLU, then a 2x2 maximum that halves the image."""
    layers: list[nn.Module] = []
    for width in widths:
        for _ in range(convolutions):
            layers += [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU()]
            in_channels = width
        layers.append(nn.MaxPool2d(2))
    return layers


def _flat_size(image_size: int, widths: Sequence[int]) -> int:
    side = image_size >> len(widths)
    if side < 1:
        raise ValueError(
            f"an image of {image_size} x {image_size} can't be halved {len(widths)} times; "
            f"use an image_size >= {2 ** len(widths)} or fewer layers"
        )
    return side * side * widths[-1]


class CNN2(nn.Sequential):
    """Two 3x3 convolutions, each followed by ReLU and a 2x2 maximum, then a linear layer.

    20,490 parameters on MNIST (of which 15,690 in the linear layer), 6,090 on digits.

    Args:
        in_channels: 1 for grey, 3 for colour.
        image_size: Side of the square image.
        widths: Channels of the two convolutions.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int = 28,
        num_classes: int = 10,
        widths: tuple[int, int] = (16, 32),
    ) -> None:
        _check_positive(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
        head = nn.Linear(_flat_size(image_size, widths), num_classes)
        super().__init__(*_stages(in_channels, widths, 1), nn.Flatten(), head)


class CNN3(nn.Sequential):
    """Three 3x3 convolutions, each followed by ReLU and a 2x2 maximum, then a linear layer.

    33,834 parameters on CIFAR-10.

    Args:
        in_channels: 1 for grey, 3 for colour.
        image_size: Side of the square image.
        widths: Channels of the three convolutions.
    """

    def __init__(
        self,
        in_channels: int = 3,
        image_size: int = 32,
        num_classes: int = 10,
        widths: tuple[int, int, int] = (16, 32, 64),
    ) -> None:
        _check_positive(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
        head = nn.Linear(_flat_size(image_size, widths), num_classes)
        super().__init__(*_stages(in_channels, widths, 1), nn.Flatten(), head)


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
        _check_positive(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
        head = nn.Linear(_flat_size(image_size, widths), num_classes)
        super().__init__(*_stages(in_channels, widths, 2), nn.Flatten(), head)


class ResNet18(nn.Module):
    """torchvision's ResNet18 with a stem for 32 x 32 images, and GroupNorm unless BatchNorm is asked for.

    The stem is a 3x3 convolution of stride 1 without the 3x3 maximum, as usual for CIFAR-10; in all
    11,173,962 parameters. GroupNorm comes by Opacus's validator.

    Args:
        in_channels: 1 for grey, 3 for colour.
        norm: "group", or "batch" as published, whose running statistics are 9,600 more coordinates.

    Raises:
        ValueError: If a number is not >= 1, or `norm` is neither.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, norm: Literal["batch", "group"] = "group"
    ) -> None:
        super().__init__()
        _check_positive(in_channels=in_channels, num_classes=num_classes)
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
