"""Callbacks that end a run, or save it, at a chosen place."""

from lightning_fedq._lightning import pl


class Fails(pl.Callback):
    """Raises an error at a batch of a client in a round."""

    def __init__(self, error, epoch, batch=0):
        self.error, self.place = error, (epoch, batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.place:
            raise self.error


class EndsAfter(pl.Callback):
    """Ends the training after some rounds."""

    knows_clients, writes_in_rounds = True, False

    def __init__(self, rounds):
        self.rounds = rounds

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 >= self.rounds


class Saves(pl.Callback):
    """Saves at every call of some hooks, in the fit or within a client: `1.ckpt`, `2.ckpt`, ..."""

    is_shared_by_clients = knows_clients = True

    def __init__(self, folder, *hooks, weights_only=False):
        self.folder, self.weights_only, self.count = folder, weights_only, 0
        for hook in hooks:
            setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        if not trainer.sanity_checking:
            self.count += 1
            trainer.save_checkpoint(self.folder / f"{self.count}.ckpt", weights_only=self.weights_only)
