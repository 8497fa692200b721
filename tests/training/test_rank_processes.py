"""Real processes: what several ranks find is what one process finds, however they are launched and end."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.training import ranks_run, ranks_table
from tests.training.ranks_features import FEATURES

HERE = Path(__file__).parent
NAMES = list(FEATURES)
QUICK = [
    *("dropouts", "random numbers", "BatchNorm, shared", "a median", "secure aggregation"),
    *("dropouts, one mean", "weights by samples"),
    *("metrics that stay with clients", "resumed", "stopped in mid-round", "DPSGD"),
    *("metric objects in the validation", "padding and pruned weights"),
]
"""Each of another kind of what ranks tell each other. All others are slow."""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def begin(command, program=sys.executable, **variables):
    known = {
        k: v for k, v in os.environ.items() if "RANK" not in k and k not in ("WORLD_SIZE", "MASTER_PORT")
    }
    own = {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([program, *map(str, command)], env={**known, **own}, **pipes)


def end(*processes):
    """Wait for processes and for all that hold their pipes. One that hangs is stopped, and fails."""
    found = []
    for process in processes:
        try:
            said = process.communicate(timeout=900)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        found.append((process.returncode, said))
    return found


def fork(main, *arguments, **variables):
    """A program as a fork of this process; for ranks that start no others."""

    def work():
        sys.argv[1:] = map(str, arguments)
        main()

    return forked.begin(work, **variables)


def run(devices, *arguments):
    if devices == 1:
        return forked.end(fork(ranks_run.main, devices, *arguments))[0], "said above"
    return end(begin([HERE / "ranks_run.py", devices, *arguments]))[0]


def result(folder, rank=0):
    return json.loads((folder / f"rank-{rank}.json").read_text())


@pytest.mark.parametrize(
    "rule", ["mean", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("median", "hooks"))]
)
def test_two_ranks_on_a_device_that_is_not_the_cpu_find_what_one_process_finds_on_the_cpu(rule, tmp_path):
    for name, arguments in (("one", (1,)), ("two", (2, *(["elsewhere"] if rule != "hooks" else [])))):
        (tmp_path / name).mkdir()
        code, said = run(arguments[0], 2, tmp_path / name, *arguments[1:], rule)
        assert code == 0, said[-2000:]
    expected = result(tmp_path / "one")
    assert [result(tmp_path / "two", rank) for rank in (0, 1)] == [expected, expected]


def test_two_ranks_rehearse_the_end_of_a_round_before_its_charge(tmp_path):
    """Each in forks of its own, which do not wait for the other rank."""
    code, said = run(2, 1, tmp_path, "private", "fails")
    assert code, said[-2000:]
    assert re.search(r"Validation fails after a round \(KeyError: 'outputs of training'\)", said), said[
        -2000:
    ]
    assert "RankLost" not in said and not list(tmp_path.iterdir()), "nothing is written"


# ---- feature by feature ---------------------------------------------------------------------------------

Table = Callable[[int, tuple[str, ...]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """What each of some ranks has found, feature by feature; each number of ranks is run once.

    One rank is this process.
    """

    @cache
    def found(ranks, names):
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        if ranks == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [json.loads(json.dumps(ranks_table.table(folder, 1, 1, names)))]
        numbers = ",".join(str(NAMES.index(name)) for name in names)
        [(code, said)] = end(begin([HERE / "ranks_table.py", folder, ranks, 1, numbers]))
        assert code == 0, said
        return [result(folder, rank) for rank in range(ranks)]

    return found


def check(name, one, ranks):
    feature = FEATURES[name]
    if feature.raises or feature.refused:
        assert feature.raises in one["error"] if feature.raises else "error" not in one, one.get("error")
        for rank in ranks:
            assert (feature.refused or feature.raises) in rank["error"]
        assert not feature.refused or feature.cure in ranks[0]["error"]
        return
    for found in (one, *ranks):
        assert "error" not in found, found["error"]
    same = [key for key in one if key not in ("rounded", "files", "checkpoints", "generator", "steps")]
    if feature.stops:  # in mid-round, which is another step of the run; what counts is that all ranks agree
        for rank in ranks[1:]:
            assert {key: rank[key] for key in same} == {key: ranks[0][key] for key in same}
        return
    for rank in ranks:
        assert {key: rank[key] for key in (*same, "generator", "steps")} == {
            key: one[key] for key in (*same, "generator", "steps")
        }
    first = ranks[0]
    if feature.within_rounds:
        kept = first["checkpoints"]
        assert kept.items() <= one["checkpoints"].items()
        assert f"epoch=2-step={one['steps'][0]}.ckpt" in kept
    else:
        assert first["files"] == one["files"]
        assert first["checkpoints"] == one["checkpoints"]
    assert first["rounded"].keys() | {"fed/sim_snr_db"} == one["rounded"].keys() | {"fed/sim_snr_db"}
    for key, value in one["rounded"].items():
        if key == "fed/sim_snr_db" and value > 100.0:
            continue  # rounding is all the noise there is
        close = math.isclose(first["rounded"][key], value, rel_tol=1e-4, abs_tol=1e-9)
        assert close or math.isnan(value), key


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_find_what_one_process_finds(name, table):
    names = tuple(QUICK)
    check(name, table(1, names)[0][name], [rank[name] for rank in table(2, names)])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ranks_find_what_one_process_finds(name, table):
    """Every feature with two ranks or with four: those that two ranks have tried already, and every other."""
    four = tuple(name for number, name in enumerate(NAMES) if number % 2 or name in QUICK)
    ranks, names = (4, four) if name in four else (2, tuple(name for name in NAMES if name not in four))
    check(name, table(1, names)[0][name], [rank[name] for rank in table(ranks, names)])


# ---- launched by others ---------------------------------------------------------------------------------

LAUNCHED = ("nothing", "dropouts", "resumed")
NUMBERS = ",".join(str(NAMES.index(name)) for name in LAUNCHED)


def launched(tmp_path, table, *commands, **variables):
    """Run commands, each with its own of some variables, and compare both ranks with one process."""
    own = [{key: str(values[i]) for key, values in variables.items()} for i in range(len(commands))]
    started = [begin(command, **more) for command, more in zip(commands, own, strict=True)]
    for code, said in end(*started):
        assert code == 0, said
    compare(tmp_path, table)


def compare(tmp_path, table):
    for name in LAUNCHED:
        check(name, table(1, LAUNCHED)[0][name], [result(tmp_path, rank)[name] for rank in range(2)])


PORT = free_port()
PAGE = (HERE.parents[1] / "docs" / "scale.md").read_text(encoding="utf-8")
ONE_NODE, TWO_NODES, RESTARTED = re.findall(r"^torchrun (.*) train.py$", PAGE, re.M)
[SRUN] = re.findall(r"^srun (.*) python train.py$", PAGE, re.M)


def torchrun(options, rank="", host="127.0.0.1"):
    """A command of the page, at a place of the test's."""
    words = {"RANK": rank, "HOST0": host, "29500": PORT}
    return ["-m", "torch.distributed.run", "--master-port", PORT, *(words.get(w, w) for w in options.split())]


