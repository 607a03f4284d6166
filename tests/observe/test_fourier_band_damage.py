"""Perturbations in a band of frequencies along the tokens, against FFT, and their damage, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import helmscope as hs
from helmscope.intervene import (
    PerturbFourierBand,
    ReplaceKernel,
    ScaleLogits,
    fourier_band_share,
    fourier_basis,
    fourier_frequencies,
)
from helmscope.models import record
from helmscope.models.sites import Chunk
from helmscope.observe import damage_under_edits, fourier_band_damage
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
BANDS = {"low": (0.0, 0.25), "high": (0.75, 1.0)}
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9, 0, 0], [8, 9, 10, 11, 12, 13, 14]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]),
}


def context(texts=3, layer=1, visible=None):
    chunk = Chunk(rows=slice(0, texts), texts=texts, visible=visible)
    return chunk.at(hs.Site.INPUT, layer)


def outside(delta, low, high):
    """The share of the squared norm outside a band, by NumPy's FFT along the tokens."""
    n = len(delta)
    power = np.abs(np.fft.rfft(delta, axis=0)) ** 2
    power[1 : (n + 1) // 2] *= 2  # a frequency between 0 and 1 stands for itself and its conjugate
    frequencies = 2 * np.arange(len(power)) / n
    inside = (frequencies >= low - 1e-9) & (frequencies <= high + 1e-9)
    return power[~inside].sum() / power.sum()


@pytest.mark.parametrize("n", [1, 2, 5, 12, 64])
def test_the_basis_is_orthonormal_with_equal_squares_at_all_tokens(n):
    basis, frequencies = fourier_basis(n), fourier_frequencies(n)
    assert float((basis.mT @ basis - torch.eye(n)).abs().max()) < 1e-14
    for k in range(n):
        assert outside(basis[:, k : k + 1].numpy(), float(frequencies[k]), float(frequencies[k])) < 1e-25
    for frequency in frequencies.unique():
        squares = basis[:, frequencies == frequency].square().sum(-1)
        assert float((squares - squares[0]).abs().max()) < 1e-14


@pytest.mark.parametrize("n", [9, 16])
def test_draws_have_the_stated_norm_and_band(n):
    states = (
        torch.randn(3, n, 6, dtype=F64, generator=torch.Generator().manual_seed(0)) * torch.arange(1, n + 1)[:, None]
    )
    for low, high in BANDS.values():
        delta = PerturbFourierBand([1], band=(low, high), relative_norm=0.3, seed=2).new(states, context()) - states
        norms = delta.norm(dim=(1, 2)) / states.norm(dim=(1, 2))
        assert float((norms - 0.3).abs().max()) < 1e-14
        assert max(outside(each.numpy(), low, high) for each in delta) < 1e-28
        assert float((fourier_band_share(delta, (low, high)) - 1).abs().max()) < 1e-14
        edit = PerturbFourierBand([1], band=(low, high), relative_norm=0.3, per_token=True, seed=2)
        matched = edit.new(states, context()) - states
        assert float((matched.norm(dim=-1) / states.norm(dim=-1) - 0.3).abs().max()) < 1e-14
        shares = np.array([outside(each.numpy(), low, high) for each in matched])
        assert (shares > 1e-3).all()  # radii differ, so that equal norms at every token leave the band
        assert np.abs(1 - shares - fourier_band_share(matched, (low, high)).numpy()).max() < 1e-14


def test_draws_depend_on_seed_layer_and_text_only():
    states = torch.ones(3, 8, 4, dtype=F64)
    edit = PerturbFourierBand(band=(0.75, 1.0), relative_norm=0.1, seed=5)
    together = edit.new(states, context())
    alone = edit.new(states[2:], Chunk(rows=slice(2, 3), texts=3).at(hs.Site.INPUT, 1))
    assert torch.equal(together[2:], alone)
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together, edit.new(states, context(layer=2)))
    assert not torch.equal(
        together, PerturbFourierBand(band=(0.75, 1.0), relative_norm=0.1, seed=6).new(states, context())
    )


def test_padding_is_not_perturbed_and_changes_nothing():
    model = tiny_model("gpt2", dtype=F64)
    states = torch.randn(2, 7, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    visible = PADDED["attention_mask"] == 1
    delta = PerturbFourierBand(band=(0.75, 1.0), relative_norm=0.1).new(states, context(2, visible=visible)) - states
    assert not delta[0, 5:].any()
    assert outside(delta[0, :5].numpy(), 0.75, 1.0) < 1e-28
    together = fourier_band_damage(record(model, PADDED), layers=[1])
    alone = fourier_band_damage(record(model, PADDED["input_ids"][:1, :5]), layers=[1])
    np.testing.assert_allclose(together.kl[..., 0], alone.kl[..., 0], rtol=1e-6)


def by_hand(model, ids, layer, edit):
    """The divergence of every scored token, by GPT-2's own blocks and SciPy."""
    logits = []
    for perturbed in (False, True):
        x = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.shape[1]))
        for number, block in enumerate(model.transformer.h):
            if perturbed and number == layer:
                x = edit.new(x, context(len(ids), layer))
            x = x + block.attn(block.ln_1(x))[0]
            x = x + block.mlp(block.ln_2(x))
        logits.append(model.lm_head(model.transformer.ln_f(x))[:, :-1].detach().numpy())
    p, q = (softmax(each, axis=-1) for each in logits)
    return rel_entr(p, q).sum(-1).mean(-1)


