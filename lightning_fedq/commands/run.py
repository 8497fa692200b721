"""`fedq fit|validate|test|predict`: LightningCLI with a summary at the end and hints in errors."""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args

import torch
import yaml

from lightning_fedq._lightning import get_callbacks, is_overridden, pl
from lightning_fedq.callbacks.run_folder import RunFolder
from lightning_fedq.commands.configs import EVALUATION, TRAINING, find
from lightning_fedq.commands.errors import concise, suggest
from lightning_fedq.commands.options import change_setting
from lightning_fedq.commands.shown import described
from lightning_fedq.mechanisms.registry import installed
from lightning_fedq.reports.runs import print_summary

if TYPE_CHECKING:
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
else:
    _cli = importlib.import_module(f"{pl.__name__}.cli")
    LightningArgumentParser, LightningCLI = _cli.LightningArgumentParser, _cli.LightningCLI

# short class names in a YAML (`class_path: CorBin`) are looked up among the classes imported so far
for _module in ("callbacks", "data", "data.datasets", "data.models", "leakage", "mechanisms"):
    importlib.import_module(f"lightning_fedq.{_module}")
installed()


def int_before_float(hint: Any) -> Any:
    """Return a union type with int before float, because the parser uses the first type that fits.

    `typing` caches equal unions, so the order in Lightning's `Optional[Union[int, float]]` depends on earlier
    imports. With float first, a limit of 1 batch would be read as 1.0, which means all batches.
    """
    args = get_args(hint)
    if not {int, float} <= set(args):
        return hint
    return Union[(int, float, *(arg for arg in args if arg not in (int, float)))]


def quieten() -> None:
    """Suppress messages of Lightning that appear in every run and that a user of `fedq` can't act on."""
    # a deprecation in torch that only Lightning can mend
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
    logging.getLogger(f"{pl.__name__}.utilities.rank_zero").addFilter(_is_no_tip)


def _is_no_tip(record: logging.LogRecord) -> bool:
    """Return whether a log record is not one of Lightning's tips."""
    return "Tip: " not in record.getMessage()


_hints = pl.Trainer.__init__.__annotations__
_hints.update({name: int_before_float(hint) for name, hint in _hints.items()})


@contextmanager
def configuration_file(config: Mapping[str, Any]) -> Iterator[str]:
    """Write a configuration to a temporary file, and yield its path."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        yield str(path)


class SuggestingParser(LightningArgumentParser):
    """Parser whose errors suggest the nearest key and omit the usage, which is two screens long."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message with a hint, and exit with status 2."""
        parser = getattr(ex, "subcommand_parser", None) or self
        keys = [action.dest for action in parser._actions]
        hint = suggest(message, keys)
        if not self.exit_on_error:
            super().error(message + hint, ex)
        sys.stderr.write(f"error: {concise(message) if hint else message}\n")
        if hint:
            sys.stderr.write(f"hint:{hint}\n")
        sys.stderr.write(f"For all options: {parser.prog.replace(' [options]', '')} NAME --help\n")
        sys.exit(2)


