"""The same federation between real machines: Flower carries the messages of the simulation's mechanisms.

`client_app` and `server_app` make a Flower app from a module, data and the settings of a simulation. The
extra `lightning-fedq[flower]` is needed. Flower needs Python 3.11 or later.
"""

from lightning_fedq.imports import extra

with extra("flower", "lightning_fedq.flower"):
    import flwr  # noqa: F401

from lightning_fedq.flower.client_app import client_app
from lightning_fedq.flower.federated_server import server_app

__all__ = ["client_app", "server_app"]
