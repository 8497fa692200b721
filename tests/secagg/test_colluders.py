"""One count of colluders: what is printed and what delta pays, against sums of its own, rings and shares."""

import math
import re
from dataclasses import replace
from fractions import Fraction
from math import comb
from pathlib import Path

import pytest
import yaml

import lightning_fedq as fedq
from lightning_fedq.commands.privacy import report_of_config
from lightning_fedq.keys.randomness import SeededKeys, Stream
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.collusion import CHANCE, Colluders
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.rounds import RoundPlanner
from lightning_fedq.secagg import Client, SecAgg, Server
from lightning_fedq.secagg.graph import is_connected, neighbours, security_log2
from lightning_fedq.secagg.layout import sum_layout
from lightning_fedq.secagg.shamir import SHARE_BYTES, element_bytes, interpolate
from lightning_fedq.training.accounts import describe_run
from tests.described import page as markdown

CONFIGS = Path(__file__).parents[2] / "configs"
DELTA = 1e-5


def tail(items, marked, drawn, least):
    ways = sum(
        comb(marked, i) * comb(items - marked, drawn - i) for i in range(least, min(marked, drawn) + 1)
    )
    return Fraction(ways, comb(items, drawn))


def least_chance(clients, cohort, corrupt, dropped, degree, threshold, lying, byzantine=0):
    """Expected number of honest clients with `threshold` corrupt neighbours, in exact integers.

    `dropped` honest ones are gone before the ring is drawn. Of the complete graph the chance of any.
    """
    counts = [min(corrupt, cohort)] if lying else range(min(corrupt, cohort) + 1)
    ways, found = comb(clients, cohort), Fraction(0)
    for count in counts:
        chance = 1 if lying else comb(corrupt, count) * comb(clients - corrupt, cohort - count)
        c = min(count + byzantine, cohort)
        if degree >= cohort - 1:
            found += chance * (c >= threshold)
        elif (honest := cohort - dropped - c) > 0:
            found += chance * honest * tail(cohort - dropped - 1, c, degree, threshold)
    return found / (1 if lying else ways)


def run_of(clients, cohort, secagg, mechanism, rounds=100, num_byzantine=0):
    return describe_run(
        RoundPlanner(clients, 0, fedq.FixedSize(cohort)),
        mechanism,
        50,
        rounds=rounds,
        secure_sum=secagg,
        plain_sum=True,
        num_byzantine=num_byzantine,
        secure_keys=True,
    )


def shipped():
    for path in sorted(CONFIGS.glob("*.yaml")):
        for callback in yaml.safe_load(path.read_text())["trainer"].get("callbacks", []):
            args = callback.get("init_args", {})
            masks = args.get("secure_aggregation")
            if masks:
                clients = args["num_clients"]
                masks = masks if isinstance(masks, dict) else {}
                secagg = SecAgg(**masks.get("init_args", {} if "class_path" in masks else masks))
                yield clients, args.get("clients_per_round") or clients, secagg


GRID = [
    (clients, cohort, SecAgg(max_colluding_fraction=corrupt, max_dropped_fraction=dropout, active=active))
    for clients, cohort in ((1000, 100), (10000, 100), (479, 100), (2000, 60), (100, 100), (3000, 300))
    for corrupt, dropout in ((0.0, 0.02), (0.02, 0.02), (0.05, 0.1), (0.15, 0.05), (0.3, 0.0))
    for active in (False, True)
]
COMPLETE = [
    (clients, cohort, SecAgg(max_colluding_fraction=corrupt))
    for clients, cohort in ((1000, 30), (1000, 40), (1000, 100), (10000, 100), (100, 100), (1000, 20))
    for corrupt in (0.02, 0.1, 0.2, 0.25, 0.3, 0.4)
]


def test_the_configurations_are_read():
    assert len(list(shipped())) >= 6


