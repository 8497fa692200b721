"""Rehearsal of a client's first steps on a copy, before the first round: what they change, log and need.

What training changes has to travel, and whoever decides by a metric that stays with clients has to hear of it
before anybody has trained. Nobody knows either without trying, because both are in the user's code.

Sizes of batches are known when the data are dealt out, also of clients that are drawn late. What needs two
samples, as BatchNorm, a contrastive loss or a standard deviation does, fails on a batch of one, and would
fail in the middle of some round, without the client's name: so the smallest one is tried, too.

A callback that averages weights by batch, and puts the average in when the training ends, does the first in
the clients' copies and the second in the user's fit, where its average is still of the first weights. So
hooks of a validation, of a checkpoint and of the end must do the same to the model of a client that has
trained, and to that model with all else as it was before.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_fedq._lightning import is_overridden, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.clock import Clock
from lightning_fedq.clients.fit import Batches, Client, ClientFit
from lightning_fedq.clients.forks import in_fork
from lightning_fedq.clients.hooks import call_start_hooks, knows_clients, looks_at_batches, overrides
from lightning_fedq.clients.measuring import statistics_of
from lightning_fedq.clients.vector import BufferMode, Rehearsed, changed_of, layers_with_statistics
from lightning_fedq.clients.world import NotCarriedError
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import own_draws, seed_for_transforms
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.own_loaders import OwnClientLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.functional.batch_stack import map_tensors
from lightning_fedq.rounds import Statistics
from lightning_fedq.training.client_metrics import ToldResults

_ROUNDS = 100
"""Rounds in which somebody to rehearse with is looked for."""


class Trial:
    """A client's training that is tried out, beside the rounds: on a copy, with all draws put back.

    Args:
        clock: Steps so far.

    Attributes:
        fit: Trains it.
        names: Names of the metrics that it has logged; they go nowhere else.
    """

    def __init__(self, trainer: Any, clock: Clock, loader: Callable[[], ClientLoader]) -> None:
        self.fit, self._clock, self._loader = ClientFit(trainer), clock, loader
        self.names: dict[str, None] = {}

    def train(
        self,
        stack: Stack,
        most: int,
        before: Callable[[Client], object] = lambda client: None,
        again: bool = False,
        change: Callable[[Any], Any] | None = None,
        loader: Any = None,
    ) -> Client:
        """Train a client on its first batches.

        Args:
            before: Called with the copy before it trains.
            again: Begin anew with the client's batches where there are fewer.
            change: What becomes of a batch before it is trained on.
            loader: Loader to train from; None is that of all clients.
        """
        with own_draws():
            client, names = self.fit.copy(stack.training_seed, stack.clients, alone=True), self.names
            client.trainer.fit_loop.epoch_loop._results = ToldResults(
                True, lambda name, value: names.setdefault(name)
            )
            before(client)
            loader, there = self._loader() if loader is None else loader, len(stack.batch_sizes)
            passes = -(-most // there) if again and there else 1
            batches: Any = chain.from_iterable(loader.of_stack(stack) for _ in range(passes))
            batches = batches if change is None else map(change, batches)
            number = min(most, passes * there)
            self.fit.train(client, Batches(batches, number, loader), self._clock.now)
            self.fit.check_frozen()
        return client

    def statistics(
        self, stack: Stack, most: int, size: int, change: Callable[[Any], Any] | None = None
    ) -> Tensor:
        """Vector of a client's first batches, `(size,)`, see `statistics_of`.

        Args:
            size: Numbers that are expected.
            change: What becomes of a batch before it is looked at; None is itself.
        """
        with own_draws():
            batches: Any = islice(self._loader().of_stack(stack), most)
            batches = batches if change is None else map(change, batches)
            return statistics_of(self.fit, stack, batches, size)


def first_clients(stacks_of: Callable[[int], Sequence[Stack]], number: int) -> list[Stack]:
    """The first clients to train, fewer where chance leaves that many out of the first hundred rounds."""
    found: dict[tuple[int, ...], Stack] = {}
    for round in range(_ROUNDS):
        for stack in stacks_of(round):
            if stack.clients and len(found) < number:
                found.setdefault(stack.clients, stack)
        if len(found) == number:
            break
    return list(found.values())


def prepare(client: Client, mode: BufferMode) -> None:
    """Call the hooks of the start of a fit on a copy, and freeze its statistics where they are to be."""
    call_start_hooks(client.trainer, client.callbacks)
    if mode == "frozen":
        for layer in layers_with_statistics(client.module).values():
            layer.training = False


class Findings(NamedTuple):
    """Outcome of a rehearsal, which may have been in a fork.

    Args:
        rehearsed: What training changes beside the parameters.
        failure: Why there was none. "" if there was.
        moved: Did any parameter move?
        stale: A hook that uses what training leaves beside the model, see `stale_hooks`. "" is none.
        raised: Hooks of which that is not known, because they raise where they are tried.
        names: Names of the metrics that were logged.
    """

    rehearsed: Rehearsed
    failure: str = ""
    moved: bool = True
    stale: str = ""
    raised: Sequence[str] = ()
    names: Mapping[str, None] = {}

    def told(self, module: pl.LightningModule) -> Rehearsed:
        """Say what the user should know.

        Raises:
            ValueError: If a hook would put weights in that nobody has averaged.
        """
        if self.stale:
            raise ValueError(
                f"{self.stale} puts weights in that follow from what hooks of batches or steps have kept "
                "beside the model, an average say: clients train with copies that are dropped, so that the "
                "fit's own would be of the first weights; keep the average in a submodule or buffer, which "
                "travels, or use EMAWeightAveraging, which averages the global model"
            )
        if self.failure:
            rank_zero_info(
                f"a rehearsal of the first steps failed ({self.failure}); of buffers, those of "
                "normalisation layers travel"
            )
        if not self.moved:
            rank_zero_warn(
                f"nothing trains: the first steps of a client moved no parameter of "
                f"{type(module).__name__}; look at whether training_step returns a loss that follows from "
                "them, at requires_grad, and at the learning rate of the first steps"
            )
        return self.rehearsed


def rehearse(
    trial: Trial, module: pl.LightningModule, clients: Sequence[Stack], mode: BufferMode, forked: bool = False
) -> Findings:
    """Find what training changes beside the parameters.

    Where the training fails here it will fail again in the first round, by the user's own error; until then
    the layers say what changes.

    Args:
        clients: The one that tries. None leaves it to the layers.
        forked: Is this done in a fork, so that hooks of the end can be tried?

    Raises:
        NotCarriedError: If something in the fit has no bytes.
    """
    if not clients:
        return Findings(Rehearsed.by_layers(module), "nobody trains in a hundred rounds")

    every: Any = module.trainer.accumulate_grad_batches
    try:
        # two steps, of one batch twice if need be: what follows the weights does not change in the first
        client = trial.train(clients[0], 2 * int(every), lambda client: prepare(client, mode), again=True)
    except NotCarriedError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return Findings(Rehearsed.by_layers(module), f"{type(error).__name__}: {first}")
    trained = [name for name, parameter in client.module.named_parameters() if parameter.requires_grad]
    moved = bool(changed_of(module, client.module, trained))
    found = Findings(Rehearsed.of(module, client.module), moved=moved, names=trial.names)
    if forked:
        with own_draws():
            before = trial.fit.copy(clients[0].training_seed, clients[0].clients, alone=True)
            prepare(before, mode)
        stale, raised = stale_hooks(client, before)
        found = found._replace(stale=stale, raised=raised)
    return found


def try_statistics(trial: Trial, stack: Stack, statistics: Statistics) -> None:
    """Make the vector of one client before anybody is charged, and drop it.

    Raises:
        ValueError: If it is of another shape, or not finite. What the hook itself raises goes on.
    """
    vector = trial.statistics(stack, len(stack.batch_sizes), statistics.size)
    if not bool(torch.isfinite(vector).all()):
        raise ValueError(
            f"client_statistics of client {stack.clients[0]} returned numbers that are not finite; divide by "
            "no count that may be 0, and take a standard deviation of two samples or more"
        )


# ---- the smallest batch ------------------------------------------------------------------------------------


def smallest_of(loader: ClientLoader, sizes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Samples of each client's smallest batch, None where nobody knows.

    Args:
        sizes: Batch sizes of each client in a round, by its share of one loader.
    """
    if not isinstance(loader, OwnClientLoader):
        return [min(own, default=None) for own in sizes]
    return [_smallest_of_own(own, len(steps)) for own, steps in zip(loader.passes, sizes, strict=True)]


