"""Image features that do not depend on data: order-2 scattering, a fixed projection, and length 1.

A model with few parameters on such features tolerates more noise than a network.

Departures from the papers: filters end at four standard deviations, and images are reflected at their edges.
The features are centred and whitened by synthetic images, drawn from a seed, and not by real ones.

References:
    Bruna, Mallat, Invariant Scattering Convolution Networks, TPAMI 2013 (two scales, eight angles).
    Tramèr, Boneh, Differentially Private Learning Needs Better Features, ICLR 2021.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

Pictures = Literal["strokes", "leaves"]
"""Kind of synthetic images: pen strokes on black (for handwriting), or dead leaves (for any task)."""
_BATCH = 200
"""Number of images per batch. An image takes 0.4 MB of memory in grey, three times as much in colour."""
_PICTURES, _RIDGE = 5000, 0.1
"""Number of synthetic images for whitening, and ridge of the variances, in units of the mean variance."""


class FixedFeatures(nn.Module):
    """Fixed image features: maps images `(N, channels, side, side)` to unit vectors `(N, size)`.

    The features do not depend on anybody's data and are never trained. Their state is two buffers: a centre
    and the axes of a projection. Inputs that have the shape of features are returned unchanged, so that one
    model accepts images and also features from `compute_features`.

    Args:
        size: Number of features of an image.
        side: Height and width of an image, >= 16, a multiple of 4 * `pool`.
        channels: Number of colour channels: 1 for grey, 3 for red, green and blue.
        pictures: Synthetic images for centring and whitening: "leaves" for any task, or "strokes" for
            handwriting on black. None uses a random projection, which is equal on every machine. Whitened
            projections differ between machines by rotations, so several machines must share one `file`.
        norm: Normalisation of the scattering coefficients. "log" takes logarithms, which is better if the
            synthetic images resemble the task. "group" normalises groups of three planes, which a random
            projection needs.
        pool: Side of the squares of coefficients that are averaged, on a grid of `side / 4`.
        mean: Mean that the data set subtracts from pixels in [0, 1]: one number, or one per channel.
        std: Standard deviation by which the data set divides pixels: one number, or one per channel.
        seed: Seed of synthetic images and projection.
        file: File with a saved projection (`torch.save(features.state_dict(), file)`). None computes the
            projection, which takes seconds.
        sha256: Expected value of the attribute `sha256`, also checked when a checkpoint is loaded. None
            accepts any projection.

    Attributes:
        sha256: Hash of the projection and its settings.

    Raises:
        ValueError: If a setting is out of its range, if the projection has another hash, or if images have
            another shape, type or range.

    Examples:
        >>> features = FixedFeatures(64, side=16, pictures=None)
        >>> features(torch.rand(5, 1, 16, 16)).shape, features.sha256[:8]
        (torch.Size([5, 64]), '77615f7b')
    """

    centre: Tensor
    axes: Tensor

    def __init__(
        self,
        size: int = 128,
        side: int = 28,
        channels: int = 1,
        pictures: Pictures | None = "leaves",
        norm: Literal["log", "group"] = "group",
        pool: int = 1,
        mean: float | list[float] = 0.0,
        std: float | list[float] = 1.0,
        seed: int = 0,
        file: str | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__()
        width = 81 * channels * (side // 4 // max(pool, 1)) ** 2
        if channels not in (1, 3) or pool < 1 or side < 16 or side % (4 * pool) or not 1 <= size <= width:
            raise ValueError(
                f"channels must be 1 or 3, side >= 16 a multiple of 4 * pool, and 1 <= size <= {width}, "
                f"got channels={channels}, side={side}, pool={pool}, size={size}. Resize the images."
            )
        self.size, self.shape, self.pool, self._wanted = size, (channels, side, side), pool, sha256
        self.norm, affine = norm, [torch.tensor(value, dtype=torch.float32) for value in (mean, std)]
        self._affine = torch.stack([value.expand(channels) for value in affine])
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("axes", torch.zeros(width, size))
        if file is not None:
            self.load_state_dict(torch.load(file, weights_only=True))
        else:
            self._make(pictures, torch.Generator().manual_seed(seed))
        self._check_hash()

    def _make(self, pictures: Pictures | None, generator: torch.Generator) -> None:
        """Compute the projection: random signs, or whitened principal axes of synthetic images' features."""
        if pictures is None:
            signs = torch.randint(2, self.axes.shape, generator=generator)
            self.axes = (2.0 * signs - 1.0) / math.sqrt(len(signs))
            return
        images = drawn(pictures, _PICTURES, self.shape, generator)
        raw = torch.cat([self._raw(part) for part in torch.split(images, _BATCH)])
        self.centre = raw.mean(0)
        raw -= self.centre
        variances, axes = torch.linalg.eigh(raw.T @ raw / _PICTURES)
        variances, axes = variances.flip(0)[: self.size], axes.flip(1)[:, : self.size]
        self.axes = axes / (variances + _RIDGE * variances.mean()).sqrt()

    def forward(self, images: Tensor) -> Tensor:
        """Return the features `(N, size)` of images. Return inputs of that shape unchanged."""
        if images.shape[1:] == (self.size,):
            return images
        if images.shape[1:] != self.shape or not images.is_floating_point():
            raise ValueError(
                f"images must be floats of shape (N, {str(self.shape)[1:]}, got {images.dtype} of shape "
                f"{tuple(images.shape)}. Give FixedFeatures their side and channels, or resize them."
            )
        mean, std = self._affine.to(self.axes)[..., None, None]
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            pixels = images.to(self.axes) * std + mean
            _check_range(pixels)
            raw = (self._raw(part) - self.centre for part in torch.split(pixels, _BATCH))
            return torch.cat([F.normalize(part @ self.axes) for part in raw])

    def _raw(self, pixels: Tensor) -> Tensor:
        """Return normalised scattering coefficients `(N, width)` of pixels in [0, 1]."""
        planes = F.avg_pool2d(_scattering(pixels), self.pool)
        if self.norm == "log":  # afterwards the centre removes the part that is common to all images
            return torch.log(planes.clamp(min=0) + 1e-3).flatten(1)
        return F.group_norm(planes, planes.shape[1] // 3).flatten(1)

    def compute_features(self, dataset: Dataset[Any]) -> TensorDataset:
        """Compute the features of a data set once, and keep them in memory.

        Args:
            dataset: Data set with samples `(image, ...)`. Random augmentations are drawn once.

        Returns:
            Data set with samples `(features, ...)`, which count as the same rows (`data.repeats`).

        Raises:
            MemoryError: If the features do not fit into memory (4 * `size` bytes per sample).
        """
        number: int = len(dataset)  # type: ignore[arg-type]
        try:
            features = torch.empty(number, self.size)
        except RuntimeError as error:
            raise MemoryError(
                f"Features of {number:,} images need {4e-9 * number * self.size:,.0f} GB. Keep fewer images, "
                "use a smaller size, or train on the images, which computes features in every round."
            ) from error
        rest = []
        for indices in torch.split(torch.arange(number), _BATCH):
            images, *others = default_collate([dataset[int(index)] for index in indices])
            features[indices] = self(images.to(self.axes.device)).to(features)
            rest.append(others)
        computed: Any = TensorDataset(features, *map(torch.cat, zip(*rest, strict=True)))
        computed.rows_of = dataset
        return computed  # type: ignore[no-any-return]

    @property
    def sha256(self) -> str:
        """SHA-256 hash of the projection and of the settings of the scattering coefficients."""
        settings = (self.shape, self.pool, self.norm, self._affine.tolist())
        parts = (part.float().cpu().numpy().tobytes() for part in (self.centre, self.axes))
        return hashlib.sha256(b"".join((repr(settings).encode(), *parts))).hexdigest()

    def _load_from_state_dict(self, *state: Any) -> None:
        super()._load_from_state_dict(*state)
        self._check_hash()

    def _check_hash(self) -> None:
        """Refuse a projection with another hash than expected."""
        if self._wanted not in (None, self.sha256):
            raise ValueError(
                f"The projection's sha256 is {self.sha256}, but {self._wanted} was expected. Give the file= "
                "of the expected projection, because a computed one differs between machines."
            )


def _check_range(pixels: Tensor) -> None:
    """Refuse pixels outside of [0, 1]."""
    try:
        low, high = float(pixels.min()), float(pixels.max())
    except RuntimeError:  # torch.func.vmap forbids reading values, but a client was tried alone before
        return
    if not -1e-3 <= low <= high <= 1.001:
        raise ValueError(
            f"images * std + mean must be in [0, 1], got {low:.3g} to {high:.3g}. "
            "Give FixedFeatures the mean and std by which the data set normalises."
        )


@lru_cache(maxsize=1)
def _filters() -> tuple[Tensor, ...]:
    """Return the filters of the scattering transform.

    Returns:
        Morlet wavelets of scale 0 and of scale 1, `(16, 1, h, h)` each (8 angles, real parts first), and the
        low-pass filters for the image and for the image of half the side.
    """
    filters = []
    for scale in (0, 1):
        std, reach = 0.8 * 2**scale, math.ceil(4 * 0.8 * 2**scale)
        line, turns = torch.arange(-reach, reach + 1.0), math.pi / 8 * torch.arange(8.0).view(8, 1, 1)
        along = line * turns.cos() + line[:, None] * turns.sin()
        across = line[:, None] * turns.cos() - line * turns.sin()
        envelope = torch.exp(-(along**2 + (0.5 * across) ** 2) / (2 * std**2))
        wave = envelope * torch.exp(0.75j * math.pi / 2**scale * along)
        mean = wave.sum((1, 2), keepdim=True) / envelope.sum((1, 2), keepdim=True)
        wave = (wave - mean * envelope) * 0.5 / (2 * math.pi * std**2)  # a Morlet wavelet has mean 0
        filters.append(torch.cat([wave.real, wave.imag])[:, None])
    line = torch.exp(-(torch.arange(-6.0, 7.0) ** 2) / (2 * 1.6**2))
    low = torch.outer(line, line)[None, None]
    return *filters, low / low.sum(), low[..., ::2, ::2] / low[..., ::2, ::2].sum()


def _scattering(pixels: Tensor) -> Tensor:
    """Return the scattering coefficients of orders 0 to 2: `(N, C, H, W)` to `(N, 81 C, H / 4, W / 4)`."""
    waves0, waves1, low0, low1 = (filters.to(pixels) for filters in _filters())
    # convert colours to brightness, red against green, and both against blue, each in [0, 1]
    if pixels.shape[1] == 3:
        red, green, blue = pixels.unbind(1)
        light, against = (red + green + blue) / 3, (red + green - 2 * blue + 2) / 4
        pixels = torch.stack([light, (red - green + 1) / 2, against], 1)
    images = pixels.flatten(0, 1)[:, None]
    fine, coarse = _moduli(images, waves0, 1), _moduli(images, waves1, 2)
    second = _moduli(fine.flatten(0, 1)[:, None], waves1, 2).reshape(len(fine), 64, *coarse.shape[2:])
    parts = [_convolved(images, low0, 4), _convolved(fine, low0, 4)]
    parts += [_convolved(coarse, low1, 2), _convolved(second, low1, 2)]
    return torch.cat(parts, 1).reshape(len(pixels), -1, *parts[0].shape[2:])


def _moduli(planes: Tensor, waves: Tensor, stride: int) -> Tensor:
    """Return the moduli of the complex convolutions with all wavelets."""
    real, imag = _convolved(planes, waves, stride).chunk(2, 1)
    return torch.sqrt(real**2 + imag**2 + 1e-12)


def _convolved(x: Tensor, filters: Tensor, stride: int) -> Tensor:
    """Convolve every plane of `(P, A, H, W)` with every filter: `(P, A * filters, ...)`, edges reflected."""
    padded = F.pad(x.flatten(0, 1)[:, None], [filters.shape[-1] // 2] * 4, "reflect")
    planes = F.conv2d(padded, filters, stride=stride)
    return planes.reshape(len(x), -1, *planes.shape[2:])


def drawn(kind: Pictures, number: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw synthetic images in [0, 1], `(number, channels, side, side)`.

    Args:
        kind: Kind of the images.
        number: Number of images.
        shape: Shape of an image, (channels, side, side).
        generator: CPU generator.
    """
    parts = torch.split(torch.arange(number), 250)
    draw = _strokes if kind == "strokes" else _leaves
    return torch.cat([draw(len(part), shape[0], shape[1], generator) for part in parts])


def _strokes(number: int, channels: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw images of one or two cubic Bezier curves. The second often starts at the end of the first."""
    t = torch.linspace(0, 1, 24)
    weights = torch.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    ends = (torch.rand(number, 2, 4, 2, generator=generator) * 20 + 4) * side / 28
    is_connected, is_single = (torch.rand(number, generator=generator) < chance for chance in (0.6, 0.3))
    ends[is_connected, 1, 0] = ends[is_connected, 0, 3]
    ends[is_single, 1] = ends[is_single, 0]
    points = torch.einsum("mcki,kt->mcti", ends, weights).flatten(1, 2)
    width = (torch.rand(number, 1, generator=generator) + 1) * 0.9 * side / 28
    pixels = torch.cartesian_prod(*[torch.arange(float(side))] * 2).expand(number, -1, -1)
    inked = (1 + width - torch.cdist(pixels, points).amin(-1)).clamp(0, 1)
    return inked.view(number, 1, side, side).expand(-1, channels, -1, -1)


def _leaves(number: int, channels: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw dead-leaves images of sixty overlapping ellipses, few of them large.

    References:
        Lee, Mumford, Huang, Occlusion Models for Natural Images, IJCV 2001.
    """
    line = torch.arange(float(side))
    pictures = torch.rand(number, channels, 1, 1, generator=generator).expand(-1, -1, side, side)
    for _ in range(60):
        right, down, u, turn, slant, light = torch.rand(6, number, 1, 1, generator=generator)
        x, y = line - right * (side + 8) + 4, line[:, None] - down * (side + 8) + 4
        cos, sin = (math.pi * turn).cos(), (math.pi * turn).sin()
        along, across = x * cos + y * sin, (y * cos - x * sin) / (0.2 + 0.8 * slant)
        inside = along**2 + across**2 < 1 / (1 / 1.5**2 - u * (1 / 1.5**2 - 1 / 20**2))
        tint = 0.35 * torch.randn(number, channels, 1, 1, generator=generator)
        pictures = torch.where(inside[:, None], (light[:, None] + tint).clamp(0, 1), pictures)
    return pictures
