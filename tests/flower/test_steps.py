"""`fedq flower init` and its steps, typed into fresh shells: server, sites and operator, with nginx."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
from lightning_fedq.commands.flower import write_app
from tests.flower.apart import federation, server_name
from tests.flower.machines import example
from tests.flower.steps import Machine, blocks, pack, set_up
from tests.flower.units import settings

DEPLOY = Path(__file__).parents[2] / "deploy"
SITES = 4
needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is a package of the system")


@pytest.fixture
def folder():
    """A folder that nginx's worker, who is nobody, can enter."""
    made = Path(tempfile.mkdtemp(prefix="steps-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.parametrize("unit", sorted(DEPLOY.rglob("*.service")), ids=lambda path: path.stem)
def test_units_turn_telemetry_off_and_come_back(unit):
    said = settings(unit)
    assert "nginx" in said["ExecStart"] or "FLWR_TELEMETRY_ENABLED=0" in said["Environment"]
    assert said["Restart"] in ("always", "on-failure") and float(said["RestartSec"]) >= 5
    if unit.stem == "fedq-superexec":  # it starts flwr-serverapp by name
        assert "PATH=/opt/fedq/bin:" in said["Environment"]
    assert said["ProtectSystem"] == "strict" and said["PrivateTmp"] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is a package of the system")
def test_systemd_takes_the_units(tmp_path):
    for unit in DEPLOY.rglob("*.service"):
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/fedq/bin", "/bin"))
    for name in ("fedq", "flower-superlink", "flower-superexec", "flower-supernode", "nginx"):
        for path in tmp_path.glob("*.service"):
            words = path.read_text().replace(f"/bin/{name} ", "/bin/true ").replace("/usr/sbin", "/bin")
            path.write_text(words.replace("/bin/nginx ", "/bin/true "))
    units = [str(path) for path in sorted(tmp_path.glob("*.service"))]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert not [line for line in done.stderr.splitlines() if "fedq-" in line], done.stderr


def test_the_files_name_this_app_and_this_server(tmp_path):
    app = tmp_path / "my-clinic"
    write_app(app, clients=SITES, server="10.0.0.1")
    texts = {path.name: path.read_text() for path in (app / "deploy").rglob("*") if path.is_file()}
    assert set(texts) == {path.name for path in DEPLOY.rglob("*") if path.is_file()}
    assert "--app my_clinic.client_app:app" in texts["fedq-client.service"]
    assert "--superlink 10.0.0.1:443" in texts["fedq-supernode.service"]
    assert "fedq flower wheels my-clinic\n" in texts["STEPS.txt"]
    server = (app / "deploy" / "server" / "setup.sh").read_text()
    assert "subjectAltName=IP:10.0.0.1,DNS:localhost" in server
    for script in (server, (app / "deploy" / "site" / "setup.sh").read_text()):
        assert "--no-index --find-links wheels --upgrade 'lightning-fedq[flower]' my-clinic\n" in script
    assert not any("my_app" in text or "server.example" in text for text in texts.values())


def test_four_sites_take_few_commands():
    """97 were typed."""
    steps = blocks((DEPLOY / "STEPS.txt").read_text())
    typed = {name: len(words.strip().splitlines()) for name, words in steps.items()}
    once = ("0. WHERE", "1. THE SERVER", "3. AN OPERATOR")
    assert sum(typed[name] for name in once) + 4 * typed["2. EACH SITE"] <= 40


@pytest.mark.parametrize(
    "script", sorted(DEPLOY.rglob("*.sh")), ids=lambda path: f"{path.parent.name} {path.stem}"
)
def test_a_script_prints_itself_before_it_acts_and_is_sound(script):
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert lines[:2] == ["set -eu", 'cat "$0"']
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert not any(line.split()[:1] in (["read"], ["select"]) for line in lines)  # it asks nothing


@needs_nginx
@pytest.mark.slow
def test_the_steps_letter_by_letter(folder):
    """Prints the shells (-s). Seeded, so that the model is compared with a simulation's."""
    app = folder / "my_app"
    write_app(app, clients=SITES, server=server_name(), seed=5)
    steps = blocks((app / "deploy" / "STEPS.txt").read_text())
    print(pack(folder, app, steps))
    server, sites = federation(folder, app, SITES)
    try:
        print(set_up(server, sites, steps))
        print("== again\n" + server.type(steps["1. THE SERVER"]))  # typed twice: nothing changes
        print("== operator\n" + server.type(steps["3. AN OPERATOR"], timeout=1500))
        home = server.folder / "var" / "lib" / "flower" / "fedq-server"
        assert (home / "runs" / "deployed" / "summary.json").exists(), server.logs()
        saved = example.checkpoint_of(home)
        assert [record["num_received"] for record in saved["records"]] == [SITES] * 3
        simulated = example.simulate(app, "my_app", 3)
        assert torch.equal(saved["engine"]["weights"], simulated.weights)
        for number, one in enumerate(sites):
            log = (one.units / "fedq-client.log").read_text()
            assert f"app my_app.client_app:app from {one.here('/opt/fedq')}/lib" in log.splitlines()[0]
            assert stat.S_IMODE((one.folder / "var" / "lib" / "fedq").stat().st_mode) == 0o700
            assert not list((one.folder / "var" / "lib" / "flower").rglob("*.py")), number
        # a site, or somebody else with the address and the certificate, is no operator
        sites[0].type(
            f'mkdir -p ~/.flwr\necho \'[superlink.fedq]\naddress = "{server_name()}:443"\n'
            'root-certificates = "/etc/fedq/server.pem"\' > ~/.flwr/config.toml\n'
        )
        for command in ("list fedq", "run ./my_app fedq", "supernode register /etc/fedq/node.pub fedq"):
            with pytest.raises(RuntimeError, match=r"403|[Ff]orbidden|denied"):
                sites[0].type(f"/opt/fedq/bin/flwr {command}\n")
    finally:
        for one in (server, *sites):
            one.stop()


@pytest.mark.slow
def test_the_first_try_on_one_machine(folder):
    app = folder / "my_app"
    write_app(app, clients=2)
    steps = blocks((app / "deploy" / "STEPS.txt").read_text())
    port = str(example.free_port())
    machine = Machine(folder / "one", app, {"8000": port, "/tmp/fedq-": f"{folder}/fedq-"})
    (machine.folder / "home" / ".flwr").mkdir(parents=True)
    (machine.folder / "home" / ".flwr" / "config.toml").write_text(machine.here(steps["config"]))
    commands = steps["A FIRST TRY"].replace("\\\n", "").splitlines()
    environment = {**os.environ, "HOME": str(machine.folder / "home"), "OMP_NUM_THREADS": "1"}
    environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["PATH"] = f"{Path(example.tool('flwr')).parent}{os.pathsep}{os.environ['PATH']}"
    link, node, run = commands[1:]
    terminals = [link.replace("flower-superlink", f"flower-superlink --port {port}")]
    for n in range(2):
        own = node.replace("partition-id=0", f"partition-id={n}").replace("/fedq-0", f"/fedq-{n}")
        terminals.append(own.replace("9094", str(example.free_port())))
    running = [
        subprocess.Popen(
            ["bash", "-c", machine.here(words)], env=environment, cwd=machine.shell, start_new_session=True
        )
        for words in terminals
    ]
    try:
        for _ in range(60):  # the SuperLink takes a while until it answers
            done = subprocess.run(["bash", "-c", run], env=environment, cwd=machine.shell, timeout=1500)
            if done.returncode == 0:
                break
        assert (machine.shell / "fedq-server" / "runs" / "deployed" / "summary.json").exists()
    finally:
        for process in running:
            os.killpg(process.pid, 15)
        for process in running:
            process.wait(60)
