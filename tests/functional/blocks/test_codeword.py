import numpy as np
import pytest
import torch

from lightning_fedq.functional.blocks.codeword import (
    frequencies,
    hadamard_signs,
    prf_mix,
    sign_words,
    threshold_frequencies,
    walsh_hadamard,
    word_correlation,
    word_table,
)
from lightning_fedq.functional.blocks.lattice import scalar_levels
from lightning_fedq.functional.blocks.lattice_codebook import finite_codebook
from tests.functional.blocks.oracle import prf_base, prf_rows, prf_uniforms, prf_words


def test_generator_vectors_of_the_specification():
    assert (prf_mix(0), prf_mix(1)) == (0, 0x5692161D100B05E5)
    base = prf_base(1234, 0, 7, 0, 0)
    assert base == 0x3D3F09F30003443A
    words = prf_words(base, 0, 8)
    assert [word % 2**64 for word in words[:5].tolist()] == [
        *(0x72DE5694219753BE, 0xB66ECB6550E051F2, 0x725E937233A842C4, 0xFE5EA216968257DF),
        0x10EF3F5D63AD92FC,
    ]
    rows = {n: (1 + prf_rows(words, n - 1)).tolist() for n in (4, 8, 16)}
    assert rows[4] == [2, 3, 2, 3, 1, 1, 3, 3]
    assert rows[8] == [4, 5, 4, 7, 1, 2, 7, 7]
    assert rows[16] == [7, 11, 7, 15, 1, 3, 15, 15]
    signs = hadamard_signs(torch.tensor(rows[4][:4])[:, None], torch.arange(4))
    assert signs.tolist() == [[1, 1, -1, -1], [1, -1, -1, 1], [1, 1, -1, -1], [1, -1, -1, 1]]
    uniforms = prf_uniforms(prf_words(prf_base(1234, 0, 7, 0, 1), 0, 4))
    exact = [0.9712397660345062, 0.7456851945577088, 0.3257954305661097, 0.13880578177853264]
    assert uniforms.tolist() == exact


def test_any_part_of_a_sequence_can_be_drawn_alone():
    assert torch.equal(prf_words(99, 5, 7), prf_words(99, 0, 12)[5:])


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_hadamard_words_have_the_law_of_balanced_words(size):
    """Exact enumeration: balanced, and E v_l v_m = -1 / (N - 1), as for all balanced words."""
    words = sign_words(size, "hadamard").astype(int)
    assert (words.sum(1) == 0).all()
    moments = words.T @ words / len(words)
    np.testing.assert_allclose(moments, np.eye(size) - (1 - np.eye(size)) / (size - 1), atol=1e-12)


@pytest.mark.parametrize(
    ("size", "words", "c2", "factor"),
    [
        *((2, "balanced", -1, 2), (3, "near_balanced", -1 / 3, 4 / 3), (4, "balanced", -1 / 3, 4 / 3)),
        *((5, "near_balanced", -0.2, 1.2), (8, "balanced", -1 / 7, 8 / 7)),
        (9, "near_balanced", -1 / 9, 10 / 9),
    ],
)
def test_bias_factors_of_the_specification(size, words, c2, factor):
    table = sign_words(size, words).astype(int)
    moments = table.T @ table / len(table)
    np.testing.assert_allclose(moments[~np.eye(size, dtype=bool)], c2, atol=1e-12)
    assert word_correlation(size, words) == pytest.approx(c2)
    assert 1 - c2 == pytest.approx(factor)


def all_codebooks():
    yield "scalar", scalar_levels(4, 1.0)[:, None].numpy()
    yield "odd", scalar_levels(5, 1.0)[:, None].numpy()
    yield "shifted", 3.0 + scalar_levels(4, 1.0)[:, None].numpy()
    yield "A2", finite_codebook("A2", 1.0).points
    yield "A2 large", finite_codebook("A2", 2.0).points


CODEBOOKS = dict(all_codebooks())