@pytest.mark.parametrize(("clients", "cohort", "secagg"), [*shipped(), *GRID, *COMPLETE])
def test_what_is_printed_is_no_less_than_a_sum_over_the_draw(clients, cohort, secagg):
    try:
        degree, threshold, _ = secagg.rules(clients, cohort)
    except ValueError as error:
        most = int(re.search(r"max_colluding_fraction <= (\d+) / ", str(error))[1])
        assert most < int((secagg.max_colluding_fraction or 0.0) * clients + 1e-9)
        replace(secagg, max_colluding_fraction=most / clients).rules(clients, cohort)
        return
    corrupt = Colluders(
        secagg.max_colluding_fraction or 0.0, clients, cohort, secagg.active
    ).num_in_federation
    assert corrupt == int((secagg.max_colluding_fraction or 0.0) * clients + 1e-9)
    dropped = math.floor((secagg.max_dropped_fraction or 0.0) * cohort)
    least = max(
        least_chance(clients, cohort, corrupt, gone, degree, threshold, secagg.active)
        for gone in (0, dropped)
    )
    tries = 2**80 if secagg.active else 1
    said = secagg.guarantee(clients, cohort, 100)
    assert Fraction(2.0**said.opened_log2) >= min(least * tries, 1)
    assert degree >= cohort - 1 or said.opened_log2 <= -50.0
    words = re.search(r"(?:below 2\^-([0-9.]+)|up to 1)", said.statement)
    printed = Fraction(0) if words is None else Fraction(2.0 ** -float(words[1] or 0))
    assert printed >= min(100 * least * tries, 1)
    assert (words is None) == (said.opened_log2 == -math.inf)


@pytest.mark.parametrize(("clients", "cohort", "secagg"), COMPLETE)
@pytest.mark.parametrize("rounds", [1, 30])
def test_no_row_counts_on_masks_that_open_unless_delta_pays(clients, cohort, secagg, rounds):
    run = run_of(clients, cohort, secagg, fedq.GaussianNoise(1.0, 1.0), rounds)
    account, threshold = Account(run, DELTA), secagg.rules(clients, cohort)[1]
    claims, corrupt = account.claims(), int(secagg.max_colluding_fraction * clients + 1e-9)
    claim = claims[Adversary.SECAGG_SERVER]
    if clients == cohort:
        assert corrupt < threshold and account.num_colluding == corrupt
        return
    # chance for a client that is there
    opened = float(tail(clients - 1, corrupt, cohort - 1, threshold)) if corrupt >= threshold else 0.0
    if claim.loss == claims[Adversary.SERVER].loss:
        assert rounds * opened > 0.3 * DELTA  # not for nothing
        assert any("colluders open masks" in words for words in claim.assumptions)
        row = privacy_report(run, DELTA).row(Adversary.SECAGG_SERVER)
        assert row.epsilon_run == privacy_report(run, DELTA).row(Adversary.SERVER).epsilon_run
    else:
        left = DELTA * (1 - rounds * CHANCE) - rounds * opened
        assert DELTA / 3 < account.available(claim, rounds) <= left * (1 + 1e-12)


def test_where_masks_open_a_colluder_may_be_the_partner():
    report = privacy_report(
        run_of(1000, 40, SecAgg(max_colluding_fraction=0.3), fedq.PairedCoins(0.5), 1), DELTA
    )
    behind, alone, partner = (
        report.row(who).epsilon_run
        for who in (Adversary.SECAGG_SERVER, Adversary.SERVER, Adversary.SERVER_AND_PARTNER)
    )
    assert behind == partner > alone


SPARSE = [
    (clients, cohort, secagg)
    for clients, cohort, secagg in GRID
    if secagg.max_colluding_fraction in (0.02, 0.05)
]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("clients", "cohort", "secagg"), SPARSE)
def test_delta_pays_for_graphs_that_open(clients, cohort, secagg, dropout):
    """At a delta of 1e-11, the smallest of use, even 2^-50 a round counts after 1,000 rounds."""
    try:
        run = run_of(clients, cohort, secagg, fedq.GaussianNoise(1.0, 1.0), 1000)
    except ValueError:
        return  # refused, see above
    run = replace(run, sampling=replace(run.sampling, dropout_probability=dropout))
    account, (degree, threshold, _) = Account(run, 1e-11), secagg.rules(clients, cohort)
    claims, corrupt = account.claims(), int(secagg.max_colluding_fraction * clients + 1e-9)
    claim, gone = claims[Adversary.SECAGG_SERVER], math.floor(secagg.max_dropped_fraction * cohort)
    least = least_chance(clients, cohort, corrupt, gone, degree, threshold, secagg.active)
    paid = 1000 * float(min(least * (2**80 if secagg.active else 1), 1))
    if claim.loss == claims[Adversary.SERVER_AND_PARTNER].loss:
        assert run.masks_open * 1000 > 0.2e-11
    else:
        assert 0.1e-11 < account.available(claim, 1000) <= 1e-11 - paid


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize(
    ("clients", "cohort", "byzantine"), [(1000, 100, 0), (1000, 100, 3), (100, 100, 5), (1000, 100, 60)]
)
def test_who_lies_may_hand_out_shares_too(clients, cohort, byzantine, active):
    """The graph is made for `max_colluding_fraction`, and the chance counts those who lie with them."""
    secagg = SecAgg(max_colluding_fraction=0.02, max_dropped_fraction=0.02, active=active)
    run = run_of(clients, cohort, secagg, fedq.LDPQ(0.5), 10, byzantine)
    degree, threshold, _ = secagg.rules(clients, cohort)
    corrupt = int(0.02 * clients)
    least = least_chance(clients, cohort, corrupt, 0, degree, threshold, active, byzantine)
    assert Fraction(run.masks_open) >= min(least * (2**80 if active else 1), 1)
    assert (run.masks_open > 2.0**-49) == (byzantine > 0)
    account = Account(run, DELTA)
    claim = account.claims()[Adversary.SECAGG_SERVER]
    assert account.masks_hold or claim.loss == account.claims()[Adversary.SERVER_AND_PARTNER].loss
    assert account.masks_hold == (10 * run.masks_open <= DELTA / 2)
    assert account.num_colluding == min(
        Colluders(0.02, clients, cohort, active).max_in_cohort(CHANCE * DELTA) + byzantine, cohort
    )


