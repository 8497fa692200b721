"""Backbones: images in, class scores out, small enough for two CPU cores. None has buffers of its own."""

from collections.abc import Sequence
from typing import Literal

from torch import nn

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")


class Linear(nn.Sequential):
    """Multinomial logistic regression. 650 parameters on digits, 7,850 on MNIST.

    Args:
        in_features: Numbers per sample; images are flattened.
        bias: Without one, all of a clipped update is about the weights.
        features: In front, as `FixedFeatures`; in_features numbers a sample come out.
    """

    def __init__(
        self,
        in_features: int = 784,
        num_classes: int = 10,
        bias: bool = True,
        features: nn.Module | None = None,
    ) -> None:
        _check_positive(in_features=in_features, num_classes=num_classes)
        front = [] if features is None else [features]
        super().__init__(*front, nn.Flatten(), nn.Linear(in_features, num_classes, bias))


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
        side = image_size // 4
        if side < 1:
            raise ValueError(
                f"an image of {image_size} x {image_size} can't be halved twice; use an image_size >= 4"
            )
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            in_channels = width
        super().__init__(*layers, nn.Flatten(), nn.Linear(side * side * in_channels, num_classes))
