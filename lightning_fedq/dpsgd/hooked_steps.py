"""Opacus's hooks on the training steps of a fit, with guards of everything that is released without noise."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from lightning_fedq.clients.undo import Undo
from lightning_fedq.dpsgd.refusals import UnchangedBuffers, UnchangedParameters
from lightning_fedq.training.checkpoints import SavedStates

if TYPE_CHECKING:
    from lightning_fedq.dpsgd.opacus import SampleGradientHooks

_ON_PARAMETERS = ("grad_sample", "summed_grad", "_forward_counter", "_current_grad_sample")
_ON_LAYERS = ("activations", "max_batch_len")
"""Attributes that the hooks and the optimiser leave on parameters and on layers."""


class HookedSteps:
    """Opacus's hooks on the module of a fit or of a client's fit, active in its own training steps only.

    Attributes:
        trainer: Trainer of the module. None if there is none.
        buffers: Guard of the module's buffers. None without a Trainer.
        parameters: Guard of the module's parameters. None without a Trainer.
    """

    def __init__(self) -> None:
        self.trainer: Any = None
        self.buffers: UnchangedBuffers | None = None
        self.parameters: UnchangedParameters | None = None
        self._hooks: SampleGradientHooks | None = None

    def hook(
        self, trainer: Any, module: nn.Module, loss_reduction: Literal["mean", "sum"], undo: Undo | None
    ) -> None:
        """Put hooks on a module, whose layers are in the mode of the first step by now.

        Args:
            loss_reduction: Reduction of the loss over a batch.
            undo: Undo list of the fit. None for a client's copy, for which nothing has to be undone.
        """
        from lightning_fedq.dpsgd.opacus import SampleGradientHooks

        self.remove_hooks()
        self._hooks = SampleGradientHooks(module, loss_reduction=loss_reduction, strict=True)
        self._hooks.disable_hooks()  # but in training steps, up to the end of their own backward pass
        if trainer is self.trainer:
            return
        self.trainer = trainer
        self.buffers, self.parameters = UnchangedBuffers(module), UnchangedParameters(module)
        watch, plugin = self.parameters.watch, trainer.precision_plugin
        step_context = plugin.train_step_context

        @contextmanager
        def context() -> Iterator[None]:
            # there are no hooks while the loss is tried
            recording = nullcontext() if self._hooks is None else self._hooks.training_step()
            saved = SavedStates(module)
            with recording, watch(), step_context():
                yield
            saved.check()

        if undo is None:
            plugin.train_step_context = context
        else:
            undo.replace(plugin, "train_step_context", context)

    def stop_recording(self) -> None:
        """Stop recording gradients, because other backward passes are no training."""
        if self._hooks is not None:
            self._hooks.disable_hooks()

    def remove_hooks(self) -> None:
        """Remove the hooks, and what they and the optimiser left on parameters and layers."""
        if self._hooks is None:
            return
        self._hooks.remove_hooks()
        module = self._hooks._module
        for owners, names in ((module.parameters(), _ON_PARAMETERS), (module.modules(), _ON_LAYERS)):
            for owner in owners:
                for name in names:
                    if name in vars(owner):
                        delattr(owner, name)
        self._hooks = None

    def forget(self) -> None:
        """Forget the Trainer and the guards. Hooks stay until they are removed."""
        self.trainer = self.buffers = self.parameters = None