@pytest.mark.slow
def test_torchrun(tmp_path, table):
    work = [HERE / "ranks_table.py", tmp_path, 2, 1, NUMBERS]
    launched(tmp_path, table, [*torchrun(ONE_NODE), *work])


@pytest.mark.slow
def test_torchrun_on_two_nodes(tmp_path, table):
    work = [HERE / "ranks_table.py", tmp_path, 1, 2, NUMBERS]
    launched(tmp_path, table, *([*torchrun(TWO_NODES, rank), *work] for rank in range(2)))


@pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.slow), ["joined"]])
def test_an_engine_s_environment_that_does_not_listen(words, tmp_path, table):
    """Two processes, each with one device, as Ray starts them; it joins them in a default group, too."""
    work = [ranks_table.main, tmp_path, 1, 1, NUMBERS, "engine", *words]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    ranks = [fork(*work, RANK=rank, LOCAL_RANK=rank, **place) for rank in "01"]
    assert forked.end(*ranks) == [0, 0]
    compare(tmp_path, table)


@pytest.mark.slow
def test_two_machines_with_a_network_between_them(tmp_path, table):
    """Network namespaces with host names of their own."""
    if no := subprocess.run(["sh", HERE / "two_hosts.sh", "true"], capture_output=True, text=True).stderr:
        pytest.skip(f"this needs iproute2, and leave to make network namespaces: {no.strip()}")
    node = torchrun(TWO_NODES, "$NODE", "10.77.0.1")
    work = [sys.executable, *node, HERE / "ranks_table.py", tmp_path, 1, 2, NUMBERS]
    launched(tmp_path, table, [HERE / "two_hosts.sh", " ".join(map(str, work))], program=["sh"])


