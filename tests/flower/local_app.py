"""The app that a site serves in the tests: nothing but Flower is imported for it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp


def local_app(seen: list[tuple[str, dict[str, Any]]]) -> ClientApp:
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        seen.append((message.metadata.message_type, dict(context.node_config)))
        if "fail" in message.content:
            raise KeyError("the client's data: 4711 of nobody else")
        if "stop" in message.content:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return Message(RecordDict({"a": ConfigRecord({"answer": 1})}), reply_to=message)

    return app
