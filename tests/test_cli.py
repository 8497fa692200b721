import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import pytorch_lightning as pl
import torch
import yaml

import lightning_fedq
from lightning_fedq import mechanisms
from lightning_fedq.callbacks import RunFolder
from lightning_fedq.cli import OTHERS, TRAINING, main
from lightning_fedq.commands.mechanism_row import describe
from lightning_fedq.commands.mechanism_text import parse_mechanism
from lightning_fedq.commands.mechanisms import SHIPPED
from lightning_fedq.commands.options import refuse_unknown_settings
from lightning_fedq.commands.run import FedqCLI
from lightning_fedq.commands.shown import described, refuse_unknown
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.mechanisms import LDPQ, SIGM, GaussianNoise
from lightning_fedq.mechanisms.interface import Adversary, GaussianLoss
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.planning import make_plan_context
from lightning_fedq.privacy.report import TargetOutcome, privacy_report
from lightning_fedq.privacy.report_file import from_json, to_json
from lightning_fedq.privacy.run import ASSUMED, Run
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.runs import write_rows, write_summary
from tests.callbacks.runs import small_run
from tests.changed import changed
from tests.configurations import linear_on_digits, written


def configuration(folder, **federated):
    """A run of two rounds on 60 digits with four clients."""
    path = folder / "small.yaml"
    corbin = written("mechanisms.CorBin", epsilon_per_coordinate=1.0)
    settings = {"mechanism": corbin, "num_clients": 4, "clients_per_step": 4, **federated}
    callbacks = [written("callbacks.Federated", **settings), written("callbacks.RoundProgressBar")]
    path.write_text(yaml.safe_dump(linear_on_digits(60, 2, callbacks=callbacks)))
    return path


def of_another_class(folder, name):
    """The same run of another module."""
    path = configuration(folder)
    path.write_text(changed(path.read_text(), ("lightning_fedq.data.models.Classifier", name)))
    return path


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the current folder


def test_overview_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in [*TRAINING, *OTHERS])
    assert len([line for line in shown.splitlines() if line.startswith("  ")]) <= 12
    assert "Start with fedq fit digits_private" in shown


@pytest.mark.parametrize("command", [*TRAINING, *OTHERS])
def test_help_imports_nothing_heavy(command):
    """What it prints is the parsers' own: tests/test_docs.py compares."""
    code = (
        "import sys; from lightning_fedq.cli import main\n"
        f"assert main([{command!r}, '--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'scipy', 'numba', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith(f"usage: fedq {command}")


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["privacyy"]) == 2
    assert "There is no command 'privacyy'. Did you mean 'privacy'?" in capsys.readouterr().err


def test_a_wrong_option_is_one_line(capsys):
    """Nothing has run of which there would be a trace."""
    assert main(["plan", "--epsilon", "8", "--hlp"]) == 2
    words = "unrecognized arguments: --hlp. Did you mean '--help'? fedq plan --help lists the options"
    assert capsys.readouterr().err.strip() == f"error: {words}"


@pytest.mark.parametrize(
    ("right", "wrong", "hint"),
    [
        ("max_epochs", "max_epoch", "Did you mean 'trainer.max_epochs'"),
        ("num_clients", "num_client", "Did you mean 'num_clients'"),
        ("mechanisms.CorBin", "mechanisms.CorBim", "Did you mean 'CorBin'"),
    ],
)
def test_a_wrong_key_names_the_nearest(right, wrong, hint, tmp_path, capsys):
    path = configuration(tmp_path)
    path.write_text(path.read_text().replace(right, wrong))
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", str(path)])
    error = capsys.readouterr().err
    assert hint in error and len(error.splitlines()) < 40  # and not two screens of usage


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--trainer.max_epochz=3 3", "arguments: --trainer.max_epochz. Did you mean 'trainer.max_epochs'?"),
        ("--trainr.max_epochs=3 3", "arguments: --trainr.max_epochs. Did you mean 'trainer.max_epochs'?"),
        ("--rounds 3", "error: unrecognized arguments: --rounds. fedq fit NAME --help lists the options"),
        ("--set Federated.num_client=7", "Did you mean 'num_clients'?"),
    ],
)
def test_a_wrong_flag_or_setting_names_the_nearest_at_once(flags, told):
    code = (
        "import sys; from lightning_fedq.cli import main\n"
        f"status = main(['fit', 'digits_private', *{flags.split()!r}])\n"
        "sys.exit(status if 'torch' not in sys.modules else 'torch was imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_wrong_setting_of_a_class_names_the_nearest(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fit", str(configuration(tmp_path)), "--model.lrr=3"])
    error = capsys.readouterr().err
    assert "Did you mean 'lr'" in error and len(error.splitlines()) < 6, error


