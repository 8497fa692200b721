"""The ranks' group, two ranks of which are threads of this process: objects, sums, a rank that is gone."""

import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_fedq.training import rank_group
from lightning_fedq.training.rank_group import _HEAD, RankGroup, RankLostError, _device

TIMEOUT = timedelta(seconds=60)


def address():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return "127.0.0.1", found.getsockname()[1]


@pytest.fixture
def groups():
    place = address()
    with ThreadPoolExecutor(2) as threads:
        yield list(threads.map(lambda rank: RankGroup(rank, 2, place, "gloo", TIMEOUT), range(2)))


def on_both(groups, call):
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(call, groups))


def test_on_one_machine_nobody_else_reaches_the_ranks(groups):
    """They exchange keys, and pickles, which run whatever they say."""
    listening = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert len(listening) >= 3  # the store and each rank's own
    assert set(listening) <= {"127.0.0.1", "::1"}


LOOPBACK = {"localhost": "127.0.0.1", "127.0.0.9": "127.0.0.1"}


@pytest.mark.parametrize("interface", [None, "eth7,eth8"])
def test_gloo_listens_where_rank_0_is_reached_or_where_it_is_told_to(interface, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    recorder = SimpleNamespace(create_device=lambda **asked: asked)
    for host, found in LOOPBACK.items():
        assert _device(recorder, (host, 1)) == {"hostname": found}
    own = [one for all in psutil.net_if_addrs().values() for one in all if one.family == socket.AF_INET]
    networks = [one.address for one in own if not one.address.startswith("127.")]
    if not networks:
        pytest.skip("this machine has no network")
    for host in networks:
        assert _device(recorder, (host, 1)) == ({"interface": "eth7"} if interface else {"hostname": host})


def test_objects_of_any_length_arrive_in_the_order_of_ranks(groups):
    words = ["short", {"long": torch.arange(1000)}]
    for first, second in on_both(groups, lambda group: group.gather(words[group.rank], "here")):
        assert first == "short"
        assert torch.equal(second["long"], torch.arange(1000))
    for src in range(2):
        assert on_both(groups, lambda group, src=src: group.broadcast(group.rank, "here", src)) == [src, src]


@pytest.mark.parametrize("more", [-9, -8, -7, 0, 1, 8000])
def test_objects_around_the_size_that_travels_at_once(groups, more):
    empty = len(pickle.dumps(("here", bytes(1000)))) - 1000
    long = bytes(number % 251 for number in range(_HEAD - empty + more))
    assert len(pickle.dumps(("here", long))) == _HEAD + more
    for found in on_both(groups, lambda group: group.gather([b"short", long][group.rank], "here")):
        assert found == [b"short", long]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32])
def test_sums_are_exact_and_in_place(groups, dtype):
    wide = [torch.arange(12).reshape(3, 4).to(dtype) * (rank + 1) for rank in range(2)]
    parts = [wide[0], wide[1].T.contiguous().T]  # one that is not contiguous
    on_both(groups, lambda group: group.add(parts[group.rank]))
    for part in parts:
        assert torch.equal(part, 3 * torch.arange(12).reshape(3, 4).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_everybody_gets_the_values_of_rank_0(groups, dtype):
    parts = [torch.tensor([1, 0, 1]).to(dtype), torch.zeros(3, dtype=dtype)]
    on_both(groups, lambda group: group.share(parts[group.rank]))
    assert torch.equal(parts[0], parts[1])


def test_nobody_else_knows_of_the_group(groups):
    assert not dist.is_initialized()


def test_ranks_at_different_places_stop(groups):
    def meet(group):
        with pytest.raises(RuntimeError, match="Let all ranks do the same") as error:
            group.gather(None, f"place {group.rank}")
        return str(error.value)

    first, second = on_both(groups, meet)
    assert first.startswith("Rank 1 is at 'place 1' while rank 0 is at 'place 0'")
    assert second.startswith("Rank 0 is at 'place 0' while rank 1 is at 'place 1'")


def test_a_rank_that_is_gone_is_noticed_at_once(groups):
    first = groups[0]
    groups.pop()  # and with it its connections
    with pytest.raises(RankLostError, match=r"Rank 0 of 2 gets no answer.*fit\(ckpt_path=...\)"):
        first.gather(None, "here")
    assert first.is_lost


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_never_comes_is_not_waited_for_without_end(rank):
    with pytest.raises(RankLostError, match=f"Rank {rank} of 2 gets no answer"):
        RankGroup(rank, 2, address(), "gloo", timedelta(seconds=1))


def test_ranks_that_are_started_again_do_not_find_what_killed_ones_wrote(monkeypatch):
    """torchrun's store keeps it, and the first rank that comes reads it before the other has come."""
    place = address()
    agent = dist.TCPStore(*place, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", place[0])
    monkeypatch.setenv("MASTER_PORT", str(place[1]))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # of each machine alone, so it need not change

    def begin(first, rank):
        time.sleep(0.2 * (rank != first))
        return RankGroup(rank, 2, place, "gloo", timedelta(seconds=5))

    for first in (0, 1, 0, 1):  # gloo connects one way only
        groups = on_both(range(2), partial(begin, first))
        assert on_both(groups, lambda one: one.gather(one.rank, "here")) == [[0, 1]] * 2
    assert agent.num_keys() > 8


def test_what_is_no_missing_answer_is_said_as_it_is(monkeypatch):
    """An address in use, here and on a network, and an interface that is not there."""
    here = address()
    network = "127.1", here[1]
    monkeypatch.setattr(rank_group, "_is_loopback", lambda host: host == here[0])
    with socket.create_server(here):
        with pytest.raises(OSError, match="in use"):
            RankGroup(0, 2, here, "gloo", TIMEOUT)
        with pytest.raises(dist.DistNetworkError, match="in use"):
            RankGroup(0, 2, network, "gloo", TIMEOUT)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(RuntimeError, match="eth77") as found:
        RankGroup(0, 1, network, "gloo", TIMEOUT)
    assert not isinstance(found.value, RankLostError)


def test_on_gpus_tensors_go_by_nccl_and_objects_by_gloo(monkeypatch):
    """What can be seen without a GPU: a double takes the place of NCCL's group."""

    class Nccl:
        made: tuple[Any, ...] = ()

        class Options:
            _timeout = timedelta()

        def __init__(self, *arguments: Any) -> None:
            Nccl.made = arguments

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    group = RankGroup(0, 1, address(), "nccl", TIMEOUT)
    _, rank, size, options = Nccl.made
    assert (rank, size, options._timeout) == (0, 1, TIMEOUT)
    assert group.gather("word", "here") == ["word"]
    assert isinstance(group._tensors, Nccl)
