"""States that overflow: where it begins, and by which weight."""

from __future__ import annotations

import pytest
import torch

from helmscope.models.record import record
from helmscope.observe import measure, measurement_names
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("gpt2", "transformer.h.1.mlp.c_fc"),
        ("gpt2", "transformer.h.0.attn.c_proj"),
        ("gpt2", "transformer.wte"),
        ("llama", "model.layers.1.mlp.up_proj"),
        ("bloom", "transformer.h.0.mlp.dense_4h_to_h"),
    ],
)
def test_the_module_and_the_weight_are_named(family, path):
    model = tiny_model(family)
    with torch.no_grad():
        model.get_submodule(path).weight *= 1e32
    message = rf"NaN or too large for float32, first in '{path}' \(\w+\); its largest weight is \S+e\+3\d, in '{path}\."
    with pytest.raises(HelmscopeError, match=message):
        record(model, inputs_of(family))


def test_the_error_suggests_float32_for_half_precision():
    model = tiny_model("llama", dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= 1e4
        model.model.layers[0].mlp.down_proj.weight.fill_(6e4)
    with pytest.raises(
        HelmscopeError,
        match=r"too large for float16, first in 'model\.layers\.0\.mlp.*load it with dtype=torch.float32$",
    ):
        record(model, inputs_of("llama"))


def test_large_queries_are_not_an_overflow():
    """Attention is then concentrated on one token, and every state is finite."""
    model = tiny_model("bert")
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.self.query.weight.fill_(1e30)
    assert record(model, inputs_of("bert")).certificate["finite"].ok


@pytest.mark.parametrize(("prompt", "token"), [(0, 0), (3, 2), (2, 7)])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_the_state_is_named_whether_it_is_probed_or_not(family, prompt, token):
    """Prompts 0 and 3 are probed, at their first tokens; what measures the others says what the certificate says."""
    ids = inputs_of(family, batch=4, n=12)
    ids[ids == 95] = 94
    ids[prompt, token] = 95
    model = tiny_model(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[95] *= 1e25
    if prompt != 2:
        with pytest.raises(HelmscopeError, match=f"first that of prompt {prompt} at layer 0, token {token}, are NaN"):
            record(model, ids)
        return
    recording = record(model, ids)
    for name in measurement_names():
        with pytest.raises(HelmscopeError, match=f"first that of prompt {prompt} at depth 0 .*, token {token}"):
            measure(recording, only=[name], quick=True)
