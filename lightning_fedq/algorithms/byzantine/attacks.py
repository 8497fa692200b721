"""Byzantine attacks: what lying clients send instead of their update, or instead of their bits.

Two kinds. An update attack replaces the update *before* it is encoded: whatever the mechanism does to
honest updates (clipping, quantising, noise) it does to these too. A wire attack replaces the message, so a
Byzantine client may also skip the coin that makes honest clients private, which is worth up to
1 / tanh(epsilon / 2) honest votes. "ones" and "flip" (each bit times a fair coin) are the attacks of the CPA
paper; with its words both have mean zero, hence test noise and not lies ("ones" is a vote for point 0 where
every word is +1 there, as Hadamard words are). "inverted" is the attack that it leaves out.

Functions are pure: Byzantine clients' honest updates, the others' mean and standard deviation, and random
numbers are arguments. Colluding ones estimate the honest statistics from their own honest updates.

References:
    Baruch et al., A Little Is Enough, NeurIPS 2019 (ALIE). Xie et al., Fall of Empires, UAI 2020 (IPM).
    Karimireddy et al., ICLR 2022 (mimic). Lang et al., CPA, section 5 (ones, flip).
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

# ---- instead of the update ----------------------------------------------------------------------------


def sign_flip(updates: Tensor, scale: float = 1.0) -> Tensor:
    """Minus `scale` times the honest updates `(num_byzantine, dim)`."""
    return -scale * updates


def constant(updates: Tensor, value: float) -> Tensor:
    """`value` in every coordinate of every Byzantine client."""
    return torch.full_like(updates, value)


def uniform_noise(updates: Tensor, scale: float, uniforms: Tensor) -> Tensor:
    """Uniform on [-scale, scale], from `(num_byzantine, dim)` uniforms on (0, 1): "random"."""
    return (scale * (2.0 * uniforms - 1.0)).to(updates)


def gaussian_noise(updates: Tensor, sigma: float, normals: Tensor) -> Tensor:
    """The honest updates plus sigma times `(num_byzantine, dim)` standard normals."""
    return updates + sigma * normals.to(updates)


def alie_shift(num_clients: int, num_byzantine: int) -> float:
    """z of ALIE: how many standard deviations the Byzantine clients can move and still look like most.

    With s = floor(n / 2 + 1) - f honest supporters needed, the normal quantile of (n - f - s) / (n - f).

    Raises:
        ValueError: If the Byzantine clients are not a minority of at least one.
    """
    if not 0 < num_byzantine < num_clients / 2:
        raise ValueError(
            f"ALIE needs between 1 and n / 2 Byzantine clients, got {num_byzantine} of {num_clients}; "
            "use sign_flip"
        )
    honest = num_clients - num_byzantine
    supporters = num_clients // 2 + 1 - num_byzantine
    share = (honest - supporters) / honest
    return NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6))


def a_little_is_enough(mean: Tensor, std: Tensor, num_byzantine: int, shift: float) -> Tensor:
    """Every Byzantine client sends mean - shift std, `(num_byzantine, dim)`."""
    return (mean - shift * std).expand(num_byzantine, -1).clone()


def inner_product_manipulation(mean: Tensor, num_byzantine: int, scale: float = 1.1) -> Tensor:
    """Every Byzantine client sends -scale times the honest mean, so that the mean may point the wrong way."""
    return (-scale * mean).expand(num_byzantine, -1).clone()


def mimic(victim: Tensor, num_byzantine: int) -> Tensor:
    """Every Byzantine client copies one honest client's update: harmless rows that skew the cohort."""
    return victim.expand(num_byzantine, -1).clone()


# ---- instead of the bits --------------------------------------------------------------------------------


def all_ones(symbols: Tensor) -> Tensor:
    """The largest symbol, one, everywhere."""
    return torch.ones_like(symbols)


def coin_flipped(symbols: Tensor, coins: Tensor) -> Tensor:
    """Each bit inverted where a fair coin (bool, same shape) says so: the paper's "flip", pure noise."""
    return symbols ^ coins.to(symbols)


def inverted(symbols: Tensor) -> Tensor:
    """Every bit inverted. On bits encoded without a coin it is worth most."""
    return 1 - symbols


def copied(symbols: Tensor, partners: Tensor) -> Tensor:
    """The bits of somebody else, a partner in a pair: correlated errors add up instead of cancelling."""
    if partners.shape != symbols.shape:
        raise ValueError(f"partners must have shape {tuple(symbols.shape)}, got {tuple(partners.shape)}")
    return partners.clone()


def garbage(symbols: Tensor, words: Tensor, low: int | Tensor, high: int | Tensor) -> Tensor:
    """Random symbols in [low, high], from integer words >= 0 of the same shape. No server can refuse them."""
    return (low + words % (high - low + 1)).to(symbols.dtype)


# ---- what one Byzantine client can do -------------------------------------------------------------------


def ldp_amplification(epsilon: float) -> float:
    """Largest decoded value of one epsilon-LDP bit over the largest honest one: coth(epsilon / 2).

    A fraction f of them moves the mean of values in [-c, c] by at most 2 f c times this. A small epsilon
    per coordinate is a long lever: 200 at epsilon = 0.01.

    Raises:
        ValueError: If epsilon is not > 0.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    return 1.0 / math.tanh(epsilon / 2.0)
