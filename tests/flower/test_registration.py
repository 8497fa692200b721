"""Registration: nobody is waited for longer than it takes, and whoever is missing is named."""

from pathlib import Path

import pytest

from lightning_fedq.data.models import Classifier, FixedFeatures, Linear
from lightning_fedq.flower import exchange, roster
from lightning_fedq.flower.exchange import Exchange
from lightning_fedq.flower.records import to_record
from lightning_fedq.flower.roster import Roster
from lightning_fedq.flower.settings import differences, fingerprint
from lightning_fedq.flower.store import Store
from lightning_fedq.flower.training_description import training_words
from lightning_fedq.mechanisms import CorBin
from tests.flower.loop import CLIENTS, LoopGrid, clients, deployment, federated, module

pytestmark = pytest.mark.filterwarnings("ignore:node:UserWarning")
HOUR = 3600.0


class Clock:
    """Time that passes in sleep only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(exchange, "time", found)
    monkeypatch.setattr(roster, "time", found)
    return found


def settings(seed=None):
    return federated(CorBin(epsilon_per_coordinate=4.0, shared_bits=5), seed=seed)


def roster_of(grid, folder, warned, seed=None):
    fed = settings(seed)
    found = Exchange(grid, HOUR, warned.append)
    words = {**fingerprint(fed, module(), None), **training_words({}, module)}
    return Roster(fed, found, Store(folder / "server"), words)


def silent(*nodes):
    """Nodes that are connected and never answer a registration."""
    return lambda kind, client, reply: None if kind == "register" and client in nodes else reply


def grid_of(folder, nodes, *quiet, seed=None):
    apps, homes = clients(lambda: settings(seed), folder)
    apps, homes = [*apps, *apps][:nodes], [*homes, *(folder / "more" / str(i) for i in range(nodes))][:nodes]
    return LoopGrid(apps, homes, silent(*quiet))


def test_it_begins_when_the_wanted_number_is_there(clock, tmp_path):
    """A fifth SuperNode is connected and says nothing: four are wanted, and four have answered."""
    found = roster_of(grid_of(tmp_path, 5, 4), tmp_path, [])
    found.gather(600.0)
    assert sorted(found.nodes) == [0, 1, 2, 3] and clock.now < 2.0


def test_who_is_missing_is_named_after_the_time_to_wait(clock, tmp_path):
    """Client 2's node is connected and silent, client 3 has not come: ten minutes are waited, not an hour."""
    found = roster_of(grid_of(tmp_path, 3, 2), tmp_path, [])
    words = (
        r"4 clients are needed, but 2 have registered within 600 s\. Missing clients: \[2, 3\]\. Nodes "
        r"\[102\] are connected and have not answered: "
    )
    with pytest.raises(RuntimeError, match=words):
        found.gather(600.0)
    assert 600.0 <= clock.now < 610.0
    more = roster_of(
        grid_of(tmp_path, CLIENTS), tmp_path, []
    )  # more SuperNodes, and client 2's answers again
    more.gather(600.0)
    assert sorted(more.nodes) == [0, 1, 2, 3]


def test_one_that_answers_late_is_taken_in(clock, tmp_path):
    grid = grid_of(tmp_path, CLIENTS)
    whole = grid.pull_messages

    def late(numbers):
        wanted = [n for n in numbers if n != "message 3" or clock.now >= 300.0]
        return whole(wanted)

    grid.pull_messages = late
    found = roster_of(grid, tmp_path, [])
    found.gather(600.0)
    assert sorted(found.nodes) == [0, 1, 2, 3] and 300.0 <= clock.now < 310.0
    assert [kind for kind, _ in grid.log] == ["register"] * CLIENTS  # asked once


def test_a_stranger_does_not_hold_up_every_round(clock, tmp_path):
    """A silent node that joins in mid-run costs one short wait, and no more in the rounds to come."""
    grid = grid_of(tmp_path, 5, 4)
    stranger = grid.contexts.pop(104)
    found = roster_of(grid, tmp_path, [])
    found.gather(600.0)
    grid.contexts[104] = stranger
    found.refresh()
    first = clock.now
    assert first < 120.0
    found.refresh()
    assert clock.now == first