def test_damage_is_that_of_the_blocks_run_by_hand_averaged_over_draws(monkeypatch):
    model, ids = tiny_model("gpt2", dtype=F64), inputs_of("gpt2")
    used = []
    right = PerturbFourierBand.__post_init__
    monkeypatch.setattr(PerturbFourierBand, "__post_init__", lambda self: (right(self), used.append(self))[0])
    measured = fourier_band_damage(record(model, ids), layers=[2, 0], draws=2, relative_norm=0.5, seed=3)
    assert measured.layer.values.tolist() == [2, 0]
    assert len({edit.seed for edit in used}) == 4  # of two bands and two draws, the same in all layers
    edits = iter(used)
    for band in BANDS:
        for layer in (2, 0):
            found = np.mean([by_hand(model, ids, layer, next(edits)) for _ in range(2)], axis=0)
            np.testing.assert_allclose(measured.kl.sel(band=band, layer=layer), found, rtol=1e-9)


def linear_model(gain):
    """A GPT-2 whose norms only remove the mean, for their epsilon is huge, and whose attention writes ``gain`` times
    the average of the states; the head reads what it writes.
    """
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, layer_norm_epsilon=1e16, tie_word_embeddings=False)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(config).double().eval()
    block, trunk = model.transformer.h[0], model.transformer
    with torch.no_grad():
        for each in block.parameters():
            each.zero_()
        block.ln_1.weight.fill_(1e8)
        trunk.ln_f.weight.fill_(1e8 / gain)
        block.attn.c_attn.weight[:, 16:] = torch.eye(8)
        block.attn.c_proj.weight.copy_(gain * torch.eye(8))
        trunk.wte.weight.normal_()
        model.lm_head.weight.normal_()
    return model


@pytest.mark.parametrize("kind", ["average", "identity"])
def test_attention_that_averages_removes_high_frequencies_and_the_identity_keeps_all(kind):
    n, gain = 8, 1e5
    kernel = torch.full((n, n), 1 / n, dtype=F64) if kind == "average" else torch.eye(n, dtype=F64)
    model = linear_model(gain)
    plain = record(model, torch.arange(16).reshape(2, n) % 11)
    recording = plain.under(ReplaceKernel(function=lambda weights: kernel.expand_as(weights)))
    bands = {"constant": (0.0, 0.0), "low": (0.2, 0.25), "high": (0.75, 1.0)}
    measured = fourier_band_damage(recording, bands=bands, relative_norm=0.3)
    states = recording.residual_stream(depth=0)
    centering = torch.eye(8, dtype=F64) - 1 / 8
    for number, (name, band) in enumerate(bands.items()):
        seed = int(np.random.SeedSequence([0, number, 0]).generate_state(1)[0])
        moved = PerturbFourierBand(band=band, relative_norm=0.3, seed=seed).new(states, context(2, 0))
        logits = [
            ((kernel @ x + x / gain) @ centering @ model.lm_head.weight.mT)[:, :-1].detach() for x in (states, moved)
        ]
        p, q = (softmax(each.numpy(), axis=-1) for each in logits)
        expected = rel_entr(p, q).sum(-1).mean(-1)
        kept = kind == "identity" or name == "constant"
        found = measured.kl.sel(band=name, layer=0).values
        assert ((found > 1e-3) == kept).all(), (name, found)
        if kept:
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        else:
            assert (found < 1e-9).all()  # removed but for the residual path, 1 / gain


def test_logits_of_attention_are_scaled():
    recording = record(tiny_model("gpt2", dtype=F64), inputs_of("gpt2"))
    plain, sharp = (each.kernel(layer=1) for each in (recording, recording.under(ScaleLogits([1], factor=3.0))))
    expected = plain**3 / (plain**3).sum(-1, keepdim=True)
    assert float((sharp - expected).abs().max()) < 1e-14
    assert (damage_under_edits(recording, {"same": ScaleLogits(factor=1.0)}).kl == 0).all()


def test_bad_input():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2", n=5))
    with pytest.raises(HelmscopeError, match="layer is 7, but this recording has layers 0 to 2"):
        fourier_band_damage(recording, layers=[7])
    with pytest.raises(HelmscopeError, match="layers is empty, but it must hold at least one"):
        fourier_band_damage(recording, layers=[])
    with pytest.raises(HelmscopeError, match="relative_norm is -1, but it must be a finite number >= 0"):
        fourier_band_damage(recording, relative_norm=-1)
    with pytest.raises(HelmscopeError, match="draws is 0, but"):
        fourier_band_damage(recording, draws=0)
    with pytest.raises(
        HelmscopeError, match=r"band 'b' is \(0.9, 1\), but text 0 has 5 visible tokens and only the freq"
    ):
        fourier_band_damage(recording, bands={"b": (0.9, 1.0)})
    with pytest.raises(HelmscopeError, match=r"band 'b' is \(0.5, 2\), but it must rise from a frequency >= 0"):
        fourier_band_damage(recording, bands={"b": (0.5, 2.0)})
    with pytest.raises(HelmscopeError, match=r"bands is \{\}, but it must be a mapping of names"):
        fourier_band_damage(recording, bands={})
    with pytest.raises(HelmscopeError, match="factor is 0, but it must be a finite number > 0"):
        ScaleLogits(factor=0)
    with pytest.raises(HelmscopeError, match="recording is an int, but it must be a Recording"):
        fourier_band_damage(3)
    sizes = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = BertForMaskedLM(BertConfig(**sizes, intermediate_size=8)).eval()
    with pytest.raises(HelmscopeError, match="the loss of the next token needs"):
        fourier_band_damage(record(encoder, torch.arange(10).reshape(2, 5)))
