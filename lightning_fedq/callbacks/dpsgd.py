"""`DPSGD`: sample-level differential privacy for an ordinary Lightning module, alone or inside every client.

Opacus's hooks give every sample's gradient on the module itself, which is never wrapped or swapped: hooks
and the optimiser's wrapper go on at the start of the fit and come off in `teardown`. Batches are Poisson
samples, drawn anew for every step; an empty batch is a step like any other, with noise alone. Every step is
charged before its noise is drawn. What the module logs from training batches is a release of its own, which
no epsilon covers; so is a loss that looks at other samples of the batch.

Clipping bounds what a sample adds to a sum; it does not bound what it changes in the dropout masks and
transforms of others, which all come from one sequence: a sample more shifts those of all that follow. To
whoever knows the sequence, by a seed, that is a change of the whole sum. So every draw of a step (torch's,
NumPy's and Python's generators, in worker processes too) comes from a secret of the step, and counts as
noise that is drawn anew for every sample: given the same draws for the samples that are in both batches,
sums differ by one clipped gradient, and a mixture of such pairs is no easier to tell apart than one of them
(joint convexity).

Beside `Federated` the clients train one at a time, every local step is such a step on samples of that
client's own data, and every client has an account of its own. What a client sends is computed from its
noisy steps alone, so the claim holds against whoever sees the messages, the server included. Who takes
part and how many samples a client holds count as known.

What is counted is a row of the training data set, or a person in `rows_per_person` of them (`dpsgd.opacus`).
Rows that `Subset` and `ConcatDataset` repeat are seen by their indices, and refused beyond that number. Every
client's account charges for all rows of a person, as nobody knows where they lie.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import is_overridden, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.client_trainer import is_client
from lightning_fedq.clients.constraints import constrain_steps
from lightning_fedq.clients.fit import ClientFit
from lightning_fedq.clients.undo import Undo
from lightning_fedq.data.batches import LocalWork
from lightning_fedq.data.generator_turns import preserve_generators, seed_generators
from lightning_fedq.data.loader import ClientBatches, check_plain
from lightning_fedq.dpsgd.accounts import SampleAccounts
from lightning_fedq.dpsgd.between_steps import check_between_steps
from lightning_fedq.dpsgd.draws import check_draws_of_data
from lightning_fedq.dpsgd.loss_reduction import loss_reduction, samples_to_try
from lightning_fedq.dpsgd.poisson import PoissonBatches, PoissonEpoch, check_repeats
from lightning_fedq.dpsgd.refusals import (
    UnchangedBuffers,
    UnchangedParameters,
    check_accumulation,
    check_kinds,
    check_layers,
    check_settings,
)
from lightning_fedq.dpsgd.statement import SampleStatement, describe_unit
from lightning_fedq.keys.randomness import Stream, hkdf_expand, hkdf_extract, pack_fields
from lightning_fedq.training.checkpoints import SavedStates
from lightning_fedq.training.client_metrics import log_figure, watch_training_log

if TYPE_CHECKING:
    from lightning_fedq.dpsgd.opacus import (
        Account,
        GridDPOptimizer,
        NoiseWords,
        SampledGaussianAccountant,
        SampleGradientHooks,
    )

_FROM_LOADER = (
    "DPSGD samples its own batches, and a loader handed straight to fit(...) can't be replaced; "
    "return it from train_dataloader of the module or of a LightningDataModule"
)


class _HandedOver(DataLoader[Any]):
    """Lets this process draw from a batch's secret when it arrives, as hooks on the batch do."""

    def __iter__(self) -> Any:
        epoch: Any = self.sampler
        for number, batch in enumerate(super().__iter__()):
            seed_generators(epoch.keys[number], "handed over")
            yield batch


