"""Ten Lightning trainings in the style of public tutorials, on small data: nothing here knows lightning_fedq.

Each is a function of a size (1 is seconds; the tests take 0) that returns the module, what `trainer.fit` is
given, and the Trainer's settings. Every module logs `val_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class Training(NamedTuple):
    """One training: a module, the keyword arguments of `fit`, and the settings of the Trainer."""

    module: pl.LightningModule
    fit: dict[str, Any]
    trainer: dict[str, Any]


def digits(num_samples: int) -> tuple[Tensor, Tensor]:
    """Images `(samples, 1, 8, 8)` in [0, 1], and labels."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))[:num_samples]
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    return images[order], torch.tensor(data.target)[order]


def loaders(dataset: Dataset[Any], batch_size: int = 16, **settings: Any) -> dict[str, Any]:
    """Training and validation loaders, handed to `fit`."""
    size = len(dataset)  # type: ignore[arg-type]
    train, val = random_split(dataset, [size - size // 5, size // 5], torch.Generator().manual_seed(0))
    return {
        "train_dataloaders": DataLoader(train, batch_size=batch_size, shuffle=True, **settings),
        "val_dataloaders": DataLoader(val, batch_size=64, **settings),
    }


# ---- 1. ResNet18 with BatchNorm, OneCycle, loaders handed to fit -----------------------------------------


class LitResnet(pl.LightningModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        from torchvision.models import resnet18

        self.model = resnet18(weights=None, num_classes=10)
        self.model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.model.maxpool = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.nll_loss(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def resnet18_onecycle(size: int) -> Training:
    images, labels = digits(160 if size else 40)
    colour = images.repeat(1, 3, 1, 1)
    return Training(LitResnet(), loaders(TensorDataset(colour, labels), 8), {"max_epochs": 4 if size else 1})


# ---- 2. a transformer with warm-up, clipping and accumulation --------------------------------------------


class LitTransformer(pl.LightningModule):
    """Classifies an image read as a sequence of rows."""

    def __init__(self, dim: int = 32, warmup: int = 10) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(8, dim)
        self.position = nn.Parameter(0.02 * torch.randn(8, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.squeeze(1)) + self.position).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        total, warmup = int(self.trainer.estimated_stepping_batches), self.hparams.warmup

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


def transformer_warmup(size: int) -> Training:
    data = loaders(TensorDataset(*digits(1000 if size else 64)), 8)
    settings = {"max_epochs": 8 if size else 1, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    return Training(LitTransformer(), data, settings)


# ---- 3. a GAN with manual optimisation --------------------------------------------------------------------


class LitGAN(pl.LightningModule):
    def __init__(self, latent: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def adversarial_loss(self, scores: Tensor, real: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))

    def sample(self, like: Tensor) -> Tensor:
        return self.generator(torch.randn(len(like), self.hparams.latent, device=self.device))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images = batch[0].flatten(1)
        optimizer_g, optimizer_d = self.optimizers()
        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self.sample(images)), 1.0)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        real = self.adversarial_loss(self.discriminator(images), 1.0)
        fake = self.adversarial_loss(self.discriminator(self.sample(images).detach()), 0.0)
        d_loss = (real + fake) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """How far the mean image of the generator is from the data's."""
        images = batch[0].flatten(1)
        self.log("val_loss", F.mse_loss(self.sample(images).mean(0), images.mean(0)))

    def configure_optimizers(self) -> Any:
        rates = {"lr": 2e-3, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(self.generator.parameters(), **rates),
            torch.optim.Adam(self.discriminator.parameters(), **rates),
        ], []


def gan_manual(size: int) -> Training:
    data = loaders(TensorDataset(*digits(1000 if size else 64)), 8)
    return Training(LitGAN(), data, {"max_epochs": 8 if size else 1})


# ---- 4. an autoencoder with ReduceLROnPlateau -------------------------------------------------------------


class LitAutoEncoder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].view(batch[0].size(0), -1)
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def autoencoder_plateau(size: int) -> Training:
    data = loaders(TensorDataset(*digits(1000 if size else 64)), 8)
    return Training(LitAutoEncoder(), data, {"max_epochs": 8 if size else 1})


# ---- 5. contrastive learning with two views ---------------------------------------------------------------


class TwoViews(Dataset[Any]):
    """Two random crops with noise of an image."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = F.pad(images, (1, 1, 1, 1)), labels

    def __len__(self) -> int:
        return len(self.labels)

    def view(self, index: int) -> Tensor:
        top, left = torch.randint(3, (2,)).tolist()
        image = self.images[index][:, top : top + 8, left : left + 8]
        return image + 0.05 * torch.randn_like(image)

    def __getitem__(self, index: int) -> Any:
        return (self.view(index), self.view(index)), self.labels[index]


class LitSimCLR(pl.LightningModule):
    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.convnet = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32)
        )
        self.projection = nn.Sequential(nn.ReLU(), nn.Linear(32, 16))

    def info_nce(self, batch: Any, mode: str) -> Tensor:
        (first, second), _ = batch
        features = F.normalize(self.projection(self.convnet(torch.cat([first, second]))), dim=1)
        similarity = features @ features.T / self.hparams.temperature
        own = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
        similarity = similarity.masked_fill(own, -9e15)
        positive = own.roll(len(similarity) // 2, 0)
        loss = (torch.logsumexp(similarity, 1) - (similarity * positive).sum(1)).mean()
        self.log(f"{mode}_loss", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.info_nce(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.info_nce(batch, "val")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=1e-4)
        epochs = self.trainer.max_epochs
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=1e-4)]


def simclr_two_views(size: int) -> Training:
    data = loaders(TwoViews(*digits(600 if size else 64)), 12 if size else 4)
    return Training(LitSimCLR(), data, {"max_epochs": 5 if size else 1})


# ---- 6. a variational autoencoder -------------------------------------------------------------------------


class LitVAE(pl.LightningModule):
    def __init__(self, latent: int = 8, kl_weight: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(64, latent), nn.Linear(64, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())

    def step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        x = batch[0]
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        sample = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        reconstruction = F.binary_cross_entropy(self.decoder(sample), x.flatten(1))
        kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
        loss = reconstruction + self.hparams.kl_weight * kl
        return loss, {"recon_loss": reconstruction, "kl": kl, "loss": loss}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logs = self.step(batch)
        self.log_dict({f"train_{k}": v for k, v in logs.items()}, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logs = self.step(batch)
        self.log_dict({f"val_{k}": v for k, v in logs.items()})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def vae(size: int) -> Training:
    data = loaders(TensorDataset(*digits(1000 if size else 64)), 8)
    return Training(LitVAE(), data, {"max_epochs": 8 if size else 1})


# ---- 7. segmentation by a U-Net with BatchNorm ------------------------------------------------------------


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class LitUNet(pl.LightningModule):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.second = double_conv(1, channels), double_conv(channels, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.third, self.last = double_conv(2 * channels, channels), nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.first(x)
        bottom = self.second(F.max_pool2d(top, 2))
        return self.last(self.third(torch.cat([top, self.up(bottom)], dim=1)))

    def training_step(self, batch: Any, batch_nb: int) -> dict[str, Tensor]:
        images, mask = batch
        loss = F.cross_entropy(self(images), mask)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, mask = batch
        self.log("val_loss", F.cross_entropy(self(images), mask))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]


def unet_segmentation(size: int) -> Training:
    count, generator = (300 if size else 40), torch.Generator().manual_seed(0)
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
    centres = 4 + 8 * torch.rand(count, 2, 1, 1, generator=generator)
    radius = 2 + 3 * torch.rand(count, 1, 1, generator=generator)
    mask = ((grid - centres) ** 2).sum(1).sqrt() < radius
    noise = 0.4 * torch.randn(count, 1, 16, 16, generator=generator)
    data = loaders(TensorDataset(mask.unsqueeze(1).float() + noise, mask.long()), 8)
    return Training(LitUNet(), data, {"max_epochs": 4 if size else 1})


# ---- 8. an LSTM on token batches in dicts -----------------------------------------------------------------


class Tokens(Dataset[Any]):
    """Sentences of several lengths; the label is the commoner half of the alphabet."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(5, 13, (count,), generator=generator)
        self.tokens = [torch.randint(1, 21, (int(n),), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "label": (tokens > 10).float().mean().gt(0.5).long()}


def collate_tokens(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.stack([sample["label"] for sample in samples])
    return {"input_ids": ids, "lengths": (ids != 0).sum(1), "label": labels}


class LitLSTM(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(32, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden, _ = self.lstm(self.embedding(batch["input_ids"]))
        mask = (batch["input_ids"] != 0).unsqueeze(-1)
        return self.head(self.dropout((hidden * mask).sum(1) / batch["lengths"].unsqueeze(-1)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch), batch["label"])
        self.log("train_loss", loss, batch_size=len(batch["label"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch), batch["label"])
        self.log("val_loss", loss, batch_size=len(batch["label"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def lstm_tokens(size: int) -> Training:
    data = loaders(Tokens(600 if size else 64), 8, collate_fn=collate_tokens)
    return Training(LitLSTM(), data, {"max_epochs": 5 if size else 1, "gradient_clip_val": 0.5})


# ---- 9. LoRA on a small transformer -----------------------------------------------------------------------


class LitLoRA(pl.LightningModule):
    """A frozen transformer, of which adapters and a new head are trained."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], modules_to_save=["head"])
        self.model = get_peft_model(Backbone(), config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.model(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=3e-3)


class AttentionBlock(nn.Module):
    """Self-attention with projections of its own; torch's layer bypasses adapters when it is evaluated."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](x)
        q, k, v = (
            layer(inner).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Backbone(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, dim), nn.Linear(dim, 10)
        self.position = nn.Parameter(0.2 * torch.randn(8, dim))
        self.blocks = nn.Sequential(AttentionBlock(dim), AttentionBlock(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x.squeeze(1)) + self.position).mean(1))


def lora_transformer(size: int) -> Training:
    data = loaders(TensorDataset(*digits(800 if size else 64)), 8)
    return Training(LitLoRA(), data, {"max_epochs": 6 if size else 1})


# ---- 10. a classifier with torchmetrics, EarlyStopping and an average of weights --------------------------


class LitClassifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from torchmetrics.classification import MulticlassAccuracy

        self.model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1),
            nn.Linear(128, 10),
        )  # fmt: skip
        self.train_acc, self.val_acc = MulticlassAccuracy(10), MulticlassAccuracy(10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.val_acc.update(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


class DigitsDataModule(pl.LightningDataModule):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def setup(self, stage: str) -> None:
        self.loaders = loaders(TensorDataset(*digits(self.count)), 8)

    def train_dataloader(self) -> Any:
        return self.loaders["train_dataloaders"]

    def val_dataloader(self) -> Any:
        return self.loaders["val_dataloaders"]


def classifier_metrics(size: int) -> Training:
    callbacks = [pl.callbacks.EarlyStopping("val_loss", patience=2)]
    callbacks.append(pl.callbacks.EMAWeightAveraging(decay=0.5))
    data = {"datamodule": DigitsDataModule(800 if size else 64)}
    return Training(LitClassifier(), data, {"max_epochs": 8 if size else 1, "callbacks": callbacks})


TRAININGS: dict[str, Callable[[int], Training]] = {
    training.__name__: training
    for training in (
        resnet18_onecycle,
        transformer_warmup,
        gan_manual,
        autoencoder_plateau,
        simclr_two_views,
        vae,
        unet_segmentation,
        lstm_tokens,
        lora_transformer,
        classifier_metrics,
    )
}