def test_flags_that_there_are_go_to_the_parser(monkeypatch):
    words = "digits_private --with corbin --set Federated.num_clients=7 --trainer.max_epochs 3 --model.lr 1"
    more = "--trainer.logger=csv --trainer.callbacks+=X --trainer.callbacks.mechanism=Y --print_config"
    refuse_unknown([*words.split(), *more.split()])
    monkeypatch.setattr("lightning_fedq.commands.shown.writers", lambda: "other packages")
    refuse_unknown(["--of_another_lightning"])  # only its parser knows


def test_abbreviations_are_refused_with_the_nearest_option(capsys):
    """`--trainer.max_epoch 3` was taken as an abbreviation, and `--set Federated.num_client=7` took 8 s."""
    assert main(["fit", "digits_private", "--trainer.max_epoch", "3"]) == 2
    assert "Did you mean 'trainer.max_epochs'?" in capsys.readouterr().err
    for words, nearest in (
        (["privacy", "digits_private", "--round", "3"], "--rounds"),
        (["compare", "--mech", "CorBin"], "--mechanisms"),
        (["plan", "--eps", "3"], "--epsilon"),  # before what is missing
    ):
        assert main(words) == 2
        assert f"Did you mean '{nearest}'?" in capsys.readouterr().err


@pytest.mark.parametrize("delta", ["0", "1.5"])
def test_a_wrong_delta_is_refused_at_once(delta, capsys, monkeypatch):
    """`fedq privacy RUN RUN --delta 0` took 1e-5 in its place, and the cure of one source was 1.5 itself."""
    monkeypatch.setattr("lightning_fedq.commands.plan.read_sizes", lambda *_: pytest.fail("it was read"))
    for words in ("privacy one two", "privacy digits_private", "plan x.yaml --epsilon 8"):
        assert main([*words.split(), "--delta", delta]) == 2
        assert f"error: delta must be > 0 and below 1, got {float(delta)}" in capsys.readouterr().err


def test_settings_of_another_package_are_checked_by_its_class(tmp_path):
    """A configuration may name a class Federated that is not the library's."""
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": [{"class_path": "mine.Federated"}]}}))
    for named in (["--config", str(path)], ["--trainer.callbacks+=mine.Federated"]):
        refuse_unknown_settings(["Federated.num_client"], named)
        with pytest.raises(ValueError, match=r"There is no setting 'epsilo'\. It has: epsilon_per_"):
            refuse_unknown_settings(["Federated.num_client", "CorBin.epsilo"], named)
    refuse_unknown_settings(["Federated.privacy.epsilon", "trainer.max_epochs", "Unknown.x"], [])
    with pytest.raises(ValueError, match=r"There is no setting 'num_client'\. Did you mean 'num_clients'"):
        refuse_unknown_settings(["Federated.num_client"], ["digits_private"])


def test_the_package_is_the_command():
    command = [sys.executable, "-m", "lightning_fedq", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == f"fedq {lightning_fedq.__version__}\n"


@pytest.mark.parametrize(("key", "option"), [("model", "hidden"), ("data", "batch_size")])
def test_the_configuration_of_a_script_needs_class_paths(key, option, tmp_path, capsys):
    """As `examples/plain.yaml`, whose script says which classes it means."""
    config = yaml.safe_load(configuration(tmp_path).read_text())
    Path("plain.yaml").write_text(yaml.safe_dump({**config, key: {option: 3}}))
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "plain.yaml", "--with", "corbin"])
    error = capsys.readouterr().err
    assert f"Option '{option}' is not accepted" in error
    assert f"`{key}` names no class. Write {key}: {{class_path: MODULE.CLASS" in error
    assert "python train.py fit --config YOURS.yaml --config FRAGMENT.yaml" in error


