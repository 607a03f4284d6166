"""Numbers of the theory that no other test has: kernels that cannot be balanced [Helmholtz Transformer, no. 11], and
the bias of nearest neighbors in 191 dimensions (no. 6)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.observe.bistochasticity import balanced_kernel, is_causal
from helmscope.observe.kernel import symmetry_defect
from helmscope.observe.neighbor_entropy import NeighborDistances

F64 = torch.float64


def causal_uniform(n: int) -> torch.Tensor:
    """The kernel of causal attention at beta = 0, through the public field."""
    return hs.SA(beta=0.0, causal=True).kernel(torch.eye(n, dtype=F64))


def diagonal_mass(kernel: torch.Tensor, sweeps: int) -> float:
    """The mean weight of the diagonal after so many row half-sweeps, with a column half-sweep between two of them."""
    k = kernel.numpy()
    columns = np.ones(len(k))
    for _ in range(sweeps - 1):
        rows = 1 / (k @ columns)
        columns = 1 / (k.T @ rows)
    rows = 1 / (k @ columns)
    return float(np.einsum("i,ii,i->", rows, k, columns) / len(k))


def test_sweeps_on_a_causal_kernel_crawl_to_the_identity() -> None:
    """Diagonal mass .39, .94, .9996 after 10, 1,000 and 200,000 sweeps at n = 32; the library refuses to balance it."""
    kernel = causal_uniform(32)
    for sweeps, printed, digits in ((10, 0.39, 2), (1_000, 0.94, 2), (200_000, 0.9996, 4)):
        assert round(diagonal_mass(kernel, sweeps), digits) == printed
    assert bool(is_causal(kernel))
    assert bool(balanced_kernel(kernel).isnan().all())
    assert float(symmetry_defect(kernel)) > 0.5
    with pytest.raises(hs.HelmscopeError, match="only causal bistochastic kernel is the identity"):
        hs.SinkhornAttention(beta=0.0, causal=True)


@pytest.mark.slow
def test_nearest_neighbors_are_biased_by_40_and_75_nats_in_191_dimensions() -> None:
    """At N = 8,192, third neighbor: N(0, I), and variances 1/i; hence no more than 8 principal axes are accepted."""
    d = 191
    x = torch.randn(8192, d, dtype=F64, generator=torch.Generator().manual_seed(0))
    variances = 1 / torch.arange(1, d + 1, dtype=F64)
    for variance, printed in ((torch.ones(d, dtype=F64), 40), (variances, 75)):
        exact = d / 2 * math.log(2 * math.pi * math.e) + float(variance.log().sum()) / 2
        assert float(NeighborDistances.of(x * variance.sqrt(), 3).entropy) - exact == pytest.approx(printed, abs=1)
    with pytest.raises(hs.HelmscopeError, match="principal_axes"):
        hs.observe.neighbor_entropy(x[:300], principal_axes=d)