@pytest.mark.slow
def test_torchrun_with_another_number_of_processes_is_refused(tmp_path):
    work = [HERE / "ranks_table.py", tmp_path, 3, 1, NAMES.index("nothing")]
    [(code, said)] = end(begin([*torchrun(ONE_NODE), *work]))
    assert code == 0, said
    assert "`devices=3`" in result(tmp_path)["nothing"]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_environment_that_slurm_sets(nodes, tmp_path, table):
    """Two tasks on one node, or one on each of two: faked variables, and real processes on loopback."""
    devices = 2 // nodes
    assert nodes == 1 or f"--nodes={nodes} --ntasks-per-node={devices}" == SRUN
    work = [HERE / "ranks_table.py", tmp_path, devices, nodes, NUMBERS]
    variables = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": str(devices),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "7",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    ranks = {"SLURM_PROCID": [0, 1], "SLURM_LOCALID": [0, 1 % devices], "SLURM_NODEID": [0, 1 // devices]}
    launched(tmp_path, table, work, work, **{key: [value] * 2 for key, value in variables.items()}, **ranks)


# ---- ranks that die -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("victim, then", [(1, 1), (1, 4), (0, 2)])
def test_a_rank_that_is_killed_ends_the_run_which_goes_on_with_any_number_of_ranks(victim, then, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, said = run(1, 4, whole)
    assert code == 0, said
    code, said = run(2, 4, broken, f"die{victim}")  # a hang would run into the timeout
    assert code != 0
    assert not list(broken.glob("rank-*.json"))
    assert (broken / "last.ckpt").exists()
    code, said = run(then, 4, broken, "resume")
    assert code == 0, said
    assert [result(broken, rank) for rank in range(then)] == [result(whole)] * then


@pytest.mark.slow
def test_torchrun_starts_ranks_again_and_they_find_what_a_run_without_loss_finds(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, said = run(1, 4, whole)
    assert code == 0, said
    work = [HERE / "ranks_run.py", 2, 4, broken, "die1", "resume"]
    [(code, said)] = end(begin([*torchrun(RESTARTED), *work]))
    assert code == 0, said
    assert [result(broken, rank) for rank in range(2)] == [result(whole)] * 2


@pytest.mark.slow
def test_what_a_killed_rank_has_sent_stays_charged_on_all_ranks(tmp_path):
    """Keys of the operating system: the third round is repeated, and paid for twice."""
    assert run(2, 4, tmp_path, "private", "die1")[0] != 0
    code, said = run(2, 4, tmp_path, "private", "resume")
    assert code == 0, said
    found = [result(tmp_path, rank) for rank in range(2)]
    assert found[0] == found[1]
    assert set(found[0]["charges"]) == {5}


@pytest.mark.slow
def test_a_target_is_not_exceeded_by_ranks_that_are_killed_and_go_on(tmp_path):
    """Four rounds are paid for. The third is charged twice, so the run ends after it."""
    assert run(2, 4, tmp_path, "private", "target", "die1")[0] != 0
    code, said = run(2, 4, tmp_path, "private", "target", "resume")
    assert code == 0, said
    found = [result(tmp_path, rank) for rank in range(2)]
    assert found[0] == found[1]
    assert set(found[0]["charges"]) == {4} and len(found[0]["received"]) == 3
    assert found[0]["epsilon"] <= 50.0
    assert "no further round can be charged" in said