class DPSGD(pl.Callback):
    """DP-SGD for an ordinary module, or any optimiser on its noisy gradients.

    Args:
        noise_multiplier: Std of the noise on the summed gradient / `max_grad_norm`, > 0.
        max_grad_norm: Norm to which every sample's gradient is clipped, > 0.
        delta: Delta at which `dp/epsilon` is logged, below 1 / samples (of the largest client).
        seed: An integer makes batches, noise and all random draws of a step reproducible, and NOT private;
            None takes them from the operating system, whatever `seed_everything` was told.
        rows_per_person: Rows of the training data set, >= 1, in which one person stands at most. Epsilon is
            about the data with and without all of them; it grows faster than this number.

    Attributes:
        accounts: What was spent, by client; client 0 is everybody where there is no federation.
        num_non_finite: Samples whose gradient was not finite and counted as zero.
        loss_reduction: How the loss of a batch is reduced, "mean" or "sum", as found before the first
            charge; a checkpoint keeps it. None before.

    Raises:
        ValueError: If a setting is out of its range.

    Example:
        >>> dpsgd = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-5)  # in trainer.callbacks
    """

    def __init__(
        self,
        noise_multiplier: float,
        max_grad_norm: float,
        *,
        delta: float,
        seed: int | None = None,
        rows_per_person: int = 1,
    ) -> None:
        from lightning_fedq.functional.checks import check_positive
        from lightning_fedq.privacy.accounting import check_delta

        check_positive(noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
        if rows_per_person < 1 or rows_per_person != int(rows_per_person):
            raise ValueError(f"rows_per_person must be a whole number >= 1, got {rows_per_person}")
        self.noise_multiplier, self.max_grad_norm = noise_multiplier, max_grad_norm
        self.rows_per_person = rows_per_person = int(rows_per_person)
        self.delta, self.seed = check_delta(delta), seed
        self._spent = SampleAccounts(rows_per_person)
        self.accounts: dict[int, Account] = self._spent.of_client
        self._new_root()
        self._undo = Undo()
        self._optimizer: GridDPOptimizer | None = None
        self._federated: Any = None
        self._first = 0
        self._present = 0
        self._first_step: dict[int, int] = {}
        self._buffers: UnchangedBuffers | None = None
        self._parameters: UnchangedParameters | None = None
        self.loss_reduction: Literal["mean", "sum"] | None = None
        self._hooks: SampleGradientHooks | None = None
        self._tried_in = -1
        self._home: Any = None
        self._inside: Any = None
        self._non_finite = 0

    knows_clients = True
    crosses_clients = True
    """Every client's training has this very object, which keeps everybody's account."""
    of_each_client = True
    """A real client has one of its own, and its account with it; a server of real clients has none."""

    def _new_root(self) -> None:
        secret = os.urandom(32) if self.seed is None else pack_fields("reproducible", hex(self.seed))
        self._root = hkdf_extract(b"fedq/v1/dp-sgd", secret)

    @property
    def protects_samples(self) -> bool:
        """Whoever knows a seed knows all noise."""
        return self.seed is None

    def training_words(self) -> str:
        """Numbers that both sides of a deployment compare, without the secrets."""
        rows = "" if self.rows_per_person == 1 else f", rows_per_person={self.rows_per_person}"
        norm = self.max_grad_norm
        return f"DPSGD({self.noise_multiplier}, {norm}, delta={self.delta}, seed={self.seed}{rows})"

    @property
    def unit(self) -> str:
        """Unit of the claim, in words."""
        return describe_unit(self.rows_per_person)

    @property
    def account(self) -> list[list[float]]:
        """Account of client 0, for a real client to keep: noise multiplier, sampling rate, steps, in turn."""
        return self._spent.history(0)

    @account.setter
    def account(self, kept: list[list[float]]) -> None:
        self._spent.go_on(0, kept)

    # ---- set up and take off ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what can't work, and put Poisson sampling in place of the user's loader."""
        if stage != "fit":
            return
        if self.seed is None:  # a copy of this object, or a fork of its process, may have drawn from the old
            self._new_root()
        self._reset_fit()
        self._home, self._optimizer, self.loss_reduction, self._non_finite = trainer, None, None, 0
        found = [c for c in trainer.callbacks if hasattr(c, "use_batches")]  # type: ignore[attr-defined]
        self._federated = found[0] if found else None  # `Federated`, or a real client's `LocalRound`
        self._first = getattr(self._federated, "number", 0)
        if sum(isinstance(callback, DPSGD) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("the Trainer has two DPSGD callbacks; leave one of them out")
        if trainer.datamodule is None and not is_overridden(  # type: ignore[attr-defined]
            "train_dataloader", pl_module, pl.LightningModule
        ):
            behind = "" if self._federated is None else "; or put DPSGD behind Federated in the callbacks"
            raise ValueError(_FROM_LOADER + behind)
        check_settings(trainer, pl_module)
        if self._federated is not None:
            self._federated.use_batches(self)
            return
        owner: Any = trainer.datamodule or pl_module  # type: ignore[attr-defined]
        user_loader = owner.train_dataloader
        self._undo.replace(owner, "train_dataloader", lambda: self._make_poisson_loader(user_loader()))

    def _key(self, purpose: str, client: int, step: int) -> bytes:
        return hkdf_expand(self._root, pack_fields(purpose, self._first + client, step))

    def _stream(self, purpose: str, client: int, step: int) -> Stream:
        return Stream(self._key(purpose, client, step))

    def _reseed_draws(self, when: str) -> None:
        """Let all that is drawn from here on come from a secret of the present client's coming step."""
        account = self.accounts.get(self._present)
        seed_generators(self._key("draws", self._present, 0 if account is None else account.steps), when)

    # ---- the federation's batches: DPSGD is its `BatchRule` ---------------------------------------------

    skips_empty = False

    def begin(self, work: LocalWork) -> None:
        """Open an account for everybody who holds data. What was spent before stays spent."""
        from lightning_fedq.privacy.accounting import check_delta

        check_delta(self.delta, max(map(len, work.client_indices)), "samples")
        assert work.dataset is not None
        self.check(work.dataset, work.client_indices)
        self._batches = PoissonBatches(work, lambda client, step: self._stream("batch", client, step))
        self._spent.open(self._batches, self.noise_multiplier)

    def check(self, dataset: Dataset[Any], client_indices: Sequence[Tensor]) -> None:
        """Refuse data, reloaded ones too, whose rows stand in more samples than are charged for."""
        check_repeats(dataset, client_indices, self.rows_per_person)

    def draw(self, round: int, attempt: int, clients: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """The next steps of each client, whatever the round, which is opened and charged next."""
        if self._home.current_epoch != self._tried_in:
            self._try_loss(self._home, self._home.lightning_module)
        self._charge_elsewhere()
        self._spent.begin_round()
        self._first_step = {client: self.accounts[client].steps for client in clients}
        return [
            tuple(
                self._batches.draw_samples(client, self.accounts[client].steps + i)
                for i in range(self._batches.steps[client])
            )
            for client in clients
        ]

    def keys(self, client: int, steps: int) -> tuple[bytes, ...]:
        """Secrets of the client's coming steps."""
        first = self._first_step[client]
        return tuple(self._key("draws", client, first + step) for step in range(steps))

    def _make_poisson_loader(self, user_loader: object) -> DataLoader[Any]:
        loader = check_plain(user_loader)
        size = len(loader.dataset)  # type: ignore[arg-type]
        self.begin(LocalWork.from_loader(loader, [torch.arange(size)], 1, None))
        self._epoch = PoissonEpoch(
            self._batches, lambda: self.accounts[0].steps, lambda step: self._key("draws", 0, step)
        )
        self._loader: DataLoader[Any] = _HandedOver(
            ClientBatches(loader.dataset, loader.collate_fn),
            sampler=self._epoch,
            batch_size=None,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )
        return self._loader

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse several optimisers, and who decides by training metrics. Remember the user's own."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"DPSGD needs exactly one optimiser, the module has {len(trainer.optimizers)}; "
                "put all parameters into one optimiser"
            )
        original = trainer.strategy.optimizers
        self._undo.callback(setattr, trainer.strategy, "optimizers", original)
        if self._federated is None and self.protects_samples:  # beside it, client_metrics says who may
            watch_training_log(trainer, self._undo)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse to train on a loader without Poisson sampling."""
        if self._federated is None and trainer.train_dataloader is not getattr(self, "_loader", None):
            raise ValueError(_FROM_LOADER)
        self._charge_elsewhere()
        if self._federated is None:
            self._make_noisy(trainer, pl_module)
        self._undo.enter_context(preserve_generators())
        self._reseed_draws("start")
        self._undo.enter_context(warnings.catch_warnings())
        # torch warns that the first layer's inputs need no gradient, which is as it should be
        warnings.filterwarnings("ignore", message="Full backward hook is firing")

    def _charge_elsewhere(self) -> None:
        """Pay for rounds that stand in the ledger and that this process has not played. Between rounds."""
        federated = self._federated
        if federated is None or federated.engine is None or federated.seed is not None:
            return
        if self._spent.charge_elsewhere(federated.engine.ledger.charges_elsewhere.tolist()):
            rank_zero_warn(
                "these clients were charged for rounds that this DPSGD has not played, of a killed process "
                "or of another run; it counts them as taken by their whole cohorts, at its own noise and "
                f"batches: epsilon {self.epsilon(self.delta):.3g} so far"
            )

    def _make_noisy(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Let the optimiser of the fit, or of a client's, step with noisy sums."""
        from lightning_fedq.dpsgd.opacus import GridDPOptimizer

        self._non_finite = self.num_non_finite
        self._optimizer = GridDPOptimizer(
            trainer.optimizers[0],
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=self._expected_size(0),
            words=lambda: self._charge(module),
            loss_reduction=self.loss_reduction or "mean",
        )
        # what layers hold constant, and what is said of parameters, behind every step: post-processing
        said = {} if self._federated is None else self._federated.fit.vector.constraints
        handles = constrain_steps(trainer.optimizers[0], module, said)
        for handle in handles if self._federated is None else ():  # a client's optimiser goes with it
            self._undo.callback(handle.remove)
        trainer.strategy.optimizers = [self._optimizer]

    def _try_loss(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Look, once an epoch and before its first charge, at the loss and the gradients of a few samples.

        A module may have another loss in another epoch. What follows from samples decides at the first look
        alone: later ones can only stop the run. Beside a federation the samples are anybody's, so they are
        tried on a copy that nobody trains.

        Args:
            trainer: The user's.

        Raises:
            ValueError: See `loss_reduction`, `draws` and `between_steps`.
        """
        from lightning_fedq.dpsgd.opacus import SampleGradientHooks

        check_kinds(module)
        epoch, home = trainer.current_epoch, trainer
        self._remove_hooks()
        if self._federated is None:
            held, fetch = torch.arange(self._batches.num_samples(0)), self._loader.dataset.__getitem__
        else:
            held, fetch = torch.cat(self._federated.client_indices), self._federated.fit.fetch
            double = ClientFit(home).copy(0, alone=True)
            trainer, module = double.trainer, double.module
        tried = samples_to_try(len(held), epoch)
        check_draws_of_data(fetch, held[tried])
        batch = fetch(held[tried])
        try:
            again = lambda: fetch(held[tried].flip(0))  # noqa: E731
            found = loss_reduction(trainer, module, batch, SampleGradientHooks, self.loss_reduction, again)
        except Exception:
            check_layers(module)  # they fail in words of their own, on a batch of one say
            raise
        self.loss_reduction = found
        check_between_steps(home, fetch, held[torch.roll(tried, epoch)], trainer.train_dataloader)
        self._tried_in = epoch

    def _hook_into(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Put Opacus's hooks on the module, whose layers are in the mode of the first step by now."""
        from lightning_fedq.dpsgd.opacus import SampleGradientHooks

        if self._federated is not None and trainer is not self._inside:
            self._make_noisy(trainer, module)
        if self._federated is None and trainer.current_epoch != self._tried_in:
            self._try_loss(trainer, module)
        assert self._optimizer is not None and self.loss_reduction is not None
        self._optimizer.loss_reduction = self.loss_reduction
        self._remove_hooks()
        self._hooks = SampleGradientHooks(module, loss_reduction=self.loss_reduction, strict=True)
        if trainer is self._inside:
            return
        self._inside = trainer
        self._buffers, self._parameters = UnchangedBuffers(module), UnchangedParameters(module)
        watch, plugin = self._parameters.watch, trainer.precision_plugin
        step_context = plugin.train_step_context

        @contextmanager
        def context() -> Iterator[None]:
            saved = SavedStates(module)
            with watch(), step_context():
                yield
            saved.check()

        if self._federated is None:
            self._undo.replace(plugin, "train_step_context", context)
        else:  # the client's own
            plugin.train_step_context = context  # type: ignore[method-assign]

    def _remove_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.remove_hooks()
            # remove what the hooks and the optimiser left on parameters and layers
            module = self._hooks._module
            for parameter in module.parameters():
                for name in ("grad_sample", "summed_grad", "_forward_counter", "_current_grad_sample"):
                    if hasattr(parameter, name):
                        delattr(parameter, name)
            for layer in module.modules():
                for name in ("activations", "max_batch_len"):
                    if name in vars(layer):
                        delattr(layer, name)
            self._hooks = None

    def _reset_fit(self) -> None:
        """Nobody trains."""
        self._home = self._inside = self._buffers = self._parameters = None
        self._tried_in = -1

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take everything off again."""
        self._undo.close()
        if stage == "fit":
            self._remove_hooks()
            self._reset_fit()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take everything off again, but go on to refuse to save what training has changed."""
        self._undo.close()
        self._remove_hooks()
        if self._federated is not None:  # what a client has changed was its copy
            self._reset_fit()

    # ---- training ---------------------------------------------------------------------------------

    @property
    def accountant(self) -> SampledGaussianAccountant:
        """Accountant of the run, where there is one data set.

        `accounts` has those of a federation's clients.
        """
        from lightning_fedq.dpsgd.opacus import SampledGaussianAccountant

        return (
            self.accounts[0].accountant if self.accounts else SampledGaussianAccountant(self.rows_per_person)
        )

    @property
    def num_non_finite(self) -> int:
        """Samples whose gradient was not finite."""
        return self._non_finite + (0 if self._optimizer is None else self._optimizer.num_non_finite)

    def epsilon(self, delta: float) -> float:
        """The largest epsilon that any client has spent at `delta`."""
        return max((account.epsilon(delta) for account in self.accounts.values()), default=0.0)

    def statement(self) -> SampleStatement | None:
        """Privacy statement on samples so far, of whoever has spent most.

        None before the first account.
        """
        if not self.accounts:
            return None
        account = max(self.accounts.values(), key=lambda account: account.epsilon(self.delta))
        return SampleStatement(
            len(self.accounts),
            account.steps,
            account.epsilon(self.delta),
            self.delta,
            self.noise_multiplier,
            self.max_grad_norm,
            account.sample_rate,
            self.seed is None,
            rows=self.rows_per_person,
        )

    def next_steps(self) -> dict[int, int]:
        """Who takes how many steps before the training can next stop: one step, or a round of the cohort.

        Raises:
            ValueError: If the training does not run on Poisson samples.
        """
        if self._federated is None:
            if not hasattr(self, "_loader"):
                raise ValueError(_FROM_LOADER)
            return {0: 1}
        engine = self._federated.engine
        assert engine is not None
        if engine.round == engine.planner.num_rounds:
            return {}
        plan = engine.next_plan()
        return {client: self._batches.steps[client] for client in plan.survivors}

    @property
    def largest_data_set(self) -> int:
        """Samples of the client that holds most."""
        return max(self._batches.num_samples(client) for client in self.accounts)

    def _expected_size(self, client: int) -> int:
        return max(round(self._batches.sample_rate(client) * self._batches.num_samples(client)), 1)

    def _charge(self, module: torch.nn.Module) -> NoiseWords:
        """Pay for one step, then hand out its noise. Whoever thawed a layer behind our back gets none."""
        check_layers(module)
        return self._stream("noise", self._present, self._spent.charge(self._present)).words64

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Tell the optimiser whose batch it is, and whether anybody is in it. Refuse what breaks the step."""
        check_accumulation(trainer)
        check_layers(pl_module)
        if trainer is not self._inside or trainer.current_epoch != self._tried_in:
            self._hook_into(trainer, pl_module)
        assert self._buffers is not None and self._optimizer is not None
        self._buffers.check()
        if self._federated is None:
            step, size = self._epoch.drawn.popleft()
            self._check_step(0, step)
            self._optimizer.batch_size, self._optimizer.batch_is_empty = size, size == 0
        else:
            stack, number = self._federated.fit.present_batch(batch_idx)
            if not stack.clients:  # nobody answers, and no step is taken
                return
            (self._present,) = stack.clients
            self._check_step(self._present, self._first_step[self._present] + number)
            size = stack.batch_sizes[number]
            self._optimizer.batch_size, self._optimizer.batch_is_empty = size, size == 0
            self._optimizer.expected_batch_size = self._expected_size(self._present)
        self._reseed_draws("step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw from a secret of the next step, whose hooks on the batch come before it."""
        self._reseed_draws("between")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The same after a validation, which may have a seed of its own."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._reseed_draws("after validation")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The same in an epoch."""
        self._reseed_draws("epoch")

    def _check_step(self, client: int, drawn: int) -> None:
        """A batch is drawn from the stream of the step that it is charged as. No stream is drawn for two."""
        if drawn != self.accounts[client].steps:
            raise RuntimeError(
                f"the batch of step {drawn} of client {client} is here and {self.accounts[client].steps} "
                "steps are charged: no step was taken on the last batch, or several; return a loss for every "
                "batch and leave every optimizer step to Lightning"
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what was spent, by whoever has spent most."""
        if self._buffers is not None:
            self._buffers.check(content=True)
        if is_client(trainer):
            self._remove_hooks()
            self._inside = self._buffers = self._parameters = None
        elif not trainer.barebones:
            epsilon = self.epsilon(self.delta)
            log_figure(pl_module, "dp/epsilon", epsilon, prog_bar=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what was protected, where no federation does."""
        if self._federated is None and (found := self.statement()) is not None:
            rank_zero_info(f"privacy of {found.line}")

    # ---- checkpoint -------------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save no model whose buffers or parameters hold what training saw."""
        if self._buffers is not None:
            self._buffers.check(content=True)
        if self._parameters is not None:
            self._parameters.check()

    def state_dict(self) -> dict[str, Any]:
        """Every account, in plain types.

        With seeds, a checkpoint of an open round is one of its start, and so is this. Without, the whole of
        an open round counts: a process that is killed after this can't say how far it came.
        """
        federated = self._federated
        found = {"loss_reduction": self.loss_reduction}
        if federated is None or federated.engine is None:
            return self._spent.state_dict() | found
        engine = federated.engine
        ledger = engine.ledger
        charges = (ledger.charges - ledger.charges_elsewhere).tolist() if federated.seed is None else []
        is_open = federated.fit.start_of_round is not None
        if None not in (self.seed, federated.seed):
            return self._spent.state_dict(charges, at_start_of_round=is_open) | found
        survivors = () if engine.plan is None else engine.plan.survivors
        return self._spent.state_dict(charges, round_taken_by=survivors) | found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what a checkpoint had spent, and this object besides."""
        self._spent.load_state_dict(state_dict, repeatable=self.seed is not None)
        self.loss_reduction = state_dict.get("loss_reduction")
