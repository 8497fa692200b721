"""Ten public-style trainings run federated by the callback alone: a step or two of each."""

import math
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
STACKED = {
    *("transformer_warmup", "autoencoder_plateau", "simclr_two_views", "vae", "unet_segmentation"),
    *("lora_transformer", "classifier_metrics"),
}
"""Those that train side by side by themselves; the others are large, recurrent or optimise by hand."""
NAMES = sorted({*STACKED, "resnet18_onecycle", "gan_manual", "lstm_tokens"})


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_a_training_runs_plain_and_federated(name, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import corpus

    assert set(corpus.TRAININGS) == set(NAMES)
    plain, ours = corpus.run(name, 0, 0), corpus.run(name, 0, 4)
    assert math.isfinite(plain.loss) and math.isfinite(ours.loss)
    assert ours.loss != corpus.before(name, 0), "the global model has moved"
    assert ours.epochs == plain.epochs == 1
    assert ours.clients_per_step == (4 if name in STACKED else 1)
