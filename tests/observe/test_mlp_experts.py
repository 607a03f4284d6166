"""Jacobian and gates of mixtures of experts, as routed and by expert, against autograd of the model's modules."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import solve

import helmscope as hs
from helmscope.models.record import record
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
LAYER = 1


def share_of(matrix):
    turning = (matrix - matrix.T) / 2
    return (turning.square().sum() / matrix.square().sum()).item()


def shares(matrix, onto, root):
    return share_of(matrix), share_of(onto @ matrix @ onto), share_of(root @ matrix @ root)


def module_of(model):
    return model.model.layers[LAYER].mlp


def reading(model, x):
    """What the MLP module of the model reads at a unit vector x."""
    return x * len(x) ** 0.5 * model.model.layers[LAYER].post_attention_layernorm.weight.detach()


def routing(module, z):
    """The weights and the indices of the experts at z."""
    out = module.gate(z[None])
    return out[-2][0], out[-1][0].tolist()


def expert_output(module, expert, z):
    gate, up = (module.experts.gate_up_proj[expert].double() @ z).chunk(2)
    return module.experts.down_proj[expert].double() @ (torch.nn.functional.silu(gate) * up)


def expert_at(model, expert, x):
    return expert_output(module_of(model), expert, reading(model, x))


def mixture_at(model, x):
    return module_of(model)(reading(model, x)[None, None])[0, 0]


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def case(request):
    model = tiny_model(request.param, dtype=F64).requires_grad_(False)
    recording = record(model, inputs_of(request.param, batch=2, n=9))
    points = hs.sphere.retract(recording.force_points(layer=LAYER).double())
    return model, recording, points


def jacobian(function, x):
    return torch.autograd.functional.jacobian(function, x)


def test_the_jacobian_as_routed_and_by_expert(case):
    model, recording, points = case
    seen = hs.observe.mlp_jacobian(recording).sel(layer=LAYER)
    assert seen.expert_antisymmetric_share.dims == ("prompt", "expert")
    for prompt, cloud in enumerate(points):
        centered = cloud - cloud.mean(0)
        value, axes = torch.linalg.eigh(centered.T @ centered / len(cloud))
        root = axes @ torch.diag(value.clamp(min=0).sqrt()) @ axes.T
        module, rows, by_expert = module_of(model), [], {}
        for x in cloud:
            weights, chosen = routing(module, reading(model, x))
            onto = torch.eye(len(x), dtype=F64) - torch.outer(x, x)
            own = {e: jacobian(partial(expert_at, model, e), x) for e in chosen}
            frozen = sum(weight * own[e] for weight, e in zip(weights, chosen, strict=True))
            whole = jacobian(partial(mixture_at, model), x)
            rows.append((*shares(frozen, onto, root), *shares(whole, onto, root)))
            for weight, e in zip(weights.tolist(), chosen, strict=True):
                by_expert.setdefault(e, []).append((weight, *shares(own[e], onto, root)))
        names = ["antisymmetric_share", "antisymmetric_share_tangent", "antisymmetric_share_weighted"]
        for k, name in enumerate([*names, *(f"{name}_with_router" for name in names)]):
            wanted = sum(row[k] for row in rows) / len(rows)
            assert seen[name][prompt].item() == pytest.approx(wanted, rel=1e-6), name
        for e in range(4):
            tokens = by_expert.get(e, [])
            total = sum(token[0] for token in tokens)
            assert seen.expert_weight[prompt, e].item() == pytest.approx(total / len(cloud), rel=1e-6)
            for k, name in enumerate(names, 1):
                found = seen[f"expert_{name}"][prompt, e].item()
                wanted = sum(token[0] * token[k] for token in tokens) / total if tokens else float("nan")
                assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True), name
    difference = abs(seen.antisymmetric_share_with_router - seen.antisymmetric_share).max()
    assert difference > 1e-6  # the router moves the share


def test_the_gates_as_routed_and_by_expert(case):
    model, recording, points = case
    seen = hs.observe.gate_sparsity(recording, threshold=0.01).sel(layer=LAYER)
    for prompt, cloud in enumerate(points):
        routed, by_expert = [], {}
        for x in cloud:
            module, z = module_of(model), reading(model, x)
            weights, chosen = routing(module, z)
            off = {e: (module.experts.gate_up_proj[e].double() @ z).chunk(2)[0] < 0.01 for e in chosen}
            pairs = list(zip(weights.tolist(), chosen, strict=True))
            routed.append(sum(w * off[e].double().mean().item() for w, e in pairs) / sum(w for w, _ in pairs))
            for w, e in pairs:
                by_expert.setdefault(e, []).append((w, off[e]))
        assert seen.gate_sparsity[prompt].item() == pytest.approx(sum(routed) / len(routed), rel=1e-6)
        for e in range(4):
            tokens = by_expert.get(e, [])
            total = sum(w for w, _ in tokens)
            mean = sum(w * each.double().mean().item() for w, each in tokens) / total if tokens else float("nan")
            silent = torch.stack([each for _, each in tokens]).all(0).double().mean().item() if tokens else float("nan")
            assert seen.expert_gate_sparsity[prompt, e].item() == pytest.approx(mean, rel=1e-6, nan_ok=True)
            assert seen.expert_silent_share[prompt, e].item() == pytest.approx(silent, nan_ok=True)


# ---- the projection share


def folded_experts(model):
    """The experts as forces on unit vectors, from the weights of the modules."""
    gain = model.model.layers[LAYER].post_attention_layernorm.weight.detach()
    module = module_of(model)
    for both, down in zip(module.experts.gate_up_proj.detach(), module.experts.down_proj.detach(), strict=True):
        gate, up = (len(gain) ** 0.5 * rows * gain for rows in both.chunk(2))
        yield hs.GatedMLP(w_gate=gate, w_up=up, w_out=down, activation=hs.activations.SiLU())


def routing_of(model, points):
    """The routing weight of every expert at every token, (prompt, token, expert)."""
    weights = torch.zeros(*points.shape[:2], 4, dtype=F64)
    for prompt, cloud in enumerate(points):
        for token, x in enumerate(cloud):
            for weight, expert in zip(*routing(module_of(model), reading(model, x)), strict=True):
                weights[prompt, token, expert] = weight
    return weights


def quadratic_rest(fitted, mass, x, force):
    """force(x) minus the best S x + b with a symmetric S for weighted points, by the normal
    equations."""
    d = x.shape[-1]
    pairs = [(i, j) for i in range(d) for j in range(i + 1)]

    def design(points):
        columns = np.zeros((len(points), d, len(pairs) + d))
        for k, (i, j) in enumerate(pairs):
            columns[:, i, k] += points[:, j]
            columns[:, j, k] += points[:, i] if i != j else 0.0
        columns[:, :, len(pairs) :] = np.eye(d)
        return columns

    root = mass.sqrt().numpy()
    left, right = design(fitted.numpy()) * root[:, None, None], force(fitted).numpy() * root[:, None]
    left = left.reshape(len(fitted) * d, -1)
    solution = solve(left.T @ left, left.T @ right.ravel(), assume_a="pos")
    return force(x) - torch.from_numpy(design(x.numpy()) @ solution)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def long_case(request):
    model = tiny_model(request.param, dtype=F64).requires_grad_(False)
    return model, record(model, inputs_of(request.param, batch=8, n=48))


def test_the_projection_of_experts_is_that_of_their_forces_at_the_tokens_that_select_them(long_case):
    model, recording = long_case
    seen = hs.observe.mlp_swirl_bound(recording, progress=False).sel(layer=LAYER)
    assert seen.expert_swirl_share_bound.dims == ("prompt", "expert")
    points = hs.sphere.retract(recording.force_points(layer=LAYER).double())
    weights = routing_of(model, points)
    assert seen.expert_weight.values == pytest.approx(weights.mean(1).numpy(), rel=1e-6)
    for expert, force in enumerate(folded_experts(model)):
        alone = hs.integrate(force, points, weights=weights[..., expert], times=[0.0])
        expected = hs.observe.mlp_swirl_bound(alone, progress=False).isel(time=0)
        for name in ("swirl_share_bound", "swirl_share_bound_quadratic"):
            found = seen[f"expert_{name}"].sel(expert=expert).values
            assert np.isfinite(found).all()
            assert found == pytest.approx(expected[name].values, rel=1e-4)


def test_the_projection_as_routed_is_the_sum_over_experts(long_case):
    model, recording = long_case
    seen = hs.observe.mlp_swirl_bound(recording, progress=False).sel(layer=LAYER)
    points = hs.sphere.retract(recording.force_points(layer=LAYER).double())
    weights, rest, total = routing_of(model, points), torch.zeros_like(points), torch.zeros_like(points)
    for expert, force in enumerate(folded_experts(model)):
        for half in (0, 1):
            fitted, mass = points[1 - half :: 2].flatten(0, 1), weights[1 - half :: 2, :, expert].flatten()
            for prompt in range(half, 8, 2):
                own = weights[prompt, :, expert, None]
                rest[prompt] += own * quadratic_rest(fitted[mass > 0], mass[mass > 0], points[prompt], force.ambient)
                total[prompt] += own * force.ambient(points[prompt])
    expected = rest.square().sum((1, 2)) / total.square().sum((1, 2))
    assert seen.swirl_share_bound_quadratic.values == pytest.approx(expected.numpy(), rel=1e-6)
    assert bool((seen.swirl_share_bound > 0).all())


def test_the_projection_finds_experts_that_are_gradients_and_rotated_ones():
    """f_k = sum_j g_j s(g_j.x) (c g_j.x) is a gradient; turned, it is not. What an expert writes does not move its own
    layer's tokens, so that both read the same points.
    """
    model = tiny_model("mixtral", dtype=F64).requires_grad_(False)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=F64))[0]
    shares = []
    for onto in (torch.eye(32, dtype=F64), turn):
        gain, experts = model.model.layers[LAYER].post_attention_layernorm.weight, module_of(model).experts
        for expert in range(4):
            gate = experts.gate_up_proj[expert].chunk(2)[0].clone()
            experts.gate_up_proj[expert] = torch.cat([gate, 0.7 * gate])
            experts.down_proj[expert] = onto @ (gate * gain).T
        seen = hs.observe.mlp_swirl_bound(record(model, inputs_of("mixtral", batch=8, n=48)), progress=False)
        shares.append(seen.sel(layer=LAYER))
    for name in ("swirl_share_bound", "expert_swirl_share_bound"):
        assert float(shares[0][name].max()) < 5e-5
        assert float(shares[1][name].min()) > 0.1


def test_an_expert_with_few_tokens_has_no_projection_share():
    seen = hs.observe.mlp_swirl_bound(record(tiny_model("mixtral"), inputs_of("mixtral", batch=4, n=9)), progress=False)
    assert bool(seen.swirl_share_bound.isnull().all())
    assert bool(seen.expert_swirl_share_bound.isnull().all())
    assert bool((seen.expert_weight.sum("expert") - 1 < 1e-6).all())
    said = seen.attrs["undetermined"]
    assert "tokens of half of the prompts that select expert" in said
    assert "of 32 dimensions, but a fit needs all of them, in four prompts or more" in said
