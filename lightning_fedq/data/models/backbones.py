"""Small backbones that map images to class scores on two CPU cores. They have no buffers."""

from collections.abc import Sequence
from typing import Literal

from torch import nn

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")


class Linear(nn.Sequential):
    """Multinomial logistic regression with 650 parameters on digits and 7,850 on MNIST.

    Args:
        in_features: Number of inputs per sample, >= 1. Images are flattened.
        num_classes: Number of classes, >= 1.
        bias: Whether the layer has a bias. Without one, a clipped update is spent on the weights alone.
        features: Module in front of the layer, such as `FixedFeatures`, with `in_features` outputs per
            sample. None uses the inputs themselves.

    Raises:
        ValueError: If a number is not positive.
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
    """Fully connected network with 4,810 parameters on digits by default (`in_features=64`).

    Args:
        in_features: Number of inputs per sample, >= 1. Images are flattened.
        hidden: Width of each hidden layer.
        num_classes: Number of classes, >= 1.
        activation: Activation between layers: "relu", or "tanh", whose bounded outputs tolerate noisy
            weights better.

    Raises:
        ValueError: If a number is not positive, or if the activation is unknown.
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
    """Two 3x3 convolutions, each followed by ReLU and 2x2 max pooling, then a linear layer.

    It has 20,490 parameters on MNIST (15,690 of them in the linear layer) and 6,090 on digits.

    Args:
        in_channels: Number of colour channels: 1 for grey, 3 for colour.
        image_size: Height and width of an image, >= 4.
        num_classes: Number of classes, >= 1.
        widths: Number of output channels of each convolution.

    Raises:
        ValueError: If a number is not positive, or if the image is too small.
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
                f"An image of {image_size} x {image_size} can't be halved twice. Use an image_size >= 4."
            )
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            in_channels = width
        super().__init__(*layers, nn.Flatten(), nn.Linear(side * side * in_channels, num_classes))