def test_those_who_lie_confirm_two_lists():
    """66 of 100 survivors and more are confirmed twice by 33 who lie, whatever the graph."""
    secagg = SecAgg(active=True)
    survivors = secagg.rules(100, 100)[2]
    for byzantine, chance in ((2 * survivors - 101, 0.0), (2 * survivors - 100, 1.0)):
        assert run_of(100, 100, secagg, fedq.LDPQ(1.0), 1, byzantine).masks_open == chance


def test_rings_of_drawn_cohorts_open_as_often_as_stated_and_more_often_than_a_share_would():
    """40 of 400 clients, 40 of whom collude, 2 dropouts, degree 8, threshold 5: 4,000 rings.

    A cohort's share of colluders is four, who never open; about 37 rings do. By chance: below 1e-5.
    """
    degree, threshold, dropped, runs, unsafe = 8, 5, 2, 4000, 0
    stream = Stream(SeededKeys(5).public())
    for _ in range(runs):
        cohort = stream.choice(400, 40)
        gone = set([client for client in cohort if client >= 40][:dropped])
        ring = [client for client in cohort if client not in gone]
        near = {client: neighbours(ring, degree, place) for place, client in enumerate(ring)}
        bad = {client for client in ring if client < 40}
        opened = any(len(bad.intersection(near[client])) >= threshold for client in set(ring) - bad)
        unsafe += opened or not is_connected(ring, degree, set(ring) - bad)
    bound = 2.0 ** security_log2(Colluders(0.1, 400, 40, chosen=False), degree, threshold, dropped)
    share = 2.0 ** security_log2(Colluders(0.1, 40, 40, chosen=False), degree, threshold, dropped)
    assert runs * bound / 5 < unsafe < runs * bound + 4 * math.sqrt(runs * bound)
    assert unsafe > 10 * runs * share


FIGURES = [
    (1000, 100, 0.02, 0.02, False, (14, 11), 44.0),
    (10000, 100, 0.02, 0.02, False, (16, 12), 43.6),
    (479, 100, 0.05, 0.05, False, (20, 15), 44.6),
    (5000, 200, 0.01, 0.05, False, (20, 12), 49.6),
    (2000, 60, 0.15, 0.05, False, (34, 29), 45.6),
    (1000, 100, 0.02, 0.02, True, (48, 46), None),
    (10000, 500, 0.02, 0.02, True, (252, 242), 44.2),
    (479, 479, 0.02, 0.02, False, (16, 10), 52.2),
]


