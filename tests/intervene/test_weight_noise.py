"""Noise on weights against its draws, its invariance under a change of basis inside the heads, and refusals."""

import numpy as np
import pytest
import torch

from helmscope.intervene import WeightNoise, with_parameters
from helmscope.models import record
from helmscope.models.sites import Site
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

FUSED = "transformer.h.{}.attn.c_attn.weight"


def recorded(family="gpt2"):
    return record(tiny_model(family, dtype=torch.float64), inputs_of(family))


@pytest.mark.parametrize("site", [Site.QUERY, Site.KEY, Site.VALUE])
def test_the_changed_entries_and_their_draws(site):
    recording = recorded()
    model, noise = recording.anatomy.model, WeightNoise.of(recording)
    part = slice(*{Site.QUERY: (0, 32), Site.KEY: (32, 64), Site.VALUE: (64, 96)}[site])
    old = model.transformer.h[1].attn.c_attn.weight.detach()
    draws = np.random.default_rng([5, 1]).standard_normal((32, 32))
    rms = np.sqrt(np.mean(old[:, part].numpy() ** 2))
    for options, expected in (
        ({"sigma": 0.1}, 0.1 * draws.T),
        ({"relative_sigma": 0.1}, 0.1 * rms * draws.T),
        ({"mixing": 0.1}, 0.1 / np.sqrt(32) * (old[:, part].numpy().T @ draws).T),
    ):
        (name, new), *more = noise.values(site, layers=[1], seed=5, **options).items()
        assert (name, more) == (FUSED.format(1), [])
        change = (new - old).numpy()
        assert np.abs(change[:, part] - expected).max() < 1e-14
        change[:, part] = 0
        assert not change.any()
    assert list(noise.values(site, sigma=0.1)) == [FUSED.format(k) for k in range(3)]


def test_mixed_noise_does_not_depend_on_the_basis_inside_the_heads():
    """W_Q -> G W_Q, W_K -> G^-T W_K leaves the model unchanged; only noise that mixes states respects it."""
    recording = recorded()
    model, generator = recording.anatomy.model, torch.Generator().manual_seed(0)
    basis = torch.eye(8, dtype=torch.float64) + 0.3 * torch.randn(8, 8, dtype=torch.float64, generator=generator)
    inverse, changed = torch.linalg.inv(basis), {}
    with torch.no_grad():
        for k, block in enumerate(model.transformer.h):
            weight, bias = block.attn.c_attn.weight.clone(), block.attn.c_attn.bias.clone()
            for head in range(4):
                for start, matrix in ((0, basis), (32, inverse.T)):
                    rows = slice(start + 8 * head, start + 8 * head + 8)
                    weight[:, rows] = weight[:, rows] @ matrix.T
                    bias[rows] = matrix @ bias[rows]
            changed |= {FUSED.format(k): weight, f"transformer.h.{k}.attn.c_attn.bias": bias}

    def logits(**options):
        with with_parameters(model, WeightNoise.of(recording).values(Site.KEY, seed=2, **options)):
            return recording.logits()

    plain, own = logits(mixing=0.3), logits(relative_sigma=0.3)
    with with_parameters(model, changed):
        assert (logits(mixing=0.3) - plain).abs().max() < 1e-10
        assert (logits(relative_sigma=0.3) - own).abs().max() > 1e-3


def test_tied_layers_are_changed_once():
    noise = WeightNoise.of(recorded("albert"))
    (name,) = noise.values(Site.QUERY, sigma=0.1)
    assert name.endswith("query.weight")


def test_refusals():
    noise = WeightNoise.of(recorded())
    with pytest.raises(HelmscopeError, match="sigma is -1, but it must be a finite number >= 0"):
        noise.values(Site.KEY, sigma=-1)
    with pytest.raises(
        HelmscopeError, match="sigma is None, relative_sigma is None and mixing is None, but exactly one"
    ):
        noise.values(Site.KEY)
    with pytest.raises(HelmscopeError, match="layers holds 3, but the model has layers 0 to 2"):
        noise.values(Site.KEY, sigma=0.1, layers=3)
    with pytest.raises(HelmscopeError, match=r"site is .*, but it must be Site.QUERY, Site.KEY or Site.VALUE"):
        noise.values(Site.MLP, sigma=0.1)
    with pytest.raises(HelmscopeError, match="recording is a GPT2LMHeadModel, but it must be a Recording"):
        WeightNoise.of(tiny_model("gpt2"))
