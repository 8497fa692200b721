import inspect
import math
import re

import pytest
import yaml

import lightning_fedq as fedq
from lightning_fedq import cli
from lightning_fedq.algorithms.byzantine.counting import count_byzantine
from lightning_fedq.commands import plan as command
from lightning_fedq.commands.configs import find
from lightning_fedq.commands.plan import candidates, sizes_for
from lightning_fedq.data.models import MLP, Classifier
from lightning_fedq.dpsgd.accountant import Account
from lightning_fedq.mechanisms import GaussianNoise
from lightning_fedq.privacy.planning import Option, Problem, plan, recommended
from lightning_fedq.privacy.target import PrivacyTarget, planned_charges
from tests.commands import federations
from tests.commands.federations import FEDERATIONS, OF_NO_WEIGHT, federation
from tests.configurations import written


def main(words):
    return cli.main(["plan", *words])


FEWER = r"with ([\d,]+) of them, GaussianNoise has R (\S+) \(costs points"
SMALL = ["--epsilon", "8", "--clients", "60", "--params", "100", "--rounds", "5"]


def only(monkeypatch, *names):
    """Plan with some candidates."""
    some = lambda params: {name: candidates(params)[name] for name in names}  # noqa: E731
    monkeypatch.setattr(command, "candidates", some)


def test_the_table_has_a_row_for_everybody(capsys, monkeypatch):
    """RotatedCoins, whose calibrations take seconds each, is in the next one's."""
    names = [name for name in candidates(100) if not name.startswith("RotatedCoins")]
    only(monkeypatch, *names)
    monkeypatch.setenv("COLUMNS", "110")
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "against the server behind secure aggregation" in printed
    for name in names:
        assert name in printed
    assert "not possible (--why prints reasons): CPA; " in printed and "homomorphic" not in printed
    assert "costs points" in printed and "no visible loss" not in printed


def test_each_option_is_said_as_it_is_found_and_the_cheap_one_is_advised(capsys, monkeypatch):
    """Rows go to the error stream while others are still calibrated; reasons only for who asks."""
    only(monkeypatch, "GaussianNoise", "RotatedCoins, paired", "CPA")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--epsilon", "8", "--clients", "479", "--params", "4060", "--rounds", "25", "--why"]) == 0
    out, err = capsys.readouterr()
    names = [line.strip().partition(": noise-to-signal ratio R ")[0] for line in err.splitlines()]
    assert names == ["GaussianNoise", "RotatedCoins, paired"], "without the one that is not possible"
    assert "not possible: CPA: CPA is not homomorphic" in out
    assert "Take RotatedCoins, paired: " in out and "about as good as GaussianNoise" in out
    assert "clip_norm" in out and "FedAvgM" in out


def test_where_r_is_poor_fewer_parameters_are_planned(capsys, monkeypatch):
    """A plan for so many says the same; nothing where R is good, more clients where no number would do."""
    only(monkeypatch, "GaussianNoise")
    monkeypatch.setenv("COLUMNS", "200")

    def said(clients, params, epsilon):
        size = ["--clients", clients, "--params", params, "--epsilon", epsilon, "--rounds", "30"]
        assert main([str(word) for word in size]) == 0
        return " ".join(capsys.readouterr())

    poor = said(1000, 7850, 1)
    fewer, ratio = re.search(FEWER, poor).groups()
    assert "docs/guides/useful_epsilon.md" in poor
    assert f"signal ratio R {ratio}, " in said(1000, fewer.replace(",", ""), 1)
    assert "Ways out" not in said(1000, 650, 8)