def test_a_client_that_comes_back_is_waited_for_as_long_as_for_an_answer(clock, tmp_path):
    """Client 3's node is gone; a new one with its folder takes five minutes to say who it is."""
    grid = grid_of(tmp_path, CLIENTS)
    found = roster_of(grid, tmp_path, [])
    found.gather(600.0)
    grid.apps.append(grid.apps[3])
    grid.contexts[104] = grid.contexts.pop(103)
    grid.contexts[104].node_id = 104
    whole = grid.pull_messages
    grid.pull_messages = lambda numbers: whole(numbers) if clock.now >= 300.0 else []
    found.refresh()
    assert found.nodes[3] == 104 and 300.0 <= clock.now < 310.0


@pytest.mark.parametrize("seed", [None, 5])
def test_a_restarted_server_goes_on_with_whoever_is_there(seed, clock, tmp_path):
    """Client 3 is away when the server is started again: it is missed, as in mid-run."""
    grid = grid_of(tmp_path, CLIENTS, seed=seed)
    first = roster_of(grid, tmp_path, [], seed)
    first.gather(600.0)
    grid.contexts.pop(103)
    again = roster_of(grid, tmp_path, [], seed)
    with pytest.warns(UserWarning, match=r"continues with 3 of 4 clients.* Missing clients: \[3\]"):
        again.gather(600.0)
    assert sorted(again.nodes) == [0, 1, 2] and 600.0 <= clock.now < 610.0
    assert again.keys().public() == first.keys().public()


def test_a_restarted_server_with_nobody_there_ends(clock, tmp_path):
    grid = grid_of(tmp_path, CLIENTS)
    roster_of(grid, tmp_path, []).gather(600.0)
    grid.contexts.clear()
    with pytest.raises(RuntimeError, match="4 clients are needed, but 0 have registered"):
        roster_of(grid, tmp_path, []).gather(600.0)


def test_a_strangers_refusal_ends_nothing_before_the_time_to_wait(clock, tmp_path):
    """Client 3 comes after five minutes, and a fifth node has refused at once: the server had ended."""
    apps, homes = clients(settings, tmp_path)

    def refusing(kind, client, reply):
        if client == CLIENTS:
            reply.content = to_record({"refused": "no"})
        return reply

    grid = LoopGrid([*apps, apps[0]], [*homes, tmp_path / "fifth"], refusing)
    late, sleep = grid.contexts.pop(103), clock.sleep

    def asleep(seconds):
        sleep(seconds)
        if clock.now >= 300.0:
            grid.contexts[103] = late

    clock.sleep = asleep
    found = roster_of(grid, tmp_path, [])
    with pytest.warns(UserWarning, match="Node 104 refuses.*: no"):
        found.gather(600.0)
    assert sorted(found.nodes) == [0, 1, 2, 3] and 300.0 <= clock.now < 310.0
    assert sum(kind == "register" for kind, _ in grid.log) == CLIENTS + 5  # the stranger once a minute


def test_the_commands_of_fedq_flower_init_name_flower_s_own_port():
    from flwr.supercore.constant import SUPERLINK_UVICORN_DEFAULT_PORT as PORT

    server = Path(__file__).parents[2] / "deploy" / "server"
    assert f'address = "127.0.0.1:{PORT}"' in (server / "config.toml").read_text()
    assert f"https://127.0.0.1:{PORT};" in (server / "fleet_only.conf").read_text()
    assert f"--host 127.0.0.1 --port {PORT} " in (server / "fedq-superlink.service").read_text()


@pytest.mark.parametrize("reconnects", [False, True])
@pytest.mark.parametrize(
    "says", [{"refused": "protocol is 6 here and 7 there"}, {"partition": 3, "key": b""}]
)
def test_who_refused_is_asked_again_every_minute_and_when_it_is_back(
    says, reconnects, clock, tmp_path, recwarn
):
    """Both mistakes were put right and restarted, and the server waited on for ten minutes."""
    cured, asked, sleep = [], [], clock.sleep

    def refusing(kind, client, reply):
        if client == 3 and not cured:
            asked.append(clock.now)
            reply.content = to_record(says)
        return reply

    apps, homes = clients(settings, tmp_path)
    grid = LoopGrid(apps, homes, refusing)
    away = []

    def asleep(seconds):
        sleep(seconds)
        if clock.now > 130.0 and not cured:
            cured.append(clock.now)
            if reconnects:
                away.append(grid.contexts.pop(103))
        elif away:
            grid.contexts[103] = away.pop()

    clock.sleep = asleep
    roster_of(grid, tmp_path, []).gather(600.0)
    assert clock.now < (135.0 if reconnects else 190.0)
    assert [round(at, -1) for at in asked] == [0, 60, 120]
    said = [str(one.message) for one in recwarn if "Node 103" in str(one.message)]
    assert len(said) == 1 and "again every minute" in said[0]


