"""How the clients of one round share the machine."""

from lightning_fedq.strategies.client_parallel import ClientParallelStrategy

__all__ = ["ClientParallelStrategy"]
