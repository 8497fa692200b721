"""A site's own client against a SuperNode's port: what it answers, what it refuses, what stops it."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.clientapp import ClientApp

from lightning_fedq.cli import main
from lightning_fedq.flower import runtime, site
from tests.flower.fake_runtime import FakeRuntime, Job
from tests.flower.local_app import local_app

KINDS = ("train.x", "query.steal", "query.mro", "system")
SECRET = b"s" * 32


def serve(*jobs, **more):
    """Answer these jobs with the local app."""
    seen = []
    most = more.pop("most_bytes", 1 << 20)
    with FakeRuntime(*jobs) as server:
        node = runtime.SuperNode(server.address, SECRET, most_bytes=most)
        here = site.Site(local_app(seen), node, {"partition-id": 3}, **more)
        site.serve(here, pause=0.001, stop=server.stop)
    return seen


def test_the_local_app_answers_and_sees_its_own_configuration():
    job, second = Job(), Job()
    assert serve(job, second) == [("train", {"partition-id": 3})] * 2
    for each in (job, second):
        assert each.ended == "completed" and not each.reply.HasField("error")
        assert each.asked.index("pull-messages") < each.asked.index("pull-object")


@pytest.mark.parametrize("kind", KINDS)
def test_other_messages_are_refused_and_forgotten_once_they_have_arrived(kind, capsys):
    """A SuperNode hands a task out before it has the message, and loses one that is confirmed by then."""
    job = Job("train", late=3)
    job.head.metadata.message_type = kind
    assert serve(job) == []
    refused(job)
    assert job.late < 0 and job.asked.index("confirm-message-received") > job.asked.index("pull-object") + 3
    assert capsys.readouterr().out.count("REFUSED") == 1


def refused(job):
    assert job.ended == "failed"
    assert job.reply.error.reason == site.REFUSED
    assert "confirm-message-received" in job.asked  # or the SuperNode keeps it


@pytest.mark.parametrize(
    ("given", "more", "words"),
    [
        ({"type": "flwr-agentapp"}, {}, "Task type 'flwr-agentapp' is not answered"),
        ({}, {"apps": frozenset({"bb" * 32})}, "This run has another app"),
        ({"fab": b"0" * (2 << 20)}, {}, "has more than 1,048,576 bytes"),
        ({"padding": 2 << 20}, {}, "has more than 1,048,576 bytes"),
        ({"padding": 600_000}, {}, "has more than 1,048,576 bytes"),  # none of its parts by itself
        ({"parts": 20_000}, {"most_bytes": 8 << 20}, "20,002 objects"),
        ({"said_run": 8}, {}, "The message differs from its envelope"),
        ({"content": RecordDict({"fail": ConfigRecord({})})}, {}, "KeyError"),
    ],
)
def test_what_is_not_for_the_app(given, more, words, capsys):
    job = Job(**given)
    honest = Job()
    seen = serve(job, honest, **more)
    printed = capsys.readouterr().out
    refused(job)
    assert words in printed and printed.count("REFUSED") == (2 if "apps" in more else 1)
    if "apps" not in more:
        assert len(seen) == (2 if words == "KeyError" else 1) and honest.ended == "completed"
    assert "4711 of" not in str(job.reply)


def test_a_training_that_failed_is_told_to_the_site_and_to_nobody_else(capsys):
    """After its message, and once more when the process ends."""
    zeros, honest = Job(content=RecordDict({"zeros": ConfigRecord({})})), Job()
    serve(zeros, honest)
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    told = "the server does not know. The last one, in round 3: ValueError: sample 3 is damaged"
    assert lines[2] == f"FAILED train of run 7: 1 of 1 trainings have failed here, and {told}"
    assert lines[-1] == f"1 of 2 trainings have failed here, and {told}"
    for each in (zeros, honest):
        assert each.ended == "completed" and "damaged" not in str(each.reply)


def test_an_array_that_unfolds_is_refused_before_it_does(capsys):
    """256 MiB of zeros travel as one piece of 20 MB that is named 13 times."""
    fits, bomb = (
        Job(content=RecordDict({"a": ArrayRecord([np.zeros(count, np.uint8)])}))
        for count in (90 << 20, 256 << 20)
    )
    assert sum(map(len, bomb.objects.values())) < 60 << 20
    assert serve(fits, bomb, most_bytes=runtime.MOST_BYTES) == [("train", {"partition-id": 3})]
    refused(bomb)
    assert "unfolds to 268,4" in capsys.readouterr().out


def test_a_message_that_never_comes_is_left_once_there_is_another(capsys):
    """Its run was killed while the SuperNode pulled it: nobody waits for an answer."""
    never, steal, honest = Job(late=10**9), Job("query.steal", late=10**9), Job()
    assert len(serve(never, steal, honest)) == 1
    for each in (never, steal):
        assert each.ended == "failed" and each.reply is None
    assert honest.ended == "completed"
    assert "The run ended before the message's content came" in capsys.readouterr().out


def test_a_task_without_a_message_ends_and_one_that_breaks_is_lost(capsys):
    empty, broken, honest = Job(empty=True), Job(status=503), Job()
    assert len(serve(empty, broken, honest)) == 1
    assert empty.ended == "failed" and empty.reply is None
    assert honest.ended == "completed"
    assert capsys.readouterr().out.count("This task is not answered") == 2


def test_nobody_else_writes_lines_into_the_log(capsys):
    job = Job()
    job.head.metadata.message_type = "a\n12:00:00 answered train\x1b[2J" + "x" * 10_000
    serve(job)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 510 for line in lines)
    assert not any(line.startswith("12:00:00 answered") for line in lines)


@pytest.mark.parametrize(
    ("status", "words"), [(401, "is --secret"), (403, "is --secret"), (404, "--isolation process")]
)
def test_a_no_of_the_supernode_stops_it(status, words):
    with FakeRuntime(refuses=status) as server:
        here = site.Site(ClientApp(), runtime.SuperNode(server.address, SECRET), {})
        with pytest.raises(site.SiteError, match=words):
            site.serve(here, pause=0.001)


def test_a_no_that_once_was_a_yes_is_waited_out(capsys):
    """A SuperNode 30 s behind its client ended it for good, and the words blamed the secret's file."""
    honest = Job()
    with FakeRuntime(honest) as server:
        server.lately = [200, 401, 401]
        here = site.Site(local_app([]), runtime.SuperNode(server.address, SECRET), {})
        site.serve(here, pause=0.001, stop=server.stop)
    assert honest.ended == "completed"
    out = capsys.readouterr().out
    assert out.count("HTTP 401") == 1 and "is the clock right" in out and "It has been let in before" in out


