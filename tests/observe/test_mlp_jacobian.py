"""The shares of the MLP's Jacobian, weights of MLPs and the projection share, on simulations and recordings, against
loops over tokens with autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import lstsq

import helmscope as hs
from helmscope.fields.activations import Identity, ReLU, Tanh
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.models.record import record
from helmscope.observe.mlp_jacobian import MlpJacobian, antisymmetric_share, mlp_jacobian
from helmscope.observe.mlp_swirl_bound import mlp_swirl_bound
from helmscope.observe.mlp_weights import (
    GateSparsity,
    gate_sparsity,
    gaussian_coherence,
    mlp_weights,
    neuron_alignment,
    neuron_coherence,
    permuted_alignment,
    row_coherence,
    welch_bound,
)
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
DRAW = torch.Generator().manual_seed(1)
D, HIDDEN = 4, 6


def normal(*shape):
    return torch.randn(*shape, dtype=F64, generator=DRAW)


PLAIN = MLP(w_in=normal(HIDDEN, D), w_out=normal(D, HIDDEN), b_in=normal(HIDDEN), activation=Tanh())
GATED = GatedMLP(w_gate=normal(HIDDEN, D), w_up=normal(HIDDEN, D), w_out=normal(D, HIDDEN), b_up=normal(HIDDEN))
X = hs.sphere.retract(normal(3, 5, D))
MASK = torch.tensor([[True] * 5, [True, True, False, True, False], [False, True, True, True, True]])


def share_of(matrix):
    turning = sum((matrix[i, j] - matrix[j, i]).item() ** 2 / 4 for i in range(len(matrix)) for j in range(len(matrix)))
    return turning / sum(entry.item() ** 2 for entry in matrix.flatten())


@pytest.mark.parametrize("force", [PLAIN, GATED])
def test_shares_are_the_loops_over_tokens(force):
    seen = mlp_jacobian(hs.integrate(force, X, times=[0.0], mask=MASK))
    for system in range(3):
        tokens = [x for x, real in zip(X[system], MASK[system], strict=True) if real]
        mean = sum(tokens) / len(tokens)
        covariance = sum(torch.outer(x - mean, x - mean) for x in tokens) / len(tokens)
        value, axes = torch.linalg.eigh(covariance)
        root = axes @ torch.diag(value.clamp(min=0).sqrt()) @ axes.T
        rows = []
        for x in tokens:
            jacobian = torch.autograd.functional.jacobian(force.ambient, x)
            onto = torch.eye(D, dtype=F64) - torch.outer(x, x)
            rows.append(
                {
                    "antisymmetric_share": share_of(jacobian),
                    "antisymmetric_share_tangent": share_of(onto @ jacobian @ onto),
                    "antisymmetric_share_weighted": share_of(root @ jacobian @ root),
                    "positive_trace_share": float(jacobian.trace() > 0),
                    "weighted_trace": (jacobian @ covariance).trace().item(),
                    "covariance_rank_bound": min(len(tokens) - 1, D),
                }
            )
        for name in rows[0]:
            wanted = sum(row[name] for row in rows) / len(rows)
            assert seen[name][0, system].item() == pytest.approx(wanted, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize("angle", [0.0, math.pi / 6, math.pi / 2])
def test_a_conservative_mlp_and_the_same_turned_by_an_angle(angle):
    """J = R diag(c1, c2) has A = sin(angle) (c1 + c2) / 2 off the diagonal, so that its share is
    sin^2 (c1 + c2)^2 / (2 (c1^2 + c2^2)): 0 for the gradient and nothing else.
    """
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=F64)
    force = MLP(w_in=torch.eye(2, dtype=F64), w_out=turn, activation=Tanh())
    x = hs.sphere.retract(normal(4, 7, 2))
    seen = mlp_jacobian(hs.integrate(force, x, times=[0.0]))
    for system in range(4):
        shares = []
        for a, b in x[system].tolist():
            c1, c2 = 1 - math.tanh(a) ** 2, 1 - math.tanh(b) ** 2
            shares.append(math.sin(angle) ** 2 * (c1 + c2) ** 2 / (2 * (c1**2 + c2**2)))
        assert seen.antisymmetric_share[0, system].item() == pytest.approx(sum(shares) / 7, rel=1e-12, abs=1e-15)
    assert (seen.antisymmetric_share_weighted.values < 1e-15).all() == (angle == 0)


def test_identical_tokens_and_a_silent_mlp_have_no_share():
    same = X[:1, :1].expand(1, 4, D)
    seen = mlp_jacobian(hs.integrate(PLAIN, same, times=[0.0]))
    assert math.isnan(seen.antisymmetric_share_weighted.item())
    assert seen.antisymmetric_share.item() > 0
    off = MLP(w_in=PLAIN.w_in, w_out=PLAIN.w_out, b_in=torch.full((HIDDEN,), -99.0, dtype=F64), activation=ReLU())
    silent = mlp_jacobian(hs.integrate(off, X, times=[0.0]))
    assert silent.antisymmetric_share.isnull().all()


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "gpt_oss"])
def test_recordings_agree_with_their_force_and_chunks_do_not_matter(family):
    model, ids = tiny_model(family, dtype=F64), inputs_of(family, batch=4)
    recording = record(model, ids)
    instruments = MlpJacobian(), GateSparsity()
    seen, again = (record(model, ids, batch_size=size).replay(*instruments) for size in (4, 1))
    for name, measured in seen.items():
        for quantity, value in measured.data_vars.items():
            np.testing.assert_allclose(again[name][quantity].values, value.values, rtol=1e-9, atol=1e-12)
    points = hs.sphere.retract(recording.force_points(layer=1))
    shares = antisymmetric_share(recording.force(layer=1), points).mean(-1)
    assert seen["mlp_jacobian"].antisymmetric_share[1].values == pytest.approx(shares.numpy(), rel=1e-9)
    assert ("expert" in mlp_weights(recording).dims) == (family in ("mixtral", "gpt_oss"))


def test_coherence_alignment_and_their_references():
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 2.0]], dtype=F64)
    largest, mean = row_coherence(rows)
    assert (largest, mean) == pytest.approx((math.sqrt(0.5), 2 * math.sqrt(0.5) / 3), rel=1e-14)
    assert all(math.isnan(value) for value in row_coherence(rows[2:]))
    tight = torch.tensor([[math.cos(math.pi * k / 3), math.sin(math.pi * k / 3)] for k in range(3)], dtype=F64)
    assert row_coherence(tight)[0] == pytest.approx(welch_bound(3, 2), rel=1e-14)
    assert welch_bound(2, 3) == 0
    assert welch_bound(100, 10) < gaussian_coherence(100, 10) < 1
    dead = MLP(w_in=rows, w_out=normal(2, 4))
    cosine = neuron_alignment(dead)
    wanted = [
        sum(a * b for a, b in zip(v, w, strict=True)) / math.hypot(*v) / math.hypot(*w) if any(v) else math.nan
        for v, w in zip(rows.tolist(), dead.w_out.T.tolist(), strict=True)
    ]
    assert cosine.tolist() == pytest.approx(wanted, nan_ok=True, rel=1e-13)
    null = permuted_alignment(PLAIN, permutations=4000, seed=0)
    unit = [each / each.norm(dim=-1, keepdim=True) for each in (PLAIN.w_in, PLAIN.w_out.T)]
    table = (unit[0] @ unit[1].T).abs()
    assert null.mean().item() == pytest.approx(table.mean().item(), abs=4 * null.std().item() / math.sqrt(4000))
    seen = mlp_weights(hs.integrate(dead, hs.sphere.retract(X[..., :2]), times=[0.0]))
    assert (seen.constant_neuron_count.item(), seen.neuron_alignment_mean.item()) == pytest.approx(
        (1, cosine.nanmean().item())
    )
    half = math.sqrt(0.5)  # e_1, (1, 1), 0 and e_2: the second row is at 45 degrees to the other two
    assert neuron_coherence(dead).tolist() == pytest.approx([half, half, math.nan, half], nan_ok=True, rel=1e-14)
    assert seen.neuron_coherence[0].values.tolist() == pytest.approx([half, half, math.nan, half], nan_ok=True)
    assert neuron_coherence(MLP(w_in=rows[2:], w_out=normal(2, 2))).isnan().all()


def test_gates_below_a_threshold():
    run = hs.integrate(PLAIN, X, times=[0.0], mask=MASK)
    seen = gate_sparsity(run, threshold=0.2, slope=0.5, per_neuron=True)
    assert "neuron" not in gate_sparsity(run).dims
    for system in range(3):
        z = [PLAIN.w_in @ x + PLAIN.b_in for x, real in zip(X[system], MASK[system], strict=True) if real]
        below = sum(float(v < 0.2) for token in z for v in token) / (HIDDEN * len(z))
        closed = sum(float(1 - math.tanh(v) ** 2 < 0.5) for token in z for v in token) / (HIDDEN * len(z))
        silent = sum(all(token[j] < 0.2 for token in z) for j in range(HIDDEN)) / HIDDEN
        found = [seen[name][0, system].item() for name in ("gate_sparsity", "closed_gate_share", "silent_share")]
        assert found == pytest.approx([below, closed, silent])
        each = [sum(float(token[j] < 0.2) for token in z) / len(z) for j in range(HIDDEN)]
        assert seen.neuron_gate_sparsity[0, system].values.tolist() == pytest.approx(each)


def test_weights_agree_with_the_training_history():
    """Which another program measured, on the weights as they are in the model."""
    recording = record("A", ["Once upon a time"])
    history = hs.models.training_history("A").isel(step=-1)
    seen = mlp_weights(recording, permutations=10)
    for name in ("coherence_max", "coherence_mean", "neuron_alignment_mean"):
        np.testing.assert_allclose(seen[name], history[name], atol=2e-3)


CLOUDS = hs.sphere.retract(normal(8, 60, 3))


def test_the_projection_finds_a_gradient_and_a_rotated_one():
    rows = normal(5, 3)
    gradient = MLP(w_in=rows, w_out=rows.T * normal(5), b_in=normal(5), b_out=normal(3), activation=Tanh())
    turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=F64)
    rotated = MLP(w_in=rows, w_out=turn @ gradient.w_out, b_in=gradient.b_in, activation=Tanh())
    shares = [mlp_swirl_bound(hs.integrate(f, CLOUDS, times=[0.0]), progress=False) for f in (gradient, rotated)]
    assert shares[0].swirl_share_bound.max() < 1e-6
    fitted = hs.fields.gradient_residual_share(rotated, CLOUDS.reshape(-1, 3))  # on the tokens of the fit
    assert fitted < float(shares[1].swirl_share_bound.mean()) < 1.5 * fitted
    assert float(shares[1].swirl_share_bound.min()) > 1e4 * float(shares[0].swirl_share_bound.max())
    assert shares[0].swirl_share_bound.dims == ("time", "system")
    few = mlp_swirl_bound(hs.integrate(gradient, CLOUDS, times=[0.0]), neurons=2, max_tokens=100, progress=False)
    assert (
        shares[0].swirl_share_bound.mean()
        < few.swirl_share_bound.mean()
        <= 1.2 * few.swirl_share_bound_quadratic.mean()
    )


def test_the_bound_of_a_linear_force_at_tokens_of_covariance_diag_1_4():
    """theory.md 000-3: M = [[0, 1], [0, 0]] and C = diag(1, 4) have the share 0.2, which does not depend on the size of
    C: tokens (+-1, +-2) / sqrt 5 on the circle.
    """
    corners = torch.tensor([[1.0, 2.0], [1.0, -2.0], [-1.0, 2.0], [-1.0, -2.0]], dtype=F64) / math.sqrt(5)
    shear = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64)
    mlp = MLP(w_in=torch.eye(2, dtype=F64), w_out=shear, activation=Identity())
    found = mlp_swirl_bound(hs.integrate(mlp, corners.expand(4, 4, 2), times=[0.0]))
    for name in ("swirl_share_bound", "swirl_share_bound_quadratic"):
        assert found[name].values == pytest.approx(0.2, abs=1e-7)


@pytest.mark.parametrize(("activation", "share"), [(ReLU(), 3 / 8), (Tanh(), 0.518716457384691)], ids=repr)
def test_the_bound_of_a_neuron_that_writes_across_what_it_reads(activation, share):
    """theory.md 000-3: 3/8 and .5187 under N(0, I), here at uniform tokens of S^15, whose law is close to it; quadratic
    potentials alone leave more.
    """
    d = 16
    x = hs.sphere.retract(torch.randn(4, 2048, d, dtype=F64, generator=torch.Generator().manual_seed(3)))
    axes = torch.eye(d, dtype=F64)
    mlp = MLP(w_in=math.sqrt(d) * axes[:1], w_out=axes[1:2].T, activation=activation)
    found = mlp_swirl_bound(hs.integrate(mlp, x, times=[0.0]), max_tokens=8192)
    assert found.swirl_share_bound.values.mean() == pytest.approx(share, abs=0.02)
    assert float(found.swirl_share_bound_quadratic.mean()) > float(found.swirl_share_bound.mean()) + 0.005


def test_an_mlp_without_a_live_neuron_is_constant_and_a_gradient():
    """f = w s(c) + b_out = grad <f, x>: no swirl, with and without potentials of neurons."""
    constant = MLP(w_in=0 * PLAIN.w_in, w_out=PLAIN.w_out, b_in=PLAIN.b_in, b_out=normal(D), activation=Tanh())
    x = hs.sphere.retract(normal(4, 20, D))
    for force in (constant, GatedMLP(w_gate=0 * GATED.w_gate, w_up=0 * GATED.w_up, w_out=GATED.w_out, b_out=normal(D))):
        found = mlp_swirl_bound(hs.integrate(force, x, times=[0.0]))
        assert found.swirl_share_bound.values.max() < 1e-20
        assert found.swirl_share_bound_quadratic.values.max() < 1e-20


def test_the_projection_of_a_rotation_is_all_swirl():
    turn = MLP(w_in=torch.eye(2, dtype=F64), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=F64))
    turn = MLP(w_in=turn.w_in, w_out=turn.w_out, activation=Identity())
    circle = torch.linspace(0, 2 * math.pi, 65, dtype=F64)[:-1]
    x = torch.stack([circle.cos(), circle.sin()], -1).expand(4, 64, 2)
    assert mlp_swirl_bound(
        hs.integrate(turn, x, times=[0.0]), progress=False
    ).swirl_share_bound.values == pytest.approx(1)


class Points(hs.Instrument):
    """Keeps the points and forces of every layer of a recording that is one chunk."""

    name, needs = "points", hs.types.Needs.FORCE

    def __init__(self):
        self.found = {}

    def mlp(self, context, tensors):
        self.found[context.layer] = tensors.point.double(), tensors.force
        self.keep(context, {"seen": torch.ones(len(tensors.point))})


def left_by_quadratics(fitted, predicted, force):
    """The shares of |f|^2 per prompt that the best S x + b with symmetric S leaves, by SciPy's least squares."""
    d = fitted.shape[-1]
    pairs = [(i, j) for i in range(d) for j in range(i + 1)]

    def design(x):
        columns = np.zeros((len(x), d, len(pairs) + d))
        for k, (i, j) in enumerate(pairs):
            columns[:, i, k] += x[:, j]
            columns[:, j, k] += x[:, i] if i != j else 0.0
        columns[:, :, len(pairs) :] = np.eye(d)
        return columns.reshape(len(x) * d, -1)

    f = force.ambient(fitted.reshape(-1, d)).numpy().ravel()
    solution = lstsq(design(fitted.reshape(-1, d).numpy()), f, cond=1e-6)[0]
    shares = []
    for x in predicted:
        exact = force.ambient(x).numpy().ravel()
        shares.append(np.square(exact - design(x.numpy()) @ solution).sum() / np.square(exact).sum())
    return shares


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_projection_of_a_recorded_model(family):
    """A plain and a gated MLP, whose quadratic part is fitted to the even prompts for the odd ones and vice versa."""
    recording = record(tiny_model(family), inputs_of(family, batch=8, n=24))
    seen = mlp_swirl_bound(recording, progress=False)
    assert seen.swirl_share_bound.dims == ("layer", "prompt")
    assert seen.sizes["prompt"] == 8
    assert float(seen.swirl_share_bound.min()) > 0
    assert bool(np.isfinite(seen.swirl_share_bound).all())
    points = Points()
    recording.replay(points)
    for layer, (x, force) in points.found.items():
        x = hs.sphere.retract(x)
        expected = np.empty(8)
        expected[1::2] = left_by_quadratics(x[::2], x[1::2], force)
        expected[::2] = left_by_quadratics(x[1::2], x[::2], force)
        assert seen.swirl_share_bound_quadratic.sel(layer=layer).values == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("family", "least"), [("gpt2", 32), ("llama", 33)])
