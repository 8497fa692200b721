"""Cohorts that stay secret: drawn by a key of their own, told by nothing, refused where a condition fails."""

import copy
import inspect
import json
import math
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.cli import main
from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy.losses import GaussianLoss
from lightning_fedq.privacy.planning import make_plan_context
from lightning_fedq.privacy.report import CONDITIONS
from lightning_fedq.privacy.sampled import secret_epsilon
from lightning_fedq.rounds import RoundPlanner
from lightning_fedq.training.accounts import make_report
from lightning_fedq.training.secret_cohorts import check_processes
from tests.described import page as markdown, privacy_report
from tests.digits_run import make_trainer
from tests.training.test_privacy_target import Line, loader

NOISE = fedq.GaussianNoise(1.0, 1.0)
TARGET = fedq.PrivacyTarget(2.0, 1e-3, "outsider")
CORRELATED = "S7, noise that is independent over rounds"


def secret(mechanism=NOISE, clients=20, **settings):
    given = {"cohort": fedq.FixedSize(4, secret=True), "diagnostics": False} | settings
    return fedq.Federated(mechanism, clients, **given)


def trainer_of(*callbacks, rounds=3, **settings):
    return make_trainer(*callbacks, max_epochs=rounds, **settings)


def fitted(federated, *callbacks, rounds=3, module=None, data=None, **settings):
    trainer = trainer_of(federated, *callbacks, rounds=rounds, **settings)
    trainer.fit(module or Line(), data or loader())
    return trainer


# ---- the draw -----------------------------------------------------------------------------------------


def test_a_secret_cohort_does_not_follow_from_the_seed():
    one, other = (RoundPlanner(1000, 7, fedq.FixedSize(10, secret=True)) for _ in range(2))
    assert one.cohort(0) != other.cohort(0)  # false alarm below 1e-23
    assert one.cohort(0) != RoundPlanner(1000, 7, fedq.FixedSize(10)).cohort(0)
    assert one.cohort(0) == one.cohort(0)


def test_every_attempt_has_a_draw_of_its_own():
    planner = RoundPlanner(1000, 7, fedq.FixedSize(10, secret=True))
    drawn = [planner.plan(round, NOISE, attempt).cohort for round in range(3) for attempt in range(3)]
    assert len(set(drawn)) == 9
    known = RoundPlanner(1000, 7, fedq.FixedSize(10))
    assert known.plan(1, NOISE, 1) == known.plan(1, NOISE, 0)


def test_every_client_is_drawn_equally_often():
    """Chi-square at 1e-6: false alarm once in a million runs."""
    planner = RoundPlanner(12, 0, fedq.FixedSize(3, secret=True))
    counts = torch.zeros(12)
    for round in range(4000):
        counts[planner.cohort(round)] += 1
    # of 3 out of 12 without replacement, a count varies by a share 9/11 of a multinomial's
    statistic = float(((counts - 1000.0) ** 2).sum()) / 1000.0 / (9.0 / 11.0)
    assert statistic < stats.chi2.isf(1e-6, 11)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_the_key_can_not_be_copied_and_is_not_printed(how):
    planner = RoundPlanner(12, 0, fedq.FixedSize(3, secret=True))
    assert "key" not in repr(planner)
    with pytest.raises(TypeError, match="can't be copied"):
        how(planner.key)


# ---- the epsilon --------------------------------------------------------------------------------------


def test_the_row_is_the_theorem_about_the_sum():
    federated = secret()
    report = make_report(federated, fitted(federated), 1e-3)
    row, server = report.secret, report.row(Adversary.SERVER)
    claim = next(c for c in NOISE.claims(federated.engine.context(federated.engine.next_plan()))
                 if c.adversary is Adversary.OUTSIDER)  # fmt: skip
    run = {"law": fedq.FixedSize(4, secret=True), "num_clients": 20, "rounds": 3}
    options = {"neighbours": claim.neighbours, "slack": claim.slack}
    assert row.epsilon_run == secret_epsilon(claim.loss, 1e-3, **run, **options)
    # four clients add 2 C each, and one of them can change the sum by 2 C
    by_hand = secret_epsilon(GaussianLoss(2.0), 1e-3, **run, neighbours=Neighbours.SUBSTITUTION)
    assert by_hand <= row.epsilon_run <= 1.01 * by_hand
    assert row.cohorts == "secret" and len(CONDITIONS) == 10
    assert set(CONDITIONS) <= set(row.assumptions)
    assert row.epsilon_run < report.row(Adversary.OUTSIDER).epsilon_run and len(report.rows) == len(Adversary)
    assert server.cohorts == "known" and server.epsilon_run > row.epsilon_run
    assert "outsider, cohorts secret" in markdown(report)


