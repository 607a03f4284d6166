"""Fragility of layers and heads against plain loops over blocks, and a closed form for linear layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.intervene.attention import AblateHead
from helmscope.models.keep import KeptTensors
from helmscope.models.record import record
from helmscope.models.sites import Chunk, Site
from helmscope.observe.damage import damage_under_edits
from helmscope.observe.head_ablation_damage import KernelRank, head_ablation_damage, head_interaction, matched_pairs
from helmscope.observe.layer_ablation_damage import (
    AblationKind,
    LayerPart,
    layer_ablation_damage,
    noise_seed,
    relative_noise,
    site_means,
)
from helmscope.observe.loss import head_ablation_loss
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 1, 2], [3, 3, 4, 8, 6]])
RELATIVE, SEED = 0.2, 5


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 8}
    options = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.4, "attn_implementation": "eager"}
    return GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval().double()


def forward(model, changed=None):
    """States (layer, prompt, n, d) after each block and the logits, by a loop over half-steps; ``changed(layer, half,
    state, write)`` returns the state after a half-step."""
    body = model.transformer
    x, states = body.wte(IDS) + body.wpe(torch.arange(IDS.shape[1])), []
    for layer, block in enumerate(body.h):
        for half, (norm, module) in enumerate([(block.ln_1, block.attn), (block.ln_2, block.mlp)]):
            if half == 0:
                mask = torch.full((IDS.shape[1],) * 2, -torch.inf, dtype=F64).triu(1)[None, None]
                write = module(norm(x), attention_mask=mask)[0]
            else:
                write = module(norm(x))
            x = x + write if changed is None else changed(layer, half, x, write)
        states.append(x)
    return torch.stack(states), model.lm_head(body.ln_f(x))


def noise(half):
    """The directions of a half-step, by NumPy: the same in every layer."""
    seed = int(np.random.SeedSequence([SEED, 0, half]).generate_state(1)[0])
    rows = []
    for text in range(len(IDS)):
        source = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(0, text)))
        rows.append(np.random.Generator(source).standard_normal((IDS.shape[1], 8)))
    rows = np.stack(rows)
    return torch.from_numpy(rows / np.sqrt((rows**2).sum(-1, keepdims=True)))


@torch.no_grad()
@pytest.mark.parametrize("kind", list(AblationKind))
@pytest.mark.parametrize("part", list(LayerPart))
def test_layers_agree_with_loops_over_half_steps(kind, part):
    model = gpt2()
    measured = layer_ablation_damage(
        record(model, IDS), kinds=[kind], parts=[part], relative_norm=RELATIVE, seed=SEED
    ).isel(part=0, kind=0)
    writes = {}

    def remember(layer, half, state, write):
        writes[layer, half] = write
        return state + write

    states, logits = forward(model, remember)
    halves = {LayerPart.LAYER: (0, 1), LayerPart.ATTENTION: (0,), LayerPart.MLP: (1,)}[part]
    for ablated in range(3):

        def changed(layer, half, state, write, ablated=ablated):
            if layer != ablated or half not in halves:
                return state + write
            if kind is AblationKind.ZERO:
                return state
            if kind is AblationKind.MEAN:
                return state + writes[layer, half].mean((0, 1))
            after = state + write
            return after + RELATIVE * after.norm(dim=-1, keepdim=True) * noise(half)

        other, edited = forward(model, changed)
        p, q = (each.softmax(-1)[:, :-1] for each in (logits, edited))
        kl = (p * (p / q).log()).sum(-1).mean(-1)
        loss = (p.gather(-1, IDS[:, 1:, None]) / q.gather(-1, IDS[:, 1:, None])).log().mean((1, 2))
        sizes = ((other - states).norm(dim=-1) / states.norm(dim=-1)).mean(-1)
        found = measured.sel(layer=ablated)
        np.testing.assert_allclose(found.kl, kl, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.loss_increase, loss, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.relative_change, sizes[ablated], rtol=1e-9)
        np.testing.assert_allclose(found.repaired_share, 1 - sizes[-1] / sizes[ablated], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rate", [0.3, -0.3])
def test_linear_layers_repair_what_the_closed_form_says(rate):
    """Embeddings of length sqrt(d) in half of the coordinates, and MLPs x -> (1 + a) x + w in the other half, with w
    and the writes of attention so small that no norm changes: the share is 1 - (1 + a)^(L - l)."""
    dim, layers = 8, 4
    sizes = {"vocab_size": 9, "n_embd": dim, "n_layer": layers, "n_head": 1, "n_positions": 8, "n_inner": dim}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval().double()
    free = torch.diag((torch.arange(dim) >= dim // 2).double())
    with torch.no_grad():
        for parameter in (*model.transformer.h.parameters(), *model.transformer.wpe.parameters()):
            parameter.zero_()
        signs = torch.tensor([[1.0, 1, -1, -1], [1, -1, 1, -1], [-1, 1, 1, -1]], dtype=F64).repeat(3, 1)
        model.transformer.wte.weight.copy_(torch.cat([2**0.5 * signs, 0 * signs], -1))
        for block in model.transformer.h:
            block.ln_1.weight.fill_(1)
            block.ln_2.weight.fill_(1)
            block.attn.c_attn.weight.normal_()
            written = torch.randn(dim, dim // 2, dtype=F64)
            block.attn.c_proj.weight[:, : dim // 2] = 1e-6 * (written - written.mean(-1, keepdim=True))
            block.mlp.c_fc.weight.copy_(torch.eye(dim))
            block.mlp.c_fc.bias.fill_(40.0)  # where GELU is linear
            block.mlp.c_proj.weight.copy_(rate * free)
            block.mlp.c_proj.bias.copy_(-40 * rate * free.sum(0))
            block.mlp.c_proj.bias[dim // 2 :] += 1e-6 * torch.tensor([1.0, -2.0, 3.0, -2.0])
    measured = layer_ablation_damage(record(model, IDS), kinds=[AblationKind.ZERO], parts=[LayerPart.MLP])
    share = measured.repaired_share.isel(part=0, kind=0)
    growth = 1 + rate / (1 + 1e-5) ** 0.5  # the norm's epsilon
    for layer in range(layers):
        np.testing.assert_allclose(share.sel(layer=layer), 1 - growth ** (layers - 1 - layer), atol=2e-5)


def test_noise_has_its_norm_and_stays_in_the_range_of_a_matrix():
    torch.manual_seed(0)
    state, matrix = torch.randn(2, 3, 6, dtype=F64), torch.randn(6, 2, dtype=F64)
    context = Chunk.whole(2).at(Site.MIDDLE, layer=4)
    for each in (None, matrix):
        change = relative_noise(0.3, 1, each)(state, context) - state
        torch.testing.assert_close(change.norm(dim=-1), 0.3 * state.norm(dim=-1), rtol=1e-12, atol=0)
        torch.testing.assert_close(
            change / state.norm(dim=-1, keepdim=True),
            (relative_noise(0.3, 1, each)(2 * state, Chunk.whole(2).at(Site.MIDDLE, layer=0)) - 2 * state)
            / (2 * state).norm(dim=-1, keepdim=True),
            rtol=1e-12,
            atol=1e-14,
        )
    projected = matrix @ torch.linalg.pinv(matrix)
    torch.testing.assert_close(change @ projected, change, rtol=1e-9, atol=1e-12)


def test_draws_are_averaged():
    recording = record(gpt2(), IDS)
    options = {"kinds": [AblationKind.NOISE], "layers": 1}
    both = layer_ablation_damage(recording, **options, draws=2, seed=SEED).kl
    one = layer_ablation_damage(recording, **options, draws=1, seed=SEED).kl
    assert noise_seed(SEED, 0, 1) != noise_seed(SEED, 1, 1)
    other = 2 * both - one
    assert float(abs(other - one).min()) > 1e-6
    assert float(other.min()) > 0


def test_zeroed_heads_lose_what_head_ablation_loss_says_and_ranks_are_those_of_loops():
    recording = record(gpt2(), IDS, keep=KeptTensors.KERNELS)
    measured = head_ablation_damage(recording).isel(kind=0)
    np.testing.assert_allclose(
        measured.loss_increase, head_ablation_loss(recording).loss_increase, rtol=1e-9, atol=1e-13
    )
    for layer, prompt, head in np.ndindex(3, 3, 2):
        kernel = recording.kept["kernel"][layer][prompt, head].numpy()
        found = measured.isel(layer=layer, prompt=prompt, head=head)
        assert found.effective_keys.item() == pytest.approx(np.mean([1 / (row**2).sum() for row in kernel]), rel=1e-12)
        p = np.sqrt(np.linalg.eigvalsh(kernel @ kernel.T).clip(0))
        p = p / p.sum()
        assert found.kernel_rank.item() == pytest.approx(np.exp(-(p * np.log(p.clip(1e-300))).sum()), rel=1e-6)


def test_heads_are_replaced_by_their_means_over_all_tokens():
    model = gpt2()
    recording = record(model, IDS, keep=KeptTensors.KERNELS | KeptTensors.VALUES)
    outputs = recording.kept["kernel"][1] @ recording.kept["value"][1]  # (prompt, head, n, r)
    mean = outputs.mean((0, 2))
    torch.testing.assert_close(site_means(recording, [Site.HEADS])[Site.HEADS, 1], mean, rtol=1e-12, atol=1e-14)
    measured = head_ablation_damage(recording, kinds=[AblationKind.MEAN, AblationKind.NOISE], heads="L1H0")
    without = head_ablation_damage(recording, heads="L1H0")
    block = model.transformer.h[1].attn
    with torch.no_grad():  # zeroing the head and adding its mean write to the bias is the same
        block.c_proj.bias += mean[0] @ block.c_proj.weight[:4]
        plain = record(gpt2(), IDS).logits().log_softmax(-1)[:, :-1]
        edited = record(model, IDS).under(AblateHead(layer=1, head=0)).logits().log_softmax(-1)[:, :-1]
    expected = (plain.exp() * (plain - edited)).sum(-1).mean(-1)
    np.testing.assert_allclose(measured.kl.sel(kind="mean").squeeze(), expected, rtol=1e-9)
    assert not np.allclose(without.kl.squeeze(), expected, rtol=1e-3)
    assert float(measured.kl.sel(kind="noise").min()) > 0


def test_matched_pairs_are_what_they_say():
    draw = np.random.default_rng(0)
    damage = {(layer, head): float(draw.lognormal()) for layer in range(6) for head in range(5)}
    found = matched_pairs(damage, 12, tol=0.3, seed=1)
    assert 8 <= len(found) <= 12
    used = [head for each in found for head in (each.shared, each.same_layer)]
    others = [each.other_layer for each in found]
    assert len(set(used)) == len(used)
    assert len(set(others)) == len(others)
    for each in found:
        assert each.shared[0] == each.same_layer[0] != each.other_layer[0]
        assert each.shared != each.same_layer
        assert abs(np.log(damage[each.same_layer] / damage[each.other_layer])) <= 0.3
    assert found == matched_pairs(damage, 12, tol=0.3, seed=1)
    assert found != matched_pairs(damage, 12, tol=0.3, seed=2)


def test_joint_damage_is_that_of_both_heads_and_the_sum_that_of_each():
    recording = record(gpt2(), IDS)
    measured = head_interaction(recording, pairs=3, tol=9.0, min_damage=1e-12, seed=3)
    assert measured.sizes["pair"] == 3
    for pair_kind, pair in np.ndindex(2, 3):
        one = measured.isel(pair_kind=pair_kind, pair=pair)
        names = [one["first"].item(), one["second"].item()]
        assert (names[0][:2] == names[1][:2]) == (pair_kind == 0)
        edits = {name: AblateHead(head=name) for name in names} | {"both": [AblateHead(head=name) for name in names]}
        kl = damage_under_edits(recording, edits).kl
        np.testing.assert_allclose(one.joint_damage, kl.sel(edit="both"), rtol=1e-12)
        np.testing.assert_allclose(one.summed_damage, kl.sel(edit=names).sum("edit"), rtol=1e-12)
    nothing = head_interaction(recording, pairs=3, min_damage=1e9)
    assert dict(nothing.joint_damage.sizes) == {"pair_kind": 2, "pair": 0, "prompt": 3}


def test_rows_of_a_learned_sink_have_ranks_too():
    measured = record(tiny_model("gpt_oss", dtype=F64), inputs_of("gpt_oss")).replay(KernelRank())["kernel_rank"]
    assert bool((measured.kernel_rank >= 1).all() and (measured.effective_keys >= 1).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3}, "layer"),
        ({"relative_norm": 0.0}, "relative_norm is 0"),
        ({"draws": 0}, "draws is 0"),
        ({"kinds": ["zero"]}, "kinds is .* but it must be a list of different ones of AblationKind.ZERO"),
        ({"parts": []}, "parts is .* but it must be a list of different ones of LayerPart.LAYER"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(options, message):
    with pytest.raises(HelmscopeError, match=message) as error:
        layer_ablation_damage(record(gpt2(), IDS), **options)
    assert str(error.value).count(". ") == 0


def test_models_and_texts_without_a_loss_are_refused():
    with pytest.raises(HelmscopeError, match="needs attention that is causal"):
        layer_ablation_damage(record(tiny_model("bert"), inputs_of("bert")))
    with pytest.raises(HelmscopeError, match="needs a text with two or more tokens"):
        head_ablation_damage(record(gpt2(), IDS[:, :1]))
    with pytest.raises(HelmscopeError, match="recording is a NoneType, but it must be a Recording"):
        head_interaction(None)
    with pytest.raises(HelmscopeError, match="layer 1 has heads 0 to 1"):
        head_ablation_damage(record(gpt2(), IDS), heads="L1H2")
