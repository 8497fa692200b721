"""What would break DP-SGD's guarantee is refused before or at the step that would break it."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq.callbacks import DPSGD, Federated, PrivacyBudget
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary
from tests.callbacks.steps import Saves
from tests.callbacks.test_dpsgd import Classifier, dpsgd, samples
from tests.callbacks.test_privacy import trainer
from tests.digits_run import Classifier as DigitsClassifier, Digits, fitted, make_trainer


class With(Classifier):
    """The classifier with a layer in its middle, or with a loss of its own."""

    def __init__(self, layer: nn.Module | None = None, loss=nn.functional.cross_entropy) -> None:
        super().__init__()
        self.net[1] = layer or nn.Identity()
        self.loss = loss

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.net(x), y)


# ---- every step is charged and sampled on its own ------------------------------------------------------


def test_a_scheduler_that_starts_later_is_refused_when_it_starts():
    private = dpsgd()
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=1, got 2"):
        trainer(GradientAccumulationScheduler({1: 2}), private, epochs=3).fit(Classifier())
    assert private.accounts[0].steps == 10


def test_a_batch_without_a_step_of_its_own_is_noticed():
    """Accumulation switched on behind the callback's back, for one batch."""

    class Sly(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            self.trainer.accumulate_grad_batches = 2

        def on_train_batch_end(self, *args):
            self.trainer.accumulate_grad_batches = 1

    private = dpsgd()
    with pytest.raises(RuntimeError, match=r"Got the batch of step \d of client 0 after 0 charged steps"):
        trainer(private, epochs=1).fit(Sly())
    assert private.accounts[0].steps == 0


def test_no_stream_of_batches_is_drawn_for_two_steps():
    private = dpsgd()
    drawn = []
    stream = private._stream
    private._stream = lambda purpose, client, step: (
        drawn.append(step) if purpose == "batch" else None,
        stream(purpose, client, step),
    )[1]
    trainer(private, epochs=3).fit(Classifier())
    assert drawn == list(range(30))
    assert private.accounts[0].steps == 30


# ---- layers and buffers --------------------------------------------------------------------------------

NORMS = {
    "affine": lambda: nn.BatchNorm1d(8),
    "not affine": lambda: nn.BatchNorm1d(8, affine=False),
    "no statistics": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "neither": lambda: nn.BatchNorm1d(8, affine=False, track_running_stats=False),
    "lazy": lambda: nn.LazyBatchNorm1d(affine=False),
    "in eval mode, no statistics": lambda: nn.BatchNorm1d(8, affine=False, track_running_stats=False).eval(),
}


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")
@pytest.mark.parametrize("norm", NORMS)
def test_batch_norm_that_uses_the_batch_is_refused(norm):
    with pytest.raises(ValueError, match=r"net\.1 \((Lazy)?BatchNorm1d\) mix.* GroupNorm"):
        trainer(dpsgd(), epochs=1).fit(With(NORMS[norm]()))


@pytest.mark.parametrize("norm", ["not affine", "no statistics", "neither"])
def test_batch_norm_that_uses_the_batch_is_refused_inside_clients(norm):
    model = DigitsClassifier()
    model.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), NORMS[norm](), nn.Linear(8, 10))
    data = FederatedDataModule(Digits(120), clients=[list(range(60)), list(range(60, 120))])
    with pytest.raises(ValueError, match=r"BatchNorm1d.* mix the samples of a batch"):
        make_trainer(Federated(FedAvg(), 2, seed=0), dpsgd(), max_epochs=1).fit(model, datamodule=data)


class Frozen(With):
    """A pretrained normalisation that stays in eval mode."""

    def on_train_epoch_start(self):
        self.net[1].eval()


def test_batch_norm_in_eval_mode_is_a_fixed_map():
    module = Frozen(nn.BatchNorm1d(8, affine=False))
    trainer(dpsgd(), epochs=1).fit(module)
    assert module.net[1].num_batches_tracked == 0