@pytest.mark.parametrize(
    "mechanism",
    [fedq.GaussianNoise(1.0, 9.0), fedq.RotatedCoins(1.0), fedq.DistributedDiscreteGaussian(1.0, 9.0, 0.01)],
)
def test_a_target_is_met_and_spends_rounds(mechanism):
    federated = secret(mechanism, privacy=TARGET)
    trainer = fitted(federated, rounds=5)
    assert federated.ledger.limits is None  # no client has a limit of its own
    assert federated.calibration.charges == 5
    row = make_report(federated, trainer, 1e-3).secret
    assert 1.95 < row.epsilon_run <= 2.0


@pytest.mark.parametrize("on_exhausted", ["stop", "raise"])
def test_a_budget_counts_rounds_and_not_charges(on_exhausted):
    federated = secret()
    budget = fedq.PrivacyBudget(2.0, 1e-3, "outsider", on_exhausted)
    trainer = trainer_of(federated, budget, rounds=50)
    if on_exhausted == "raise":
        with pytest.raises(RuntimeError, match=f"allows {'[0-9]+'} rounds"):
            trainer.fit(Line(), loader())
    else:
        trainer.fit(Line(), loader())
    rounds = federated.ledger.rounds
    assert 1 < rounds == budget.affordable < 50
    assert federated.ledger.limits is None and federated.ledger.round_limit is None  # lifted
    row = make_report(federated, trainer, 1e-3).secret
    assert row.epsilon_run == pytest.approx(budget.epsilon_spent) and row.epsilon_run <= 2.0
    context = federated.engine.context(federated.engine.next_plan())
    claim = next(c for c in NOISE.claims(context) if c.adversary is Adversary.OUTSIDER)
    options = {"law": fedq.FixedSize(4, secret=True), "num_clients": 20, "neighbours": claim.neighbours}
    more = secret_epsilon(claim.loss, 1e-3, rounds=rounds + 1, **options)
    assert more > 2.0


# ---- nothing tells who took part ----------------------------------------------------------------------


class Kept(pl.loggers.logger.DummyLogger):
    """Keeps all that is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append(dict(metrics))


def test_logs_hold_nothing_that_follows_from_the_drawn_clients():
    federated, logger = secret(), Kept()
    fitted(federated, logger=logger)
    assert len({federated.ledger.charges.tolist().__str__()}) == 1
    names = {name for line in logger.lines for name in line}
    assert not {name for name in names if "sim_" in name or "charged" in name or "train" in name}
    for name in ("fed/num_received", "fed/num_dropped", "fed/uplink_bits", "fed/cohort_size"):
        assert len({line[name] for line in logger.lines if name in line}) == 1


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def test_checkpoints_of_two_draws_differ_in_the_model_only(tmp_path):
    saved = []
    for index in range(2):
        federated = secret(fedq.DistributedDiscreteGaussian(1.0, 1.0, 0.01))
        trainer = fitted(federated)
        trainer.save_checkpoint(tmp_path / f"{index}.ckpt")
        checkpoint = torch.load(tmp_path / f"{index}.ckpt", weights_only=False)
        assert checkpoint["callbacks"]["Federated"] == {"cohorts": "secret"}
        saved.append({key: plain(value) for key, value in checkpoint.items() if key != "state_dict"})
    assert saved[0] == saved[1]


def test_a_run_folder_tells_rounds_and_no_charges(tmp_path, capsys):
    federated, folder = secret(privacy=TARGET), fedq.RunFolder("run", tmp_path, show=False)
    fitted(federated, folder, rounds=4)
    path = folder.path
    assert "charged" not in (path / "metrics.csv").read_text()
    page = (path / "privacy.md").read_text() + (path / "report.md").read_text()
    assert "Who was charged how often" not in page and "outsider, cohorts secret" in page
    stated = json.loads((path / "privacy.json").read_text())
    assert stated["charged"] == [] and stated["secret"]["cohorts"] == "secret"
    assert not list((path / "clients").glob("*.jsonl"))
    summary = json.loads((path / "summary.json").read_text())
    assert summary["seconds"] is None
    assert stated["asked"]["met"] and stated["asked"]["adversary"] == "OUTSIDER, cohorts secret"
    assert stated["state"] == "ended" and "What was protected" in (path / "privacy.md").read_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", stated["origin"]["made"])  # the minute tells how long it took
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    assert "outsider, cohorts secret" in html and ">outsider<" in html
    assert main(["compare", str(path), "--monitor", "update_norm", "--out", str(tmp_path / "both")]) == 0
    assert "against outsider, cohorts secret, asked for 2 over the run: met" in " ".join(
        capsys.readouterr().out.split()
    )
    assert stated["by_round"][-1] == [4, pytest.approx(stated["secret"]["epsilon_run"])]


def test_no_journal_is_written(tmp_path):
    federated = secret()
    checkpoints = pl.callbacks.ModelCheckpoint(tmp_path)
    fitted(federated, checkpoints, enable_checkpointing=True)
    assert list(tmp_path.glob("*.ckpt")) and not list(tmp_path.glob("*.jsonl"))


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cohort": fedq.FixedSize(20, secret=True)}, "S1, .*size below 20"),
        ({"privacy": fedq.PrivacyTarget(2.0, 1e-3, "server")}, "S5, .*limits every client"),
        ({"client_metrics": "shared"}, "S8, .*client_metrics='none'"),
    ],
)
def test_other_values_that_break_a_condition_are_refused_by_name(settings, words):
    """One value of each, with its cures: `tests.cures.rows_secret`."""
    with pytest.raises(ValueError, match=words):
        secret(**settings)


REFUSED = {"seed", "cohort", "dropout_probability", "deadline", "privacy"}
REFUSED |= {"weighting", "aggregator", "algorithm", "buffers", "evaluate_clients", "check_isolation"}
REFUSED |= {"personal_parameters"}
REFUSED |= {"diagnostics", "client_metrics", "ledger"}
REFUSED |= {"secure_aggregation", "sends"}  # where clients draw for themselves
TAKEN = {"mechanism", "num_clients", "partition", "labels", "local_epochs", "local_steps"}
TAKEN |= {"clients_per_step", "ranges", "server_lr", "server_optimizer", "extra_buffers", "constraints"}
TAKEN |= {"broadcast_bits", "statistics"}


def test_every_argument_was_looked_at():
    """One that is added to `Federated` may tell who was drawn: say here whether it is refused, and try it."""
    assert {*inspect.signature(fedq.Federated).parameters} == REFUSED | TAKEN
    assert not REFUSED & TAKEN


@pytest.mark.parametrize(
    ("mechanism", "words"),
    [
        (fedq.FedAvg(), "S10, a claim against outsiders"),
        (fedq.CSGM(1.0, 1.0, 0.5), "S10, .*ZERO_OUT"),
        (fedq.SIGM(1.0, 1.0, 0.5), "S10, .*ZERO_OUT"),
        (fedq.CPA(epsilon=1.0, epsilon_scope="bit"), "S4, .*CPA"),
        (fedq.PairedCoins(1.0), "S4, "),
        (fedq.RotatedCoins(1.0, 0.5, paired=True), "S4, groups"),
    ],
)
def test_a_mechanism_whose_rounds_do_not_amplify_is_refused(mechanism, words):
    with pytest.raises(ValueError, match=words):
        fitted(secret(mechanism))


def test_correlated_noise_is_refused():
    with pytest.raises(ValueError, match="Cyclic"):  # as with any random cohorts
        secret(fedq.BandedGaussian(1.0, 1.0, band=3))
    with pytest.raises(ValueError, match="DistributedDiscreteGaussian"):
        secret(fedq.HandedOnGaussian(1.0, 1.0, 0.01, num_cohorts=5))


class Fails(pl.Callback):
    """Ends the fit in the middle of the second round, as a client's data could."""

    def __init__(self):
        self.at = 2

    def on_clients_done(self, trainer, done, expected):
        if trainer.callbacks[0].ledger.rounds == self.at:
            self.at = -1
            raise ArithmeticError("a client's")


