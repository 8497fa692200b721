"""`DPSGD`: sample-level differential privacy for an ordinary, unfederated Lightning module.

Opacus's hooks give every sample's gradient on the module itself, which is never wrapped or swapped: hooks
and the optimiser's wrapper go on at the start of the fit and come off in `teardown`. Batches are Poisson
samples, drawn anew for every step; an empty batch is a step like any other, with noise alone. Every step is
charged before its noise is drawn. What the module logs from training batches is a release of its own, which
no epsilon covers; so is a loss that looks at other samples of the batch.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.callbacks.federated import Federated
from lightning_fedq.data.loader import check_loader
from lightning_fedq.randomness import Stream, hkdf_expand, hkdf_extract, pack_fields

if TYPE_CHECKING:
    from lightning_fedq.privacy.sgd import GridDPOptimizer, NoiseWords, SampledGaussianAccountant

_FROM_LOADER = (
    "DPSGD samples its own batches, and a loader handed straight to fit(...) can't be replaced; "
    "return it from train_dataloader of the module or of a LightningDataModule"
)


class PoissonBatches(Sampler[list[int]]):
    """Every step takes every sample independently, with probability `threshold / 2^32`.

    Args:
        num_samples: Size of the training set.
        batch_size: Expected size of a batch.
        stream: Gives the stream of a step's coins.
        next_step: Tells the number of the next step.
    """

    def __init__(
        self, num_samples: int, batch_size: int, stream: Callable[[int], Stream], next_step: Callable[[], int]
    ) -> None:
        self.num_samples, self.stream, self.next_step = num_samples, stream, next_step
        self.threshold = min((batch_size << 32) // num_samples, 1 << 32)
        self.sizes: deque[int] = deque()

    @property
    def sample_rate(self) -> float:
        """The exact probability that a sample is taken."""
        return self.threshold / 2.0**32

    def __len__(self) -> int:
        """Steps of an epoch: one pass over the data, on average."""
        return max(round(2**32 / self.threshold), 1)

    def __iter__(self) -> Iterator[list[int]]:
        self.sizes.clear()
        first = self.next_step()
        for step in range(first, first + len(self)):
            taken = np.flatnonzero(self.stream(step).words(self.num_samples) < self.threshold)
            self.sizes.append(len(taken))
            yield taken.tolist()


class EmptyBatches:
    """Collates an empty batch to one sample of zeros, whose gradient the optimiser drops.

    Args:
        collate: The loader's own collate function.
        dataset: Gives the structure of a sample; its values are not used.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Dataset[Any]) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, samples: list[Any]) -> Any:
        """Collate the samples, or zeros if there are none."""
        if samples:
            return self.collate(samples)
        one = self.collate([self.dataset[0]])
        return tree_map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, one)


