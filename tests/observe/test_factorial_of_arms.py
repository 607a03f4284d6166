"""The factorial of arms is the clustering of each arm, recorded separately."""

from __future__ import annotations

import pytest
import torch

from helmscope.intervene import Arm, only_one_mlp
from helmscope.intervene.arms import ARMS
from helmscope.models.record import record
from helmscope.models.subject import Subject
from helmscope.observe import attention_mlp_factorial, cloud_statistics
from helmscope.types import HelmscopeError, check_replicates
from support.model_families import inputs_of, tiny_model


@pytest.fixture(scope="module")
def recording():
    return record(tiny_model("llama", dtype=torch.float64), inputs_of("llama"))


def test_every_arm_is_measured(recording):
    shares = []
    arms = (*ARMS, Arm(mlp=False, radius_of_whole_model=True), *only_one_mlp(recording.layers))
    measured = check_replicates(
        attention_mlp_factorial(recording, arms=arms, gap=2, levels=[0.1], progress=shares.append)
    )
    assert measured.arm.values.tolist() == [arm.label for arm in arms]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for arm in arms:
        alone = cloud_statistics(recording.under(*arm.edits(recording)), gap=2, levels=[0.1])
        assert measured.sel(arm=arm.label).drop_vars("arm").equals(alone), arm
    still = measured.sel(arm="no writes")
    assert (still.aligned_pair_share == still.aligned_pair_share.isel(depth=0)).all()
    held = measured.radius.sel(arm="attention alone, at the whole model's radius")
    assert abs(held - measured.radius.sel(arm="whole model")).max() < 1e-12


def test_a_subject_and_its_texts():
    texts = ["Once upon a time", "The cat sat on the mat"]
    measured = attention_mlp_factorial(Subject("A"), texts=texts, arms=ARMS[:1], gap=1)
    assert measured.sizes["prompt"] == 2
    assert measured.isel(arm=0).drop_vars("arm").equals(cloud_statistics(Subject("A").record(texts), gap=1))


def test_bad_arguments(recording):
    with pytest.raises(HelmscopeError, match="texts is given with a Recording"):
        attention_mlp_factorial(recording, texts=["a"])
    with pytest.raises(HelmscopeError, match="subject is a str"):
        attention_mlp_factorial("A")
    with pytest.raises(HelmscopeError, match="arms holds a str"):
        attention_mlp_factorial(recording, arms=["whole model"])
    with pytest.raises(HelmscopeError, match="different arms"):
        attention_mlp_factorial(recording, arms=[Arm(), Arm()])
