"""Kernel statistics against loops over every weight, closed forms, and the mean over systems against NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import helmscope as hs
import support.mechanism_oracles as oracles
from helmscope.fields.multihead import MultiHead
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.observe.kernel import (
    bistochastic_defect,
    check_kernel,
    effective_keys,
    first_token_mass,
    future_mass,
    kernel_statistics,
    largest_weight,
    normalized_rows,
    received_mass,
    row_entropy,
    row_mass,
    symmetry_defect,
)
from helmscope.types import AttentionTensors, ReplayContext, ReplayPlan
from helmscope.types.instrument import results, start_instruments

F64 = torch.float64
X = hs.Uniform(5, 3).sample(4, seed=0)
B = torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[True] * 5, [False, True, True, True, True], [True, True, True, False, False], [True] * 5])
FIELDS = {
    "sa": hs.SA(3.0),
    "usa": hs.USA(2.0),
    "sharp": hs.SA(60.0),
    "causal": hs.SA(3.0, causal=True, query_key=B),
    "causal usa": hs.USA(1.0, causal=True, query_key=B),
    "sinkhorn": SinkhornAttention(2.0),
}
BY_ROW = {
    "row_entropy": row_entropy,
    "effective_keys": effective_keys,
    "largest_weight": largest_weight,
    "first_token_mass": first_token_mass,
    "future_mass": future_mass,
}


@dataclass(frozen=True)
class Attending:
    """The least of a System: a trajectory with given kernels."""

    trajectory: hs.Trajectory
    kernels: list[torch.Tensor]
    visible: torch.Tensor | None = None
    axis, layer_axis, replicate = "time", "time", "system"

    @property
    def layers(self):
        return range(len(self.kernels))

    def kernel(self, *, layer):
        return self.kernels[layer]

    def force(self, *, layer):
        return None

    def resume(self, *, depth, states, generator=None):
        raise NotImplementedError

    def unsupported_reason(self, instrument):
        return None

    def replay(self, *instruments, progress=None):
        """One system at a time."""
        path, batch = self.trajectory, self.trajectory.states.shape[1]
        start_instruments(
            self, instruments, ReplayPlan(self.layers, self.layer_axis, path.times.numpy(), self.replicate, batch)
        )
        for row in range(batch):
            rows = slice(row, row + 1)
            weights = None if path.weights is None else path.weights[0, rows]
            visible = None if self.visible is None else self.visible[rows]
            for layer, kernel in enumerate(self.kernels):
                context = ReplayContext(layer, hs.types.Half.ATTENTION, float(layer), rows, weights, visible)
                state = path.states[layer, rows]
                for instrument in instruments:
                    instrument.attention(context, AttentionTensors(state, state, kernel[rows]))
        return results(instruments)


@pytest.mark.parametrize("name", FIELDS)
def test_every_quantity_is_the_loop(name):
    kernel = FIELDS[name].kernel(X)
    for k, one in zip(kernel, kernel.tolist(), strict=True):
        for quantity, loops in oracles.kernel_rows(one).items():
            assert BY_ROW[quantity](k).tolist() == pytest.approx(loops, rel=2e-14, abs=1e-15), quantity
        system = oracles.kernel_system(one, [True] * 5)
        assert received_mass(k).tolist() == pytest.approx(oracles.received(one, [True] * 5), rel=1e-14, abs=0)
        assert bistochastic_defect(k).item() == pytest.approx(system["bistochastic_defect"], rel=1e-13, abs=1e-15)
        assert symmetry_defect(k).item() == pytest.approx(system["symmetry_defect"], rel=1e-14, abs=1e-15)
        assert row_mass(k).mean().item() == pytest.approx(system["row_mass"], rel=1e-15, abs=0)


def measured(system):
    """Means, errors and intervals over the systems."""
    return hs.reduce_replicates(kernel_statistics(system))


@pytest.mark.parametrize("name", FIELDS)
def test_statistics_over_systems_are_the_loops(name):
    run = hs.integrate(FIELDS[name], X, times=[0.0, 0.5])
    seen = measured(run)
    loops = [[oracles.kernel_system(k, [True] * 5) for k in run.kernel(layer=layer).tolist()] for layer in range(2)]
    assert set(seen.data_vars) == {f"{q}{end}" for q in loops[0][0] for end in ("", "_stderr", "_low", "_high")}
    for quantity in loops[0][0]:
        values = np.array([[system[quantity] for system in row] for row in loops])
        assert seen[quantity].values == pytest.approx(values.mean(1), rel=1e-13, abs=1e-15)
        spread = values.std(1, ddof=1) / 2
        assert seen[f"{quantity}_stderr"].values == pytest.approx(spread, rel=1e-12, abs=1e-15)
    assert seen.attrs["n"] == 4
    assert seen.time.values.tolist() == [0.0, 0.5]


def test_padding_is_no_query_and_heads_have_an_axis():
    draw = torch.Generator().manual_seed(3)
    kernels = [torch.rand(4, 2, 5, 5, dtype=F64, generator=draw) * MASK[:, None, None, :] for _ in range(3)]
    kernels[1][0, 1, 2] = 0.0  # a query that sees nobody
    path = hs.Trajectory(torch.arange(3.0), X.expand(3, 4, 5, 3), weights=MASK.double()[None])
    seen = measured(Attending(path, kernels, MASK))
    for step, kernel in enumerate(kernels):
        for head in range(2):
            loops = [oracles.kernel_system(k[head].tolist(), m.tolist()) for k, m in zip(kernel, MASK, strict=True)]
            for quantity in loops[0]:
                mean = np.mean([system[quantity] for system in loops])
                assert seen[quantity].values[step, head] == pytest.approx(mean, rel=1e-13, abs=0)
    assert seen.row_entropy.dims == ("time", "head")
    assert seen["head"].values.tolist() == [0, 1]
    assert np.isfinite(seen.row_entropy.values).all()


def test_a_token_that_no_statistic_counts_may_still_be_the_sink():
    """As [CLS] is: attention sees it, so that it is a key, but it is no query of which a mean is taken."""
    kernel = torch.tensor([[1.0, 0.0, 0.0], [0.7, 0.3, 0.0], [0.5, 0.1, 0.4]], dtype=F64).expand(1, 3, 3)
    weights = torch.tensor([[[0.0, 1.0, 3.0]]], dtype=F64)
    seen = measured(Attending(hs.Trajectory(torch.zeros(1), X[None, :1, :3], weights), [kernel]))
    assert seen.first_token_mass.item() == pytest.approx((0.7 + 3 * 0.5) / 4, rel=1e-15)
    assert seen.bistochastic_defect.item() == pytest.approx(1.2, rel=1e-15)  # the column of the sink, 2.2


def test_heads_of_a_field_are_seen_one_by_one():
    heads = [hs.SA(1.0), hs.SA(9.0, query_key=B)]
    together = measured(hs.integrate(MultiHead(heads), X, times=[0.0]))
    for h, head in enumerate(heads):
        alone = measured(hs.integrate(head, X, times=[0.0]))
        for quantity in alone.data_vars:
            assert together[quantity].values[0, h] == pytest.approx(alone[quantity].values[0], rel=1e-12, abs=1e-15)


def test_closed_forms():
    n = 7
    equal, eye = torch.full((n, n), 1 / n, dtype=F64), torch.eye(n, dtype=F64)
    assert row_entropy(equal).tolist() == pytest.approx([math.log(n)] * n, rel=1e-15)
    assert effective_keys(equal).tolist() == pytest.approx([n] * n, rel=1e-15)
    assert bistochastic_defect(equal).item() < 1e-15
    assert row_entropy(eye).tolist() == [0.0] * n
    assert effective_keys(eye).tolist() == [1.0] * n
    assert bistochastic_defect(eye).item() == 0
    one_sink = eye[:1].expand(n, n)
    assert bistochastic_defect(one_sink).item() == n - 1
    assert first_token_mass(one_sink).tolist() == [1.0] * n
    assert received_mass(one_sink).tolist() == [n, *[0.0] * (n - 1)]
    # [Helmholtz Transformer, no. 2]
    assert effective_keys(torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=F64))[0].item() == 2.6315789473684212


def test_what_the_fields_promise():
    causal = FIELDS["causal"].kernel(X)
    assert future_mass(causal).abs().max() == 0
    assert first_token_mass(causal)[:, 0].tolist() == [1.0] * 4
    assert (
        bistochastic_defect(causal).min() > 0.1
    )  # only the identity is causal and doubly stochastic [Helmholtz Transformer, no. 11]
    assert bistochastic_defect(FIELDS["sinkhorn"].kernel(X)).max() < 1e-13
    assert symmetry_defect(FIELDS["sinkhorn"].kernel(X)).max() < 1e-13
    assert symmetry_defect(FIELDS["usa"].kernel(X)).max() < 1e-16
    assert symmetry_defect(FIELDS["sa"].kernel(X)).min() > 1e-3
    # USA's rows, normalized, are those of SA
    assert (normalized_rows(hs.USA(2.0).kernel(X)) - hs.SA(2.0).kernel(X)).abs().max() < 1e-15
    assert symmetry_defect(torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64)).item() == pytest.approx(0.5**0.5)


def test_a_query_that_sees_nobody_has_no_shares():
    kernel = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=F64)
    for quantity in BY_ROW.values():
        assert quantity(kernel).isnan().tolist() == [True, False]
    assert row_mass(kernel).tolist() == [0.0, 2.0]
    assert received_mass(kernel).tolist() == [0.5, 0.5]
    # left padding: the first visible token is the sink
    assert first_token_mass(kernel, visible=torch.tensor([False, True]))[1].item() == 0.5


def test_gradients():
    kernel = FIELDS["sa"].kernel(X).requires_grad_()
    for quantity in (row_entropy, effective_keys, symmetry_defect):
        assert torch.autograd.gradcheck(quantity, kernel)
    with_zeros = FIELDS["causal"].kernel(X).requires_grad_()
    (slope,) = torch.autograd.grad(row_entropy(with_zeros).sum(), with_zeros)
    assert torch.isfinite(slope).all()


def test_a_system_alone_and_in_a_batch_have_the_same_bits():
    kernel = hs.SA(3.0).kernel(hs.Uniform(33, 3).sample(9, seed=5))
    for quantity in (*BY_ROW.values(), received_mass, bistochastic_defect, symmetry_defect):
        together = quantity(kernel)
        for i in range(9):
            assert torch.equal(together[i : i + 1], quantity(kernel[i : i + 1]))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: check_kernel([[1.0]]), "kernel is a list.*torch tensor"),
        (lambda: row_mass(torch.ones(2, 3)), r"kernel has shape \(2, 3\).*\(..., n, n\)"),
        (lambda: row_mass(torch.ones(2)), r"kernel has shape \(2,\)"),
        (lambda: row_entropy(torch.ones(2, 2, dtype=torch.int64)), "kernel has dtype torch.int64.*float64"),
        (lambda: effective_keys(torch.tensor([[1.0, -1.0], [1.0, 1.0]])), "kernel holds the weight -1.*>= 0"),
        (lambda: effective_keys(torch.full((2, 2), math.nan)), "kernel holds the weight nan.*finite"),
        (lambda: received_mass(torch.ones(2, 2), visible=torch.ones(3, dtype=torch.bool)), "visible has .*(3,)"),
        (lambda: kernel_statistics(hs.Trajectory(torch.zeros(1), X[None])), "system is a Trajectory.*System"),
        (lambda: kernel_statistics(hs.Simulation), "system is the class Simulation, .*System"),
        (lambda: kernel_statistics(hs.integrate(torch.zeros_like, X, times=[1.0])), "attention fields only"),
        (
            lambda: kernel_statistics(Attending(hs.Trajectory(torch.zeros(1), X[None]), [torch.ones(4, 3, 3)])),
            r"kernel of layer 0 has shape \(1, 3, 3\), but for 1 system of 5 tokens it must be",
        ),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