def test_batch_norm_that_is_thawed_on_the_way_is_refused_then():
    class Thawed(Frozen):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 3:
                self.net[1].train()

    private = dpsgd()
    with pytest.raises(ValueError, match=r"BatchNorm1d.* mix"):
        trainer(private, epochs=1).fit(Thawed(nn.BatchNorm1d(8, affine=False)))
    assert private.accounts[0].steps == 3


class Remembers(nn.Module):
    """Keeps a sum of what it saw in a buffer, in one of four ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place":
                self.seen += x.sum(0)
            elif self.how == "replaced":
                self.seen = self.seen + x.sum(0)
            elif self.how == "data":
                self.seen.data.add_(x.sum(0))
            elif self.how == "numpy":
                self.seen.numpy()[:] += x.detach().numpy().sum(0)
            elif self.how == "added":
                self.register_buffer("more", x.sum(0))
        return x


@pytest.mark.parametrize("how", ["in place", "replaced", "data", "numpy", "added"])
def test_buffers_that_change_in_training_are_refused(how):
    with pytest.raises(
        ValueError, match=rf"changed the buffers net\.1\.{'more' if how == 'added' else 'seen'}"
    ):
        trainer(dpsgd(), epochs=1).fit(With(Remembers(how)))


def test_a_checkpoint_never_holds_a_buffer_that_changed(tmp_path):
    """A write that leaves no trace on the tensor is found before anything is saved."""

    saves = Saves(tmp_path, "on_train_batch_end")
    with pytest.raises(ValueError, match=r"changed the buffers net\.1\.seen"):
        trainer(dpsgd(), saves, epochs=1).fit(With(Remembers("numpy")))
    assert saves.count and not list(tmp_path.iterdir())


def test_nor_does_one_that_is_written_because_the_training_failed(tmp_path):
    saves = Saves(tmp_path, "on_exception")
    with pytest.raises(ValueError, match=r"changed the buffers net\.1\.seen"):
        trainer(dpsgd(), saves, epochs=1).fit(With(Remembers("numpy")))
    with pytest.raises(ValueError, match="changed the parameters"):
        trainer(dpsgd(), saves, epochs=1).fit(Writes("data"))
    assert saves.count == 2 and not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="The privacy budget allows"):
        trainer(dpsgd(), PrivacyBudget(2.0, 1e-3, Adversary.OUTSIDER), saves, min_epochs=50).fit(Classifier())
    assert (tmp_path / "3.ckpt").exists()


class Writes(Classifier):
    """Leaves the mean of a batch in a parameter, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.kept = nn.Parameter(torch.zeros(6), requires_grad=how == "trained")
        self.words = nn.Embedding(50, 6, max_norm=0.5 if how == "max_norm" else None)

    def training_step(self, batch, batch_idx):
        mean = batch[0].mean(0)
        if self.how == "replaced":
            self.kept = nn.Parameter(mean, requires_grad=False)
        elif self.how == "copied":
            self.kept.data.copy_(mean)
        elif self.how in ("data", "trained"):
            self.kept.data = mean
        scale = 1.0 + 0.0 * (self.words(batch[1]).sum() + self.kept.sum())
        return scale * nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():  # an average of noisy weights is nobody's secret
            self.words.weight.lerp_(torch.ones(6), 0.1)


@pytest.mark.parametrize("how", ["replaced", "copied", "data", "trained", "max_norm"])
def test_a_step_that_writes_to_parameters_itself_is_refused(how):
    name = "words.weight" if how == "max_norm" else "kept"
    with pytest.raises(ValueError, match=f"training_step changed the parameters {name} without noise"):
        trainer(dpsgd(), epochs=1).fit(Writes(how))


