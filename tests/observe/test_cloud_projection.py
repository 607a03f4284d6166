"""Growth off and along the token cloud: closed forms, finite differences, and GPT-2's own modules with plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.intervene import Ablate
from helmscope.models import record
from helmscope.observe import cloud_projection
from helmscope.observe.cloud_projection import directional_growth, idempotence_defect, local_cloud
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
SIZES = {"vocab_size": 24, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
IDS = torch.arange(36).reshape(4, 9) * 7 % 24


def tiny() -> GPT2LMHeadModel:
    """Eight dimensions: after a LayerNorm directions have six, three along the cloud and three off it."""
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**SIZES, eos_token_id=0, initializer_range=0.5)).double().eval()


def states(count=5, dim=6):
    return torch.randn(count, dim, dtype=F64, generator=torch.Generator().manual_seed(0)) + 2


def tangents(z):
    """Two orthonormal tangents at each direction."""
    x = z / z.norm(dim=-1, keepdim=True)
    basis = torch.linalg.qr(torch.stack([x, x.roll(1, -1), x.roll(2, -1)], -1))[0]
    return basis[..., 1:].permute(2, 0, 1)


def test_the_identity_and_turns_grow_nothing_and_a_stretch_grows_tangents():
    z = states()
    w = tangents(z)
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=F64, generator=torch.Generator().manual_seed(1)))[0]
    for half_step in (lambda y: y + 0, lambda y: 3 * y, lambda y: y @ turn.mT):
        assert float((directional_growth(half_step, z, w) - 1).abs().max()) < 1e-14


@pytest.mark.parametrize("share", [0.5, 0.9, -0.4])
def test_moving_by_a_share_toward_a_plane_has_the_ratio_and_the_defect_one_minus_the_share(share):
    z = states()
    z[:, 3:] = 0  # in the plane, so that the radius does not change
    off, along = torch.zeros(2, 1, 5, 6, dtype=F64)
    off[..., 4] = 1
    along[..., :2] = torch.stack([z[:, 1], -z[:, 0]], -1) / z[:, :2].norm(dim=-1, keepdim=True)

    def half_step(y):
        return torch.cat([y[..., :3], (1 - share) * y[..., 3:]], -1)

    growth = directional_growth(half_step, z, torch.cat([off, along]))
    assert float((growth[0] / growth[1] - (1 - share)).abs().max()) < 1e-14
    assert float((idempotence_defect(half_step, states()) - abs(1 - share)).abs().max()) < 1e-14


def test_the_defect_of_a_projection_is_0_and_that_of_a_constant_write_1():
    z = states()
    assert float(idempotence_defect(lambda y: torch.cat([y[..., :3], 0 * y[..., 3:]], -1), z).abs().max()) == 0
    assert float((idempotence_defect(lambda y: y + 1, z) - 1).abs().max()) < 1e-14
    assert idempotence_defect(lambda y: y, z).isnan().all()


def test_growth_agrees_with_finite_differences():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 6)).double()
    z, h = states(), 1e-5
    w, radius = tangents(z), z.norm(dim=-1, keepdim=True)

    def direction(x):
        y = radius * x + layers(radius * x)
        return (y / y.norm(dim=-1, keepdim=True)).detach()

    found = directional_growth(lambda y: y + layers(y), z, w).detach()
    for k in range(2):
        ahead, behind = (direction(z / radius + sign * h * w[k]) for sign in (1, -1))
        assert float((found[k] - (ahead - behind).norm(dim=-1) / (2 * h)).abs().max()) < 1e-9


def test_the_cloud_near_a_token_is_that_of_its_neighbors():
    """A great sphere of dimension two in eight dimensions: its axes are those of the cloud."""
    draw = torch.Generator().manual_seed(0)
    flat = torch.randn(300, 3, dtype=F64, generator=draw)
    points = torch.zeros(300, 8, dtype=F64)
    points[:, 1:4] = flat / flat.norm(dim=-1, keepdim=True)
    hidden = torch.eye(4, 300, dtype=torch.bool)
    found = local_cloud(points[:4], points, neighbors=12, principal_axes=2, hidden=hidden)
    assert float(found.axes[..., [0, 4, 5, 6, 7]].abs().max()) < 1e-12
    gram = torch.einsum("knd,jnd->nkj", found.axes, found.axes)
    assert float((gram - torch.eye(2)).abs().max()) < 1e-13
    assert float((found.axes * points[:4]).sum(-1).abs().max()) < 1e-13
    for k in range(4):
        order = np.argsort(-(points.numpy() @ points[k].numpy()))[1:13]  # the nearest but itself
        assert float((found.mean[k] - points[order].mean(0)).abs().max()) < 1e-14
        angles = np.arccos(points[order].numpy() @ points[k].numpy())
        assert float(found.angle[k]) == pytest.approx(angles.mean(), abs=1e-12)
    assert found.spans.all()
    assert not local_cloud(points[:1], points[:1].expand(5, 8), neighbors=4, principal_axes=2).spans.any()


def by_hand(model, layer, neighbors, dims):
    """Growths, ratio and defect of each prompt, by GPT-2's own modules, NumPy and loops."""
    block = model.transformer.h[layer]
    x = model.transformer.wte(IDS) + model.transformer.wpe(torch.arange(IDS.shape[1]))
    for number, each in enumerate(model.transformer.h):
        x = x + each.attn(each.ln_1(x))[0]
        if number == layer:
            break
        x = x + each.mlp(each.ln_2(x))
    x = (x - x.mean(-1, keepdim=True)).detach()
    units = (x / x.norm(dim=-1, keepdim=True)).numpy()

    def step(z):
        write = block.mlp(block.ln_2(z))
        return z + write - write.mean()

    results = []
    for prompt in range(len(IDS)):
        squares, defects = [], []
        cloud = np.concatenate([units[other, 1:] for other in range(len(IDS)) if other != prompt])
        for t in range(1, IDS.shape[1]):
            z, u = x[prompt, t], units[prompt, t]
            nearest = cloud[np.argsort(-(cloud @ u))[:neighbors]]
            inside = nearest - np.outer(nearest @ u, u)
            axes = np.linalg.svd(inside - inside.mean(0))[2][:dims]
            y = step(z).detach()
            jacobian = torch.autograd.functional.jacobian(step, z).numpy() * float(z.norm())
            v = (y / y.norm()).numpy()
            turned = (np.eye(8) - np.outer(v, v)) @ jacobian / float(y.norm())
            tangent = np.eye(8) - np.outer(u, u) - 1 / 8
            whole, along = ((turned @ part) ** 2 for part in (tangent, axes.T))
            squares.append((along.sum() / dims, (whole.sum() - along.sum()) / (6 - dims)))
            defects.append(float((step(y).detach() - y).norm() / (y - z).norm()))
        along, off = np.sqrt(np.mean(squares, axis=0))
        results.append((off / along, off, along, np.mean(defects)))
    return np.array(results)