@pytest.mark.parametrize("points", list(CODEBOOKS.values()), ids=CODEBOOKS)
@pytest.mark.parametrize("words", ["hadamard", "balanced", "near_balanced", "iid"])
def test_decoder_is_unbiased_and_has_its_second_moment(points, words):
    """Exact enumeration of every word: no statistics."""
    size = len(points)
    if words != "hadamard" and (size > 9 or words == ("near_balanced" if size % 2 == 0 else "balanced")):
        with pytest.raises(ValueError, match="need"):
            word_table(points, words)
        return
    table = word_table(points, words)
    rows = torch.arange(table.num_rows)[:, None]
    signs = table.signs if len(table.signs) else hadamard_signs(rows + 1, torch.arange(size)).numpy()
    assert signs.shape == (table.num_rows, size)
    np.testing.assert_allclose(table.weights, signs @ points, atol=1e-9)
    decoded = table.offset + table.gain * signs.T @ table.weights / table.num_rows
    np.testing.assert_allclose(decoded, points, atol=1e-9)
    np.testing.assert_allclose(table.second_moment, np.square(table.gain * table.weights).mean(0), atol=1e-9)


def test_raw_decoders_of_the_specification_are_biased():
    q = np.array([[-2.0], [-1.0], [0.0], [1.0]])
    table = word_table(q, "balanced")
    raw = table.signs.T.astype(float) @ table.weights / table.num_rows
    np.testing.assert_allclose(raw[:, 0], [-2, -2 / 3, 2 / 3, 2])
    near = word_table(np.array([[-1.0], [0.0], [1.0]]), "near_balanced")
    np.testing.assert_allclose((near.signs.T.astype(float) @ near.weights / 3)[:, 0], [-4 / 3, 0, 4 / 3])


def test_weights_and_moments_of_the_specification():
    table = word_table(scalar_levels(4, 1.0)[:, None].numpy(), "hadamard")
    assert table.weights[:, 0].tolist() == [-1.0, -2.0, 0.0]
    for radius, energy, moment in ((1.0, 6.0, 5.25), (2.0, 48.0, 46.5)):
        points = finite_codebook("A2", radius).points
        table = word_table(points, "hadamard")
        assert np.square(points).sum() == pytest.approx(energy)
        assert table.second_moment.sum() == pytest.approx(moment)


def test_walsh_hadamard_is_the_sign_matrix():
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signs = hadamard_signs(torch.arange(8)[:, None], torch.arange(8)).double()
    torch.testing.assert_close(walsh_hadamard(x), x @ signs)


@pytest.mark.parametrize(
    ("size", "words"), [(4, "hadamard"), (7, "hadamard"), (4, "iid"), (3, "near_balanced")]
)
def test_frequencies_are_unbiased(size, words):
    """Sender always at point 1; exact mean over the words: the frequencies are a one at point 1."""
    table = word_table(np.arange(size, dtype=float)[:, None], words)
    rows = torch.arange(table.num_rows)
    hadamard = hadamard_signs(rows + 1, torch.tensor(1))
    signs = torch.from_numpy(table.signs)[rows, 1] if len(table.signs) else hadamard
    votes = torch.diag(signs.double())  # sample r: the word is row r
    got = frequencies(votes, table)
    torch.testing.assert_close(got.mean(0), torch.eye(size, dtype=torch.float64)[1], atol=1e-12, rtol=0)
    if size == 4 and words == "hadamard":
        torch.testing.assert_close(got.sum(1), torch.ones(3, dtype=torch.float64))


def test_thresholded_frequencies_are_a_distribution():
    values = torch.tensor([[0.5, -0.1, 0.6], [-1.0, -2.0, 0.0]], dtype=torch.float64)
    got = threshold_frequencies(values)
    torch.testing.assert_close(got, torch.tensor([[5 / 11, 0, 6 / 11], [1 / 3] * 3], dtype=torch.float64))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="words must be one of"):
        sign_words(4, "hash")
    with pytest.raises(ValueError, match="at least 2 points, got 1"):
        word_table(np.zeros((1, 1)), "hadamard")