def test_the_projection_needs_tokens_that_span_all_dimensions(family, least):
    """After a LayerNorm 32 tokens span the 31 dimensions, after an RMSNorm 33 tokens the 32; a half of four prompts of
    n tokens has 2 n.
    """
    for n in (16, 17):
        ids = inputs_of(family, batch=4, n=n)
        seen = mlp_swirl_bound(record(tiny_model(family), ids), progress=False)
        determined = 2 * n >= least
        assert ("undetermined" not in seen.attrs) == determined
        assert bool(np.isfinite(seen.swirl_share_bound).all()) == determined
        assert bool(np.isnan(seen.swirl_share_bound_quadratic).all()) != determined
    if family == "llama":
        alike = mlp_swirl_bound(record(tiny_model(family), inputs_of(family, n=16, batch=1).expand(4, 16)))
        assert alike.attrs["undetermined"] == (
            "swirl_share_bound and swirl_share_bound_quadratic are NaN in layers 0, 1, 2: the tokens of half of the "
            "prompts, of which 16 are distinct, span 15 of 32 dimensions, but a fit needs all of them: use more or "
            "longer prompts"
        )


def test_the_projection_is_not_determined_by_tokens_of_a_plane_or_equal_ones():
    force = MLP(w_in=normal(5, 3), w_out=normal(3, 5), activation=Tanh())
    plane = hs.sphere.retract(torch.cat([normal(4, 60, 2), torch.zeros(4, 60, 1, dtype=F64)], -1))
    for x, numbers in ((plane, "120 are distinct, span 2 of 3"), (CLOUDS[:4, :1].expand(4, 9, 3), "span 1 of 3")):
        seen = mlp_swirl_bound(hs.integrate(force, x, times=[0.0]), progress=False)
        assert bool(np.isnan(seen.swirl_share_bound).all())
        assert numbers in seen.attrs["undetermined"]
    assert bool(
        np.isfinite(mlp_swirl_bound(hs.integrate(force, CLOUDS, times=[0.0]), progress=False).swirl_share_bound).all()
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: mlp_swirl_bound(hs.integrate(PLAIN, X, times=[0.0])),
            "system has fewer than four systems, but mlp_swirl_bound",
        ),
        (lambda: mlp_weights(hs.integrate(hs.SA(1.0), X, times=[0.0])), r"system has no MLP: force\(layer=0\) is None"),
        (lambda: row_coherence([1.0]), "rows is a list, but it must be a float tensor"),
        (lambda: welch_bound(0, 2), "count is 0"),
        (
            lambda: mlp_swirl_bound(record(tiny_model("gpt_oss"), inputs_of("gpt_oss", batch=4))),
            "system has a ClampedGatedMLP as an expert of force",
        ),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
