"""Thresholds of one-bit and of coupled coins in tensor code, to hold the shipped loops to."""

import torch

from lightning_fedq.functional.one_bit.coupled_coins import flip_threshold


def one_bit_thresholds(update, center, radius, coin):
    """Thresholds below which a word sends a one, int64. Values outside the range are clipped."""
    x = ((update.double() - center.double()) * (1.0 / radius.double())).clamp(-1.0, 1.0)
    return coin.low + torch.floor((x + 1.0) * (0.5 * (coin.high - coin.low)) + 0.5).to(torch.int64)


def one_bit_quantize(update, words, center, radius, coin):
    """One bit a coordinate, 1 if the word is below the threshold."""
    return (words < one_bit_thresholds(update, center, radius, coin)).to(torch.uint8)


def coupled_thresholds(update, center, radius, coin, secret):
    """Thresholds below which a private word sends a one, given the member's version of the secret bit."""
    whole, flip = 1 << coin.word_bits, flip_threshold(coin)
    x = ((update.double() - center.double()) * (1.0 / radius.double())).clamp(-1.0, 1.0)
    # float64 throughout: torch.where of two Python numbers would round thresholds to float32
    says = coin.low + (coin.high - coin.low) * (x > 0).double()
    idle = flip + (whole - 2 * flip) * secret.double()
    size = x.abs()
    return torch.floor(size * says + (1.0 - size) * idle + 0.5).to(torch.int64)
