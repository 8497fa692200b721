"""The trainer, its metrics, its end, and what is logged or saved of stored losses."""

from lightning_fedq._lightning import pl
from tests.isolation.worlds import Shape


class AttributeOfTrainer(Shape):
    def scaled(self, loss):
        trainer = self.trainer
        trainer.mean = 0.5 * (getattr(trainer, "mean", 1.0) + loss.item())
        return loss / trainer.mean


class AttributeOfFitLoop(Shape):
    def scaled(self, loss):
        loop = self.trainer.fit_loop
        loop.mean = 0.5 * (getattr(loop, "mean", 1.0) + loss.item())
        return loss / loop.mean


class ShouldStopByLoss(Shape):
    """Ends the fit by one client's loss; client 0's other data have losses above 4."""

    def scaled(self, loss):
        if loss.item() > 4.0:
            self.trainer.should_stop = True
        return loss


class StopByReturn(Shape):
    """Lightning skips the rest of an epoch where the hook returns -1."""

    def begin(self):
        self.large = False

    def scaled(self, loss):
        self.large = self.large or loss.item() > 4.0
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.large else None


class MetricsWritten(Shape):
    def begin(self):
        self.largest = 0.0

    def scaled(self, loss):
        self.largest = max(self.largest, loss.item())
        for metrics in (self.trainer.callback_metrics, self.trainer.logged_metrics):
            metrics["largest"] = loss.detach().new_tensor(self.largest)
        return loss


class LoggedInValidation(Shape):
    """A stored loss of training is logged where the server's metrics are."""

    def begin(self):
        self.losses = []

    def scaled(self, loss):
        self.losses.append(loss.detach())
        return loss

    def on_validation_epoch_end(self):
        self.log("stored", sum(self.losses) / max(1, len(self.losses)))


class StopsEarly(LoggedInValidation):
    """`EarlyStopping` looks at a stored loss."""

    def on_validation_epoch_end(self):
        self.log("stored", 1.0 * (max(map(float, self.losses), default=0.0) > 4.0))

    def callbacks(self):
        return (pl.callbacks.EarlyStopping("stored", stopping_threshold=0.5, mode="max", patience=9),)


class HyperparametersWritten(Shape):
    """Which checkpoints hold."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"largest": 0.0})

    def scaled(self, loss):
        self.hparams.largest = max(self.hparams.largest, loss.item())
        return loss


class WrittenIntoGroups(Shape):
    """Of the optimiser, and its defaults."""

    def scaled(self, loss):
        optimizer = self.optimizers().optimizer
        optimizer.defaults["seen"] = optimizer.defaults.get("seen", 0.0) + loss.item()
        optimizer.param_groups[0]["seen"] = optimizer.defaults["seen"]
        return loss
