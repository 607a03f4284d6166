"""Jacobian and gates of mixtures of experts, as routed and by expert, against autograd of the model's modules."""

from __future__ import annotations

from functools import partial

import pytest
import torch

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
    points = hs.sphere.retract(recording.points(layer=LAYER).double())
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
