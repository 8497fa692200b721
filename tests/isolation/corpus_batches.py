"""Published styles of batches: padded text, pictures with paths, boxes, dataclasses, an own precision."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_fedq._lightning import pl
from tests.isolation.corpus import Training
from tests.isolation.published import BATCH, Data


class _Collated(Data):
    """The samples by number, and a `collate_fn` of one's own."""

    def collate(self, numbers):
        raise NotImplementedError

    def train_dataloader(self):
        return DataLoader(range(len(self.labels)), batch_size=BATCH, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(range(8), batch_size=8, collate_fn=self.collate)


class PaddedText(Training):
    """Tokens in a dict, padded to the longest of the batch; labels smoothed on the device."""

    class data(_Collated):
        def collate(self, numbers):
            words = [(self.inputs[n][: 3 + n % 4].abs() * 9).long().clamp_max(19) + 1 for n in numbers]
            tokens = pad_sequence(words, batch_first=True)
            return {"input_ids": tokens, "attention_mask": tokens > 0, "labels": self.labels[numbers]}

    def build(self):
        self.table = nn.Embedding(21, 6, padding_idx=0)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "labels": 0.9 * nn.functional.one_hot(batch["labels"], 3) + 0.1 / 3}

    def loss(self, batch):
        mask = batch["attention_mask"][..., None]
        pooled = (self.table(batch["input_ids"]) * mask).sum(1) / mask.sum(1)
        return nn.functional.cross_entropy(self.net(pooled), batch["labels"])


class PicturesWithPaths(Training):
    """The path goes with each picture, to be named where it is wrong; augmented on the device."""

    class data(_Collated):
        def collate(self, numbers):
            paths = [f"/pictures/{n}.png" for n in numbers]
            return {"image": self.inputs[numbers], "label": self.labels[numbers], "path": paths}

        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert len(batch["path"]) == len(batch["image"])
            return {**batch, "image": batch["image"].flip(0).flip(0) * 0.5}

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])


@dataclass
class _Examples:
    inputs: Tensor
    labels: Tensor
    weight: float = 1.0


class Dataclasses(Training):
    """A batch with names, which the data module moves."""

    class data(_Collated):
        def collate(self, numbers):
            return _Examples(self.inputs[numbers], self.labels[numbers], 0.5)

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return replace(batch, inputs=batch.inputs.to(device), labels=batch.labels.to(device))

    def loss(self, batch):
        return batch.weight * nn.functional.cross_entropy(self.net(batch.inputs), batch.labels)


class _Halved(pl.plugins.Precision):
    """Rounds inputs to 16 bits, and trains in 32."""

    def convert_input(self, data: Any) -> Any:
        inputs, labels = data
        assert labels.dim() == 1
        return [inputs.half().float(), labels]


class OwnPrecision(Training):
    flags: ClassVar[dict[str, Any]] = {"plugins": [_Halved()]}