def test_a_question_is_lost_with_its_node_s_connection(clock, tmp_path):
    """Its client was killed with the question in its hands: the node is back, and is asked again."""
    lost, sleep = [1], clock.sleep

    def silent_once(kind, client, reply):
        return None if client == 3 and lost and lost.pop() else reply

    apps, homes = clients(settings, tmp_path)
    grid = LoopGrid(apps, homes, silent_once)
    away = {}

    def asleep(seconds):
        sleep(seconds)
        if 30.0 < clock.now < 60.0 and 103 in grid.contexts:
            away[103] = grid.contexts.pop(103)
        elif clock.now > 60.0:
            grid.contexts |= away

    clock.sleep = asleep
    roster_of(grid, tmp_path, []).gather(600.0)
    assert 60.0 < clock.now < 62.0


@pytest.mark.parametrize(
    "release, cure", [("0.9.9", "install release 0.9.9"), (None, "install the same wheel")]
)
def test_another_protocol_is_named_by_itself_with_the_release_to_install(release, cure, clock, tmp_path):
    """It listed pairs that looked alike, and both called themselves 0.2.0."""
    grid, warned = grid_of(tmp_path, 4), []
    found = roster_of(grid, tmp_path, warned)
    found._settings |= {"setting protocol": "7"}
    found._settings.pop("setting algorithm", None)
    if release is not None:
        found._settings["setting lightning_fedq"] = release
    with pytest.warns(UserWarning), pytest.raises(RuntimeError) as refused:
        found.gather(0.0)
    words = str(refused.value)
    assert "The server uses protocol 7" in words and cure in words and "with its old folder" in words
    assert "algorithm" not in words


def test_a_setting_that_one_side_lacks_is_said_so(clock, tmp_path):
    found = roster_of(grid_of(tmp_path, 4), tmp_path, [])
    del found._settings["setting local_steps"]
    found._settings["setting mechanism"] = "x" * 10_000
    with (
        pytest.warns(UserWarning),
        pytest.raises(RuntimeError, match="is None here and not known there") as refused,
    ):
        found.gather(0.0)
    assert len(str(refused.value)) < 2_000


def test_an_old_home_with_new_settings_is_named(tmp_path):
    """It was told a simulation's cure, after 20 lines of trace."""
    make = lambda epsilon=4.0: federated(CorBin(epsilon), seed=None)  # noqa: E731
    grid = LoopGrid(*clients(make, tmp_path))
    deployment(make(), 1, tmp_path).run(grid)
    asked = len(grid.log)
    with pytest.raises(
        ValueError, match=r"other settings \(mechanism is CorBin\(.*=3.0.*new folders: server_app\(home="
    ):
        deployment(make(3.0), 2, tmp_path).run(grid)
    assert len(grid.log) == asked
    one = Store(tmp_path / "server")
    one.put("settings", {**one.get("settings"), "lightning_fedq": "0.1", "protocol": "7"})  # of an upgrade
    _, server = deployment(make(), 2, tmp_path).run(grid)
    assert [record.num_received for record in server.records] == [4, 4]


def test_who_has_not_answered_has_dropped_out(tmp_path):
    """`num_dropped` was 0 with three answers of four."""
    make = lambda: federated(CorBin(epsilon_per_coordinate=4.0), seed=None)  # noqa: E731
    lost = lambda kind, client, reply: None if (kind, client) == ("train", 1) else reply  # noqa: E731
    _, server = deployment(make(), 1, tmp_path).run(LoopGrid(*clients(make, tmp_path), lost))
    assert [(record.num_received, record.num_dropped) for record in server.records] == [(3, 1)]


def test_another_projection_is_named(tmp_path):
    """Fixed features do not travel: a site that made its own would train on others, and nobody would know."""

    def features(seed):
        return Classifier(Linear(6, 3, features=FixedFeatures(6, side=16, pictures=None, seed=seed)))

    here, there = (training_words({}, lambda seed=seed: features(seed)) for seed in (0, 1))
    name = "sha256 of backbone.0"
    assert differences(here, there) == f"{name} is {here[name]} here and {there[name]} there"
    assert here[name] == features(0).backbone[0].sha256 and not differences(here, here)
