"""The app that a site serves in the tests: of this package it counts what fails, and no more."""

import os
import signal
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from lightning_fedq.flower.failures import Failures


def local_app(seen):
    app = ClientApp()
    app.failures = failures = Failures()

    @app.train()
    def train(message, context):
        seen.append((message.metadata.message_type, dict(context.node_config)))
        if "fail" in message.content:
            raise KeyError("the client's data: 4711 of nobody else")
        failures.asked += 1
        if "zeros" in message.content:
            failures.add(2, ValueError("sample 3 is\ndamaged"), message=False, store=None)
        if "stop" in message.content:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return Message(RecordDict({"a": ConfigRecord({"answer": 1})}), reply_to=message)

    return app
