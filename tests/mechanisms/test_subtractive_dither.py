import pytest
import torch
from scipy import stats

from lightning_fedq.mechanisms import SubtractiveDither
from reproductions.exact.formulas import irwin_hall_cdf
from tests.one_round import decode, encode, make_context


@pytest.mark.parametrize("size", [1, 4])
def test_the_error_of_the_mean_is_irwin_hall(size):
    # false alarm 1e-4 a case; inputs at random and at both ends of the range
    mechanism, dim = SubtractiveDither(bits=3), 50_000
    context = make_context(mechanism, range(size), (dim,), radius=2.0, center=0.5)
    values = 0.5 + 2.0 * (torch.rand(size, dim, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    values[:, :100], values[:, 100:200] = 2.5, -1.5
    mean = decode(mechanism, encode(mechanism, values, context).symbols, context.cohort, context) / size
    error = (mean - values.mean(0)).double() / (2.0 / 3.0 / (12 * size) ** 0.5)
    assert stats.kstest(error.numpy(), lambda x: irwin_hall_cdf(x, size)).pvalue > 1e-4
