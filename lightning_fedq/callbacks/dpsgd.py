"""`DPSGD`: sample-level differential privacy for an ordinary Lightning module, alone or inside every client.

This file is long because Lightning calls one object for all hooks. The hooks are short, and what they call
is in `dpsgd/`.

Opacus's hooks compute per-sample gradients on the user's module, which is neither wrapped nor replaced. Hooks
and the optimiser's wrapper are added at the start of the fit and removed in `teardown`. Every step draws a
Poisson batch. An empty batch is also a step, with noise alone. Every step is charged before its noise is
drawn. Metrics that the module logs from training batches are separate releases that no epsilon covers. A loss
that compares samples of a batch is not covered either.

Clipping bounds a sample's contribution to a sum. It does not bound its effect on the dropout masks and random
transforms of other samples. All of them are drawn from one sequence, so one additional sample shifts the
draws of all later samples. An adversary who knows the sequence, from a seed, sees the whole sum change. So
every draw of a step (torch's, NumPy's and Python's generators, also in worker processes) comes from a secret
key of the step. Such draws count as noise that is drawn anew for every sample. Given equal draws for the
samples that are in both batches, the sums differ by one clipped gradient. A mixture of such pairs is no
easier to distinguish than one of them (joint convexity).

With `Federated`, the clients train one at a time. Every local step is a DP-SGD step on that client's samples,
and every client has its own account. A client's messages follow from its noisy steps alone, so the guarantee
holds against any adversary who sees the messages, including the server. The participating clients and their
numbers of samples count as public.

The guarantee is for one row of the training data set, or for a person in up to `rows_per_person` rows
(`dpsgd.accountant`). Rows that appear more often are refused. They are found by their indices in `Subset` and
`ConcatDataset`, and by their content, for which all samples are read once before the first charge. Every
client's account charges for all rows of a person, because their clients are unknown.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import is_overridden, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.client_trainer import is_client
from lightning_fedq.clients.constraints import constrain_steps
from lightning_fedq.clients.undo import Undo
from lightning_fedq.data.batches import LocalWork
from lightning_fedq.data.generator_turns import preserve_generators, seed_generators
from lightning_fedq.data.loader import check_plain
from lightning_fedq.dpsgd.accounts import SampleAccounts
from lightning_fedq.dpsgd.first_trial import try_steps
from lightning_fedq.dpsgd.hooked_steps import HookedSteps
from lightning_fedq.dpsgd.poisson import PoissonBatches, PoissonEpoch, check_repeats, make_poisson_loader
from lightning_fedq.dpsgd.refusals import check_accumulation, check_layers, check_settings
from lightning_fedq.dpsgd.statement import SampleStatement, describe_unit
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.keys.randomness import Stream, hkdf_expand, hkdf_extract, pack_fields
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.training.checkpoints import count_other_runs
from lightning_fedq.training.checks import check_shapes
from lightning_fedq.training.client_metrics import log_figure, warn_unlogged_monitors, watch_training_log

if TYPE_CHECKING:
    from lightning_fedq.dpsgd.accountant import Account, SampledGaussianAccountant
    from lightning_fedq.dpsgd.opacus import GridDPOptimizer, NoiseWords

_FROM_LOADER = (
    "DPSGD draws its own batches, so it must replace the loader, but fit(...) got one directly. "
    "Return it from train_dataloader of the module or of a LightningDataModule."
)


class DPSGD(pl.Callback):
    """DP-SGD callback: per-sample clipping and noise for an ordinary module with any optimiser.

    Args:
        noise_multiplier: Scale of the noise divided by the sensitivity, > 0. The noise is that of the summed
            gradient, and the sensitivity is `max_grad_norm`.
        max_grad_norm: L2 norm to which each per-sample gradient is clipped, > 0.
        delta: Additive slack in the bound of epsilon, below one divided by the number of protected units.
            `dp/epsilon` is logged at it. A unit is a sample of the largest client.
        seed: Number that makes a run reproducible, and not private. Batches, noise and all random draws of a
            step follow from it. None draws them from the operating system, also after `seed_everything`.
        rows_per_person: Largest number of training rows of one person, >= 1. Epsilon compares the data with
            and without all of these rows. It grows faster than this number.
        count_equal_rows: Whether samples of equal content count as rows of one person. False means that they
            are of different people. Samples are then not read, and only repeated indices are found.

    Attributes:
        accounts: Privacy account of each client. Without a federation, client 0 is the whole data set.
        num_non_finite: Number of samples whose gradient was not finite and counted as zero.
        loss_reduction: Reduction of the loss over a batch, "mean" or "sum". It is found before the first
            charge (None until then), and checkpoints keep it.

    Raises:
        ValueError: If a setting is out of its range.

    Examples:
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
        count_equal_rows: bool = True,
    ) -> None:
        check_positive(noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
        if rows_per_person < 1 or rows_per_person != int(rows_per_person):
            raise ValueError(f"rows_per_person must be a whole number >= 1, got {rows_per_person}")
        self.noise_multiplier, self.max_grad_norm = noise_multiplier, max_grad_norm
        self.rows_per_person = rows_per_person = int(rows_per_person)
        self.delta, self.seed, self.count_equal_rows = check_delta(delta), seed, count_equal_rows
        self._read: tuple[Dataset[Any], list[Tensor]] | None = None
        self._spent = SampleAccounts(rows_per_person)
        self.accounts: dict[int, Account] = self._spent.of_client
        self._new_root()
        self._undo = Undo()
        self._optimizer: GridDPOptimizer | None = None
        self._federated: Any = None
        self._first = 0
        self._present = 0
        self._first_step: dict[int, int] = {}
        self.loss_reduction: Literal["mean", "sum"] | None = None
        self._hooked = HookedSteps()
        self._tried_in = -1
        self._home: Any = None
        self._non_finite = 0

    knows_clients = True
    is_shared_by_clients = True
    """All clients of a simulation share this object, which keeps the account of each client."""
    is_per_client = True
    """A real client has its own callback with its own account, and a server of real clients has none."""

    def _new_root(self) -> None:
        secret = os.urandom(32) if self.seed is None else pack_fields("reproducible", hex(self.seed))
        self._root = hkdf_extract(b"fedq/v1/dp-sgd", secret)

    @property
    def protects_samples(self) -> bool:
        """Whether samples are protected. With a seed they are not, because the seed reveals all noise."""
        return self.seed is None

    def training_words(self) -> str:
        """Return the settings that both sides of a deployment compare, without secrets."""
        rows = "" if self.rows_per_person == 1 else f", rows_per_person={self.rows_per_person}"
        norm = self.max_grad_norm
        return f"DPSGD({self.noise_multiplier}, {norm}, delta={self.delta}, seed={self.seed}{rows})"

    @property
    def unit(self) -> str:
        """Unit of the guarantee in words: the data that neighbouring data sets differ by."""
        return describe_unit(self.rows_per_person)

    @property
    def account(self) -> list[list[float]]:
        """Charges of client 0, which a real client stores: noise multiplier, sampling rate, steps of each."""
        return self._spent.history(0)

    @account.setter
    def account(self, kept: list[list[float]]) -> None:
        self._spent.go_on(0, kept)

    # ---- set up and take off ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse settings that can't work, and replace the user's loader by Poisson sampling."""
        if stage != "fit":
            return
        if self.seed is None:  # a copy of this object, or of its process, may have drawn from the old key
            self._new_root()
        self._reset_fit()
        self._home, self._optimizer, self.loss_reduction, self._non_finite = trainer, None, None, 0
        federations = [c for c in trainer.callbacks if hasattr(c, "use_batches")]  # type: ignore[attr-defined]
        self._federated = federations[0] if federations else None  # `Federated`, or a client's `LocalRound`
        self._present, self._first = 0, getattr(self._federated, "number", 0)
        if sum(isinstance(callback, DPSGD) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("The Trainer has two DPSGD callbacks. Leave one of them out.")
        if trainer.datamodule is None and not is_overridden(  # type: ignore[attr-defined]
            "train_dataloader", pl_module, pl.LightningModule
        ):
            behind = "" if self._federated is None else " Or put DPSGD behind Federated in the callbacks."
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
        """Seed all default generators from a secret key of the present client's next step."""
        account = self.accounts.get(self._present)
        seed_generators(self._key("draws", self._present, 0 if account is None else account.steps), when)

    # ---- the federation's batches: DPSGD is its `BatchRule` ---------------------------------------------

    skips_empty = False

    def begin(self, work: LocalWork) -> None:
        """Open an account for each client, and keep all earlier charges."""
        check_delta(self.delta, max(map(len, work.client_indices)), "samples")
        assert work.dataset is not None
        self.check(work.dataset, work.client_indices)
        self._batches = PoissonBatches(work, lambda client, step: self._stream("batch", client, step))
        self._spent.open(self._batches, self.noise_multiplier)

    def check(self, dataset: Dataset[Any], client_indices: Sequence[Tensor]) -> None:
        """Refuse data in which a row appears in more than `rows_per_person` samples, also reloaded data."""
        held = list(client_indices)
        known, parts = self._read or (None, [])
        is_read = known is dataset and len(parts) == len(held) and all(map(torch.equal, parts, held))
        check_repeats(dataset, held, self.rows_per_person, self.count_equal_rows and not is_read)
        self._read = dataset, held

    def draw(self, round: int, attempt: int, clients: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Return the sample indices of each client's next steps.

        The account's step number selects the stream, not the round. The ledger charges the round afterwards.
        """
        if self._home.current_epoch != self._tried_in:
            self._try_loss(self._home, self._home.lightning_module)
        self._charge_elsewhere()
        self._spent.begin_round()
        self._first_step = {client: self.accounts[client].steps for client in clients}
        drawn = []
        for client, first in self._first_step.items():
            steps = range(first, first + self._batches.steps[client])
            drawn.append(tuple(self._batches.draw_samples(client, step) for step in steps))
        return drawn

    def keys(self, client: int, steps: int) -> tuple[bytes, ...]:
        """Return the secret keys for the random draws of a client's next steps."""
        first = self._first_step[client]
        return tuple(self._key("draws", client, first + step) for step in range(steps))

    def _make_poisson_loader(self, user_loader: object) -> DataLoader[Any]:
        loader = check_plain(user_loader)
        everything = torch.arange(len(loader.dataset))  # type: ignore[arg-type]
        self.begin(LocalWork.from_loader(loader, [everything], 1, None))
        self._epoch = PoissonEpoch(
            self._batches, lambda: self.accounts[0].steps, lambda step: self._key("draws", 0, step)
        )
        self._loader = make_poisson_loader(loader, self._epoch)
        return self._loader

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse several optimisers, and callbacks that decide by training metrics."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"DPSGD needs exactly one optimiser, but the module has {len(trainer.optimizers)}. "
                "Put all parameters into one optimiser."
            )
        self._undo.callback(setattr, trainer.strategy, "optimizers", trainer.strategy.optimizers)
        if self._federated is None and self.protects_samples:  # a federation checks this by client_metrics
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
        # torch warns that the first layer's inputs need no gradient, as is expected here
        warnings.filterwarnings("ignore", message="Full backward hook is firing")

    def _charge_elsewhere(self) -> None:
        """Charge rounds of the ledger that this process has not run. Called between rounds."""
        federated = self._federated
        if federated is None or federated.engine is None or federated.seed is not None:
            return
        if self._spent.charge_elsewhere(federated.engine.ledger.charges_elsewhere.tolist()):
            rank_zero_warn(
                "The ledger has rounds of a killed process or another run. DPSGD charges their whole cohorts "
                f"at the present noise and batches: epsilon {self.epsilon(self.delta):.3g} so far."
            )

    def _count_other_runs(self) -> None:
        """Look for rounds of other runs and charge them, unless a round is open."""
        engine = None if self._federated is None else self._federated.engine
        if engine is not None and engine.plan is None and self.accounts:
            count_other_runs(engine.ledger)
            self._charge_elsewhere()

    def _make_noisy(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Wrap the optimiser of the fit, or of a client's fit, so that it steps with noisy sums."""
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
        # constraints on parameters are applied after every noisy step, so they are post-processing
        constraints = {} if self._federated is None else self._federated.fit.vector.constraints
        handles = constrain_steps(trainer.optimizers[0], module, constraints)
        # a client's optimiser is dropped after its training, so its handles stay
        for handle in handles if self._federated is None else ():
            self._undo.callback(handle.remove)
        trainer.strategy.optimizers = [self._optimizer]

    def _try_loss(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Try the loss and the gradients of a few samples, once an epoch and before its first charge.

        Args:
            trainer: The user's Trainer.
            module: The user's module.

        Raises:
            ValueError: If a check of `dpsgd.first_trial` fails.
        """
        check_shapes(module)
        self._hooked.remove_hooks()
        if self._federated is None:
            held, fetch = torch.arange(self._batches.num_samples(0)), self._loader.dataset.__getitem__
        else:
            held, fetch = torch.cat(self._federated.client_indices), self._federated.fit.fetch
        of_clients = self._federated is not None
        self.loss_reduction, names = try_steps(trainer, module, held, fetch, of_clients, self.loss_reduction)
        if self._tried_in < 0:
            warn_unlogged_monitors(trainer, names)
        self._tried_in = trainer.current_epoch

    def _hook_into(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Put Opacus's hooks on the module. By now its layers are in the mode of the first step."""
        alone = self._federated is None
        if not alone and trainer is not self._hooked.trainer:
            self._make_noisy(trainer, module)
        if alone and trainer.current_epoch != self._tried_in:
            self._try_loss(trainer, module)
        assert self._optimizer is not None and self.loss_reduction is not None
        self._optimizer.loss_reduction = self.loss_reduction
        self._hooked.hook(trainer, module, self.loss_reduction, self._undo if alone else None)

    def _reset_fit(self) -> None:
        """Forget the Trainer and the guards of the last fit."""
        self._home = self._read = None
        self._hooked.forget()
        self._tried_in = -1

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove hooks, loader and optimiser wrapper."""
        self._undo.close()
        if stage == "fit":
            self._hooked.remove_hooks()
            self._reset_fit()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Remove hooks, loader and optimiser wrapper. Keep the guards against saving changed tensors."""
        self._undo.close()
        self._hooked.remove_hooks()
        if self._federated is not None:  # a client has changed its copy only
            self._reset_fit()

    # ---- training ---------------------------------------------------------------------------------

    @property
    def accountant(self) -> SampledGaussianAccountant:
        """Accountant of a run without a federation. For clients, see `accounts`."""
        from lightning_fedq.dpsgd.accountant import SampledGaussianAccountant

        return (
            self.accounts[0].accountant if self.accounts else SampledGaussianAccountant(self.rows_per_person)
        )

    @property
    def num_non_finite(self) -> int:
        """Number of samples whose gradient was not finite and counted as zero."""
        return self._non_finite + (0 if self._optimizer is None else self._optimizer.num_non_finite)

    def epsilon(self, delta: float) -> float:
        """Return the largest epsilon that any client has spent at `delta`, also in other runs' rounds."""
        self._count_other_runs()
        return max((account.epsilon(delta) for account in self.accounts.values()), default=0.0)

    def statement(self) -> SampleStatement | None:
        """Return the statement of the client with the largest epsilon, or None before the first fit."""
        self._count_other_runs()
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
        """Return each client's number of steps until the training can next stop.

        Without a federation this is one step of client 0, otherwise the next round's steps of its cohort.

        Raises:
            ValueError: If the training does not run on Poisson samples.
        """
        if self._federated is None:
            if not hasattr(self, "_loader"):
                raise ValueError(_FROM_LOADER)
            return {0: 1}
        engine = self._federated.started_engine
        if engine.round == engine.planner.num_rounds:
            return {}
        plan = engine.next_plan()
        return {client: self._batches.steps[client] for client in plan.survivors}

    @property
    def largest_data_set(self) -> int:
        """Largest number of samples of any client."""
        return max(self._batches.num_samples(client) for client in self.accounts)

    def _expected_size(self, client: int) -> int:
        return max(round(self._batches.sample_rate(client) * self._batches.num_samples(client)), 1)

    def _charge(self, module: torch.nn.Module) -> NoiseWords:
        """Charge one step and return its noise. Refuse if a layer was unfrozen since the last check."""
        check_layers(module)
        return self._stream("noise", self._present, self._spent.charge(self._present)).words64

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the client and the size of the batch for the optimiser, and refuse invalid steps."""
        check_accumulation(trainer)
        check_layers(pl_module)
        if trainer is not self._hooked.trainer or trainer.current_epoch != self._tried_in:
            self._hook_into(trainer, pl_module)
        assert self._hooked.buffers is not None and self._optimizer is not None
        self._hooked.buffers.check()
        client = 0
        if self._federated is None:
            drawn, size = self._epoch.drawn.popleft()
        else:
            stack, number = self._federated.fit.present_batch(batch_idx)
            if not stack.clients:  # no client answers in this round, and no step is taken
                return
            (client,) = stack.clients
            self._present = client
            drawn, size = self._first_step[client] + number, stack.batch_sizes[number]
            self._optimizer.expected_batch_size = self._expected_size(client)
        # every step has its own random stream, which must not be used for two steps
        if drawn != self.accounts[client].steps:
            raise RuntimeError(
                f"Got the batch of step {drawn} of client {client} after {self.accounts[client].steps} "
                "charged steps. Return a loss for every batch, and leave every optimizer step to Lightning."
            )
        self._optimizer.batch_size, self._optimizer.batch_is_empty = size, size == 0
        self._reseed_draws("step")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop recording gradients, because other backward passes are no training."""
        self._hooked.stop_recording()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Seed the generators for hooks that run between two steps."""
        self.on_after_backward(trainer, pl_module)
        self._reseed_draws("between")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed the generators again, because a validation may have seeded them."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._reseed_draws("after validation")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed the generators at the start of an epoch."""
        self._reseed_draws("epoch")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the largest epsilon of any client."""
        if self._hooked.buffers is not None:
            self._hooked.buffers.check(content=True)
        if is_client(trainer):
            self._hooked.remove_hooks()
            self._hooked.forget()
        elif not trainer.barebones:
            log_figure(pl_module, "dp/epsilon", self.epsilon(self.delta), prog_bar=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the privacy statement, unless a federation prints it."""
        if self._federated is None and (statement := self.statement()) is not None:
            rank_zero_info(f"privacy of {statement.line}")

    # ---- checkpoint -------------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to save a model whose buffers or parameters were changed without noise."""
        if self._hooked.buffers is not None:
            self._hooked.buffers.check(content=True)
        if self._hooked.parameters is not None:
            self._hooked.parameters.check()

    def state_dict(self) -> dict[str, Any]:
        """Return all accounts in plain types.

        With seeds, the checkpoint of an open round describes the round's start, and so do the accounts.
        Without seeds, an open round counts in full, because a killed process can't report its progress.
        """
        federated, settings = self._federated, dict[str, Any]()
        if federated is not None and federated.engine is not None:
            engine, ledger = federated.engine, federated.engine.ledger
            if federated.seed is None:
                settings["charges"] = (ledger.charges - ledger.charges_elsewhere).tolist()
            if None not in (self.seed, federated.seed):
                settings["at_start_of_round"] = federated.fit.start_of_round is not None
            elif engine.plan is not None:
                settings["round_taken_by"] = engine.plan.survivors
        return {**self._spent.state_dict(**settings), "loss_reduction": self.loss_reduction}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the accounts of a checkpoint. Without a seed, charges of this object are kept."""
        self._spent.load_state_dict(state_dict, repeatable=self.seed is not None)
        self.loss_reduction = state_dict["loss_reduction"]