@pytest.mark.parametrize(("clients", "cohort", "corrupt", "dropout", "active", "graph", "said"), FIGURES)
def test_what_was_stated_of_a_share_is_now_stated_of_the_run(
    clients, cohort, corrupt, dropout, active, graph, said
):
    """Each was said to be below 2^-43.3 over 100 attempts; of the graphs of then only the last one was."""
    secagg = SecAgg(max_colluding_fraction=corrupt, max_dropped_fraction=dropout, active=active)
    assert secagg.rules(clients, cohort)[:2] == graph
    words = re.search(r"below 2\^-([0-9.]+)", secagg.guarantee(clients, cohort, 100).statement)
    assert (words and float(words[1])) == said
    degree, threshold, _ = secagg.rules(cohort, cohort)  # what a share of the cohort asks for
    gone, known = math.floor(dropout * cohort), Colluders(corrupt, clients, cohort, active)
    then = security_log2(known, degree, threshold, gone) + 80 * active + math.log2(100)
    assert (then <= -43.3) == (clients == cohort)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digits_private", "54.2"),
        ("digits_adaptive_clip", "54.2"),
        ("mnist_private", "49.2"),
        ("mnist_handed_on_gaussian", "44"),
        ("digits_handed_on_gaussian", None),
        ("digits_secagg", None),
    ],
)
def test_configurations_print_the_chance_of_their_run(name, said):
    report = report_of_config(str(CONFIGS / f"{name}.yaml"), None, DELTA, False, params=100)
    words = re.search(r"shows more than its sum.* is below 2\^-([0-9.]+[0-9])", markdown(report))
    assert (words and words[1]) == said


def test_threshold_neighbours_open_and_one_less_does_not():
    secagg = SecAgg(max_colluding_fraction=0.02, max_dropped_fraction=0.02)
    layout = sum_layout(4, 0, 1, 100)
    terms = secagg.terms(b"edge", 0, 0, range(100), layout, 1000)
    assert (terms.degree, terms.threshold) == secagg.rules(1000, 100)[:2] != secagg.rules(100, 100)[:2]
    server, clients = Server(terms, bytes(32)), {c: Client(c, terms, bytes(32)) for c in terms.cohort}
    for number, client in clients.items():
        server.receive(client.advertise(server.invitation(number)))
    for number, message in server.close().items():
        server.receive(clients[number].share_keys(message))
    for number, message in server.close().items():
        clients[number].accept_shares(message)
    stream = Stream(SeededKeys(6).public())
    for count, opens in ((terms.threshold - 1, False), (terms.threshold, True)):
        for victim in range(0, 100, 7):
            around = sorted(clients[victim]._neighbours)
            near = [around[place] for place in stream.choice(len(around), count)]
            got = []
            for kind in (0, 1):
                place = slice(SHARE_BYTES * kind, SHARE_BYTES * (kind + 1))
                shares = {other + 1: clients[other]._held[victim][place] for other in near}
                got.append(element_bytes(interpolate(shares)))
            assert (got == [clients[victim]._mask_root, clients[victim]._seed]) == opens


def test_a_run_counts_its_own_colluders():
    sums = SecAgg(max_colluding_fraction=0.1).guarantee(1000, 100, 1)
    with pytest.raises(ValueError, match="are for cohorts of 100 of 1000 clients, got 100 of 900"):
        run_of(900, 100, sums, fedq.LDPQ(1.0))


@pytest.mark.parametrize(
    ("settings", "cohort"),
    [
        ({"degree": 16, "max_colluding_fraction": 0.1, "max_dropped_fraction": 0.02}, 100),
        ({"max_colluding_fraction": 0.6}, 100),
        ({"max_colluding_fraction": 0.6, "max_dropped_fraction": 0.1}, 60),
        ({"max_colluding_fraction": 0.2, "max_dropped_fraction": 0.1, "active": True}, 100),
    ],
)
def test_too_many_are_refused_with_the_most_that_are_safe_and_the_complete_graph(settings, cohort):
    with pytest.raises(ValueError, match="could see more than the sum") as refused:
        SecAgg(**settings).rules(1000, cohort)
    most = int(re.search(r"keep max_colluding_fraction <= (\d+) / 1000", str(refused.value))[1])
    wanted = -50.0  # 2^-130 and 2^80 rosters, if the server lies
    safe = SecAgg(**{**settings, "max_colluding_fraction": most / 1000})
    assert safe.guarantee(1000, cohort, 1).opened_log2 <= wanted
    try:
        more = SecAgg(**{**settings, "max_colluding_fraction": (most + 1) / 1000}).guarantee(1000, cohort, 1)
        assert more.opened_log2 > wanted
    except ValueError as error:
        assert "could see more than the sum" in str(error)
    found = re.search(
        r"\(complete graph, threshold (\d+): (0|up to 1|below 2\^-([0-9.]+))\)\. ", str(refused.value)
    )
    corrupt, threshold = int(settings["max_colluding_fraction"] * 1000), int(found[1])
    chance = 2.0 ** -float(found[3]) if found[3] else float(found[2] != "0")
    counts = min(corrupt, cohort) if settings.get("active") else None
    assert chance >= (tail(1000, corrupt, cohort, threshold) if counts is None else counts >= threshold)