def test_fit_ends_with_a_summary(tmp_path, capsys):
    path = configuration(tmp_path)
    folder = "--trainer.callbacks+=lightning_fedq.callbacks.RunFolder"
    assert main(["fit", "--config", str(path), folder, "--trainer.callbacks.name=mine"]) == 0
    shown = capsys.readouterr().out
    for what in ("test_acc", "Bits a parameter", "MB up", "MB down", "both ways"):
        assert what in shown
    assert "server that sees every message" in shown and "runs/mine/: report.md, privacy.md" in shown
    resolved = yaml.safe_load(Path("runs/mine/config.yaml").read_text())
    assert resolved["trainer"]["callbacks"][0]["init_args"]["server_lr"] == 1.0  # defaults are filled in
    assert main(["privacy", "runs/mine/config.yaml", "--rounds", "3"]) == 0  # every command reads it
    assert "3 rounds" in " ".join(capsys.readouterr().out.split())
    assert main(["fit", "runs/mine/config.yaml", "--trainer.max_epochs=1"]) == 0
    assert "runs/mine-2/: report.md" in capsys.readouterr().out


def test_a_module_of_the_current_folder_is_found(tmp_path, capsys):
    """As with `python train.py fit`."""
    Path("my_own_training.py").write_text("from lightning_fedq.data.models import Classifier as Mine\n")
    path = of_another_class(tmp_path, "my_own_training.Mine")
    assert main(["privacy", str(path)]) == 0
    assert "epsilon_per_coordinate=1.0" in capsys.readouterr().out


def test_settings_by_short_names(tmp_path, capsys):
    """As in `fedq privacy`; after the flags."""
    fit = ["fit", str(configuration(tmp_path)), "--trainer.callbacks+=lightning_fedq.callbacks.RunFolder"]
    changes = "Federated.num_clients=6 CorBin.epsilon_per_coordinate=2.0 RunFolder.name=mine model.lr=0.01"
    more = ["--trainer.max_epochs=3", "--set=trainer.max_epochs=1"]
    assert main([*fit, "--set", *changes.split(), *more]) == 0
    assert "runs/mine/: report.md, privacy.md, model.ckpt" in capsys.readouterr().out
    resolved = yaml.safe_load(Path("runs/mine/config.yaml").read_text())
    federated = resolved["trainer"]["callbacks"][0]["init_args"]
    assert federated["num_clients"] == 6
    assert federated["mechanism"]["init_args"]["epsilon_per_coordinate"] == 2.0
    assert resolved["trainer"]["max_epochs"] == 1 and resolved["model"]["init_args"]["lr"] == 0.01
    for change, hint in (
        ("Federated.num_client=7", "Did you mean 'num_clients'?"),
        ("num_clients", "A setting is name=value"),
        ("--trainer.max_epochs=1", "--set needs NAME=VALUE"),
    ):
        assert main([*fit, "--set", change]) == 2
        assert hint in capsys.readouterr().err


def test_what_a_run_refuses_is_told_in_a_line(tmp_path, capsys, monkeypatch):
    path = str(configuration(tmp_path))
    elsewhere = ["--data=lightning_fedq.data.datasets.MNISTDataModule"]
    in_mid_round = ["--trainer.val_check_interval=0.5"]
    monkeypatch.delenv("FEDQ_DATA", raising=False)
    for more, message in ((elsewhere, "no MNIST/raw in"), (in_mid_round, "validate during a round")):
        assert main(["fit", path, *more]) == 2
        told = capsys.readouterr().err.splitlines()
        assert any(line.startswith("error: ") and message in line for line in told)
        assert not any("Traceback" in line for line in told) and "FEDQ_TRACE=1" in told[-1]
    monkeypatch.setenv("FEDQ_TRACE", "1")
    with pytest.raises(ValueError, match="validate during a round"):
        main(["fit", path, *in_mid_round])


