"""The measurements under edits as one group: what they are, that they agree with their functions, their number of
forward passes, and what a quick run leaves out.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import xarray as xr
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Model

import helmscope as hs
from helmscope.observe import (
    AblationKind,
    NoiseKind,
    head_interaction,
    intervention_measurements,
    intervention_names,
    measurement_names,
    query_key_noise,
    query_key_noise_by_layer,
    query_key_noise_ratio,
    query_key_noise_slope,
    unsupported_measurements,
)
from helmscope.observe.interventions import INTERVENTIONS
from support.model_families import inputs_of, tiny_model

TEXTS, TOKENS, LAYERS, HEADS = 32, 16, 12, 6


@pytest.fixture(scope="module")
def recording() -> hs.Recording:
    """A model of the shape of A, and as many texts as the cost is stated for, but small."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 24, "n_layer": LAYERS, "n_head": HEADS, "n_positions": TOKENS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)).eval()
    ids = torch.randint(40, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))
    return hs.record(model, ids)


def test_a_quick_run_takes_at_most_200_forwards(recording, monkeypatch):
    forwards = {"forward": 0.0, "backward": 0.0}
    plain, gradients = GPT2Model.forward, torch.autograd.grad

    def counted(self, input_ids=None, **options):
        forwards["forward"] += len(input_ids) / TEXTS
        return plain(self, input_ids, **options)

    def backward(*given, **options):
        forwards["backward"] += 2 * recording.runner.batch_size / TEXTS
        return gradients(*given, **options)

    monkeypatch.setattr(GPT2Model, "forward", counted)
    monkeypatch.setattr(torch.autograd, "grad", backward)
    with pytest.warns(UserWarning, match="sink_damage is left out: threshold is 0.3, but no head has"):
        measured = hs.measure(recording, interventions=True, quick=True)
    assert list(measured) == [name for name in intervention_names() if name != "sink_damage"]
    assert 100 < sum(forwards.values()) <= 200
    # what can be sampled says what is missing, the rest is complete
    complete = {"query_key_metric", "attention_sinks", "sink_constancy", "attention_temperature_damage"}
    for name, each in measured.items():
        text = each.attrs.get("not_tried", "")
        assert text.endswith(": not tried in quick") != (name in complete), name
        hs.types.check_replicates(each)
    assert measured["query_key_noise"].attrs["not_tried"] == (
        "noise on values, the kinds relative, relative weights, centered, mixed states and 18 of 20 draws: not tried "
        "in quick"
    )
    page = hs.plot(measured)
    titles = [panel.get_title(loc="left").replace("\n", " ") for panel in page.axes]
    for name in measured:
        assert any(title.startswith(name.replace("_", " ")) for title in titles), name


def test_they_are_taken_only_when_they_are_asked_for():
    assert not set(intervention_names()) & set(measurement_names())
    recording = hs.record(tiny_model("gpt2"), inputs_of("gpt2"))
    assert not set(intervention_names()) & set(unsupported_measurements(recording))
    alone = hs.measure(recording, only=["attention_temperature_damage", "depth_steps"])
    assert list(alone) == ["depth_steps", "attention_temperature_damage"]
    expected = hs.observe.attention_temperature_damage(recording)
    xr.testing.assert_identical(alone["attention_temperature_damage"], expected)