def test_where_no_row_is_good_none_is_advised_and_three_ways_out_have_numbers(capsys, monkeypatch):
    """It said "Take RotatedCoins" where every row says "do not"."""
    only(monkeypatch, "GaussianNoise", "RotatedCoins, share 1/8", "LDPQ")
    monkeypatch.setenv("COLUMNS", "200")
    size = ["--epsilon", "8", "--clients", "40", "--params", "10000", "--rounds", "30"]
    assert main(size) == 0
    printed = capsys.readouterr().out
    assert "Take none of these: GaussianNoise has the smallest R, 30" in printed
    assert "Take RotatedCoins" not in printed
    noise = float(re.search(r"noise_multiplier ([\d.]+) for epsilon 8 per row", printed).group(1))
    [clients] = re.findall(r"from about ([\d,]+) with GaussianNoise", printed)
    params, ratio = re.search(FEWER, printed).groups()
    account = Account(noise, 0.1)  # one pass a round over 1,000 rows in batches of 100
    for _ in range(300):
        account.charge()
    assert 7.0 < account.epsilon(1e-5) < 8.1
    for changed in (("--clients", clients), ("--params", params)):
        rest = list(size)
        rest[rest.index(changed[0]) + 1] = changed[1].replace(",", "")
        assert main(rest) == 0
        again = capsys.readouterr().out
        assert "Take none" not in again and (changed[0] != "--params" or ratio in again)


def test_what_is_advised_has_the_verdict_of_the_best_row():
    poor, worse = (Option("a", GaussianNoise(1.0, 1.0), bits=b, ratio=r) for b, r in ((17, 3.5), (1, 4.5)))
    assert recommended((poor, worse)) is poor


def test_the_clip_and_the_server_s_optimiser_of_a_configuration_are_named(capsys, monkeypatch):
    only(monkeypatch, "GaussianNoise")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["digits_private", "--epsilon", "8"]) == 0
    printed = capsys.readouterr().out
    assert "clip_norm 0.5, server optimiser FedAvgM" in printed and "Take GaussianNoise" in printed


def test_a_narrow_terminal_cuts_no_figure(capsys, monkeypatch):
    """With 80 columns names, "no visible loss" and "good from" used to end in an ellipsis."""
    only(monkeypatch, "DistributedDiscreteGaussian", "LDPQ")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--epsilon", "8", "--clients", "1000", "--params", "100", "--rounds", "5"]) == 0
    printed = capsys.readouterr().out
    assert "no visible loss" in printed and "good from" in printed and "…" not in printed


def test_a_configuration_says_the_sizes_and_gets_settings_to_paste(capsys, monkeypatch):
    only(monkeypatch, "RotatedCoins")
    assert main(["digits_private", "--epsilon", "4"]) == 0
    printed = capsys.readouterr().out
    assert "479 clients, 4,060 parameters, 25 rounds" in printed
    settings = yaml.safe_load(printed[printed.index("mechanism:\n") :])
    assert settings["mechanism"]["class_path"] == "lightning_fedq.mechanisms.RotatedCoins"
    assert settings["mechanism"]["init_args"]["clip_norm"] == 0.5
    assert settings["privacy"] == dict(epsilon=4.0, delta=1e-05, adversary="secagg_server", over="run")
    kept = {"max_colluding_fraction": 0.02, "max_dropped_fraction": 0.02}
    assert settings["secure_aggregation"] == {"simulation": "masked", "degree": "auto", **kept}


def test_who_is_not_trusted_is_in_the_table_and_in_what_is_pasted(capsys, monkeypatch):
    only(monkeypatch, "RotatedCoins")
    asked = "digits_private --epsilon 4 --max_colluding_fraction 0.05 --dropout_probability 0.01"
    assert main(asked.split()) == 0
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    assert "5.00% of the clients may collude" in said and "1.00% of the clients drop out" in said
    settings = yaml.safe_load(printed[printed.index("mechanism:\n") :])
    assert settings["secure_aggregation"]["max_colluding_fraction"] == 0.05
    assert settings["dropout_probability"] == 0.01


def test_what_is_missing_is_said(capsys):
    for more, message in (
        ("--adversary serverr", "adversary must be one of"),
        ("--delta 0.5", "delta must be"),
    ):
        assert main([*SMALL, *more.split()]) == 2
        assert message in capsys.readouterr().err


