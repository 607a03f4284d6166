"""Gradient norms along depth against a forward pass written out with the model's own modules, and autograd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from helmscope.models.record import record
from helmscope.observe import GradientVersion, loss_gradient_norms
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

CUT = (GradientVersion.NO_RESIDUAL, GradientVersion.BOTH)
FIXED = (GradientVersion.FIXED_SCALES, GradientVersion.BOTH)


def scales_of(model: Any, ids: torch.Tensor) -> dict[Any, torch.Tensor]:
    """The s by which each norm of the blocks divides, in the whole model."""
    found: dict[Any, torch.Tensor] = {}

    def keep(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        found[module] = (args[0].var(-1, correction=0, keepdim=True) + module.eps).sqrt().detach()

    hooks = [norm.register_forward_pre_hook(keep) for block in model.transformer.h for norm in (block.ln_1, block.ln_2)]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


def by_hand(model: Any, ids: torch.Tensor, version: GradientVersion) -> np.ndarray:
    """log of the root mean square gradient at the input of every block and at the last output, (block, text)."""
    scales, count = scales_of(model, ids), ids.shape[1]

    def norm(module: Any, y: torch.Tensor) -> torch.Tensor:
        if version not in FIXED:
            return torch.as_tensor(module(y))
        return (y - y.mean(-1, keepdim=True)) / scales[module] * module.weight + module.bias

    state = (model.transformer.wte(ids) + model.transformer.wpe(torch.arange(count))).detach().requires_grad_()
    states = [state]
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    for block in model.transformer.h:
        parts = block.attn.c_attn(norm(block.ln_1, state)).chunk(3, -1)
        query, key, value = (each.unflatten(-1, (model.config.n_head, -1)).transpose(1, 2) for each in parts)
        logits = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        write = block.attn.c_proj((logits.softmax(-1) @ value).transpose(1, 2).flatten(2))
        middle = write if version in CUT else state + write
        write = block.mlp(norm(block.ln_2, middle))
        state = write if version in CUT else middle + write
        state.retain_grad()
        states.append(state)
    logits = model.lm_head(model.transformer.ln_f(state))
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return np.stack([each.grad.square().sum(-1).mean(-1).log().numpy() / 2 for each in states])


@pytest.mark.parametrize("version", list(GradientVersion))
def test_every_version_against_a_forward_written_out(version: GradientVersion) -> None:
    model, ids = tiny_model("gpt2").double(), inputs_of("gpt2", batch=3, n=9)
    found = loss_gradient_norms(record(model, ids), versions=[version])
    expected = by_hand(model, ids, version)
    np.testing.assert_allclose(found.log_loss_gradient_rms.squeeze("version"), expected, rtol=1e-9, atol=1e-9)


def test_fixed_scales_leave_the_whole_model_as_it_is() -> None:
    """Its gradient differs: along the radial direction the output of a norm does not change."""
    model, ids = tiny_model("gpt2").double(), inputs_of("gpt2", batch=2, n=9)
    before = model(ids).logits.detach()
    found = loss_gradient_norms(record(model, ids))
    assert torch.equal(model(ids).logits.detach(), before)  # nothing is left on the model
    whole, fixed = (found.log_loss_gradient_rms.sel(version=name) for name in ("whole model", "norms at fixed scales"))
    np.testing.assert_array_equal(whole.isel(depth=-1), fixed.isel(depth=-1))  # the final norm is no norm of a block
    assert float(abs(whole - fixed).max()) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_other_families_are_cut_exactly(family: str) -> None:
    """Without residual connections nothing of a state reaches the next block but through its writes: where these are 0
    the gradient before them is 0.
    """
    model, ids = tiny_model(family).double(), inputs_of(family, batch=2, n=9)
    last = model.model.layers[-1] if family == "llama" else model.gpt_neox.layers[-1]
    with torch.no_grad():
        for parameter in last.mlp.parameters():
            parameter.zero_()
        if family == "gpt_neox":
            for parameter in last.attention.dense.parameters():
                parameter.zero_()
    found = loss_gradient_norms(record(model, ids)).log_loss_gradient_rms
    assert np.isneginf(found.sel(version="no residual connections").values[:-1]).all()
    assert np.isfinite(found.sel(version="whole model").values).all()


def test_the_chunk_size_changes_nothing() -> None:
    model, ids = tiny_model("gpt2").double(), inputs_of("gpt2", batch=5, n=9)
    whole, single = (loss_gradient_norms(record(model, ids, batch_size=size)).log_loss_gradient_rms for size in (5, 2))
    np.testing.assert_allclose(single, whole, rtol=1e-10, atol=1e-10)


def test_padding_does_not_count() -> None:
    model = tiny_model("gpt2").double()
    padded = {"input_ids": torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12]])}
    padded["attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    together = loss_gradient_norms(record(model, padded)).log_loss_gradient_rms
    alone = loss_gradient_norms(record(model, torch.tensor([[5, 6, 7]]))).log_loss_gradient_rms
    np.testing.assert_allclose(together.isel(prompt=0), alone.isel(prompt=0), rtol=1e-9, atol=1e-9)


def test_bad_input_is_refused() -> None:
    recording = record(tiny_model("gpt2"), inputs_of("gpt2", batch=2, n=5))
    with pytest.raises(HelmscopeError, match="versions holds 'whole model'"):
        loss_gradient_norms(recording, versions=["whole model"])  # type: ignore[list-item]
    with pytest.raises(HelmscopeError, match="versions is empty"):
        loss_gradient_norms(recording, versions=[])
    with pytest.raises(HelmscopeError, match="scales its residual connections"):
        loss_gradient_norms(record(tiny_model("granite"), inputs_of("granite", batch=2, n=5)))
    with pytest.raises(HelmscopeError, match="norms that cannot be read"):
        loss_gradient_norms(record(tiny_model("gemma2"), inputs_of("gemma2", batch=2, n=5)), versions=FIXED)
    with pytest.raises(HelmscopeError, match="causal"):
        loss_gradient_norms(record(tiny_model("bert"), inputs_of("bert", batch=2, n=5)))
    assert math.isfinite(
        float(loss_gradient_norms(recording, versions=[GradientVersion.WHOLE]).log_loss_gradient_rms[0, 0, 0])
    )