def test_a_step_of_a_client_that_writes_to_parameters_itself_is_refused():
    class Remembering(DigitsClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.kept = nn.Parameter(torch.zeros(()), requires_grad=False)

        def training_step(self, batch, batch_idx):
            self.kept.data = batch[0].mean()
            return super().training_step(batch, batch_idx)

    for order in (1, -1):
        callbacks = [Federated(FedAvg(), 2, seed=0), dpsgd()][::order]
        with pytest.raises(ValueError, match="training_step changed the parameters kept"):
            make_trainer(*callbacks).fit(Remembering(), datamodule=FederatedDataModule(Digits(40)))


# ---- how the loss is reduced ---------------------------------------------------------------------------


def released_sum(module, batch_size=100):
    """The clipped sum of one step over all samples, at hardly any noise, C = 1."""
    module.batch_size = batch_size
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)
    trainer(DPSGD(1e-6, 1.0, delta=1e-4, seed=3), epochs=1, max_steps=1).fit(module)
    return before - torch.cat([p.detach().flatten() for p in module.parameters()])


class InRows(Classifier):
    """Gives its layers something else than a row for every sample of the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.positions = nn.Embedding(3, 6)

    def training_step(self, batch, batch_idx):
        x, y = batch
        steps = torch.stack([x, x, x], 1)  # (batch, time, features)
        if self.how == "flattened":
            logits = self.net(steps.reshape(-1, 6)).reshape(len(x), 3, 3)
        elif self.how == "time first":
            logits = self.net(steps.transpose(0, 1)).transpose(0, 1)
        elif self.how == "positions":
            logits = self.net(steps + self.positions(torch.arange(3)))
        else:
            logits = self.net(steps + self.positions(torch.arange(3).expand(len(x), 3)))
        return nn.functional.cross_entropy(logits.mean(1), y)

    def configure_optimizers(self):
        trained = [*self.net.parameters(), *(self.positions.parameters() if "pos" in self.how else ())]
        return torch.optim.SGD(trained, lr=0.3)


@pytest.mark.parametrize("how", ["flattened", "time first", "positions"])
def test_layers_see_one_row_of_every_sample_or_the_run_is_refused(how):
    """In 3 rows a sample adds up to 3 times the clipping norm."""
    module, private = InRows(how), dpsgd()
    module.batch_size = 100
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(RuntimeError, match=r"Layers .*saw .* rows for a batch of .* samples"):
        trainer(private, epochs=1).fit(module)
    assert not len(private.accountant)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_axes_behind_the_samples_are_as_before():
    trainer(dpsgd(), epochs=1).fit(InRows("positions of each sample"))


class Passes(Classifier):
    """A second pass of some samples, or of all with what comes out masked."""

    def __init__(self, masked: bool) -> None:
        super().__init__(batch_size=100)
        self.masked = masked

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        losses = nn.functional.cross_entropy(self.net(inputs), labels, reduction="none")
        chosen = labels == 2
        if self.masked:
            again = nn.functional.cross_entropy(self.net(-inputs), labels, reduction="none")
            return (losses + torch.where(chosen, again, 0.0)).mean()
        again = torch.zeros_like(losses)
        again[chosen] = nn.functional.cross_entropy(
            self.net(-inputs[chosen]), labels[chosen], reduction="none"
        )
        return (losses + again).mean()


def test_a_second_pass_of_some_samples_is_refused():
    """Its rows would be those of other samples, each clipped together with one of them."""
    private = dpsgd()
    with pytest.raises(RuntimeError, match=r"\(Linear\) saw .* rows in one pass and .* in another"):
        trainer(private, epochs=1).fit(Passes(False))
    assert not len(private.accountant)


def test_a_summed_loss_is_found_out_and_clipped_per_sample():
    """Clipped per sample, then summed: a summed loss takes the step of a mean one, times the batch."""

    def total(scores, labels):
        return nn.functional.cross_entropy(scores, labels, reduction="sum")

    of_sum, of_mean = released_sum(With(loss=total)), released_sum(With())
    torch.testing.assert_close(of_sum, 100 * of_mean, atol=2e-3, rtol=1e-3)


def weighted(scores, labels):
    return nn.functional.cross_entropy(scores, labels, weight=torch.tensor([1.0, 5.0, 0.2]))


def contrastive(scores, labels):
    return nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


def over_tokens(scores, labels):
    return nn.functional.cross_entropy(scores, torch.where(labels == 2, -100, labels))


def per_root(scores, labels):
    return nn.functional.cross_entropy(scores, labels, reduction="sum") / len(labels) ** 0.5


def centred(scores, labels):
    return nn.functional.cross_entropy(scores - scores.mean(0), labels)


@pytest.mark.parametrize("loss", [weighted, contrastive, over_tokens, per_root, centred])
def test_a_loss_in_which_samples_weigh_on_each_other_is_refused(loss):
    with pytest.raises(ValueError, match=r"neither the mean \(.*\) nor the sum \(.*\)"):
        trainer(dpsgd(), epochs=1).fit(With(loss=loss))


def test_dropout_and_counters_do_not_disturb_the_trial():
    class Counting(With):
        def training_step(self, batch, batch_idx):
            self.seen.append(len(batch[0]))
            self.log("loss", loss := super().training_step(batch, batch_idx))
            self.log_dict({"twice": 2 * loss})
            return {"loss": loss}

    module = Counting(nn.Dropout(0.5))
    trainer(dpsgd(), epochs=1, limit_train_batches=1).fit(module)
    assert len(module.seen) == 1


def test_one_sample_is_too_few_to_tell():
    class One(Classifier):
        def train_dataloader(self):
            x, y = samples().tensors
            return DataLoader(TensorDataset(x[:1], y[:1]), batch_size=1)

    with pytest.raises(ValueError, match="2 samples or more"):
        trainer(DPSGD(1.0, 1.0, delta=1e-3), epochs=1).fit(One())


# ---- tuners --------------------------------------------------------------------------------------------


class Tuned(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1


@pytest.mark.parametrize("tuner", [LearningRateFinder, BatchSizeFinder])
def test_finders_train_without_noise_and_are_refused(tuner):
    module = Tuned()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(
        ValueError, match=f"{tuner.__name__} trains without clipping and noise.* Leave it out"
    ):
        trainer(tuner(), dpsgd(), epochs=1).fit(module)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert module.seen == []


# ---- who decides by what ---------------------------------------------------------------------------------


class Watched(Classifier):
    """Logs a loss of its own in training and in validation, and may schedule by either."""

    def __init__(self, plateau: str = "") -> None:
        super().__init__()
        self.plateau = plateau

    def on_train_epoch_end(self):
        self.log("end", 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def val_dataloader(self):
        return DataLoader(samples(), batch_size=50)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if not self.plateau:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.plateau}}


def watching(kind, monitor, folder):
    if kind == "ReduceLROnPlateau":
        return Watched(monitor), []
    if kind == "EarlyStopping":
        return Watched(), [pl.callbacks.EarlyStopping(monitor, check_on_train_epoch_end=True)]
    return Watched(), [pl.callbacks.ModelCheckpoint(folder, monitor=monitor)]


KINDS = ("ReduceLROnPlateau", "EarlyStopping", "ModelCheckpoint")


@pytest.mark.parametrize("monitor", ["loss", "loss_epoch", "end"])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_decides_by_what_training_logs(tmp_path, kind, monitor):
    module, callbacks = watching(kind, monitor, tmp_path)
    private, before = dpsgd(), [p.detach().clone() for p in module.parameters()]
    with pytest.raises(
        ValueError, match=f"{kind} watches '{monitor}', which training logs.* of the validation"
    ):
        trainer(private, *callbacks, enable_checkpointing=True, default_root_dir=tmp_path).fit(module)
    if monitor != "end":
        assert not len(private.accountant)
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert not list(tmp_path.iterdir())
    assert "log" not in vars(module)


@pytest.mark.parametrize(("monitor", "seed"), [("val_loss", None), ("dp/epsilon", None), ("loss", 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_validation_what_is_spent_and_a_run_without_privacy_may_be_watched(tmp_path, kind, monitor, seed):
    module, callbacks = watching(kind, monitor, tmp_path)
    run = trainer(
        dpsgd(seed=seed), *callbacks, epochs=2, enable_checkpointing=True, default_root_dir=tmp_path
    )
    run.fit(module)
    assert run.current_epoch >= 1 and {"loss", "end", "val_loss", "dp/epsilon"} <= run.callback_metrics.keys()


def test_no_file_is_named_by_what_training_logs(tmp_path):
    for name in ("{epoch}-{loss:.9f}", "{loss_epoch}"):
        files = pl.callbacks.ModelCheckpoint(tmp_path, filename=name)
        with pytest.raises(
            ValueError, match=r"ModelCheckpoint names its files by 'loss.*, which training logs"
        ):
            trainer(dpsgd(), files, epochs=1, enable_checkpointing=True).fit(Watched())
    assert not list(tmp_path.iterdir())
    files = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}-{val_loss:.3f}-{dp/epsilon:.3f}")
    trainer(dpsgd(), files, epochs=1, enable_checkpointing=True).fit(Watched())
    assert "val_loss=" in files.best_model_path


# ---- rows of a batch, and losses that change --------------------------------------------------------------


class Reordered(Classifier):
    """The second layer has the batch in another order than the first, and the loss is what it was."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.drop = how, nn.Dropout(0.5 if how == "shuffled, dropout" else 0.0)

    def training_step(self, batch, batch_idx):
        x, y = batch
        order = x[:, 0].argsort() if self.how == "sorted" else torch.randperm(len(x))
        h = self.drop(self.net[:2](x))
        return nn.functional.cross_entropy(self.net[2:](h[order]), y[order])


