"""Models that carry no tokens are refused in one sentence, whatever they are given."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import helmscope as hs
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model


@pytest.fixture(scope="module")
def convolutions():
    torch.manual_seed(0)
    return tf.ResNetModel(tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])).eval()


def test_a_convolutional_model_raises(convolutions):
    message = r"ResNetStage blocks read tensors of shape \(2, 8, \d+, \d+\), but only models of tokens"
    with pytest.raises(HelmscopeError, match=message):
        hs.models.diagnose(convolutions)
    with pytest.raises(HelmscopeError, match=message):
        hs.record(convolutions, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_token_ids_for_a_vision_model_raise(family, convolutions):
    model = convolutions if family == "resnet" else tiny_model(family)
    with pytest.raises(HelmscopeError, match="which takes pixel_values, but it has no embedding table of token"):
        hs.record(model, inputs_of("gpt2"))


def test_a_speech_model_raises():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    convolution = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (4,), "num_feat_extract_layers": 1}
    model = tf.Wav2Vec2Model(tf.Wav2Vec2Config(**sizes, **convolution, num_conv_pos_embedding_groups=2)).eval()
    with pytest.raises(HelmscopeError, match="which takes input_values, but it has no embedding table"):
        hs.models.diagnose(model)


def test_rectangular_images():
    """The image size is given as height and width."""
    model = tiny_model("vit")
    model.config.image_size = (16, 16)
    assert hs.models.diagnose(model).certificate.ok
