"""Forms of heads against dense matrices and the logits of the model, holonomy defects in closed form, and refusals."""

import numpy as np
import pytest
import torch

from helmscope.models import KeptTensors, record
from helmscope.observe import (
    HeadMatrices,
    head_matrices,
    holonomy_defect,
    qk_ov_alignment,
    query_key_metric,
    symmetric_eigenvalues,
    symmetric_share,
    triangle_holonomy_defect,
)
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model


def recorded(family, **options):
    return record(tiny_model(family, dtype=torch.float64), inputs_of(family), **options)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_measurement_against_dense_matrices(family):
    recording = recorded(family)
    metric, forms = query_key_metric(recording), head_matrices(recording)
    assert forms[0].dim == (31 if family == "gpt2" else 32)
    for layer, head in ((0, 0), (2, 3)):
        m = forms[layer].queries[head].T @ forms[layer].keys[head]
        o = forms[layer].outputs[head] @ forms[layer].values[head]
        s, found = (m + m.T) / 2, metric.sel(layer=layer, head=head)
        values = torch.linalg.eigvalsh(s)
        assert float(found.symmetric_share) == pytest.approx(float((s.norm() / m.norm()) ** 2), abs=1e-12)
        assert float(found.qk_ov_alignment) == pytest.approx(float((m * o).sum() / m.norm() / o.norm()), abs=1e-12)
        negative = float(values.clamp(max=0).square().sum() / values.square().sum())
        assert float(found.negative_eigenvalue_share) == pytest.approx(negative, abs=1e-12)
        assert int(found.positive_eigenvalue_count) == int((values > 1e-10).sum())
        assert int(found.negative_eigenvalue_count) == int((values < -1e-10).sum())
    d = forms[0].dim
    assert np.abs(metric.symmetric_share_null - (d + 1) / (2 * d)).max() < 1e-15


def test_the_form_is_that_of_the_logits():
    """Without biases <q_i, k_j> = u_i^T M u_j with u the state normalized by hand."""
    model = tiny_model("gpt2", dtype=torch.float64)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.bias.zero_()
            block.ln_1.bias.zero_()
    recording = record(model, inputs_of("gpt2"), keep=KeptTensors.QUERIES | KeptTensors.KEYS)
    for layer in range(3):
        state = recording.residual_stream(depth=2 * layer)
        u = state / (state.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()  # its mean is left for P
        forms = head_matrices(recording)[layer]
        for head in range(4):
            m = forms.queries[head].T @ forms.keys[head]
            logits = recording.kept["query"][layer, :, head] @ recording.kept["key"][layer, :, head].mT
            assert (u @ m @ u.mT - logits).abs().max() < 1e-11


def test_grouped_heads_share_their_keys_and_values():
    forms = head_matrices(recorded("llama"))[0]
    assert forms.keys.shape == (4, 8, 32)
    assert torch.equal(forms.keys[0], forms.keys[1])
    assert not torch.equal(forms.keys[1], forms.keys[2])
    assert torch.equal(forms.values[2], forms.values[3])


def test_shares_of_known_matrices():
    a = normal(5, 12)
    assert symmetric_share(a, a).item() == pytest.approx(1, abs=1e-12)
    turn = torch.block_diag(*[torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)] * 3)
    six = normal(6, 12)
    assert symmetric_share(six, turn @ six).item() == pytest.approx(0, abs=1e-12)  # six^T turn six is antisymmetric
    left, right = normal(4000, 3, 12, seed=1), normal(4000, 3, 12, seed=2)
    shares = symmetric_share(left, right)
    inner, square = ((left.mT @ right) ** 2).sum((1, 2)), shares
    mean = float((inner * square).sum() / inner.sum())  # a ratio of means, as in the closed form
    assert mean == pytest.approx(13 / 24, abs=4 * float(shares.std()) / 4000**0.5)
    assert symmetric_share(0 * a, a).isnan()


def test_independent_factors_have_as_many_eigenvalues_of_either_sign():
    values = symmetric_eigenvalues(normal(20, 5, 12, seed=3), normal(20, 5, 12, seed=4))
    assert values.shape == (20, 10)
    assert ((values > 0).sum(-1) == 5).all()
    a = normal(5, 12)
    same = symmetric_eigenvalues(a, a)
    assert (same > -1e-12).all()
    assert int((same > 1e-9).sum()) == 5


