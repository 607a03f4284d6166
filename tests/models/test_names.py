"""Heads and layers by name, in Measurements, edits and recordings."""

from __future__ import annotations

import pytest
import torch

import helmscope as hs
from helmscope.models.record import record
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model


@pytest.mark.parametrize("name", ["L2H3", "l2h3", "2.3", "L02H3"])
def test_a_head_by_its_name_in_a_measurement_and_in_an_edit(name):
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    seen = hs.kernel_statistics(recording)
    assert float(seen.sel(**hs.models.parse_head(name)).row_entropy.mean()) == float(
        seen.row_entropy.isel(layer=2, head=3).mean()
    )
    for edit in (hs.intervene.AblateHead(**hs.models.parse_head(name)), hs.intervene.AblateHead(head=name)):
        assert repr(edit) == "AblateHead(layers=[2], heads=[3])"


@pytest.mark.parametrize(
    "name", ["", "L2", "H3", "L2H3 ", "L-1H2", "2,3", "L2H3H4", "L2.3", 2.3, None, "L²H3", "L" + "9" * 5000 + "H1"]
)
def test_what_names_no_head_is_refused(name):
    with pytest.raises(HelmscopeError, match=r"name is .*, but a head is named by layer and head, such as 'L3H5' or"):
        hs.models.parse_head(name)


def test_one_head_and_several_are_not_given_at_once():
    with pytest.raises(HelmscopeError, match="layer is 1 and layers is given too: pass either"):
        hs.intervene.AblateHead([1], heads=[2], layer=1)
    with pytest.raises(HelmscopeError, match="head is 0 and heads is given too"):
        hs.intervene.AblateHead([1], heads=[2], head=0)
    with pytest.raises(HelmscopeError, match="head is 0 and heads is given too"):
        hs.intervene.AblateHead([1], heads=0, head=0)
    with pytest.raises(HelmscopeError, match="layer is 1 and head is 'L1H2', but that name contains its layer"):
        hs.intervene.AblateHead(layer=1, head="L1H2")
    with pytest.raises(HelmscopeError, match="head is -1, but it must be a whole number >= 0"):
        hs.intervene.AblateHead(layer=0, head=-1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"layers": "L2H0"}, "layers is 'L2H0', but names of heads are given by heads="),
        ({"layers": ["2.0"]}, "layers is ['2.0'], but names of heads are given by heads="),
        (
            {"layers": [2], "heads": "L2H0"},
            "heads is 'L2H0' and layers is [2], but the names of heads contain their layers: give heads alone",
        ),
        (
            {"layer": 2, "heads": ["L2H0"]},
            "heads is ['L2H0'] and layer is 2, but the names of heads contain their layers: give heads alone",
        ),
        (
            {"head": ["L2H0", "L1H3"]},
            "head is ['L2H0', 'L1H3'], but it must be one head: for several use heads=[...]",
        ),
        ({"layer": 1, "head": [0, 3]}, "head is [0, 3], but it must be one head: for several use heads=[...]"),
        ({"layers": "H0"}, "layers is 'H0', but it must be a layer such as 3 or 'L3', or a list of layers"),
    ],
)
def test_a_name_in_the_wrong_argument_says_which_is_right(arguments, says):
    with pytest.raises(HelmscopeError) as error:
        hs.intervene.AblateHead(**arguments)
    assert str(error.value) == says


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("gpt2", "transformer.h.1"), ("gpt2", "h.1"), ("llama", "model.layers.1"), ("bert", "encoder.layer.1")),
        *(("gpt2", "L1"), ("llama", "l1"), ("albert", "L1")),
    ],
)
def test_a_layer_by_the_name_of_its_block(family, name):
    recording = record(tiny_model(family), inputs_of(family))
    assert recording.layer(name) == recording.layer(1) == 1
    assert torch.equal(recording.kernel(layer=name), recording.kernel(layer=1))
    assert torch.equal(recording.kernel(name), recording.kernel(layer=1))
    assert torch.equal(recording.force_points(layer=name), recording.force_points(layer=1))
    assert recording.force(layer=name) is not None


@pytest.mark.parametrize(
    ("family", "name", "says"),
    [
        (
            "gpt2",
            "transformer.h.3",
            r"layer is 'transformer\.h\.3', but the layers are 'transformer\.h\.0' to 'tr.*\.2'",
        ),
        ("gpt2", "transformer.h.1.mlp", "but the layers are"),
        ("gpt2", "four", r"layer is 'four', but the layers are '.*', or by number 0 to 2 or 'L0' to 'L2'$"),
        ("gpt2", 3, "layer is 3, but this recording has layers 0 to 2"),
        ("gpt2", True, "layer is True, but"),
        ("gpt2", "L3", "layer is 'L3', but this recording has layers 0 to 2"),
        ("gpt2", "2", r"layer is '2', but the layers are 'tr.*\.0' to 'tr.*\.2': a number is written 2 or 'L2'$"),
        ("gpt2", "L2H0", "layer is 'L2H0', but the layers are"),
        ("albert", "encoder.albert_layer_groups.0.albert_layers.0", "is called 3 times: pass its number"),
    ],
)
def test_what_names_no_layer_is_refused(family, name, says):
    recording = record(tiny_model(family), inputs_of(family))
    with pytest.raises(HelmscopeError, match=says):
        recording.layer(name)