class DPSGD(pl.Callback):
    """Train an ordinary module with differentially private SGD, or any optimiser on its noisy gradients.

    Args:
        noise_multiplier: Std of the noise on the summed gradient / `max_grad_norm`, > 0.
        max_grad_norm: Norm to which every sample's gradient is clipped, > 0.
        delta: At which `dp/epsilon` is logged, in (0, 1 / samples).
        seed: An integer makes batches and noise reproducible, and NOT private; None takes them from the
            operating system.

    Attributes:
        accountant: What was spent.
        num_non_finite: Samples whose gradient was not finite and counted as zero.

    Raises:
        ValueError: If a setting is out of its range.
    """

    def __init__(
        self, noise_multiplier: float, max_grad_norm: float, *, delta: float, seed: int | None = None
    ) -> None:
        from lightning_fedq.privacy.accounting import check_delta
        from lightning_fedq.privacy.sgd import SampledGaussianAccountant

        if not (noise_multiplier > 0.0 and max_grad_norm > 0.0):
            raise ValueError(
                f"noise_multiplier and max_grad_norm must be > 0, got {noise_multiplier} and {max_grad_norm}"
            )
        self.noise_multiplier, self.max_grad_norm = noise_multiplier, max_grad_norm
        self.delta, self.seed = check_delta(delta), seed
        self.accountant: SampledGaussianAccountant = SampledGaussianAccountant()
        self.step_limit: int | None = None
        """Steps after which no more are taken; `PrivacyBudget` sets it."""
        secret = os.urandom(32) if seed is None else pack_fields("reproducible", hex(seed))
        self._root = hkdf_extract(b"fedq/v1/dp-sgd", secret)
        self._restore: list[Callable[[], object]] = []
        self._optimizer: GridDPOptimizer | None = None

    # ---- set up and take off ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what can't work, and put Poisson sampling in place of the user's loader."""
        if stage != "fit":
            return
        _check(trainer, pl_module)
        owner: Any = trainer.datamodule or pl_module  # type: ignore[attr-defined]
        user_loader = owner.train_dataloader
        self._replace(owner, "train_dataloader", lambda: self._poisson(user_loader()))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        if name in vars(owner):
            previous = vars(owner)[name]
            self._restore.append(lambda: setattr(owner, name, previous))
        else:
            self._restore.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def _stream(self, purpose: str, step: int) -> Stream:
        return Stream(hkdf_expand(self._root, pack_fields(purpose, step)))

    def _poisson(self, given: object) -> DataLoader[Any]:
        from lightning_fedq.privacy.accounting import check_delta

        loader = check_loader(given)
        size = len(loader.dataset)  # type: ignore[arg-type]
        check_delta(self.delta, size)
        assert loader.batch_size is not None
        self._batches = PoissonBatches(
            size, loader.batch_size, lambda step: self._stream("batch", step), lambda: len(self.accountant)
        )
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._batches,
            collate_fn=EmptyBatches(loader.collate_fn, loader.dataset),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )
        return self._loader

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hook into the module and wrap its optimiser."""
        from opacus.grad_sample import GradSampleHooks

        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"DPSGD needs exactly one optimiser, the module has {len(trainer.optimizers)}; "
                "put all parameters into one optimiser"
            )
        quiet = warnings.catch_warnings()
        quiet.__enter__()
        self._restore.append(lambda: quiet.__exit__(None, None, None))
        # torch warns that the first layer's inputs need no gradient, which is as it should be
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        hooks = GradSampleHooks(pl_module, strict=True)
        self._restore += [lambda: _clear(pl_module), hooks.remove_hooks]
        original = trainer.strategy.optimizers
        self._restore.append(lambda: setattr(trainer.strategy, "optimizers", original))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse to train on a loader without Poisson sampling."""
        from lightning_fedq.privacy.sgd import GridDPOptimizer

        if trainer.train_dataloader is not getattr(self, "_loader", None):
            raise ValueError(_FROM_LOADER)
        assert self._loader is not None
        self._optimizer = GridDPOptimizer(
            trainer.optimizers[0],
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=max(round(self._batches.sample_rate * self._batches.num_samples), 1),
            words=self._charge,
        )
        trainer.strategy.optimizers = [self._optimizer]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take everything off again."""
        self._take_off()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take everything off again."""
        self._take_off()

    def _take_off(self) -> None:
        while self._restore:
            self._restore.pop()()

    # ---- training ---------------------------------------------------------------------------------

    @property
    def sample_rate(self) -> float:
        """Chance that a sample is in a batch, from the start of the training on."""
        if not hasattr(self, "_batches"):
            raise ValueError(_FROM_LOADER)
        return self._batches.sample_rate

    @property
    def num_samples(self) -> int:
        """Size of the training set, from the start of the training on."""
        if not hasattr(self, "_batches"):
            raise ValueError(_FROM_LOADER)
        return self._batches.num_samples

    @property
    def num_non_finite(self) -> int:
        """Samples whose gradient was not finite."""
        return 0 if self._optimizer is None else self._optimizer.num_non_finite

    def _charge(self) -> NoiseWords:
        """Pay for one step, then hand out its noise."""
        step = len(self.accountant)
        if self.step_limit is not None and step >= self.step_limit:
            raise RuntimeError(
                f"the privacy budget allows {self.step_limit} steps and all are taken; "
                "raise the budget, or stop the training here"
            )
        self.accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate)
        return self._stream("noise", step).words64

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Tell the optimiser whether anybody is in the batch."""
        assert self._optimizer is not None
        self._optimizer.batch_is_empty = self._batches.sizes.popleft() == 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what was spent."""
        if not trainer.barebones:
            epsilon = self.accountant.get_epsilon(self.delta)
            pl_module.log("dp/epsilon", epsilon, prog_bar=True, on_step=False, on_epoch=True, batch_size=1)

    # ---- checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was spent, in plain types."""
        return {"history": [list(entry) for entry in self.accountant.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what a checkpoint had spent."""
        self.accountant.history = [(nm, rate, steps) for nm, rate, steps in state_dict["history"]]


def _clear(module: torch.nn.Module) -> None:
    """Remove what the hooks and the optimiser left on parameters and layers."""
    for parameter in module.parameters():
        for name in ("grad_sample", "summed_grad", "_forward_counter", "_current_grad_sample"):
            if hasattr(parameter, name):
                delattr(parameter, name)
    for layer in module.modules():
        for name in ("activations", "max_batch_len"):
            if name in vars(layer):
                delattr(layer, name)


def _check(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse what would break the guarantee, each with its cure."""
    if any(isinstance(callback, Federated) for callback in trainer.callbacks):
        raise ValueError(
            "DPSGD inside the clients of a federation is not supported: stacks of clients have no gradients "
            "per sample; use DPSGD without Federated, or Federated with a private mechanism"
        )
    if sum(isinstance(callback, DPSGD) for callback in trainer.callbacks) > 1:
        raise ValueError("the Trainer has two DPSGD callbacks; leave one of them out")
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy) or trainer.world_size > 1:
        raise ValueError(
            f"DPSGD runs on one device, got {type(trainer.strategy).__name__} on {trainer.world_size}; "
            "use Trainer(strategy='auto', devices=1)"
        )
    if not module.automatic_optimization:
        raise ValueError(
            "DPSGD needs automatic optimisation; return the loss and leave the steps to Lightning"
        )
    if trainer.datamodule is None and not is_overridden("train_dataloader", module, pl.LightningModule):
        raise ValueError(_FROM_LOADER)
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches would change the sampling, got {trainer.accumulate_grad_batches}; "
            "use a larger batch_size"
        )
    if trainer.gradient_clip_val:
        raise ValueError("gradient_clip_val clips batches, not samples; use DPSGD(max_grad_norm=...) instead")
    if trainer.precision not in ("32-true", "64-true"):
        raise ValueError(f"DPSGD needs full precision, got {trainer.precision}; use Trainer(precision=32)")
    if trainer.overfit_batches:
        raise ValueError("overfit_batches replaces the sampling; use a small dataset")