def test_alignment_of_a_gradient():
    a, b = normal(2, 3, 8, seed=5), normal(2, 3, 8, seed=6)
    for sign in (1, -1):
        forms = HeadMatrices(a, b, b, sign * a.mT, dim=8)
        assert (qk_ov_alignment(forms) - sign).abs().max() < 1e-12


def whole(*matrices):
    """Heads that write the given matrices."""
    eye = torch.eye(len(matrices[0]), dtype=torch.float64).expand(len(matrices), -1, -1)
    return HeadMatrices(eye, eye, eye, torch.stack(matrices), dim=len(matrices[0]))


def test_holonomy_defects_in_closed_form():
    weights = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, second = (normal(6, 6, seed=k) for k in (7, 8))
    positive = whole(first @ first.T + torch.eye(6).double(), second @ second.T)
    assert abs(triangle_holonomy_defect(positive, weights)) < 1e-12
    commuting = whole(torch.diag(torch.arange(1.0, 7).double()), torch.eye(6).double())
    assert abs(triangle_holonomy_defect(commuting, weights)) < 1e-12
    angle = 0.7
    plane = torch.tensor([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    turned = whole(torch.block_diag(plane, plane, plane), 2 * torch.block_diag(plane, plane, plane))
    assert triangle_holonomy_defect(turned, weights) == pytest.approx(1 - np.cos(angle), abs=1e-12)
    assert triangle_holonomy_defect(whole(-torch.eye(6).double()), weights[:, :1]) == pytest.approx(2, abs=1e-12)
    projector = torch.diag(torch.tensor([1.0, 1.0, 0, 0, 0, 0]).double())
    assert abs(triangle_holonomy_defect(whole(projector), weights[:, :1])) < 1e-12
    assert np.isnan(triangle_holonomy_defect(whole(0 * projector), weights[:, :1]))
    mean = np.mean(
        [
            triangle_holonomy_defect(whole(normal(6, 6, seed=2 * k), normal(6, 6, seed=2 * k + 1)), weights)
            for k in range(300)
        ]
    )
    assert abs(mean - 1) < 0.1


def test_the_holonomy_defect_of_a_model_by_hand():
    recording = recorded("gpt2", batch_size=2)
    found = holonomy_defect(recording, triangles=2, layers=[1], seed=4)
    kernel, forms = recording.kernel(layer=1), head_matrices(recording)[1]
    for prompt in range(3):
        draw, expected = np.random.default_rng([4, prompt]), []
        for _ in range(2):
            i, j, k = np.sort(draw.choice(np.arange(13), 3, replace=False))[::-1]
            units = []
            for a, b in ((i, j), (j, k), (i, k)):
                transport = sum(kernel[prompt, h, a, b] * forms.outputs[h] @ forms.values[h] for h in range(4))
                left, sizes, right = np.linalg.svd(transport.numpy())
                rank = int((sizes > 1e-8 * sizes[0]).sum())
                units.append(left[:, :rank] @ right[:rank])
            expected.append(1 - np.trace(units[0] @ units[1] @ units[2].T) / rank)
        assert float(found.holonomy_defect[0, prompt]) == pytest.approx(np.mean(expected), abs=1e-10)


def test_short_texts_and_refusals():
    model, ids = tiny_model("gpt2"), inputs_of("gpt2")
    mask = torch.ones_like(ids)
    mask[1, 2:] = 0
    found = holonomy_defect(record(model, {"input_ids": ids, "attention_mask": mask}), triangles=1).holonomy_defect
    assert found.isnull().any("layer").values.tolist() == [False, True, False]
    with pytest.raises(HelmscopeError, match="recording holds no text with 3 visible tokens, but a triangle needs"):
        holonomy_defect(record(model, ids[:, :2]))
    recording = record(model, ids)
    with pytest.raises(HelmscopeError, match="layer is 9, but this recording has layers 0 to 2"):
        holonomy_defect(recording, layers=[9])
    with pytest.raises(HelmscopeError, match="triangles is 0, but it must be"):
        holonomy_defect(recording, triangles=0)
    with pytest.raises(HelmscopeError, match="recording is a GPT2LMHeadModel, but it must be a Recording"):
        query_key_metric(model)
    with pytest.raises(HelmscopeError, match="layer 0 has a query that is not the output of one linear module"):
        query_key_metric(record(tiny_model("qwen3"), inputs_of("qwen3")))