def test_what_clips_in_l1_is_measured_with_the_same_updates():
    """An update of l2 norm 1 that is clipped to l1 norm 1 would be sqrt(2 d / pi) times too short.

    Laplace noise at epsilon 8 a message: 2 (2 |x|_1 / 8)^2 a coordinate, so E = d / 8 * 2 d / pi / n, and not
    d / (8 n), which would put it before the optimum of a message against the server.
    """
    target = PrivacyTarget(8.0, 1e-5, "server", "round")
    some = {name: candidates(7850)[name] for name in ("LaplaceNoise", "RotatedAxes", "GaussianNoise", "LDPQ")}
    found = plan(Problem(1000, 7850, 30, target), some)
    options = {option.name: option for option in found}
    assert options["LaplaceNoise"].error == pytest.approx(7850 / 8 * 2 * 7850 / math.pi / 1000, rel=0.02)
    assert found[0].name == "RotatedAxes" and options["RotatedAxes"].error < 2.0


def test_a_budget_for_a_message_goes_into_some_blocks():
    """CPA keeps its scope when it is calibrated, so that a message holds some blocks only."""
    target = PrivacyTarget(8.0, 1e-5, "server", "round")
    both = {name: candidates(7850)[name] for name in ("CPA", "CPA, some blocks")}
    found = plan(Problem(1000, 7850, 30, target), both)
    assert [option.name for option in found] == ["CPA, some blocks", "CPA"]
    assert found[0].error < 0.5 * found[1].error
    assert found[0].mechanism.epsilon_scope == "round" and found[0].bits < 0.01


def test_each_client_once_is_what_is_pasted(monkeypatch):
    target = PrivacyTarget(8.0, 1e-5, "server")
    problem = Problem(1000, 7850, 30, target)
    option = plan(problem, {"RotatedAxes": candidates(7850)["RotatedAxes"]})[0]
    settings = yaml.safe_load(command.to_yaml(option, problem, 2.0))
    assert settings["cohort"]["class_path"].endswith(".DisjointOnce")
    assert settings["cohort"]["init_args"] == {"size": 33}
    assert settings["mechanism"]["init_args"]["clip_norm"] == 2.0


def configured(folder, callbacks=(), **settings):
    """The path of a small configuration with other settings of `Federated` and further callbacks."""
    config = yaml.safe_load(find("digits_ldpq").read_text())
    config["trainer"]["max_epochs"] = 4
    callback = next(c for c in config["trainer"]["callbacks"] if c["class_path"].endswith(".Federated"))
    callback["init_args"].update(num_clients=60, **settings)
    callback["init_args"].pop("secure_aggregation", None)
    config["trainer"]["callbacks"] = [callback, *callbacks]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def pasted(capsys, *arguments):
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    return printed, yaml.safe_load(printed[printed.index("mechanism:\n") :])["mechanism"]["init_args"]


MEDIAN = written("algorithms.byzantine.aggregation.RobustAggregation", rule="median")
LIARS = written("callbacks.ByzantineClients", fraction=0.2, attack="sign_flip")


@pytest.mark.parametrize(
    "settings, told", [({"weighting": "samples"}, "weighted"), ({"aggregator": MEDIAN}, "robust rule")]
)
def test_a_mean_that_is_no_plain_sum_hides_nobody(settings, told, tmp_path, capsys, monkeypatch):
    """The run takes the noise of a view of all messages: 7.7 times as much, R 49 where 0.8 was said."""
    only(monkeypatch, "GaussianNoise")
    config = configured(tmp_path, **settings)
    printed, against_outsider = pasted(capsys, config, "--epsilon", "30", "--adversary", "outsider")
    assert told in printed and "R is that of a plain mean" in printed
    assert against_outsider == {"clip_norm": 1.0, "noise_multiplier": 0.4295}  # what the run finds, too


def test_behind_masks_nothing_is_planned_that_the_run_refuses(tmp_path, capsys, monkeypatch):
    only(monkeypatch, "GaussianNoise")
    assert main([configured(tmp_path, weighting="samples"), "--epsilon", "8", "--why"]) == 0
    printed = capsys.readouterr().out
    assert "not possible: GaussianNoise: Client weights are impossible with secure aggregation" in printed
    assert "Paste these settings" not in printed