def test_a_full_run_agrees_with_the_functions(monkeypatch):
    monkeypatch.setattr("helmscope.observe.interventions.DRAWS", 2)
    monkeypatch.setattr("helmscope.observe.interventions.PAIRS", 2)
    recording = hs.record(tiny_model("gpt2"), inputs_of("gpt2", batch=6, n=16))
    names = ["query_key_noise", "query_key_noise_by_layer", "head_ablation_damage", "loss_gradient_cosine"]
    shares: list[float] = []
    measured = hs.measure(recording, only=names, seed=3, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    assert not any("not_tried" in each.attrs for each in measured.values())
    noise = measured["query_key_noise"]
    assert noise.kind.values.tolist() == [kind.value for kind in NoiseKind]
    assert noise.site.values.tolist() == ["query", "key", "value"]
    fair = query_key_noise(recording, kinds=[NoiseKind.CENTERED, NoiseKind.MATCHED], draws=2, seed=3)
    for kind in ("kl", "prediction_entropy_change", "top_token_agreement", "top_key_agreement"):
        found = noise[kind].sel(kind=["centered", "matched"], site=["query", "key"])
        assert np.array_equal(found, fair[kind].mean("draw"))
        assert noise[kind].sel(kind=["centered", "matched"], site="value").isnull().all()
    assert np.array_equal(noise.kl_by_draw.sel(kind=["centered", "matched"], site=["query", "key"]), fair.kl)
    ratio, slope = noise.ratio.sel(kind=["centered", "matched"]), noise.slope.sel(kind=["centered", "matched"])
    assert np.allclose(ratio, query_key_noise_ratio(fair), rtol=1e-12)
    assert np.allclose(slope.sel(site=["query", "key"]), query_key_noise_slope(fair), rtol=1e-12)
    assert noise.ratio_null.sel(kind="matched") == 1
    assert noise.ratio_null.isnull().sum() == len(NoiseKind) - 1
    assert noise.printed_ratio.values.tolist() == [1.86, 0.86, 1.28]
    assert "valid_min" not in noise.prediction_entropy_change_at_equal_kl.attrs
    layers = query_key_noise_by_layer(recording, seed=3)
    assert np.array_equal(measured["query_key_noise_by_layer"].ratio, query_key_noise_ratio(layers))
    heads = measured["head_ablation_damage"]
    assert heads.kind.values.tolist() == [kind.value for kind in AblationKind]
    pairs = head_interaction(recording, pairs=2, seed=3)
    for name in ("joint_damage", "summed_damage"):
        assert np.array_equal(heads[name], pairs[name])
    assert np.array_equal(heads.kl.sel(kind="zero"), pairs.kl)
    assert heads["first"].values.tolist() == pairs["first"].values.tolist()


def test_forms_that_draw_the_same_noise_are_run_once(monkeypatch):
    recording = hs.record(tiny_model("gpt2"), inputs_of("gpt2"))
    forms = [NoiseKind.RELATIVE, NoiseKind.CENTERED, NoiseKind.MATCHED]
    apart = [query_key_noise(recording, kinds=[form], sigmas=[0.3], draws=1) for form in forms]
    runs = [0]
    plain = GPT2Model.forward

    def counted(self, *given, **options):
        runs[0] += 1
        return plain(self, *given, **options)

    monkeypatch.setattr(GPT2Model, "forward", counted)
    together = query_key_noise(recording, kinds=forms, sigmas=[0.3], draws=1)
    assert runs[0] == 1 + 1 + 4  # sizes of matched noise, without noise, and four different kinds of noise
    xr.testing.assert_identical(together, xr.concat(apart, "kind", data_vars="minimal"))


def test_estimates_count_layers_and_heads(recording):
    small = hs.record(tiny_model("gpt2"), inputs_of("gpt2"))
    for each in intervention_measurements():
        assert 0 < each.cost(small, quick=True) <= each.cost(small, quick=False)
    large, less = (
        sum(each.cost(one, quick=True) for each in intervention_measurements()) for one in (recording, small)
    )
    assert large > less


def sentences(system):
    found = unsupported_measurements(system, only=INTERVENTIONS)
    assert list(found) == list(INTERVENTIONS)
    assert all(reason is None or "\n" not in reason for reason in found.values())
    return found


def test_what_a_model_does_not_have_is_said_in_one_sentence():
    causal = sentences(hs.record(tiny_model("llama"), inputs_of("llama", batch=6, n=16)))
    assert set(causal.values()) == {None}
    encoder = sentences(hs.record(tiny_model("bert"), inputs_of("bert", batch=6, n=16)))
    assert "needs attention that is causal" in encoder["query_key_noise"]
    assert encoder["attention_sinks"] is None
    short = sentences(hs.record(tiny_model("gpt2"), inputs_of("gpt2", batch=6, n=2)))
    assert short["fourier_band_damage"] is None  # the frequencies 0 and 1
    one = sentences(hs.record(tiny_model("gpt2"), inputs_of("gpt2", batch=6, n=3)))
    assert "band 'high'" in one["fourier_band_damage"]
    run = sentences(hs.integrate(hs.SA(1.0), hs.Uniform(12, 3).sample(4, seed=0), times=[0.0, 0.5]))
    assert run["attention_sinks"] is None
    assert run["sink_constancy"] is None
    assert run["query_key_noise"] == "recording is a Simulation, but it must be a Recording"
    assert run["query_key_metric"] == "system is a Simulation, but matrices of heads are those of a Recording"


def test_what_short_texts_and_few_prompts_do_not_have_is_known_before():
    """Not one measurement of a run is left out with a warning only when its turn comes."""
    model, ids = tiny_model("gpt2"), inputs_of("gpt2", batch=6, n=16)
    few = sentences(hs.record(model, ids[:3, :5]))
    assert few["sink_damage"] == "recording has 3 prompts, but the mean over other prompts needs at least 4"
    assert few["cloud_projection"].startswith("neighbors is 16, but the prompts other than one have only 8 tokens")
    assert few["holonomy_defect"] is None
    sizes = {"vocab_size": 40, "n_embd": 12, "n_layer": 1, "n_head": 2, "n_positions": 16}
    narrow = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    reason = sentences(hs.record(narrow, ids % 40))["cloud_projection"]
    assert "principal_axes is 8, but it must be" in reason
    assert "at most half of the dimension of the directions, 10" in reason
    pairs = sentences(hs.record(model, ids[:, :2]))
    assert pairs["holonomy_defect"] == "recording holds no text with 3 visible tokens, but a triangle needs as many"
    single = hs.record(model, ids[:, :1])
    alone = sentences(single)
    needs_one = "prompt 0 has no token that counts besides the first, but {} needs one"
    assert alone["cloud_projection"] == needs_one.format("cloud_projection")
    assert unsupported_measurements(single)["mlp_entropy_change"] == needs_one.format("mlp_entropy_change")
    for interventions in (False, True):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* is left out: ")
            hs.measure(single, interventions=interventions, quick=True)


def test_a_learned_sink_leaves_out_what_must_be_matched():
    recording = hs.record(tiny_model("gpt_oss"), inputs_of("gpt_oss", batch=6, n=16))
    reasons = sentences(recording)
    assert "weights have a row whose sum differs from 1" in reasons["query_key_edit_damage"]
    noise = hs.measure(recording, only=["query_key_noise"], quick=True)["query_key_noise"]
    assert "matched" not in noise.kind.values
    assert "matched noise: weights have a row whose sum differs from 1" in noise.attrs["not_tried"]
    assert float(hs.measure(recording, only=["attention_sinks"])["attention_sinks"].missing_mass.min()) > 0.01


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interventions": True, "only": ["query_key_noise"]}, "interventions is True and only is given, but only one"),
        ({"interventions": "yes"}, "interventions is 'yes', but it must be True or False"),
        ({"only": ["query_key_noises"]}, "did you mean 'query_key_noise'"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(options, said):
    recording = hs.record(tiny_model("gpt2"), inputs_of("gpt2"))
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        hs.measure(recording, **options)
    assert "\n" not in str(caught.value)
    with pytest.raises(hs.HelmscopeError, match="instruments are given: omit them"):
        hs.measure(recording, hs.observe.KernelStatistics(), interventions=True)


def test_damage_of_single_heads_must_be_that_of_the_prompts():
    recording = hs.record(tiny_model("gpt2"), inputs_of("gpt2"))
    other = hs.observe.head_ablation_damage(hs.record(tiny_model("gpt2"), inputs_of("gpt2", batch=2)))
    with pytest.raises(hs.HelmscopeError, match=r"alone is .*, but it must be a DataArray along \(layer, head, prompt"):
        head_interaction(recording, alone=other.kl.sel(kind="zero"))
    with pytest.raises(hs.HelmscopeError, match="alone is a list, but it must be a DataArray"):
        head_interaction(recording, alone=[1.0])
