"""The built distributions are complete: what is installed from them runs from any folder."""

import os
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.configurations import linear_on_digits

ROOT = Path(__file__).parents[1]
IMPORT_ALL = """
import importlib.util, pkgutil, sys
import lightning_fedq
assert lightning_fedq.__file__.startswith(sys.prefix), lightning_fedq.__file__
names = [found.name for found in pkgutil.walk_packages(lightning_fedq.__path__, "lightning_fedq.")]
for name in names:
    if name.startswith("lightning_fedq.flower") and importlib.util.find_spec("flwr") is None:
        continue  # an extra
    if name not in sys.argv[1:]:
        importlib.import_module(name)
print(len(names))
"""
SUBCLASSES_OPACUS = "lightning_fedq.dpsgd.accountant", "lightning_fedq.dpsgd.opacus"
TRAIN = """
import sys
from lightning_fedq.cli import main
assert main(["fit", "digits_corbin", "--trainer.max_epochs=1"]) == 0
assert main(["fit", "--config", "mine.yaml", "--with", "corbin"]) == 0
assert "lightning.pytorch" not in sys.modules  # under one of Lightning's packages, nothing imports the other
"""


def build(source, *arguments):
    command = [sys.executable, "-m", "hatchling", "build", *arguments]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=100)


def shell(folder, *command):
    """Run a command in `folder` and return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pipes = {"capture_output": True, "text": True, "check": False}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(part) for part in command], cwd=folder, env=environment, **pipes)
    assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("distributions")
    build(ROOT, "-d", str(folder))
    return folder


def wheel_of(folder):
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment_of(folder):
    """A new virtual environment without any package; returns its folder of scripts."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin"


def install(scripts, *arguments):
    command = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "install", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_wheel_holds_every_file(distributions):
    with zipfile.ZipFile(wheel_of(distributions)) as wheel:
        packed = set(wheel.namelist())
        metadata = wheel.read(next(name for name in packed if name.endswith("/METADATA"))).decode()
    kinds = (".py", ".typed", ".json", ".csv", ".yaml", ".html", ".css", ".txt")
    files = [path for path in (ROOT / "lightning_fedq").rglob("*") if path.suffix in kinds]
    expected = {str(path.relative_to(ROOT)) for path in files}
    expected |= {f"lightning_fedq/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    expected |= {f"lightning_fedq/fragments/{path.name}" for path in (ROOT / "callbacks").glob("*.yaml")}
    deploy = (path for path in (ROOT / "deploy").rglob("*") if path.is_file())
    expected |= {f"lightning_fedq/deploy/{path.relative_to(ROOT / 'deploy')}" for path in deploy}
    assert expected <= packed
    others = {name for name in packed - expected if ".dist-info/" not in name}
    assert not others, "nothing else is in it"
    assert any(name.endswith("licenses/LICENSE") for name in packed)
    assert "License-Expression: Apache-2.0" in metadata and "Author: The lightning_fedq" in metadata


def test_the_sdist_builds_the_same_wheel(distributions, tmp_path):
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert all((source / name).exists() for name in ("LICENSE", "tests", "docs", "examples", "reproductions"))
    build(source, "-t", "wheel", "-d", str(tmp_path / "dist"))
    with zipfile.ZipFile(wheel_of(tmp_path / "dist")) as one, zipfile.ZipFile(wheel_of(distributions)) as two:
        assert set(one.namelist()) == set(two.namelist())


def test_the_wheel_trains_from_any_folder(distributions, tmp_path):
    scripts = environment_of(tmp_path / "env")
    install(scripts, "--no-deps", str(wheel_of(distributions)))
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # what it depends on is taken from here, to be quick; the slow test installs it
    here = [path for path in sys.path if path in site.getsitepackages() or path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(here))
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "mine.yaml").write_text(yaml.safe_dump(linear_on_digits(200, 1)))
    *_, imported = shell(folder, scripts / "python", "-c", TRAIN + IMPORT_ALL).split()
    assert int(imported) > 150
    assert (folder / "runs" / "digits_corbin" / "report.md").is_file()
    assert len((folder / "runs" / "corbin" / "metrics.csv").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_wheel_alone_installs_and_trains(distributions, tmp_path):
    """Its own dependencies, newest versions, no extras and no constraints: gigabytes, minutes."""
    scripts = environment_of(tmp_path / "env")
    install(scripts, str(wheel_of(distributions)))
    folder = tmp_path / "work"
    folder.mkdir()
    shell(folder, scripts / "python", "-c", IMPORT_ALL, *SUBCLASSES_OPACUS)
    shell(folder, scripts / "fedq", "fit", "digits_corbin", "--trainer.max_epochs=2")
    shell(folder, scripts / "fedq", "mechanisms")
    assert (folder / "runs" / "digits_corbin" / "report.md").is_file()