def test_liars_hide_nobody(tmp_path, capsys, monkeypatch):
    only(monkeypatch, "GaussianNoise")
    config = configured(tmp_path, [LIARS])
    printed, found = pasted(capsys, config, "--epsilon", "8", "--adversary", "outsider")
    assert "12 clients are Byzantine" in printed
    assert found["noise_multiplier"] == 0.1733  # with 60 honest clients 0.155


def test_cohorts_that_take_turns_pay_for_their_turns_alone(tmp_path, capsys, monkeypatch):
    target = PrivacyTarget(8.0, 1e-5, "outsider")
    settings = {"GaussianNoise": candidates(100)["GaussianNoise"]}
    drawn, in_turn = (Problem(60, 100, 40, target, law=law) for law in (fedq.FixedSize(20), fedq.Cyclic(20)))
    mechanism = settings["GaussianNoise"]
    charges = [planned_charges(one.run(mechanism), False) for one in (in_turn, drawn)]
    assert charges[0] == 14 < charges[1]
    noise = [plan(problem, settings)[0].mechanism.noise_multiplier for problem in (in_turn, drawn)]
    assert noise[0] < noise[1]
    only(monkeypatch, "GaussianNoise")
    config = configured(tmp_path, cohort=written("Cyclic", size=20))
    printed, found = pasted(capsys, config, "--epsilon", "8", "--adversary", "outsider")
    assert "60 clients, 20 a round by Cyclic(size=20)" in " ".join(printed.split())
    assert "cohorts.Cyclic\n" in printed and "size: 20" in printed  # as it was planned
    two = Problem(20, 650, 2, PrivacyTarget(8.0, 1e-5, "outsider"))  # of four rounds, three cohorts
    everybody_twice = plan(two, settings)[0].mechanism.noise_multiplier
    assert found["noise_multiplier"] == pytest.approx(everybody_twice, rel=1e-3)


@pytest.mark.parametrize("who", ["server", "outsider"])
def test_masks_are_planned_for_nobody_who_sees_none(who, capsys):
    for more in (["--max-colluding-fraction", "0.1"], *([["--active"]] if who == "server" else [])):
        assert main([*SMALL, "--adversary", who, *more]) == 2
        assert "--active and --max-colluding-fraction do not apply" in capsys.readouterr().err


def test_clients_whom_a_rule_names_pay_for_all_rounds_in_which_they_are_named(tmp_path, capsys, monkeypatch):
    """Twenty of sixty in every round have no lottery: the plan of twenty clients alone."""
    only(monkeypatch, "GaussianNoise")
    here = f"{federations.__name__}.first_twenty"
    config = configured(tmp_path, cohort=written("Available", size=20, rule=here))
    printed, found = pasted(capsys, config, "--epsilon", "8", "--adversary", "outsider")
    alone = Problem(20, 650, 4, PrivacyTarget(8.0, 1e-5, "outsider"))
    everybody = plan(alone, {"GaussianNoise": candidates(650)["GaussianNoise"]})[0].mechanism
    assert found["noise_multiplier"] == pytest.approx(everybody.noise_multiplier, rel=1e-3)
    assert "60 clients, 20 a round by Available(" in " ".join(printed.split())
    only(monkeypatch, "RotatedAxes")  # nobody is dealt out
    printed, _ = pasted(capsys, config, "--epsilon", "8", "--adversary", "server")
    assert "once" not in printed


def test_every_argument_of_federated_is_planned_with():
    asked = {name.partition(",")[0] for name in FEDERATIONS} - {"liars"}
    assert asked | OF_NO_WEIGHT == inspect.signature(fedq.Federated).parameters.keys()