class FedqCLI(LightningCLI):
    """Command line that trains any LightningModule with any LightningDataModule, given by class path.

    Args:
        args: Arguments of the command line.
        run: Whether to run the subcommand, which is the first argument. If False, classes are only
            instantiated.
        changes: Settings to change after the configurations and the flags, see `change_setting`.

    Raises:
        ValueError: If there is no such setting.
    """

    def __init__(
        self, args: Sequence[str], run: bool = True, changes: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        quieten()
        self.changes = changes
        super().__init__(
            pl.LightningModule,  # no data class is required, because a module may have its own loaders
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            parser_class=SuggestingParser,
            parser_kwargs={
                "prog": "fedq",
                **{name: {"allow_abbrev": False, **described(name)} for name in TRAINING},
            },
            args=list(args),
            run=run,
        )

    def before_instantiate_classes(self) -> None:
        """Check the callbacks and the checkpoint.

        It is an error to have two `Federated` callbacks, `WandbRounds` before `RunFolder`, or an evaluation
        without a checkpoint.
        """
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        names = [c.class_path.rpartition(".")[2] for c in config.trainer.callbacks or []]
        if names.count("Federated") > 1:
            self.parser.error(
                "A run has one Federated callback and mechanism, got two. Choose another complete run "
                "(`fedq configs` lists them), or write one to a file (fedq configs NAME --out mine.yaml) "
                "and change its mechanism."
            )
        after_wandb = names[names.index("WandbRounds") :] if "WandbRounds" in names else []
        if self.subcommand == "fit" and "RunFolder" in after_wandb:
            self.parser.error(
                "WandbRounds sends the run folder and must come after RunFolder. Give --with wandb after "
                "the other fragments, or change the order in trainer.callbacks."
            )
        if self.subcommand in EVALUATION and not self.config[self.subcommand].ckpt_path:
            self.parser.error(
                f"fedq {self.subcommand} needs a trained model, got no checkpoint. Use "
                f"fedq {self.subcommand} runs/NAME, or --ckpt_path FILE."
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse `args` in place of `sys.argv`, and change settings."""
        self.config = parser.parse_args(args)
        if not self.changes:
            return
        self.subcommand = self.config.get("subcommand")  # Lightning sets it only after this method
        changed = yaml.safe_load(self.resolved())
        for name, value in self.changes.items():
            change_setting(changed, name, value)
        subcommand = [] if self.subcommand is None else [self.subcommand]
        with configuration_file(changed) as path:
            self.config = parser.parse_args([*subcommand, "--config", path])

    @property
    def run_folder(self) -> RunFolder | None:
        """`RunFolder` callback of the trainer, or None."""
        return next((c for c in get_callbacks(self.trainer) if isinstance(c, RunFolder)), None)

    def before_fit(self) -> None:
        """Give the resolved configuration to the run folder, whose summary is printed after the test."""
        names = {base.__name__ for c in get_callbacks(self.trainer) for base in type(c).__mro__}
        if not names & {"Federated", "DPSGD"}:
            print(
                "There is no Federated callback, so this is ordinary training without federation or privacy. "
                "Add one with --with FRAGMENT (`fedq configs` lists them).",
                file=sys.stderr,
            )
        if self.run_folder is None:
            return
        config = yaml.safe_load(self.resolved())
        for name in self._subcommand_method_arguments["fit"]:  # other commands don't have these arguments
            config.pop(name, None)
        self.run_folder.config, self.run_folder.show = yaml.safe_dump(config, sort_keys=False), False

    def resolved(self) -> str:
        """Return the configuration with all defaults, as YAML that `--config` reads."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        return str(self._parser(self.subcommand).dump(config, skip_none=False))

    def after_fit(self) -> None:
        """Test the last global model if it has a test step and test data, and print the summary."""
        data = self.datamodule
        if data is None or not is_overridden("test_dataloader", data):
            data = self.model
        testable = is_overridden("test_step", self.model) and is_overridden("test_dataloader", data)
        if testable:
            self.trainer.test(self.model, self.datamodule, verbose=False)
        folder = self.run_folder
        if folder is not None and folder.path is not None and folder.privacy is not None:
            print_summary(folder.summary, folder.privacy, folder.path)

    def after_predict(self) -> None:
        """Write the predictions next to the checkpoint, and print the path. Each rank writes its own file."""
        predictions: Any = self.trainer.predict_loop.predictions
        if not predictions or all(batch is None for batch in predictions):
            print("predict_step returned nothing that could be written")
            return
        what = f"a list of {len(predictions)}, one item per batch (or data loader)"
        if all(isinstance(batch, torch.Tensor) and batch.ndim > 0 for batch in predictions):
            shapes = {batch.shape[1:] for batch in predictions}
            if len(shapes) == 1:
                predictions = torch.cat(predictions)
                what = f"a tensor of shape {tuple(predictions.shape)}, in the order of predict_dataloader"
        name = "predictions"
        if self.trainer.world_size > 1:
            name += f"-rank{self.trainer.global_rank}"
        folder, number = Path(self.config["predict"].ckpt_path).parent, 1
        while (path := folder / f"{name}{f'-{number}' if number > 1 else ''}.pt").exists():
            number += 1
        torch.save(predictions, path)
        print(f"{path}: {what} (torch.load reads it)")


class _Parsed(FedqCLI):
    """Command line that only parses and instantiates no class."""

    def instantiate_classes(self) -> None:
        """Do nothing."""


def resolve(configs: Sequence[str]) -> dict[str, Any]:
    """Merge and check configurations as `fedq fit` would, and return the result with all defaults.

    Args:
        configs: Files, or names of configurations that ship with the package.

    Raises:
        ValueError: If there is no such file or name.
    """
    arguments = [part for config in configs for part in ("--config", str(find(config)))]
    parsed: dict[str, Any] = yaml.safe_load(_Parsed(arguments, run=False).resolved())
    return parsed


def run_config(config: dict[str, Any], name: str, root: Path) -> Path:
    """Train one resolved configuration, and return its run folder.

    Args:
        config: Configuration that `resolve` returned. A `RunFolder` callback is added if there is none.
        name: Name of the run and of its folder.
        root: Parent of the run folder. Its name is the group of W&B runs.

    Raises:
        RuntimeError: If the run was interrupted before its first round ended.
    """
    callbacks = config["trainer"]["callbacks"] = list(config["trainer"]["callbacks"] or [])
    folders = [c for c in callbacks if c["class_path"].rpartition(".")[2] == "RunFolder"]
    if not folders:
        folders = [{"class_path": "lightning_fedq.callbacks.RunFolder"}]
        callbacks += folders
    folders[0].setdefault("init_args", {}).update(name=name, root=str(root))
    loggers = config["trainer"].get("logger")
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(logger, dict) and logger["class_path"].rpartition(".")[2] == "WandbLogger":
            settings = logger.setdefault("init_args", {})
            settings.update(name=settings.get("name") or name, group=settings.get("group") or root.name)
    with configuration_file(config) as path:
        folder = FedqCLI(["fit", "--config", path]).run_folder
    if folder is None or folder.path is None or not folder.rows:
        raise RuntimeError(f"The run {name} ended before its first round")
    return folder.path
