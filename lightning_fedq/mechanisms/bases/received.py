"""Checks of received messages before decoding: shape and range of the symbols."""

from torch import Tensor


def check_received(symbols: Tensor, num_clients: int, dim: int, largest: int) -> None:
    """Refuse messages, or a sum of messages, that no client can have sent.

    Args:
        symbols: `(num_clients, dim)`, one message a row, or their sum `(dim,)`.
        num_clients: Number of clients.
        dim: Number of symbols of one message.
        largest: Largest symbol. The smallest is 0.

    Raises:
        ValueError: If the shape is wrong, or a symbol is not an integer in the code's range.
    """
    if tuple(symbols.shape) not in ((num_clients, dim), (dim,)):
        raise ValueError(
            f"messages must have shape {(num_clients, dim)}, or {(dim,)} for their sum, "
            f"got {tuple(symbols.shape)}"
        )
    most = largest * (num_clients if symbols.dim() == 1 else 1)
    wrong = symbols.is_floating_point()
    if wrong or (symbols.numel() and not 0 <= int(symbols.min()) <= int(symbols.max()) <= most):
        raise ValueError(
            f"symbols must be integers in [0, {most}]. Drop the client that sent something else."
        )