@pytest.mark.parametrize("name", FEDERATIONS)
def test_the_noise_that_is_planned_is_what_the_run_finds(name):
    """One fact, two homes: `Problem`, of numbers, and the `Run` of a federation."""
    settings, model = FEDERATIONS[name], Classifier(MLP(8, [4], 3))
    whom = ["outsider"] if name == "cohort, secret" else ["outsider", "client"]
    for adversary in (*whom, *(["secagg_server"] if "secure_aggregation" in settings else [])):
        target = PrivacyTarget(8.0, 1e-5, adversary)
        federated, trainer = federation(name, 4, privacy=target)
        sizes, masks = sizes_for(trainer, federated, model), federated.server.secure_aggregation
        found = federated.calibrated(sizes["params"], 4, count_byzantine(trainer, federated.planner))
        problem = Problem(**sizes, target=target, secure_aggregation=masks or fedq.SecAgg())
        option = plan(problem, {"GaussianNoise": candidates(sizes["params"])["GaussianNoise"]})[0]
        assert option.mechanism.noise_multiplier == pytest.approx(found.noise_multiplier, rel=2e-3), adversary


def test_cohorts_are_drawn_from_all_clients(tmp_path, capsys, monkeypatch):
    """A cohort of 20 of 60: everybody once is 15 a round, not 5; and nobody pays for all of 40 rounds."""
    only(monkeypatch, "RotatedAxes")
    config = configured(tmp_path, cohort=20)
    printed, _ = pasted(capsys, config, "--epsilon", "8", "--adversary", "server")
    assert "60 clients, 20 a round" in printed and "size: 15" in printed
    target = PrivacyTarget(8.0, 1e-5, "outsider")
    several = {"GaussianNoise": candidates(100)["GaussianNoise"]}
    asked = (Problem(clients, 100, 40, target, law=fedq.FixedSize(20)) for clients in (200, 20))
    some, everybody = (plan(problem, several)[0] for problem in asked)
    assert some.mechanism.noise_multiplier < 0.6 * everybody.mechanism.noise_multiplier
    with pytest.raises(ValueError, match=r"cohorts must have 1 to num_clients = 20 clients, got FixedSize"):
        Problem(20, 100, 40, target, law=fedq.FixedSize(30))


SECRET = [*SMALL, "--delta", "1e-4", "--adversary", "outsider", "--secret"]


def test_secret_cohorts_take_less_noise_and_the_others_epsilon_is_said(capsys, monkeypatch):
    only(monkeypatch, "GaussianNoise")
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*SECRET, "--clients_per_round", "6"]) == 0
    printed = capsys.readouterr().out
    assert "never learns who took part" in printed
    assert "against an outsider who learns who took part" in printed
    noises = []
    for secret in (True, False):
        target = PrivacyTarget(8.0, 1e-4, "outsider")
        problem = Problem(60, 100, 5, target, law=fedq.FixedSize(6, secret=secret))
        (option,) = plan(problem, {"GaussianNoise": candidates(100)["GaussianNoise"]})
        noises.append(option.mechanism.noise_multiplier)
    assert noises[0] < 0.6 * noises[1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "S1, a draw from all clients, got Everybody"),
        (["--clients_per_round", "60"], "S1, a draw, but all 60"),
        (["--clients_per_round", "6", "--dropout_probability", "0.1"], "S3, .*dropout_probability=0"),
        (["--clients_per_round", "6", "--adversary", "server"], "adversary='outsider'"),
        (["--clients_per_round", "6", "--over", "round"], "over the run"),
    ],
)
def test_plans_that_secret_cohorts_do_not_go_with_are_refused(capsys, more, words):
    assert main([*SECRET, *more]) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))


def test_a_configuration_is_planned_whose_own_mechanism_masks_refuse(tmp_path, capsys, monkeypatch):
    """It was refused because of the mechanism that the plan replaces."""
    only(monkeypatch, "LDPQ")
    values = yaml.safe_load(find("digits_secagg").read_text())
    federated = next(c for c in values["trainer"]["callbacks"] if c["class_path"].endswith(".Federated"))
    federated["init_args"]["mechanism"] = written("mechanisms.FedAvg")
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(values))
    assert main([str(mine), "--epsilon", "8"]) == 0
    assert "LDPQ" in capsys.readouterr().out