def _smallest_of_own(loader: Any, steps: int) -> int | None:
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    samples, size = len(loader.sampler), loader.batch_sampler.batch_size  # type: ignore[arg-type]
    rest = samples % size
    cut = steps < len(loader) or loader.drop_last or not rest
    return size if cut else rest


class _Cut:
    """A loader whose batches have so many samples."""

    def __init__(self, loader: ClientLoader, size: int) -> None:
        self._loader, self._size = loader, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def of_stack(self, stack: Stack) -> Iterator[Any]:
        """Yield the first samples of each batch."""
        for batch in self._loader.of_stack(stack):
            yield map_tensors(lambda t: t[: self._size] if t.dim() else t, batch)


def check_smallest(
    trial: Trial,
    loader: ClientLoader,
    held: Sequence[Tensor],
    sizes: Sequence[tuple[int, ...]],
    rehearsed: Stack,
    mode: BufferMode,
) -> None:
    """Refuse a split that leaves a client a batch on which the training fails, if a whole one does not.

    Args:
        rehearsed: A client that has been tried.

    Raises:
        ValueError: Naming the clients, with the cure.
    """
    found = smallest_of(loader, sizes)
    smallest = min((size for size in found if size), default=0)
    if isinstance(loader, OwnClientLoader):
        largest = max(
            (one.batch_size or 0 for one in loader.passes if isinstance(one, DataLoader)), default=0
        )
    else:
        largest = max((size for own in sizes for size in own), default=0)
    if smallest >= largest:
        return
    clients = [client for client, size in enumerate(found) if size == smallest]

    def failure(size: int) -> str:
        """First line of what goes wrong on a batch of so many samples. Empty if nothing does."""
        source: Any = loader
        if isinstance(loader, OwnClientLoader):
            stack, source = Stack(rehearsed.clients, (1,), rehearsed.training_seed, ()), _Cut(loader, size)
        else:
            owner = next(c for c, own in enumerate(sizes) if size in own)
            drawn = (held[owner][:size],)
            stack = Stack((owner,), (size,), rehearsed.training_seed, (), drawn)
        try:
            client = trial.train(stack, 1, lambda client: prepare(client, mode), loader=source)
        except NotCarriedError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        broken = [n for n, t in client.module.state_dict().items() if not bool(torch.isfinite(t).all())]
        return f"{', '.join(broken[:4])} is NaN or infinite" if broken else ""

    if not (first := failure(smallest)) or failure(largest):
        return
    raise ValueError(
        f"the last batch of clients {in_short(clients)} has {smallest} of {largest} samples, and training on "
        f"it fails ({first}); use drop_last=True in the DataLoader, which leaves these out, another "
        "batch_size, or another number of clients"
    )


