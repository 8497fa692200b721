"""Build a release and try it in empty environments, up to the upload. `make release` runs it.

    python tests/release.py [python3.10 python3.13 ...]

The version must be the same in the package, CITATION.cff, README and CHANGELOG.md. The wheel and the sdist
go to dist/. `twine check` reads them. For each interpreter, the wheel is installed into an empty environment
with the newest packages. README's training and commands then run in a folder outside of the repository.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INTERPRETERS = ("python3.10", "python3.13")


def find_version_errors(root: Path) -> list[str]:
    """Return one sentence for each file whose version is not the package's release version."""
    texts = {name: (root / name).read_text() for name in ("CITATION.cff", "README.md", "CHANGELOG.md")}
    [version] = re.findall(r'^__version__ = "(.+)"$', (root / "lightning_fedq/__init__.py").read_text(), re.M)
    minor = ".".join(version.split(".")[:2])
    errors = [] if re.fullmatch(r"\d+\.\d+\.\d+", version) else [f"{version} is no release version."]
    released = re.search(r"^date-released: (.+)$", texts["CITATION.cff"], re.M)
    if f"\nversion: {version}\n" not in texts["CITATION.cff"]:
        errors.append(f"CITATION.cff does not have the version {version}.")
    if f"Version {minor} " not in texts["README.md"]:
        errors.append(f"README.md does not have the version {minor}.")
    heading = re.search(r"^## (\S+) \((.+)\)$", texts["CHANGELOG.md"], re.M)
    if heading is None or heading[1] != version:
        errors.append(f"CHANGELOG.md does not begin with {version} and a date.")
    elif released is None or released[1] != f"{datetime.strptime(heading[2], '%d %B %Y'):%Y-%m-%d}":
        errors.append(f"CITATION.cff and CHANGELOG.md have different dates for {version}.")
    return errors


def run(folder: Path, *command: object) -> None:
    """Run a command in `folder`, without this process's PYTHONPATH; its output is shown."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    print("$", *command, flush=True)
    subprocess.run(
        [str(part) for part in command], cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, check=True
    )


def try_wheel(interpreter: str, wheel: Path) -> None:
    """Install the wheel into an empty environment. Run README's block and commands in another folder."""
    readme = (ROOT / "README.md").read_text()
    [training] = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    [commands] = re.findall(r"^```bash\n(.*?)^```", readme, re.M | re.S)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, interpreter, "-m", "venv", "env")
        scripts = folder / "env" / "bin"
        run(folder, scripts / "python", "-m", "pip", "install", "--quiet", wheel)
        (folder / "readme.py").write_text(training)
        run(folder, scripts / "python", "readme.py")
        for line in commands.strip().splitlines():
            run(folder, scripts / "fedq", *line.split()[1:])


def main(interpreters: list[str]) -> int:
    """Check, build and try the release. Returns 1 if anything is wrong or an interpreter is missing."""
    if errors := find_version_errors(ROOT):
        print(*errors, sep="\n")
        return 1
    missing = [name for name in interpreters if shutil.which(name) is None]
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(ROOT, sys.executable, "-m", "hatchling", "build", "-d", "dist")
    run(ROOT, sys.executable, "-m", "twine", "check", "--strict", *sorted((ROOT / "dist").iterdir()))
    [wheel] = (ROOT / "dist").glob("*.whl")
    for interpreter in interpreters:
        if interpreter not in missing:
            try_wheel(interpreter, wheel)
            print(f"{interpreter}: the wheel installs and runs README's block and commands.")
    for interpreter in missing:
        print(f"{interpreter} was not found, so the wheel was NOT tried with it.")
    print("dist/ is ready. Upload it with: python -m twine upload dist/*")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(INTERPRETERS)))