@pytest.mark.parametrize("layer", [0, 1])
def test_half_steps_agree_with_the_modules_run_by_hand(layer):
    """Three random directions off the cloud span all that is off it, so that their mean is exact."""
    model = tiny()
    measured = cloud_projection(record(model, IDS), neighbors=5, principal_axes=3, sampled_tokens=None).sel(layer=layer)
    names = ("growth_ratio", "growth_off", "growth_along", "idempotence_defect")
    for name, expected in zip(names, by_hand(model, layer, 5, 3).T, strict=True):
        np.testing.assert_allclose(measured[name], expected, rtol=1e-10, err_msg=name)
    np.testing.assert_allclose(measured.growth_ratio, measured.growth_off / measured.growth_along)


def test_a_planted_half_step_has_the_ratio_and_the_defect_of_its_share():
    recording = record(tiny_model("llama", dtype=F64), inputs_of("llama", batch=4))
    for share in (0.5, 0.75):
        measured = cloud_projection(recording, neighbors=8, principal_axes=4, sampled_tokens=6, planted_share=share)
        assert float(abs(measured.idempotence_defect - (1 - share)).max()) < 1e-12
        assert float(abs(measured.growth_ratio / (1 - share) - 1).max()) < 0.05  # directions turn a little
        assert float(measured.growth_ratio.max()) <= 1 - share + 1e-12


def test_padding_and_the_number_of_sampled_tokens():
    model, draw = tiny_model("gpt2", dtype=F64), torch.Generator().manual_seed(0)
    ids = torch.randint(3, 96, (3, 9), generator=draw)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, 6:] = 0
    padded = {"input_ids": ids * mask, "attention_mask": mask}
    options = {"neighbors": 6, "principal_axes": 3, "sampled_tokens": None}
    together = cloud_projection(record(model, padded), **options)
    wider = {name: torch.cat([value, torch.zeros(3, 2, dtype=torch.long)], 1) for name, value in padded.items()}
    further = cloud_projection(record(model, wider), **options)
    for name in ("growth_along", "idempotence_defect", "neighbor_angle"):
        np.testing.assert_allclose(together[name], further[name], rtol=1e-6, err_msg=name)
    fewer = cloud_projection(record(model, padded), neighbors=6, principal_axes=3, sampled_tokens=2)
    assert fewer.attrs["sampled_tokens"] == 2
    assert not np.allclose(fewer.growth_along, together.growth_along)


def test_bad_input():
    recording = record(tiny(), IDS)
    with pytest.raises(HelmscopeError, match="layer is 7, but this recording has layers 0 to 1"):
        cloud_projection(recording, neighbors=5, principal_axes=3, layers=[7])
    with pytest.raises(
        HelmscopeError, match="principal_axes is 5, but it must be below neighbors, 5, and at most half of"
    ):
        cloud_projection(recording, neighbors=5, principal_axes=5)
    with pytest.raises(HelmscopeError, match="at most half of the dimension of the directions, 6"):
        cloud_projection(recording, neighbors=9, principal_axes=4)
    with pytest.raises(HelmscopeError, match="neighbors is 25, but the prompts other than one have only 24 tokens"):
        cloud_projection(recording, neighbors=25, principal_axes=3)
    with pytest.raises(HelmscopeError, match="planted_share is -1, but it must be a finite number >= 0"):
        cloud_projection(recording, neighbors=5, principal_axes=3, planted_share=-1)
    with pytest.raises(HelmscopeError, match="moves a token in layer 0 by another map"):
        cloud_projection(recording.under(Ablate([0])), neighbors=5, principal_axes=3)
    with pytest.raises(HelmscopeError, match="recording has 1 prompt, but the token cloud is that of other prompts"):
        cloud_projection(record(tiny(), IDS[:1]))
    with pytest.raises(HelmscopeError, match="cloud_projection needs MLPs that add to the state they read"):
        cloud_projection(record(tiny_model("bert"), inputs_of("bert")))
