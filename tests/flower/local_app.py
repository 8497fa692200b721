"""The app that a site serves in the tests: nothing but Flower is imported for it."""

import os
import signal
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp


def local_app(seen):
    app = ClientApp()

    @app.train()
    def train(message, context):
        seen.append((message.metadata.message_type, dict(context.node_config)))
        if "fail" in message.content:
            raise KeyError("the client's data: 4711 of nobody else")
        if "stop" in message.content:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return Message(RecordDict({"a": ConfigRecord({"answer": 1})}), reply_to=message)

    return app