# ---- hooks that use what training leaves -------------------------------------------------------------------


_HOOKS = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
)
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}
_CHANGES |= {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "socket.connect", "shutil.rmtree"}


def stale_hooks(trained: Client, before: Client) -> tuple[str, list[str]]:
    """Which hook would use what the user's own objects never get ("" if none does), and which raise there.

    Only in a fork: hooks are called in forks of it in which nothing can be written.

    Args:
        before: One that has not. It is given the other's parameters and buffers.
    """
    if not _called(_callbacks(trained), trained.module):
        return "", []
    with torch.no_grad():
        theirs = dict(_tensors(trained.module))
        for name, tensor in _tensors(before.module):
            if name in theirs and tensor.shape == theirs[name].shape:
                tensor.data.copy_(theirs[name])
    (one, raised), (other, _) = in_fork(lambda: _after_hooks(trained)), in_fork(lambda: _after_hooks(before))
    return next((hook for hook in one if one[hook] != other[hook]), ""), raised


def untried(trainer: Any, why: str, raised: Sequence[str]) -> str:
    """Sentence of a run and its page about hooks that are not tried. "" where there are none.

    Args:
        why: Why none is. "" if they were.
        raised: Those that raised where they were tried, and what.
    """
    module = trainer.lightning_module
    names = _called([one for one in trainer.callbacks if _is_user_s(one)], module) if why else list(raised)
    if not names:
        return ""
    return (
        f"{in_short(names, 3)} were not tried ({why or 'they raised there'}): weights that such "
        "hooks put in, from what hooks of batches keep beside the model, an average say, are the first ones; "
        "EMAWeightAveraging averages the global model."
    )


