"""The effective beta of heads: simulations give back their beta, and a model agrees with its weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.fields.multihead import MultiHead
from helmscope.models.load import load
from helmscope.models.record import record
from helmscope.observe import EffectiveBeta, KernelStatistics, effective_beta
from helmscope.solve.integrate import integrate
from helmscope.theory.starts import Uniform
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

START = Uniform(n=9, dim=4).sample(batch=3, seed=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("beta", [0.5, 8.0])
def test_a_simulation_gives_back_its_beta(beta, causal):
    found = effective_beta(integrate(SA(beta=beta, causal=causal), START, times=[0.0, 0.5]))
    for name in ("beta", "beta_without_self"):
        assert np.abs(found[name] - beta).max() < 1e-10, name
    for name in ("r_squared", "r_squared_without_self"):
        assert np.abs(found[name] - 1).max() < 1e-12, name
    # a causal query i sees i + 1 keys, of which the first is left out
    assert float(found["key_count"][0, 0]) == pytest.approx(4 if causal else 8)


def test_every_head_has_its_own_beta():
    field = MultiHead([SA(beta=1.0), SA(beta=5.0)])
    found = effective_beta(integrate(field, START, times=[0.0]))
    assert found.beta.dims == ("time", "system", "head")
    assert np.abs(found.beta.values - [1.0, 5.0]).max() < 1e-10


def regression(rows, *, diagonal):
    """Slope and R^2 of logits on inner products, both centered within rows; rows hold (query, [(key, g, a)])."""
    xx = xy = yy = 0.0
    for query, keys in rows:
        used = [(g, a) for key, g, a in keys if diagonal or key != query]
        if not used:
            continue
        mean_g, mean_a = (math.fsum(values) / len(used) for values in zip(*used, strict=True))
        for g, a in used:
            xx += (g - mean_g) ** 2
            xy += (g - mean_g) * (a - mean_a)
            yy += (a - mean_a) ** 2
    return xy / xx, xy**2 / (xx * yy)


def test_a_by_hand():
    """Logits from the weights of layer 3, head 2, of model A; tokens are the directions of the centered stream."""
    loaded = load("A")
    loaded.model.double()
    recording = record(loaded, ["Once upon a time there was a little dog who", "The cat sat on the"])
    found = effective_beta(recording)
    block, head, size = loaded.model.transformer.h[3], 2, 32
    for prompt, ids in enumerate(recording.batch.visible_ids):
        n, d = len(ids), 192
        with torch.no_grad():
            y = recording.residual_stream(depth=6)[prompt, :n]
            read = block.ln_1(y)
            weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
            query, key = (
                read @ weight[:, c] + bias[c]
                for c in (slice(p * d + head * size, p * d + (head + 1) * size) for p in (0, 1))
            )
            x = y - y.mean(-1, keepdim=True)
            x = x / x.norm(dim=-1, keepdim=True)
            inner, logits = x @ x.T, query @ key.T / math.sqrt(size)
        rows = [(i, [(j, float(inner[i, j]), float(logits[i, j])) for j in range(1, i + 1)]) for i in range(n)]
        at = found.isel(layer=3, prompt=prompt, head=head)
        for suffix, diagonal in (("", True), ("_without_self", False)):
            beta, r_squared = regression(rows, diagonal=diagonal)
            assert float(at[f"beta{suffix}"]) == pytest.approx(beta, rel=1e-9)
            assert float(at[f"r_squared{suffix}"]) == pytest.approx(r_squared, rel=1e-9)


def test_chunks_change_nothing():
    model, ids = tiny_model("llama", dtype=torch.float64), inputs_of("llama")
    whole, parts = (effective_beta(record(model, ids, batch_size=size)) for size in (16, 1))
    assert all(np.abs(whole[name] - parts[name]).max() < 1e-10 for name in whole)


def test_a_post_norm_model_is_measured_on_its_sphere():
    """The recording knows its sphere, also among other instruments of one replay."""
    recording = record(tiny_model("bert", dtype=torch.float64), inputs_of("bert"))
    together = recording.replay(EffectiveBeta(), KernelStatistics())["effective_beta"]
    given = recording.replay(EffectiveBeta(on_sphere=recording.on_sphere))["effective_beta"]
    assert together.identical(given)
    assert together.identical(effective_beta(recording))
    raw = recording.replay(EffectiveBeta(on_sphere=recording.trajectory))["effective_beta"]
    assert float(np.abs(raw.beta - together.beta).max()) > 1e-3
    found = together.isel(layer=1, prompt=0, head=3)
    x, weights = recording.on_sphere.states[2, 0], recording.kernel(layer=1)[0, 3]
    rows = [(i, [(j, float(x[i] @ x[j]), float(weights[i, j].log())) for j in range(1, 13)]) for i in range(13)]
    assert float(found.beta) == pytest.approx(regression(rows, diagonal=True)[0], rel=1e-9)


def test_spread_of_the_logits_within_rows():
    """Without the first key, against loops."""
    recording = record(tiny_model("llama", dtype=torch.float64), inputs_of("llama", batch=1, n=6))
    weights = recording.kernel(layer=1)[0, 2]
    total, pairs = 0.0, 0
    for i in range(6):
        logits = [float(weights[i, j].log()) for j in range(1, i + 1)]
        mean = sum(logits) / max(len(logits), 1)
        total += sum((each - mean) ** 2 for each in logits)
        pairs += len(logits)
    found = effective_beta(recording).isel(layer=1, prompt=0, head=2)
    assert float(found.logit_spread) == pytest.approx((total / pairs) ** 0.5, rel=1e-9)
    assert found.logit_spread.attrs["long_name"]


def test_bad_arguments():
    with pytest.raises(HelmscopeError, match="on_sphere is a str"):
        EffectiveBeta(on_sphere="on")
    recording = record(tiny_model("llama"), inputs_of("llama"))
    other = record(tiny_model("llama"), inputs_of("llama", n=5))
    with pytest.raises(HelmscopeError, match="on_sphere has no states"):
        recording.replay(EffectiveBeta(on_sphere=other.trajectory))
