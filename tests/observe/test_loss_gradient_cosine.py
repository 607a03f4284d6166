"""Cosines of writes with the loss gradient, against GPT-2's own blocks run by hand and against differences."""

import itertools

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import helmscope as hs
from helmscope.intervene import Ablate, Edit
from helmscope.models import record
from helmscope.observe.loss_gradient_cosine import _cosines, loss_gradient, loss_gradient_cosine
from helmscope.types import HelmscopeError

IDS = torch.tensor([[1, 5, 7, 2, 9, 3], [4, 4, 8, 6, 1, 2]])
SIZES = {"vocab_size": 12, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16, "bos_token_id": 0}


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**SIZES, eos_token_id=0, initializer_range=0.4)).double().eval()


def by_hand(model, ids, chosen, half, scale, shift=None):
    """The write of a half-step, the state after it and the summed loss, by the modules of GPT-2 themselves."""
    x = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.shape[1]))
    for layer, block in enumerate(model.transformer.h):
        for name in ("attention", "mlp"):
            write = block.attn(block.ln_1(x))[0] if name == "attention" else block.mlp(block.ln_2(x))
            if (layer, name) == (chosen, half):
                kept = write.detach()
                x = (x.detach() + scale * kept + (0 if shift is None else shift)).requires_grad_()
                after = x
            else:
                x = x + write
    logits = model.lm_head(model.transformer.ln_f(x))
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return kept, after, loss


@pytest.mark.parametrize("half", ["attention", "mlp"])
@pytest.mark.parametrize("scale", [0.0, 0.75, 1.0])
def test_cosines_are_those_of_the_blocks_run_by_hand(half, scale):
    model = tiny()
    measured = loss_gradient_cosine(record(model, IDS), scales=[scale])
    for layer in range(3):
        write, after, loss = by_hand(model, IDS, layer, half, scale)
        (gradient,) = torch.autograd.grad(loss, after)
        expected = torch.cosine_similarity(write, -gradient, dim=-1)[:, :-1].mean(-1)  # the last predicts nothing
        found = measured.cosine.sel(layer=layer, half=half, scale=scale).values
        assert np.abs(found - expected.numpy()).max() < 1e-10


def test_the_gradient_is_that_of_finite_differences():
    model, step = tiny(), 1e-5
    gradient = loss_gradient(record(model, IDS), layer=1, site=hs.Site.MLP, scale=0.5)
    for text, token, entry in ((0, 0, 3), (1, 4, 0), (0, 5, 2)):
        shift = torch.zeros(2, 6, 8, dtype=torch.float64)
        shift[text, token, entry] = step
        losses = [by_hand(model, IDS, 1, "mlp", 0.5, sign * shift)[2].item() for sign in (1, -1)]
        assert gradient[text, token, entry].item() == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-7)


def test_the_null_is_the_mean_over_all_permutations():
    draw = torch.Generator().manual_seed(0)
    write, downward = torch.randn(2, 1, 5, 3, generator=draw, dtype=torch.float64)
    found = _cosines(write, downward, torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]]), 0, 0)
    kept = [0, 1, 3, 4]
    table = torch.cosine_similarity(write[0, kept, None], downward[0, None, kept], dim=-1)
    every = [np.mean([table[p[i], i] for i in range(4)]) for p in itertools.permutations(range(4))]
    assert found[0, 0] == pytest.approx(float(table.diagonal().mean()), abs=1e-14)
    assert found[1, 0] == pytest.approx(np.mean(every), abs=1e-14)
    assert all(np.abs(np.array(every) - value).min() < 1e-14 for value in found[2:, 0])


def test_a_write_down_the_gradient_has_cosine_1_and_one_up_has_minus_1():
    recording = record(tiny(), IDS)
    gradient = loss_gradient(recording, layer=1)
    for sign in (1.0, -1.0):
        planted = recording.under(
            Edit(hs.Site.MLP, [1], lambda write, context, sign=sign: -sign * 0.1 * gradient[context.rows])
        )
        cosine = loss_gradient_cosine(planted, scales=[0], layers=[1]).cosine.sel(half="mlp")
        assert np.abs(cosine.values - sign).max() < 1e-12


def test_silent_writes_and_padding_have_no_cosine():
    recording = record(tiny(), IDS)
    silent = loss_gradient_cosine(recording.under(Ablate([1])), scales=[0], layers=[1]).cosine
    assert silent.sel(half="mlp").isnull().all()
    assert silent.sel(half="attention").notnull().all()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    padded = loss_gradient_cosine(record(tiny(), {"input_ids": IDS, "attention_mask": mask}), scales=[0, 1])
    alone = loss_gradient_cosine(record(tiny(), IDS[:1, :4]), scales=[0, 1])
    assert np.abs(padded.cosine.values[..., 0] - alone.cosine.values[..., 0]).max() < 1e-10


def test_bad_input():
    recording = record(tiny(), IDS)
    with pytest.raises(HelmscopeError, match="layer is 7, but this recording has layers 0 to 2"):
        loss_gradient_cosine(recording, layers=[7])
    with pytest.raises(HelmscopeError, match="scales is \\[\\], but it must be a list of numbers"):
        loss_gradient_cosine(recording, scales=[])
    with pytest.raises(HelmscopeError, match=r"site is .* but it must be that of a write"):
        loss_gradient(recording, layer=0, site=hs.Site.KEY)
    with pytest.raises(HelmscopeError, match="needs a text with two or more tokens that count"):
        loss_gradient_cosine(record(tiny(), IDS[:, :1]))
    sizes = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = BertModel(BertConfig(**sizes, intermediate_size=8)).eval()
    with pytest.raises(HelmscopeError, match="the loss of the next token needs"):
        loss_gradient_cosine(record(encoder, IDS))
