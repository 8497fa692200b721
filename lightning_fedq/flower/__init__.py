"""The same federation between real machines: Flower carries the messages of the simulation's mechanisms.

`client_app` and `server_app` make a Flower app of a module, data and the settings of a simulation;
`encoding_mod` and `DecodingStrategy` put a mechanism into a Flower app that there is already. Needs
the extra `lightning-fedq[flower]`, and Python 3.11 or later, as Flower does.
"""

from lightning_fedq.imports import extra

with extra("flower", "lightning_fedq.flower"):
    import flwr  # noqa: F401

from lightning_fedq.flower.client_app import client_app
from lightning_fedq.flower.decoding_strategy import DecodingStrategy
from lightning_fedq.flower.encoding_mod import encoding_mod
from lightning_fedq.flower.federated_server import server_app

__all__ = ["DecodingStrategy", "client_app", "encoding_mod", "server_app"]