# ---- the command, in a process of its own ---------------------------------------------------------------


def package(folder):
    """An installed app, which is what the tests above answer with."""
    (folder / "my_own_app.py").write_text(
        "from tests.flower.local_app import local_app\nseen = []\napp = local_app(seen)\nother = 3\n"
    )
    (folder / "secret").write_bytes(SECRET)
    (folder / "secret").chmod(0o600)
    return folder


def words(folder, server):
    named = ["flower", "client", "--app", "my_own_app:app", "--secret", str(folder / "secret")]
    return [*named, "--supernode", server.address, "--node-config", 'partition-id=3 fedq-home="/x"']


def command(folder, server, before):
    code = f"{before}\nimport sys\nfrom lightning_fedq.cli import main\n"
    code += f"sys.exit(main({words(folder, server)!r}))"
    places = [str(folder), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_signal_refuses_what_is_worked_on_and_ends_it_cleanly(tmp_path):
    job = Job(content=RecordDict({"stop": ConfigRecord({})}))
    check = "import atexit, sys; atexit.register(lambda: print('loaded', 'flwr.cli.install' in sys.modules))"
    with FakeRuntime(job) as server:
        done = command(package(tmp_path), server, before=check)
    assert done.returncode == 0, done.stdout + done.stderr
    refused(job)
    assert f"app my_own_app:app from {tmp_path}" in done.stdout
    assert "SIGTERM: ending" in done.stdout and "loaded False" in done.stdout


def private_names():
    tree = ast.parse(Path(runtime.__file__).read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "flwr.app"]
    private = [node for node in nodes if str(node.module).startswith("flwr.")]
    return [(node.module, alias.name) for node in private for alias in node.names]


def test_private_names_of_flwr_are_in_one_module():
    assert len(private_names()) > 20
    for path in Path(runtime.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        private = [n for n in names if n.startswith(("flwr.supercore", "flwr.supernode", "flwr.proto"))]
        assert path.name == "runtime.py" or not private, path.name


@pytest.mark.parametrize(("module", "name"), private_names())
def test_a_name_that_moved_stops_it(module, name, monkeypatch):
    monkeypatch.delattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("again", runtime.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "again", again)
    with pytest.raises(ImportError, match=name):
        spec.loader.exec_module(again)


def test_a_version_that_was_not_tried_stops_it(monkeypatch):
    runtime.check_flower()
    with pytest.raises(
        runtime.FlowerChangedError, match=r"flwr 1.43.0 is installed, which this client does not support"
    ):
        runtime.check_flower("1.43.0")
    monkeypatch.setattr(runtime, "_FIELDS", ((runtime.AcquireTaskRequest, {"elsewhere"}),))
    with pytest.raises(runtime.FlowerChangedError, match=r"lacks AcquireTaskRequest.elsewhere"):
        runtime.check_flower()


def test_a_moved_name_stops_the_command_before_it_asks_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.delattr("flwr.supercore.runtime.RuntimeHttpClient")
    for name in ("runtime", "site"):
        monkeypatch.delitem(sys.modules, f"lightning_fedq.flower.{name}")
        monkeypatch.delattr(f"lightning_fedq.flower.{name}")
    monkeypatch.syspath_prepend(package(tmp_path))
    with FakeRuntime(Job()) as server:
        assert main(words(tmp_path, server)) == 2 and server.requests == 0
    assert "Is flwr 1.41 or 1.42 installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--app", "nothing_like_it:app"], "There is no nothing_like_it"),
        (["--app", "json:dumps"], "ClientApp"),
        (["--supernode", "10.0.0.3:9094"], "needs TLS"),
        (["--node-config", "partition-id"], "No pair of a name and a value"),
        (["--node-config", "partition-id=[["], "Not a node configuration"),
    ],
)
def test_settings_that_are_refused(more, words, tmp_path, capsys):
    folder = package(tmp_path)
    base = ["flower", "client", "--app", "json:dumps", "--secret", str(folder / "secret"), *more]
    assert main(base) == 2
    assert words in capsys.readouterr().err


def test_secrets_that_are_none(tmp_path, capsys):
    folder = package(tmp_path)
    (folder / "secret").chmod(0o644)
    base = ["flower", "client", "--app", "json:dumps", "--secret", str(folder / "secret")]
    assert main(base) == 2
    assert "All users of this machine can access" in capsys.readouterr().err
    (folder / "secret").chmod(0o600)
    (folder / "secret").write_bytes(b"")
    assert main(base) == 2
    assert "has 0 bytes" in capsys.readouterr().err
