"""`fedq configs`: find the runs and fragments that ship with the package, by name.

They are in `configs/` and `callbacks/` at the top of the repository, and in `lightning_fedq/configs/` and
`lightning_fedq/fragments/` of an installed package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_fedq.commands.errors import nearest

_PACKAGE = Path(__file__).parents[1]
TRAINING = {
    "fit": "train a configuration: fedq fit digits_corbin, or fedq fit mine.yaml --with corbin",
    "validate": "evaluate a checkpoint on the validation data",
    "test": "evaluate a checkpoint on the test data",
    "predict": "predict with a checkpoint and write predictions.pt next to it",
}
EVALUATION = ("validate", "test", "predict")
SUFFIXES = (".yaml", ".yml", ".json")


def shipped_folder(installed: str, in_repository: str) -> Path:
    """Return a folder of files that ship with the package: in an installed package or in the repository."""
    folder = _PACKAGE / installed
    return folder if folder.is_dir() else _PACKAGE.parent / in_repository


def _shipped(installed: str, in_repository: str) -> dict[str, Path]:
    """Return the YAML files of a folder by name."""
    return {path.stem: path for path in sorted(shipped_folder(installed, in_repository).glob("*.yaml"))}


def configs() -> dict[str, Path]:
    """Return the files of complete runs by name."""
    return _shipped("configs", "configs")


def fragments() -> dict[str, Path]:
    """Return the files of fragments by name. A fragment has one mechanism or one callback."""
    return _shipped("fragments", "callbacks")


def find(name: str, kind: str = "configuration") -> Path:
    """Return the file that `name` means: a file of that path, or the shipped file of that name.

    Args:
        name: Path of a YAML file, or the name of a shipped one such as `digits_corbin`.
        kind: "configuration" or "fragment".

    Raises:
        ValueError: If there is neither. The message has the nearest name.
    """
    if Path(name).is_file():
        return Path(name)
    if (Path(name) / "config.yaml").is_file():
        raise ValueError(f"{name} is the folder of a run. Its {kind} is {Path(name) / 'config.yaml'}.")
    shipped = configs() if kind == "configuration" else fragments()
    if name in shipped:
        return shipped[name]
    raise ValueError(
        f"There is no {kind} {name}, neither a file nor a name that ships with the package."
        f"{nearest(Path(name).stem, shipped)} `fedq configs` lists the names."
    )


def expand(arguments: Sequence[str]) -> list[str]:
    """Replace the names in the arguments of a training command with files: `fit NAME --with FRAGMENT`.

    `fit NAME` and `fit --config NAME` become `fit --config FILE`, and so does `--with NAME` for a fragment.
    The order is kept, since the last file has precedence. `test RUN` becomes
    `test --config RUN/config.yaml --ckpt_path RUN/model.ckpt` without the loggers of the training. A later
    `--trainer.logger` sets another logger.

    Raises:
        ValueError: If there is no such configuration, fragment or run, or a flag has no value.
    """
    expanded: list[str] = []
    rest = list(arguments)
    if rest and not rest[0].startswith("-"):
        expanded.append(rest.pop(0))
        if expanded[0] in EVALUATION and rest and not rest[0].startswith("-"):
            expanded += _of_run(Path(rest.pop(0)))
        while rest and not rest[0].startswith("-"):
            expanded += ["--config", str(find(rest.pop(0)))]
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in ("--config", "-c", "--with"):
            expanded.append(flag + equals + value)
            continue
        if not equals:
            if not rest:
                raise ValueError(f"{flag} needs the name or the path of a YAML file")
            value = rest.pop(0)
        expanded += ["--config", str(find(value, "fragment" if flag == "--with" else "configuration"))]
    return expanded


def _of_run(folder: Path) -> list[str]:
    """Return the arguments that evaluate the model of a run folder.

    Raises:
        ValueError: If the folder lacks the checkpoint or the configuration.
    """
    config, model = folder / "config.yaml", folder / "model.ckpt"
    if not folder.is_dir():
        raise ValueError(f"There is no run folder {folder}. Give the folder that `fedq fit` printed.")
    if not model.is_file():
        raise ValueError(
            f"{folder} holds no model.ckpt. Give the folder of a run with the RunFolder callback."
        )
    if not config.is_file():
        raise ValueError(
            f"{folder} holds no config.yaml, since `fedq fit` did not start its run. "
            f"In Python, use trainer.test(model, datamodule=data, ckpt_path={str(model)!r})."
        )
    # with the training's loggers, an evaluation would start another logged run
    return ["--config", str(config), "--trainer.logger", "false", "--ckpt_path", str(model)]


def main(name: str | None = None, *, out: Path | None = None) -> None:
    """List the runs and fragments that ship with the package, print one, or write it out.

    Args:
        name: Name of a run or a fragment (without: list all).
        out: File to write. An existing file is not overwritten.

    Examples:
        fedq configs digits_corbin --out mine.yaml; fedq fit mine.yaml --with reload_best
    """
    if name is None:
        if out is not None:
            raise ValueError("--out needs the name of one file: fedq configs NAME --out FILE")
        for head, shipped in (
            ("complete runs: fedq fit NAME", configs()),
            ("fragments: fedq fit yours.yaml --with NAME", fragments()),
        ):
            print(f"{head}\n")
            for label, path in shipped.items():
                comment = path.read_text().splitlines()[0].removeprefix("# ")
                print(f"  {label:<34} {comment}")
            print()
        return
    every = {**fragments(), **configs()}
    if name not in every:
        raise ValueError(f"There is no {name!r}.{nearest(name, every)} `fedq configs` lists all names.")
    text = every[name].read_text()
    if out is None:
        sys.stdout.write(text)
        return
    if out.exists():
        raise FileExistsError(f"{out} exists and is not overwritten. Choose another name.")
    with out.open("x") as file:
        file.write(text)
    print(out)
