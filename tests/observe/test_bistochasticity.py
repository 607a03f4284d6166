"""The divergence from the Sinkhorn-balanced kernel, against plain sweeps; causal kernels have none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.geometry.sphere import retract
from helmscope.models.record import record
from helmscope.observe.bistochasticity import (
    Bistochasticity,
    balance_kl,
    balanced_kernel,
    bistochasticity,
    causal_uniform_column_sums,
    is_causal,
)
from helmscope.observe.kernel import kernel_statistics
from helmscope.solve.integrate import integrate
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12], [3, 4, 5, 6, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
}


def rows(n, *, seed=0, scale=1.0):
    return torch.softmax(scale * torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=F64), -1)


def swept(kernel, sweeps=5000):
    """Alternate normalization of rows and columns with plain loops; the rows are normalized last."""
    b = [list(row) for row in kernel.tolist()]
    n = len(b)
    for _ in range(sweeps):
        for j in range(n):
            total = sum(b[i][j] for i in range(n))
            for i in range(n):
                b[i][j] /= total
        for i in range(n):
            total = sum(b[i])
            b[i] = [each / total for each in b[i]]
    return b


def divergence_by_loops(kernel):
    b = swept(kernel)
    return [
        sum(p * math.log(p / q) for p, q in zip(row, other, strict=True) if p > 0)
        for row, other in zip(kernel.tolist(), b, strict=True)
    ]


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_divergence_is_that_of_plain_sweeps(scale):
    kernel = rows(4, scale=scale)
    np.testing.assert_allclose(balance_kl(kernel, tol=1e-13).tolist(), divergence_by_loops(kernel), atol=1e-10)


def test_balanced_kernels_have_rows_and_columns_of_sum_1():
    balanced = balanced_kernel(rows(6, scale=3.0), tol=1e-12)
    for sums in (balanced.sum(-1), balanced.sum(-2)):
        np.testing.assert_allclose(sums.tolist(), 1, atol=1e-10)


def test_a_bistochastic_kernel_has_divergence_0():
    x = retract(torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0), dtype=F64))
    balanced = integrate(SinkhornAttention(beta=3.0), x, [0.0])
    assert float(bistochasticity(balanced).balance_kl.max()) < 1e-10
    assert float(bistochasticity(integrate(SA(beta=3.0), x, [0.0])).balance_kl.min()) > 1e-3


def test_causal_kernels_have_no_balanced_form():
    causal = rows(5).tril()
    causal = causal / causal.sum(-1, keepdim=True)
    assert bool(is_causal(causal))
    assert not bool(is_causal(rows(5)))
    assert balanced_kernel(causal).isnan().all()
    recording = record(tiny_model("gpt2", dtype=F64), inputs_of("gpt2", batch=2, n=6))
    measured = bistochasticity(recording)
    assert bool(measured.balance_kl.isnull().all())
    yardstick = (causal_uniform_column_sums(6) - 1).square().mean().sqrt()
    np.testing.assert_allclose(measured.column_sum_deviation_causal_uniform.values, float(yardstick), rtol=1e-14)


def test_column_sums_of_the_causal_uniform_kernel():
    n = 12
    kernel = [[1 / (i + 1) if j <= i else 0.0 for j in range(n)] for i in range(n)]
    columns = [sum(row[j] for row in kernel) for j in range(n)]
    np.testing.assert_allclose(causal_uniform_column_sums(n).tolist(), columns, rtol=1e-14)
    run = integrate(SA(beta=0.0, causal=True), torch.eye(n, dtype=F64), [0.0])
    rms = math.sqrt(sum((each - 1) ** 2 for each in columns) / n)
    statistics = kernel_statistics(run)
    assert statistics.column_sum_deviation_rms.item() == pytest.approx(rms, rel=1e-13)
    assert statistics.bistochastic_defect.item() == pytest.approx(columns[0] - 1, rel=1e-13)


def test_what_did_not_converge_is_nan():
    sharp = rows(8, scale=60.0)
    assert balance_kl(sharp, max_iterations=1).isnan().all()
    assert balance_kl(sharp, max_iterations=200).isfinite().all()


@pytest.mark.parametrize("family", ["bert"])
def test_padding_and_chunks_change_nothing(family):
    model = tiny_model(family, dtype=F64)
    together = bistochasticity(record(model, PADDED))
    small = bistochasticity(record(model, PADDED, batch_size=1))
    np.testing.assert_allclose(small.balance_kl.values, together.balance_kl.values, atol=1e-10)
    for row, mask in enumerate(PADDED["attention_mask"]):
        alone = bistochasticity(record(model, PADDED["input_ids"][row : row + 1, : int(mask.sum())]))
        np.testing.assert_allclose(
            alone.balance_kl.values[:, 0], together.balance_kl.values[:, row], rtol=1e-5, atol=1e-8
        )
    kernel = record(model, PADDED).kernel(layer=0)[1, 0]
    expected = np.mean(divergence_by_loops(kernel.double()))
    assert together.balance_kl.values[0, 1, 0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("name", "value"), [("tol", 0.0), ("max_iterations", 0)])
def test_arguments_are_checked(name, value):
    with pytest.raises(HelmscopeError, match=name):
        Bistochasticity(**{name: value})