RECORDED = hs.record("A", ["Once upon a time there was a cat who liked the sun", "The dog ran home to eat his bone"])
LAYERS = {"number": 1, "name": "L1", "block": "transformer.h.1", "list": [1], "names": ["L1"]}
OF_RECORDINGS = {
    "fourier_band_damage": lambda layers: hs.observe.fourier_band_damage(RECORDED, layers=layers),
    "loss_gradient_cosine": lambda layers: hs.observe.loss_gradient_cosine(RECORDED, layers=layers, scales=(0.0,)),
    "layer_ablation_damage": lambda layers: hs.observe.layer_ablation_damage(RECORDED, layers=layers),
    "head_ablation_damage": lambda layers: hs.observe.head_ablation_damage(RECORDED, layers=layers),
    "head_ablation_loss": lambda layers: hs.observe.head_ablation_loss(RECORDED, layers=layers),
    "query_key_noise": lambda layers: hs.observe.query_key_noise(RECORDED, layers=layers, draws=2, sigmas=[0.1]),
    "holonomy_defect": lambda layers: hs.observe.holonomy_defect(RECORDED, layers=layers),
    "cloud_projection": lambda layers: hs.observe.cloud_projection(
        RECORDED, layers=layers, sampled_tokens=4, neighbors=8, principal_axes=2
    ),
}


def outcome(call):
    """The Measurement, or the sentence with which it is refused."""
    try:
        return call()
    except HelmscopeError as error:
        return str(error)


@pytest.mark.parametrize("name", OF_RECORDINGS)
def test_layers_are_chosen_in_the_same_ways_everywhere(name):
    measure = OF_RECORDINGS[name]
    expected, *others = (outcome(lambda layers=layers: measure(layers)) for layers in LAYERS.values())
    if not isinstance(expected, str):
        assert all(other.identical(expected) for other in others)
    else:  # too few tokens: then all are refused for that reason, and not for their layers
        assert set(others) == {expected}
        assert "layer is" not in expected
    for layers, says in (([], "layers is empty"), ("L12", "layer is 'L12'"), ([0, "L0"], "holds layer 0 twice")):
        with pytest.raises(HelmscopeError, match=says):
            measure(layers)


EDITS = {
    "Ablate": hs.intervene.Ablate,
    "Edit": lambda layers: hs.Edit(hs.Site.MLP, layers, torch.zeros_like),
    "AblateHead": lambda layers: hs.intervene.AblateHead(layers, heads=[0]),
    "Perturb": lambda layers: hs.intervene.Perturb(layers, sigma=0.1),
    "ReplaceKernel": lambda layers: hs.intervene.ReplaceKernel(layers, function=torch.ones_like),
    "ScaleLogits": lambda layers: hs.intervene.ScaleLogits(layers, factor=2.0),
    "Arm": lambda layers: hs.intervene.Arm(mlp=layers),
    "only_one_mlp": lambda layers: hs.intervene.only_one_mlp(layers)[0],
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_takes_layers_by_number_or_name(name):
    make = EDITS[name]
    expected = make([3])
    assert repr(make(3)) == repr(make("L3")) == repr(make(["L3"])) == repr(make(["l3"])) == repr(expected)
    assert repr(make(["L3", 5])) == repr(make([3, 5]))
    with pytest.raises(HelmscopeError, match=r"recording\.layer\('transformer\.h\.3'\)"):
        make("transformer.h.3")


def test_heads_by_name_in_several_layers():
    edit = hs.intervene.AblateHead(heads=["L2H0", "1.3", "L2H4"])
    assert repr(edit) == "AblateHead(heads=['L1H3', 'L2H0', 'L2H4'])"
    assert [edit.acts(layer) for layer in range(4)] == [False, True, True, False]
    one_by_one = RECORDED.under(*(hs.intervene.AblateHead(head=name) for name in ("L2H0", "L1H3", "L2H4")))
    assert torch.equal(RECORDED.under(edit).logits(), one_by_one.logits())
    assert repr(hs.intervene.AblateHead(heads=["L2H0"])) == repr(hs.intervene.AblateHead([2], heads=[0]))
    assert repr(hs.intervene.AblateHead(layer="L2", head=0)) == repr(hs.intervene.AblateHead(head="L2H0"))
    for names, says in (
        (["L2H9", "L1H0"], "heads holds 9, but layer 2 has heads 0 to 5"),
        (["L99H0", "L1H0"], "heads holds 'L99H0', but the model has layers 0 to 11"),
    ):
        with pytest.raises(HelmscopeError, match=says):
            RECORDED.under(hs.intervene.AblateHead(heads=names))