def test_a_round_that_was_given_up_is_not_drawn_again():
    federated, fails = secret(clients_per_step=1), Fails()
    trainer = trainer_of(federated, fails)
    module = Line()
    with pytest.raises(ArithmeticError):
        trainer.fit(module, loader())
    row = make_report(federated, trainer, 1e-3).secret
    assert row.verdict == "no guarantee" and "S2" in row.reason and math.isinf(row.epsilon_run)
    with pytest.raises(ValueError, match=r"S2, .*2 rounds were charged and 1 are finished.*new Federated"):
        fitted(federated, module=module)
    assert federated.ledger.rounds == 2


def test_several_processes_are_refused():
    with pytest.raises(ValueError, match=r"S1, .*2 processes.*devices=1"):  # to Lightning, each is alone
        check_processes(SimpleNamespace(world_size=1, strategy=SimpleNamespace(num_ranks=2)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dropout_probability": 0.1}, "S3, .*dropout_probability=0"),
        ({"fewest_answers": 4}, "S3, .*silent"),
        ({"equal_weights": False}, "S4, .*weighting='uniform'"),
        ({"num_byzantine": 1}, "S4, .*ByzantineClients"),
        ({"secure_keys": False}, "S1, .*seed=None"),
        ({"secret_cohorts": "S2, one draw"}, "S2, one draw"),
        ({"mechanism": fedq.BandedGaussian(1.0, 1.0, band=3)}, CORRELATED),
        ({"mechanism": fedq.HandedOnGaussian(1.0, 1.0, 0.01, num_cohorts=5)}, CORRELATED),
    ],
)
def test_a_report_states_no_such_epsilon_where_a_condition_fails(change, words):
    given = {"mechanism": NOISE, "rounds": 3, "delta": 1e-3, "num_clients": 20, "secret_cohorts": ""}

    def secret_row(mechanism, **settings):
        return privacy_report(mechanism, make_plan_context(mechanism, 4, 5), **settings).secret

    assert secret_row(**given).epsilon_run < 2.0
    row = secret_row(**given | change)
    assert row.verdict == "no guarantee" and math.isinf(row.epsilon_run) and re.search(words, row.reason)
