"""Rehearsal of a client's first steps on a copy, before the first round: what they change and log.

What training changes has to travel, and whoever decides by a metric that stays with clients has to hear of it
before anybody has trained. Nobody knows either without trying, because both are in the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.fit import Batches, Client, ClientFit
from lightning_fedq.clients.hooks import call_start_hooks
from lightning_fedq.clients.measuring import statistics_of
from lightning_fedq.clients.vector import BufferMode, Rehearsed, changed_of, layers_with_statistics
from lightning_fedq.clients.world import NotCarriedError
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import own_draws
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.training.clock import Clock
from lightning_fedq.training.round_loop import told_results
from lightning_fedq.training.stale import stale_hooks

_ROUNDS = 100
"""Rounds in which somebody to rehearse with is looked for."""


class Trial:
    """A client's training that is tried out, beside the rounds: on a copy, with all draws put back.

    Args:
        trainer: The user's, in its fit.
        clock: Steps so far.
        loader: The loader of all clients.

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
            stack: The client.
            most: Most batches.
            before: Called with the copy before it trains.
            again: Begin anew with the client's batches where there are fewer.
            change: What becomes of a batch before it is trained on.
            loader: Loader to train from; None is that of all clients.
        """
        with own_draws():
            client, names = self.fit.copy(stack.training_seed, stack.clients, alone=True), self.names
            client.trainer.fit_loop.epoch_loop._results = told_results(
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
            stack: The client.
            most: Most batches.
            size: Numbers that are expected.
            change: What becomes of a batch before it is looked at; None is itself.
        """
        with own_draws():
            batches: Any = islice(self._loader().of_stack(stack), most)
            batches = batches if change is None else map(change, batches)
            return statistics_of(self.fit, stack, batches, size)


def first_clients(stacks_of: Callable[[int], Sequence[Stack]], number: int) -> list[Stack]:
    """The first clients to train, fewer where chance leaves that many out of the first hundred rounds.

    Args:
        stacks_of: The stacks of a round, of one client each.
    """
    found: dict[tuple[int, ...], Stack] = {}
    for round in range(_ROUNDS):
        for stack in stacks_of(round):
            if stack.clients and len(found) < number:
                found.setdefault(stack.clients, stack)
        if len(found) == number:
            break
    return list(found.values())


def prepare(client: Client, mode: BufferMode) -> None:
    """Call the hooks of the start of a fit on a copy, and freeze its statistics where they are to be.

    Args:
        client: The copy.
        mode: What happens to buffers.
    """
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
        trial: Trains.
        module: The global model.
        clients: The one that tries. None leaves it to the layers.
        mode: What happens to buffers.
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
