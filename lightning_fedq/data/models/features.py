"""Features of images that see no data: order-2 scattering, a fixed projection, length 1.

Sources: Bruna and Mallat, Invariant Scattering Convolution Networks, TPAMI 2013 (two scales, eight angles);
that few parameters on them bear more noise than a network: Tramèr and Boneh, Differentially Private Learning
Needs Better Features, ICLR 2021. Departures: filters end at four deviations and edges reflect; what centres
and whitens is from pictures of nothing (`data.models.pictures`), and not from images of anybody.
"""

import hashlib
import math
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from lightning_fedq.data.models.pictures import Pictures, drawn

_BATCH = 200
"""Images at a time: 0.4 MB each while they are worked on, three times as much in colour."""
_PICTURES, _RIDGE = 5000, 0.1
"""Pictures that whiten, and what is added to a variance, in units of the mean one."""


class FixedFeatures(nn.Module):
    """`size` numbers of joint length 1 an image: `(N, channels, side, side)` to `(N, size)`, in batches.

    They see no data of anybody and are never trained: two buffers, a centre and the axes of a projection.
    What has the shape of features passes, so that one model takes images, and what `compute_features` made of
    them.

    Args:
        size: Numbers an image.
        side: Height and width of an image, >= 16, a multiple of 4 times `pool`.
        channels: 1 for grey, 3 for red, green and blue.
        pictures: What whitens: "leaves", or "strokes" on black, a guess about the task. None is a random
            projection, the same on every machine; where the others are made differs in rotations, so that
            several machines take one `file`.
        norm: "log" of the coefficients, which is better where pictures are like the task's, or by "group" of
            three planes, which a random projection needs.
        pool: Side of the squares of the grid (`side / 4`) that are averaged.
        mean: What the data set subtracts from pixels in [0, 1], a number or one a channel.
        std: What it divides by.
        seed: Seed of pictures and projection.
        file: `torch.save(features.state_dict(), file)` of others; None makes the projection, in seconds.
        sha256: Attribute that the projection must have, in checkpoints, too; None is any.

    Raises:
        ValueError: If a number is out of range, the projection is another, or images are of another kind.

    Example:
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
                f"channels 1 or 3, a side >= 16 that 4 * pool divides and 1 <= size <= {width} are needed, "
                f"got channels={channels}, side={side}, pool={pool}, size={size}; resize the images"
            )
        self.size, self.shape, self.pool, self._wanted = size, (channels, side, side), pool, sha256
        self.norm, affine = norm, [torch.tensor(one, dtype=torch.float32) for one in (mean, std)]
        self._affine = torch.stack([one.expand(channels) for one in affine])
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("axes", torch.zeros(width, size))
        if file is not None:
            self.load_state_dict(torch.load(file, weights_only=True))
        else:
            self._make(pictures, torch.Generator().manual_seed(seed))
        self._check_hash()

    def _make(self, pictures: Pictures | None, generator: torch.Generator) -> None:
        """Random signs, or the main axes of the pictures' features, whitened."""
        if pictures is None:
            signs = torch.randint(2, self.axes.shape, generator=generator)
            self.axes = (2.0 * signs - 1.0) / math.sqrt(len(signs))
            return
        shown = drawn(pictures, _PICTURES, self.shape, generator)
        raw = torch.cat([self._raw(part) for part in torch.split(shown, _BATCH)])
        self.centre = raw.mean(0)
        raw -= self.centre
        variances, axes = torch.linalg.eigh(raw.T @ raw / _PICTURES)
        variances, axes = variances.flip(0)[: self.size], axes.flip(1)[:, : self.size]
        self.axes = axes / (variances + _RIDGE * variances.mean()).sqrt()

    def forward(self, images: Tensor) -> Tensor:
        """Return the features `(N, size)` of images, or features as they are."""
        if images.shape[1:] == (self.size,):
            return images
        if images.shape[1:] != self.shape or not images.is_floating_point():
            raise ValueError(
                f"images must be floats of shape (N, {str(self.shape)[1:]}, got {images.dtype} of shape "
                f"{tuple(images.shape)}; give FixedFeatures their side and channels, or resize them"
            )
        mean, std = self._affine.to(self.axes)[..., None, None]
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            pixels = images.to(self.axes) * std + mean
            _check_range(pixels)
            raw = (self._raw(part) - self.centre for part in torch.split(pixels, _BATCH))
            return torch.cat([F.normalize(part @ self.axes) for part in raw])

    def _raw(self, pixels: Tensor) -> Tensor:
        """`(N, width)` of pixels in [0, 1], before the projection."""
        planes = F.avg_pool2d(_scattering(pixels), self.pool)
        if self.norm == "log":  # behind it the centre takes off what all pictures have in common
            return torch.log(planes.clamp(min=0) + 1e-3).flatten(1)
        return F.group_norm(planes, planes.shape[1] // 3).flatten(1)

    def compute_features(self, dataset: Dataset[Any]) -> TensorDataset:
        """Compute the features of a data set once, and keep them in memory.

        Args:
            dataset: Samples `(image, ...)`; what it draws, augmentations say, is drawn once.

        Returns:
            Samples `(features, ...)`, the same rows as those of the data set (`data.repeats`).

        Raises:
            MemoryError: If there is no room for `size` numbers a sample.
        """
        number: int = len(dataset)  # type: ignore[arg-type]
        try:
            found = torch.empty(number, self.size)
        except RuntimeError as error:
            raise MemoryError(
                f"features of {number:,} images need {4e-9 * number * self.size:,.0f} GB; keep fewer, or of "
                "a smaller size, or train on the images themselves, which computes them anew in every round"
            ) from error
        rest = []
        for some in torch.split(torch.arange(number), _BATCH):
            images, *others = default_collate([dataset[int(index)] for index in some])
            found[some] = self(images.to(self.axes.device)).to(found)
            rest.append(others)
        kept: Any = TensorDataset(found, *map(torch.cat, zip(*rest, strict=True)))
        kept.rows_of = dataset
        return kept  # type: ignore[no-any-return]

    @property
    def sha256(self) -> str:
        """Hash of the projection, and of the settings of what is projected."""
        settings = (self.shape, self.pool, self.norm, self._affine.tolist())
        parts = (part.float().cpu().numpy().tobytes() for part in (self.centre, self.axes))
        return hashlib.sha256(b"".join((repr(settings).encode(), *parts))).hexdigest()

    def _load_from_state_dict(self, *state: Any) -> None:
        super()._load_from_state_dict(*state)
        self._check_hash()

    def _check_hash(self) -> None:
        if self._wanted not in (None, self.sha256):
            raise ValueError(
                f"the projection's sha256 is {self.sha256}, wanted is {self._wanted}; give the file= that "
                "was saved where that is from (one that is made again differs from machine to machine)"
            )


def _check_range(pixels: Tensor) -> None:
    try:
        low, high = float(pixels.min()), float(pixels.max())
    except RuntimeError:  # nobody may look within torch.func.vmap, before which a client is tried alone
        return
    if not -1e-3 <= low <= high <= 1.001:
        raise ValueError(
            f"pixels must lie in [0, 1] after images * std + mean, got {low:.3g} to {high:.3g}; give "
            "FixedFeatures the mean and std that the data set subtracts and divides by"
        )


@lru_cache(maxsize=1)
def _filters() -> tuple[Tensor, ...]:
    """Waves `(16, 1, h, h)` of both scales, real parts first, and low passes of the image and of its half."""
    found = []
    for scale in (0, 1):
        std, reach = 0.8 * 2**scale, math.ceil(4 * 0.8 * 2**scale)
        line, turns = torch.arange(-reach, reach + 1.0), math.pi / 8 * torch.arange(8.0).view(8, 1, 1)
        along = line * turns.cos() + line[:, None] * turns.sin()
        across = line[:, None] * turns.cos() - line * turns.sin()
        envelope = torch.exp(-(along**2 + (0.5 * across) ** 2) / (2 * std**2))
        wave = envelope * torch.exp(0.75j * math.pi / 2**scale * along)
        mean = wave.sum((1, 2), keepdim=True) / envelope.sum((1, 2), keepdim=True)
        wave = (wave - mean * envelope) * 0.5 / (2 * math.pi * std**2)  # Morlet: of mean 0
        found.append(torch.cat([wave.real, wave.imag])[:, None])
    line = torch.exp(-(torch.arange(-6.0, 7.0) ** 2) / (2 * 1.6**2))
    low = torch.outer(line, line)[None, None]
    return *found, low / low.sum(), low[..., ::2, ::2] / low[..., ::2, ::2].sum()


def _scattering(pixels: Tensor) -> Tensor:
    """`(N, C, H, W)` to `(N, 81 C, H / 4, W / 4)`."""
    waves0, waves1, low0, low1 = (one.to(pixels) for one in _filters())
    if pixels.shape[1] == 3:  # brightness, red against green, both against blue, in [0, 1]
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
    real, imag = _convolved(planes, waves, stride).chunk(2, 1)
    return torch.sqrt(real**2 + imag**2 + 1e-12)


def _convolved(x: Tensor, filters: Tensor, stride: int) -> Tensor:
    """Every plane of `(P, A, H, W)` with every filter: `(P, A * filters, ...)`, edges reflected."""
    padded = F.pad(x.flatten(0, 1)[:, None], [filters.shape[-1] // 2] * 4, "reflect")
    found = F.conv2d(padded, filters, stride=stride)
    return found.reshape(len(x), -1, *found.shape[2:])