@pytest.mark.parametrize("how", ["sorted", "shuffled", "shuffled, dropout"])
def test_batches_whose_order_changes_between_layers_are_refused(how):
    """40 samples, two layers: one sample more moved the clipped sum by 24 max_grad_norm."""
    private = dpsgd()
    with pytest.raises(ValueError, match="Gradients of a sample in a batch differ from those of the sample"):
        trainer(private, epochs=1).fit(Reordered(how))
    assert private.accounts[0].steps == 0


def test_a_batch_that_is_sorted_before_all_layers_is_welcome():
    class Sorted(Classifier):
        def training_step(self, batch, batch_idx):
            order = batch[0][:, 0].argsort()
            return super().training_step([part[order] for part in batch], batch_idx)

    run = fitted(Sorted(), dpsgd(), max_epochs=1)
    assert run.current_epoch == 1


@pytest.mark.parametrize("later", ["sum", "weights", "reordered"])
def test_a_loss_that_changes_in_a_later_epoch_is_refused_then(later):
    class Changes(Reordered):
        def training_step(self, batch, batch_idx):
            if not self.current_epoch:
                return Classifier.training_step(self, batch, batch_idx)
            if later == "reordered":
                return super().training_step(batch, batch_idx)
            weight = torch.tensor([1.0, 5.0, 9.0]) if later == "weights" else None
            reduction = "sum" if later == "sum" else "mean"
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight, reduction=reduction)

    private = dpsgd()
    message = "is now the sum|neither the mean \\(.*\\) nor the sum|Gradients of a sample in a batch differ"
    with pytest.raises(ValueError, match=message):
        trainer(private, epochs=2).fit(Changes("sorted"))
    assert private.accounts[0].steps == 10


class NoisyBackward(torch.autograd.Function):
    """The loss is what it was, its gradients never are."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.randn_like(grad)


@pytest.mark.parametrize("how", ["in order", "sorted"])
def test_gradients_that_are_random_though_the_loss_is_not_are_refused(how):
    """Rows could not be compared, and a batch that is reordered between two layers passed behind them."""

    class Noisy(Reordered):
        def training_step(self, batch, batch_idx):
            x, y = batch
            order = x[:, 0].argsort() if self.how == "sorted" else torch.arange(len(x))
            h = NoisyBackward.apply(self.net[:2](x)[order])
            return nn.functional.cross_entropy(self.net[2:](h), y[order])

    private = dpsgd()
    with pytest.raises(ValueError, match="Gradients of one sample are random, though its loss is not"):
        trainer(private, epochs=1).fit(Noisy(how))
    assert private.accounts[0].steps == 0