def _called(callbacks: list[Any], module: Any) -> list[str]:
    """Hooks of a validation, a checkpoint or the end that somebody overrides, with whose they are."""
    hooks = ("on_save_checkpoint", *_HOOKS)
    found = [f"{type(one).__name__}.{hook}" for one in callbacks for hook in hooks if overrides(one, hook)]
    own = [hook for hook in hooks if is_overridden(hook, module, pl.LightningModule)]
    return found + [f"{type(module).__name__}.{hook}" for hook in own]


def _no_changes(event: str, args: Any) -> None:
    """Let Python change no file and reach nobody, as an audit hook of a fork."""
    if event == "open" and not isinstance(args[0], int):
        writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR) or any(sign in (args[1] or "") for sign in "wax+")
    else:
        writes = event in _CHANGES
    if writes:
        raise PermissionError("nothing can be written where hooks are tried")


def _after_hooks(client: Client) -> tuple[dict[str, Digests], list[str]]:
    """The model as checkpoints would hold it, and after each hook, and which hooks raise."""
    sys.addaudithook(_no_changes)
    seed_for_transforms(0)
    module, trainer, called = client.module, client.trainer, _callbacks(client)
    saved: dict[str, Any] = {"state_dict": dict(module.state_dict())}
    raised = list[str]()

    def call(one: Any, hook: str, *more: Any) -> None:
        try:
            getattr(one, hook)(*(more if one is module else (trainer, module, *more)))
        except Exception as error:
            if (one is module and is_overridden(hook, module)) or (
                one is not module and looks_at_batches(one)
            ):
                raised.append(f"{type(one).__name__}.{hook} ({type(error).__name__}: {error})"[:200])

    for one in (*called, module):
        call(one, "on_save_checkpoint", saved)
    state = saved["state_dict"] if isinstance(saved.get("state_dict"), Mapping) else {}
    weights = {name: state[name] for name, _ in _tensors(module) if name in state}  # no other kind of state
    found = {"on_save_checkpoint": digests(weights, "")}
    for hook in _HOOKS:
        for one in (*called, module):
            call(one, hook)
        found[hook] = digests(dict(_tensors(module)), "")
    return found, raised


def _callbacks(client: Client) -> list[Any]:
    """Its copies, and the user's own of which it has none."""
    copied = [type(one) for one in client.callbacks]
    own = [*client.callbacks, *(one for one in client.trainer.home.callbacks if type(one) not in copied)]
    return [one for one in own if _is_user_s(one)]


def _is_user_s(one: Any) -> bool:
    return not (isinstance(one, pl.callbacks.Checkpoint | pl.callbacks.ProgressBar) or knows_clients(one))


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


Digests = dict[str, str]


_PER_RUN = {"seconds", "id"}
"""A record's time and a ledger's name."""


def digests(value: Any, path: str, depth: int = 0, plain: bool = False) -> Digests:
    """A digest of every leaf, by its place.

    Args:
        plain: Leave out objects, at which containers end.

    Example:
        >>> sorted(digests({"a": [1, 2.5]}, "checkpoint"))
        ['checkpoint/a/0', 'checkpoint/a/1', 'checkpoint/a/length', 'checkpoint/keys']
    """
    if isinstance(value, Tensor):
        raw = value.detach().cpu()
        raw = raw.contiguous().view(-1) if raw.layout == torch.strided else raw.to_dense().view(-1)
        head = f"{value.dtype}{tuple(value.shape)}".encode()
        return {path: hashlib.sha256(head + raw.view(torch.uint8).numpy().tobytes()).hexdigest()}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {path: hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()}
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return {path: repr(value)[:2000]}
    if depth > (4 if plain else 20):
        return {}
    found: Digests = {}
    if isinstance(value, Mapping):
        found[path + "/keys"] = repr(sorted(map(str, value)))
        for key, one in value.items():
            if key not in _PER_RUN:
                found |= digests(one, f"{path}/{key}", depth + 1, plain)
        return found
    if isinstance(value, list | tuple | set | frozenset):
        found[path + "/length"] = str(len(value))
        for number, one in enumerate(value):
            found |= digests(one, f"{path}/{number}", depth + 1, plain)
        return found
    if plain:
        return {}
    if hasattr(value, "__dict__"):
        return {path: type(value).__qualname__} | digests(dict(vars(value)), path, depth + 1)
    try:
        return {path: hashlib.sha256(pickle.dumps(value)).hexdigest()}
    except Exception:
        return {path: type(value).__qualname__}