def test_a_second_mechanism_is_refused_in_a_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "digits_corbin", "--with", "ldpq"])
    error = capsys.readouterr().err
    assert "error: A run has one Federated callback and mechanism, got two" in error


def test_wandb_in_front_of_the_run_folder_is_refused_before_it_begins(tmp_path, capsys):
    plain = yaml.safe_load(configuration(tmp_path).read_text())
    del plain["trainer"]["callbacks"]
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump(plain))
    with pytest.raises(SystemExit, match="2"):
        main(["fit", str(path), "--with", "wandb", "--with", "corbin"])
    assert "error: WandbRounds sends the run folder and must come after RunFolder" in capsys.readouterr().err
    assert not Path("wandb").exists()


OWN_MODEL = """
from lightning_fedq.data.models import Classifier

class Failing(Classifier):
    def validation_step(self, batch, batch_idx):
        raise ValueError("of my own")
"""


def test_errors_in_code_of_ones_own_keep_their_trace(tmp_path, capsys):
    Path("my_failing.py").write_text(OWN_MODEL)
    path = of_another_class(tmp_path, "my_failing.Failing")
    with pytest.raises(ValueError, match="of my own"):
        main(["fit", str(path)])


def test_the_trained_model_is_tested(tmp_path, capsys):
    path = configuration(tmp_path, seed=0)  # the accuracy of other coins might be anything
    folder = "--trainer.callbacks+=lightning_fedq.callbacks.RunFolder"
    assert main(["fit", str(path), folder, "--trainer.callbacks.name=mine", "--trainer.max_epochs=3"]) == 0
    expected = json.loads(Path("runs/mine/summary.json").read_text())["metrics"]["test_acc"]
    assert main(["test", "runs/mine", "--trainer.callbacks+=tests.test_cli.Metrics"]) == 0
    assert Metrics.seen["test_acc"] == expected > 0.2
    assert main(["validate", "runs/mine"]) == 0
    capsys.readouterr()
    for name in ("predictions", "predictions-2"):  # nothing is written over
        assert main(["predict", "runs/mine"]) == 0
        assert f"runs/mine/{name}.pt: a tensor of shape (359,), in the order" in capsys.readouterr().out
    data = DigitsDataModule(num_train=60)
    data.setup("predict")
    labels = torch.cat([labels for _, labels in data.predict_dataloader()])
    found = torch.load("runs/mine/predictions.pt")
    assert (found == labels).float().mean().item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([None, None], "returned nothing that could be written"),
        ([torch.ones(2), torch.ones(1)], "predictions.pt: a tensor of shape (3,)"),
        ([torch.ones(2, 3), torch.ones(2, 4)], "predictions.pt: a list of 2"),
        ([{"label": torch.ones(2)}], "predictions.pt: a list of 1"),
    ],
)
def test_whatever_is_predicted_is_written(batches, told, tmp_path, capsys):
    cli = FedqCLI.__new__(FedqCLI)
    loop = SimpleNamespace(predictions=batches)
    cli.trainer = SimpleNamespace(predict_loop=loop, world_size=1, global_rank=0)
    cli.config = {"predict": SimpleNamespace(ckpt_path=str(tmp_path / "model.ckpt"))}
    cli.after_predict()
    assert told in capsys.readouterr().out
    assert (tmp_path / "predictions.pt").exists() == ("nothing" not in told)


