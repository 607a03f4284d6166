"""Query, key and value matrices of several layouts against slices of the weights by hand, and against the model."""

import pytest
import torch

from helmscope.models import KeptTensors, record
from helmscope.models.input_matrices import input_matrices
from helmscope.models.sites import Site
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

NAMES = {Site.QUERY: "query", Site.KEY: "key", Site.VALUE: "value"}


def by_hand(family, model, layer):
    """Weights (heads, r, d) of queries, keys and values, from the layout of the family."""
    if family == "gpt2":
        fused = model.transformer.h[layer].attn.c_attn.weight.detach().T
        return [part.reshape(4, 8, 32) for part in fused.split(32)]
    if family == "gpt_neox":  # query, key and value of a head follow one another
        fused = model.gpt_neox.layers[layer].attention.query_key_value.weight.detach()
        return list(fused.reshape(4, 3, 8, 32).unbind(1))
    attention = model.model.layers[layer].self_attn
    return [getattr(attention, f"{name}_proj").weight.detach().reshape(-1, 8, 32) for name in "qkv"]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_those_of_the_layout(family, dtype):
    model = tiny_model(family, dtype=dtype)
    found = input_matrices(record(model, inputs_of(family)))
    assert len(found) == 3
    for layer in (0, 2):
        for site, expected in zip(NAMES, by_hand(family, model, layer), strict=True):
            assert torch.equal(found[layer][site].weight, expected.float())
            stored = found[layer][site].module.weight
            assert stored.shape[0 if family == "gpt2" else 1] == 32


@pytest.mark.parametrize("family", ["gpt2", "bert", "albert", "opt", "gpt_oss"])
def test_matrices_reproduce_the_queries_of_the_first_token(family):
    """The inputs of attention are taken from a hook on the module that was found."""
    model = tiny_model(family, dtype=torch.float64)
    recording = record(model, inputs_of(family), keep=KeptTensors.QUERIES | KeptTensors.KEYS | KeptTensors.VALUES)
    matrices = input_matrices(recording)
    for site, name in NAMES.items():
        matrix, inputs = matrices[1][site], []
        handle = matrix.module.register_forward_hook(lambda module, args, out, inputs=inputs: inputs.append(args[0]))
        recording.logits()
        handle.remove()
        own = inputs[1] if family == "albert" else inputs[0]
        x = own.reshape(-1, own.shape[-1])[0]
        expected = recording.kept[name][1, 0, :, 0]
        bias = 0 if matrix.bias is None else matrix.bias
        assert (matrix.weight @ x + bias - expected).abs().max() < 1e-12, site


def test_reading_leaves_the_model_as_it_is():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    before = recording.logits()
    input_matrices(recording)
    assert torch.equal(recording.logits(), before)


def test_refusals():
    with pytest.raises(HelmscopeError, match="layer 0 has a query that is not the output of one linear module"):
        input_matrices(record(tiny_model("qwen3"), inputs_of("qwen3")))
    with pytest.raises(HelmscopeError, match="does not look up its attention function in the registry"):
        input_matrices(record(tiny_model("bloom"), inputs_of("bloom")))
