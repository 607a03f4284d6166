"""Gains, biases and epsilons of norms, to the last digit where a parameter holds them."""

from __future__ import annotations

import pytest
import torch

from helmscope.fields.norms import LayerNorm, RMSNorm
from helmscope.models.load import load
from helmscope.models.norm_reading import read_norm
from helmscope.models.record import record
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model


def norms(model):
    """The norms before the MLPs as they were read, with their modules."""
    return [
        (layer.mlp_norm, layer.part(layer.wiring.mlp_norm)) for layer in record(model, inputs_of("gpt2")).anatomy.layers
    ]


@pytest.mark.parametrize("family", ["llama", "t5", "bert", "gpt2"])
def test_a_gain_in_double_precision_is_the_parameter(family):
    """Some of these norms compute in float32, so that their outputs have seven digits only."""
    for read, module in norms(tiny_model(family, dtype=torch.float64)):
        assert torch.equal(read.gain, module.weight.detach())
        if isinstance(read, LayerNorm):
            assert torch.equal(read.bias, module.bias.detach())


def test_a_gain_of_one_plus_a_parameter():
    for read, module in norms(tiny_model("gemma2", dtype=torch.float64)):
        assert torch.equal(read.gain, 1 + module.weight.detach())


def test_a_gain_in_half_precision_is_the_parameter():
    for read, module in norms(tiny_model("llama", dtype=torch.bfloat16)):
        assert torch.equal(read.gain, module.weight.detach().float())


class Exponential(torch.nn.Module):
    """A norm whose gain is not a parameter."""

    def __init__(self, d):
        super().__init__()
        self.log_gain = torch.nn.Parameter(torch.linspace(-0.5, 0.5, d))

    def forward(self, x):
        return x / x.square().mean(-1, keepdim=True).sqrt() * self.log_gain.exp()


@pytest.mark.parametrize("d", [8, 9])
def test_a_gain_that_is_not_a_parameter_is_estimated(d):
    read = read_norm(Exponential(d), torch.ones(1, d))
    assert isinstance(read, RMSNorm)
    assert read.eps == 0
    assert torch.allclose(read.gain, torch.linspace(-0.5, 0.5, d).exp(), rtol=1e-5)


@pytest.mark.parametrize("d", [8, 9])
def test_a_norm_without_epsilon(d):
    """Such a norm returns NaN for the vector 0."""
    module = torch.nn.LayerNorm(d, eps=0.0)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2, d))
        module.bias.copy_(torch.linspace(-1, 1, d))
    read = read_norm(module, torch.ones(1, d))
    assert torch.equal(read.gain, module.weight.detach())
    assert torch.equal(read.bias, module.bias.detach())


def test_other_modules_are_not_norms():
    assert read_norm(torch.nn.Linear(8, 8), torch.ones(1, 8)) is None
    assert read_norm(torch.nn.Tanh(), torch.ones(1, 8)) is None
    assert read_norm(torch.nn.Linear(8, 4), torch.ones(1, 8)) is None


@pytest.mark.parametrize("eps", [-1e-5, -10.0, float("nan"), float("inf")])
def test_the_error_names_an_invalid_epsilon(eps):
    model = tiny_model("llama")
    model.model.layers[1].post_attention_layernorm.variance_epsilon = eps
    with pytest.raises(
        HelmscopeError, match=rf"the norm 'model\.layers\.1\.post_attention_layernorm' with the epsilon {eps:g}, but it"
    ):
        load(model)