class Metrics(pl.Callback):
    """Keeps what a test logged."""

    seen: ClassVar[dict[str, float]] = {}

    def on_test_end(self, trainer, pl_module):
        Metrics.seen.update({key: float(value) for key, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_random_weights_are_not_evaluated(command, tmp_path, capsys):
    path = configuration(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([command, "--config", str(path)])
    error = capsys.readouterr().err
    assert f"fedq {command} needs a trained model" in error and f"fedq {command} runs/NAME" in error
    for folder, message in (("runs/none", "no run folder runs/none"), (".", "holds no model.ckpt")):
        assert main([command, folder]) == 2
        assert message in capsys.readouterr().err
    Path("model.ckpt").write_text("")
    assert main([command, "."]) == 2
    assert "trainer.test(model, datamodule=data, ckpt_path='model.ckpt')" in capsys.readouterr().err


def test_compare_runs_and_reads(tmp_path, capsys):
    path = configuration(tmp_path)
    assert main(["compare", str(path), "--out", "first"]) == 0
    assert main(["compare", str(path), "first/small", "--out", "both"]) == 0
    table = json.loads(Path("both/table.json").read_text())["runs"]
    assert [row["run"] for row in table] == ["small", "small-2"]
    assert table[1]["uplink_megabytes"] == pytest.approx(2 * 4 * 650 / 8e6)
    summary = json.loads(Path("first/small/summary.json").read_text())
    about = from_json(Path("first/small/privacy.json").read_text()).about
    assert [(row["verdict"], row["epsilon"]) for row in table] == [(about.verdict, about.epsilon)] * 2
    noise = summary["noise_over_signal"]
    assert table[1]["R"] == max(noise["planned"], noise["sim_seen"]) > 0
    assert Path("both/compare.png").read_bytes()[:4] == b"\x89PNG" and "small" in capsys.readouterr().out
    assert [row["rounds"] for row in table] == [2, 2]
    assert main(["compare", "first/small", "--monitor", "loss"]) == 2
    assert "never logged 'loss'" in capsys.readouterr().err
    assert main(["compare", "nowhere"]) == 2
    assert "nowhere is not the folder of a run. There is no configuration nowhere" in capsys.readouterr().err


def finished_run(folder, name, rounds, mechanism="CorBin(epsilon_per_coordinate=1.0)"):
    """A run folder with invented numbers."""
    cost = {"uplink_bits": 8e3, "downlink_bits": 8e3, "setup_bits": 0.0, "num_received": 4, "seconds": 1.0}
    rows = [{"round": number + 1.0, "val_loss": 1.0 / (number + 1), **cost} for number in range(rounds)]
    write_rows(folder / name / "metrics.csv", rows)
    write_summary(folder / name / "summary.json", {"mechanism": mechanism, "bits_per_parameter": 1.0})
    return folder / name


def test_compare_warns_of_runs_of_different_length(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    long_name = "digits_distributed_discrete_gaussian"
    runs = [finished_run(tmp_path, long_name, 3), finished_run(tmp_path, "plain", 2, "FedAvg()")]
    assert main(["compare", *map(str, runs), "--out", "both"]) == 0
    shown = capsys.readouterr()
    assert "because the numbers of rounds differ (3, 2)" in shown.err
    assert sum(long_name in line for line in shown.out.splitlines()) == 1  # not cut, not folded
    table = json.loads(Path("both/table.json").read_text())
    assert all(row["epsilon"] == row["R"] == "-" for row in table["runs"])
    assert table["monitor"] == "val_loss"  # the only one that there is, and nobody tells its direction
    assert [(row["rounds"], row["best"]) for row in table["runs"]] == [(3, "-"), (2, "-")]
    assert main(["compare", *map(str, runs), "--mode", "min", "--out", "told"]) == 0
    table = json.loads(Path("told/table.json").read_text())
    assert [row["best"] for row in table["runs"]] == [pytest.approx(1 / 3), 0.5]


def test_compare_warns_of_epsilons_at_different_deltas(tmp_path, capsys):
    context, folders = make_plan_context(LDPQ(0.1), 50, 10), []
    for delta in (1e-5, 1e-3, 1e-3):
        folders.append(str(finished_run(tmp_path, f"run{len(folders)}", 3)))
        made = replace(privacy_report(Run.ideal(LDPQ(0.1), context, 3, None), delta), state="ended")
        (Path(folders[-1]) / "privacy.json").write_text(to_json(made))
    assert main(["compare", *folders, "--out", "all"]) == 0
    shown = capsys.readouterr()
    assert "not comparable because their deltas differ (1e-05, 0.001)" in shown.err
    assert "run0: outsider, at delta 1e-05" in shown.out and "run2: outsider, at delta 0.001" in shown.out
    table = json.loads(Path("all/table.json").read_text())
    assert [row["delta"] for row in table["runs"]] == [1e-5, 1e-3, 1e-3]
    assert main(["compare", *folders[1:], "--out", "two"]) == 0
    shown = capsys.readouterr()
    assert "deltas" not in shown.err and "over the run, against outsider, at delta 0.001\n" in shown.out


def test_compare_says_whether_what_was_asked_for_is_met(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked, none = finished_run(tmp_path, "asked", 3), finished_run(tmp_path, "digits_layered", 3)
    made = privacy_report(Run.ideal(LDPQ(0.1), make_plan_context(LDPQ(0.1), 500, 100), 3, ASSUMED), 1e-5)
    made = replace(made, state="ended", masks="ran")
    met = replace(made, asked=TargetOutcome("SECAGG_SERVER", 8.0, "run", 7.9991, True))
    nothing = replace(made, rows=tuple(row.refused("nobody claims anything") for row in made.rows))
    for folder, report, seen in ((asked, met, 0.15), (none, nothing, None)):
        (folder / "privacy.json").write_text(to_json(report))
        summary = json.loads((folder / "summary.json").read_text())
        noise = {"planned": 0.02, "sim_seen": seen}
        write_summary(folder / "summary.json", summary | {"noise_over_signal": noise})
    assert main(["compare", str(asked), str(none), "--out", "both"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    [row] = [line for line in lines if line.strip().startswith("asked ")]
    epsilon = format_epsilon(made.row(Adversary.SECAGG_SERVER).epsilon)
    assert epsilon in row and "0.15" in row
    assert any("∞ no guarantee" in line and "0.02" in line for line in lines)
    assert "asked: server behind secure aggregation, asked for 8 over the run: met" in shown
    assert "digits_layered: server behind secure aggregation" in shown
    assert max(map(len, lines[:6])) <= 80


def test_compare_reads_folders_of_earlier_versions(tmp_path, capsys):
    """Their curves are drawn, and a line says that their privacy must be computed again."""
    old = finished_run(tmp_path, "old", 3)
    (old / "privacy.json").write_text(json.dumps({"rows": [], "protocol": "masking really ran"}))
    assert main(["compare", str(old), "--out", "both"]) == 0
    assert "Compute it again: `fedq privacy CONFIG`" in capsys.readouterr().err
    assert json.loads(Path("both/table.json").read_text())["runs"][0]["epsilon"] == "-"


def test_what_an_agent_runs_logs_to_wandb(tmp_path, monkeypatch):
    """The command of the guide as an agent calls it, offline. Without a logger an agent saw nothing."""
    wandb = pytest.importorskip("wandb")
    from tests.callbacks.test_wandb_rounds import finished_records_of

    config = yaml.safe_load(configuration(tmp_path).read_text())
    config["trainer"]["callbacks"].append({"class_path": "lightning_fedq.callbacks.RunFolder"})
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "tune.md").read_text()
    sweep = yaml.safe_load(guide.partition("```yaml\n")[2].partition("```")[0])
    command = " ".join(sweep["command"]).replace("${args_no_hyphens}", "Federated.server_lr=0.5").split()
    for name in [name for name in os.environ if "WANDB" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # an agent's run is a process, which ends, and knows nothing of the runs of this one
    assert main(command[1:]) == 0
    wandb.finish()
    records = finished_records_of(Path.cwd())
    history = [record.history for record in records if record.HasField("history")]
    logged = {item.key or ".".join(item.nested_key) for row in history for item in row.item}
    assert sweep["metric"]["name"] in logged, logged


def test_the_shipped_table_has_every_mechanism(capsys):
    """That it says what the classes do is checked with the other tables, in `tests/test_docs.py`."""
    rows = json.loads(SHIPPED.read_text(encoding="utf-8"))["mechanisms"]
    assert [row["mechanism"] for row in rows] == mechanisms.__all__
    assert all(float(row["bits"]) > 0 and row["sum"] in ("yes", "no") for row in rows)
    assert all(row["paper"] != "-" for row in rows)
    assert main(["mechanisms", "LDPQ", "LDPQ", "tests.contract.test_check_mechanism.TinyLever"]) == 0
    printed = capsys.readouterr().out
    assert "TinyLever" in printed and "CorBin" not in printed.partition("bits: bits of one")[0]


def test_the_table_tells_what_pairs_cost():
    row = describe(mechanisms.CorBin)
    assert (row["bits"], row["sum"], row["eavesdropper"], row["server"]) == ("1", "yes", "1", "∞")
    assert set(describe(mechanisms.FedAvg).values()) >= {"32", "none"}


def test_privacy_of_a_configuration_and_of_a_checkpoint(tmp_path, capsys):
    path = configuration(tmp_path)
    assert main(["privacy", str(path), "--out", "statement"]) == 0
    planned = json.loads(Path("statement/privacy.json").read_text())
    assert (planned["rounds"], planned["num_clients"], planned["dim"]) == (2, 4, 650)
    text = path.read_text().replace("enable_checkpointing: false", f"default_root_dir: {tmp_path}")
    path.write_text(text)
    main(["fit", "--config", str(path)])
    checkpoint = next(tmp_path.glob("**/*.ckpt"))
    assert main(["privacy", str(checkpoint), "--out", "spent"]) == 0
    spent = json.loads(Path("spent/privacy.json").read_text())
    assert [r["epsilon_run"] for r in spent["rows"]] == [r["epsilon_run"] for r in planned["rows"]]
    assert (planned["state"], spent["state"]) == ("planned", "running")
    assert spent["mechanism"] == planned["mechanism"]
    assert main(["privacy", "nowhere.ckpt"]) == 2
    assert "There is no file nowhere.ckpt" in capsys.readouterr().err


def test_a_mechanism_is_read_without_evaluating_code():
    read = parse_mechanism("CorBin(epsilon_per_coordinate=1.0, shared_bits=None)")
    assert read == mechanisms.CorBin(1.0, None)
    code = "print('x')", "CorBin(epsilon_per_coordinate=f())", "__import__('os').system(command='x')"
    for text in (*code, "CorBin", "CorBin("):
        with pytest.raises(ValueError, match=r"[Gg]ive the configuration of its run\."):
            parse_mechanism(text)


@pytest.mark.parametrize("arguments", [["configs"], ["--help"], ["configs", "digits_corbin"]])
def test_a_reader_that_stops_early_is_no_error(arguments):
    """As in `fedq configs | head`."""
    command = [sys.executable, "-m", "lightning_fedq.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        complaint = process.stderr.read()
    assert complaint == "" and process.returncode == 1


def test_help_of_training_says_what_lightning_does_not_know(capsys):
    for command in TRAINING:
        assert main([command, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"fedq {command} " in shown and "--with FRAGMENT" in shown
        assert "--set Federated.num_clients=7" in shown and "--trainer.max_epochs" in shown
    assert main(["fit", "digits_corbin", "--help"]) == 0
    whole = " ".join(capsys.readouterr().out.split())
    assert described("fit")["description"] in whole and "--trainer.max_epochs" in whole


def test_flags_of_other_packages_than_are_installed_come_from_the_parser(monkeypatch, capsys):
    assert main(["fit", "digits_corbin", "--help"]) == 0
    shipped = capsys.readouterr().out
    monkeypatch.setattr("lightning_fedq.commands.shown.version", lambda name: "0.0.1")
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "digits_corbin", "--help"])
    parsed = capsys.readouterr().out
    assert re.findall(r"--[\w.]+", parsed) == re.findall(r"--[\w.]+", shipped)


def test_flags_need_no_lightning():
    code = (
        "import sys; from lightning_fedq.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "fit", "digits_corbin", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.endswith("False\n") and "--trainer.max_epochs" in found


def test_flags_of_a_name_that_does_not_ship_are_refused(capsys):
    assert main(["fit", "digits_corbinn", "--help"]) == 2
    assert "digits_corbin" in capsys.readouterr().err


def test_a_module_with_loaders_of_its_own_needs_no_data(tmp_path, monkeypatch):
    (tmp_path / "loaders_of_mine.py").write_text(
        "from lightning_fedq.data.datasets import DigitsDataModule\n"
        "from lightning_fedq.data.models import Classifier, Linear\n"
        "class Mine(Classifier):\n"
        "    def __init__(self):\n"
        "        super().__init__(Linear(in_features=64))\n"
        "        self.digits = DigitsDataModule(num_train=60)\n"
        "        self.digits.setup('fit')\n"
        "    def train_dataloader(self):\n"
        "        return self.digits.train_dataloader()\n"
        "    def val_dataloader(self):\n"
        "        return self.digits.val_dataloader()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = yaml.safe_load(configuration(tmp_path).read_text())
    del config["data"]
    config["model"] = {"class_path": "loaders_of_mine.Mine"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "mine.yaml"]) == 0


def test_a_training_without_a_federation_is_called_one(tmp_path, capsys):
    config = yaml.safe_load(configuration(tmp_path).read_text())
    config["trainer"]["callbacks"] = []
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "plain.yaml", "--trainer.enable_progress_bar=false"]) == 0
    assert "ordinary training without federation or privacy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit"], "No model is given. Name a run that ships with the package"),
        (["fit", "small.yaml", "--set", "Federated.num_clients=eight"], "num_clients must be int, got eight"),
    ],
)
def test_mistakes_are_answered_in_a_few_lines(arguments, said, tmp_path, capsys):
    configuration(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) < 6 and len(error) < 500


def test_the_folder_of_a_run_is_no_configuration(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{}")
    assert main(["fit", "run"]) == 2
    assert "Its configuration is run/config.yaml" in capsys.readouterr().err


def test_an_interrupted_command_says_so_without_a_trace(monkeypatch, capsys):
    def interrupted(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_fedq.commands.configs.main", interrupted)
    assert main(["configs"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_folder_that_can_not_be_written_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "taken").write_text("a file")
    config = yaml.safe_load(configuration(tmp_path).read_text())
    folder = {"class_path": "lightning_fedq.callbacks.RunFolder", "init_args": {"root": "taken"}}
    config["trainer"]["callbacks"].append(folder)
    (tmp_path / "folder.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "folder.yaml"]) == 2
    error = capsys.readouterr().err
    assert "Not a directory" in error and "taken" in error and "Traceback" not in error


def test_compare_shows_what_tells_any_two_updates_apart(tmp_path):
    """Of `SIGM`, whose own claim is about an update and zero: beside claims about any two it would look half
    as loud. With every coordinate selected it is a Gaussian of z, and z / 2 between any two."""
    for name, mechanism in (("sigm", SIGM(0.1, 200.0, 1.0)), ("gaussian", GaussianNoise(1.0, 4.0))):
        small_run(RunFolder(name, tmp_path), mechanism=mechanism, rounds=1, seed=None)
    folders = [str(tmp_path / name) for name in ("sigm", "gaussian")]
    out = ["--monitor", "val_acc", "--out", str(tmp_path / "both")]
    for adversary in ([], ["--adversary", "outsider"]):
        assert main(["compare", *folders, *adversary, *out]) == 0
        table = {row["run"]: row for row in json.loads((tmp_path / "both/table.json").read_text())["runs"]}
        zero, any_two = (spent(GaussianLoss(z), 1e-5, compositions=650).epsilon for z in (200.0, 100.0))
        assert table["sigm"]["epsilon"] == pytest.approx(any_two, rel=0.02) and any_two > 1.9 * zero
        stated = json.loads((tmp_path / "gaussian/privacy.json").read_text())
        outsider = next(row for row in stated["rows"] if row["adversary"] == "OUTSIDER")
        assert table["gaussian"]["epsilon"] == outsider["epsilon_run"] == outsider["epsilon_any_two"]
