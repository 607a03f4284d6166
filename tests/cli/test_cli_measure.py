"""The command ``helmscope measure``."""

from __future__ import annotations

import csv
import importlib
import json
import os

import numpy as np
import pytest

import helmscope as hs
from helmscope.cli.measure_table import quantities
from helmscope.jobs import MeasurementSpec, names, read_spec, run
from helmscope.jobs.measure import join_measurements, split_measurements
from helmscope.models.subject import Subject
from helmscope.observe import intervention_names, measurement_names
from support.model_families import inputs_of, tiny_model

SMALL = ("measure", "A", "--text-count", "3", "--text-length", "8", "--out", "run")


def test_a_run_matches_the_library(helmscope, tmp_path):
    model, ids = tiny_model("gpt2"), inputs_of("gpt2")[:3, :8]
    model.save_pretrained(tmp_path / "mine")
    (tmp_path / "texts.json").write_text(json.dumps(ids.tolist()))
    options = ("--texts", "texts.json", "--quick", "--json", "--seed", "2", "--out", "run")
    code, out, _ = helmscope("measure", "mine", *options)
    assert code == 0
    report = json.loads(out)
    taken = [name for name in measurement_names() if name not in ("context_noise", "mlp_swirl_bound", "jko_step_test")]
    assert list(report["measured"]) == taken
    assert "fewer than four prompts" in report["skipped"]["mlp_swirl_bound"]
    assert "context_noise" in report["skipped"]  # contexts come with the bundled models only: the next test has some
    files = {f"{name}.nc" for name in taken} | {"measurements.png", "spec.toml", "units.json"}
    assert files <= set(os.listdir(tmp_path / "run"))
    recording = hs.record(model, ids)
    stored = hs.store.RunFolder.open("run")
    compared = [
        "kernel_statistics",
        "attention_diffusion_spectrum",
        "perturbation_growth",
        "mlp_weights",
        "transport_ratio",
    ]
    for name, expected in hs.measure(recording, only=compared, quick=True, seed=2).items():
        found = stored.read_results(name)
        assert set(found.data_vars) == set(expected.data_vars)
        for variable in expected.data_vars:
            assert found[variable].dims == expected[variable].dims
            assert np.allclose(found[variable].values, expected[variable].values, rtol=1e-4, atol=1e-5, equal_nan=True)
    row = report["measured"]["depth_steps"]["angle"]
    assert row["value"] == pytest.approx(float(stored.read_results("depth_steps").angle.mean()), rel=1e-9)
    assert row["low"] < row["value"] < row["high"]
    assert row["n"] == 3


def test_fewer_tokens_than_dimensions_are_said(helmscope, tmp_path):
    """Four texts of six tokens do not determine a potential in 32 dimensions: the table says so, and gives the rest."""
    tiny_model("gpt2").save_pretrained(tmp_path / "mine")
    (tmp_path / "texts.json").write_text(json.dumps(inputs_of("gpt2", batch=4, n=6).tolist()))
    words = ("measure", "mine", "--texts", "texts.json", "--quick")
    code, out, err = helmscope(*words, "--json", "--out", "run")
    assert code == 0, err
    report = json.loads(out)
    assert "swirl_share_bound_quadratic are NaN in layers 0, 1, 2" in report["undetermined"]["mlp_swirl_bound"]
    assert report["measured"]["mlp_swirl_bound"]["swirl_share_bound"]["value"] is None
    assert report["measured"]["mlp_jacobian"]["covariance_rank_bound"]["value"] == 5
    code, out, err = helmscope(*words, "--out", "again")
    assert code == 0, err
    assert "undefined because: swirl_share_bound and" in out


def test_interventions_are_measured_when_they_are_asked_for(helmscope, tmp_path):
    model, ids = tiny_model("gpt2"), inputs_of("gpt2", batch=6, n=16)
    model.save_pretrained(tmp_path / "mine")
    (tmp_path / "texts.json").write_text(json.dumps(ids.tolist()))
    words = ("measure", "mine", "--texts", "texts.json", "--interventions", "--quick", "--json", "--out", "run")
    code, out, err = helmscope(*words)
    assert code == 0, err
    assert "14 measurements of 6 texts: roughly" in err  # the estimate comes first
    report = json.loads(out)
    assert list(report["measured"]) == [name for name in intervention_names() if name != "sink_damage"]
    assert "no head has a mean weight on the first token" in report["skipped"]["sink_damage"]
    assert report["not_tried"]["cloud_projection"] == "more than 4 tokens of each prompt: not tried in quick"
    folder = hs.store.RunFolder.open("run")
    recording = hs.record(model, ids)
    for name, expected in hs.measure(recording, only=["fourier_band_damage", "attention_sinks"], quick=True).items():
        found = folder.read_results(name)
        for variable in expected.data_vars:
            assert np.allclose(found[variable].values, expected[variable].values, rtol=1e-4, atol=1e-5, equal_nan=True)
        with open(tmp_path / "run" / f"{name}.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) > 0
    assert (tmp_path / "run" / "measurements.png").stat().st_size > 10_000


def test_the_texts_of_interventions_are_those_of_their_stated_cost():
    spec = MeasurementSpec(interventions=True)
    assert (spec.text_count, spec.text_length) == (32, 64)
    assert (MeasurementSpec().text_count, MeasurementSpec().text_length) == (64, 128)
    quick, full = (hs.jobs.estimate(MeasurementSpec(interventions=True, quick=quick)) for quick in (True, False))
    assert quick.work == full.work == "14 measurements of 32 texts"
    assert 5 < full.seconds / quick.seconds < 30


def test_the_table_and_the_picture(helmscope, tmp_path):
    only = ("--only", "context_noise", "--only", "arc_length")
    code, out, err = helmscope(*SMALL, "--quick", *only, "--plot", "steps.svg")
    assert code == 0
    lines = out.splitlines()
    assert "arc_length" in lines
    assert any(line.strip().startswith("nu_context: ") for line in lines)
    assert "picture: steps.svg" in lines
    assert (tmp_path / "steps.svg").read_bytes()[:5] == b"<?xml"
    assert "2 measurements of 3 texts: roughly" in err  # the estimate comes first


def test_an_interrupted_run_is_resumed(helmscope, tmp_path):
    options = (*SMALL, "--only", "depth_steps,arc_length", "--only", "kernel_statistics")
    assert helmscope(*options)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run" / "units").iterdir()}
    (tmp_path / "run" / "units" / "depth_steps.nc").unlink()
    (tmp_path / "run" / "depth_steps.nc").unlink()
    code, _, err = helmscope(*options, "--resume")
    assert code == 0
    assert "2 already done" in err
    assert {path.name: path.read_bytes() for path in (tmp_path / "run" / "units").iterdir()} == before
    code, _, err = helmscope(*options, "--seed", "1", "--resume")
    assert code == 2
    assert "was started with seed 0 (now 1)" in err


def test_a_folder_and_a_file_of_texts(helmscope, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "mine")
    (tmp_path / "texts.json").write_text(json.dumps([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]))
    code, _, err = helmscope("measure", "mine", "--texts", "texts.json", "--only", "depth_steps", "--out", "run")
    assert code == 0, err
    assert hs.store.RunFolder.open("run").read_results("depth_steps").sizes["prompt"] == 2
    assert read_spec("run").model == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--only", "depth_step"), "did you mean 'depth_steps'"),
        (("--text-length", "1"), "text_length is 1"),
        (("--texts", "missing.txt"), "texts is 'missing.txt', but it cannot be read"),
        (("--plot", "x.bmp"), "--plot is 'x.bmp'"),
        (("--interventions", "--only", "arc_length"), "interventions is true and only is given, but only one of them"),
        (("--only", "query_key_noises"), "did you mean 'query_key_noise'"),
        (("--only", "arc_length,depth_step"), "did you mean 'depth_steps'"),
        (("--model", "B"), "--model is B, but"),
    ],
)
def test_bad_input_exits_with_one_sentence(helmscope, options, said):
    code, _, err = helmscope(*SMALL, *options)
    assert code == 2
    assert said in err
    assert not os.path.exists("run")


def test_completion_knows_all_measurements():
    assert measurement_names() == names.MEASUREMENTS
    assert intervention_names() == names.INTERVENTIONS


def test_measurements_joined_in_one_dataset_are_split_again():
    measured = hs.measure(
        hs.record("A", ["Once upon a time", "The cat sat"]), only=["perturbation_growth", "kernel_statistics"]
    )
    again = split_measurements(join_measurements(measured))
    assert list(again) == list(measured)
    for name, each in measured.items():
        assert again[name].identical(each)


def test_one_line_per_quantity():
    steps = hs.measure(hs.record("A", ["Once upon a time", "The cat sat"]), only=["depth_steps"])["depth_steps"]
    table = quantities(steps)
    assert set(table) == set(steps.data_vars)
    assert table["angle"]["value"] == pytest.approx(float(steps.angle.mean()))


def test_the_estimate_counts_forwards():
    full = hs.jobs.estimate(MeasurementSpec(text_count=4, text_length=8))
    some = hs.jobs.estimate(MeasurementSpec(text_count=4, text_length=8, only=["depth_steps"]))
    assert full.work == f"{len(measurement_names())} measurements of 4 texts"
    assert full.seconds > some.seconds > 0
    assert run is hs.jobs.run


def test_texts_of_different_lengths_and_what_needs_four_of_them(helmscope, tmp_path):
    texts = ["Once upon a time there was a cat.", "The dog ran home.", "Lily had a red ball.", "Tom saw a big tree."]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    words = ("measure", "A", "--texts", "texts.txt", "--text-length", "6", "--quick", "--out", "run", "--json")
    code, out, _ = helmscope(*words, "--only", "mlp_swirl_bound", "--only", "depth_steps")
    assert code == 0
    assert list(json.loads(out)["measured"]) == ["depth_steps", "mlp_swirl_bound"]
    recording = hs.record("A", [Subject("A").loaded.tokenizer.decode(row[:6]) for row in Subject("A", texts).token_ids])
    steps = hs.store.RunFolder.open("run").read_results("depth_steps")
    assert steps.angle.values == pytest.approx(hs.observe.depth_steps(recording).angle.values, rel=1e-4, nan_ok=True)


def test_a_measurement_that_fails_is_left_out_unless_it_is_asked_for(helmscope, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise hs.HelmscopeError("this model has no depth")

    module = importlib.import_module("helmscope.observe.measure")
    monkeypatch.setattr(module, "depth_steps", fails)
    monkeypatch.setattr(module, "measurement_names", lambda: ("arc_length", "depth_steps"))
    both = {"arc_length": None, "depth_steps": None}
    monkeypatch.setattr(module, "unsupported_measurements", lambda system, only=None: both)
    code, out, _ = helmscope(*SMALL, "--json")
    assert code == 0
    report = json.loads(out)
    assert list(report["measured"]) == ["arc_length"]
    assert report["skipped"] == {"depth_steps": "this model has no depth"}
    with pytest.warns(UserWarning, match="depth_steps is left out: this model has no depth"):
        assert list(hs.measure(hs.record("A", ["Once upon a time"]))) == ["arc_length"]
    with pytest.raises(hs.HelmscopeError, match="this model has no depth"):
        hs.measure(hs.record("A", ["Once upon a time"]), only=["depth_steps"])


def test_cumulative_quantities_are_shown_at_the_last_depth():
    recording = hs.record(tiny_model("gpt2"), inputs_of("gpt2", batch=4))
    only = ["arc_length", "depth_steps", "transport_ratio", "perturbation_growth", "free_energy_along_depth"]
    measured = hs.measure(recording, only=only, quick=True)
    at_end = {
        "depth_steps": {"arc_length", "net_angle"},
        "transport_ratio": {"ratio_from_start"},
        "perturbation_growth": {"stretch"},
    }
    at_end |= {"arc_length": {"arc_length"}}
    at_end["free_energy_along_depth"] = {
        "gaussian_entropy",
        "free_energy",
        "predicted_entropy",
        "predicted_free_energy",
    }
    at_end["free_energy_along_depth"] |= {"gaussian_predicted_entropy", "gaussian_predicted_free_energy"}
    for name, each in measured.items():
        table = quantities(each)
        assert {variable for variable, row in table.items() if row["of"] == "last depth"} == at_end[name]
        for variable, row in table.items():
            values = each[variable].values
            expected = np.nanmean(values[-1] if variable in at_end[name] else np.nanmean(values, axis=0))
            if each[variable].dims[-1] == "prompt":
                assert row["value"] == pytest.approx(expected, rel=1e-9)
    reduced = quantities(hs.stats.reduce_replicates(measured["depth_steps"]))
    assert reduced["arc_length"]["value"] == pytest.approx(quantities(measured["depth_steps"])["arc_length"]["value"])


def test_every_measurement_has_a_table(helmscope, tmp_path):
    names = ["arc_length", "attention_diffusion", "mlp_weights", "mlp_entropy_change"]
    code, out, _ = helmscope(*SMALL, "--quick", *(part for name in names for part in ("--only", name)))
    assert code == 0
    lines = [line.strip() for line in out.splitlines()]
    assert any(line.startswith("arc_length: ") and line.endswith(", at the last depth") for line in lines)
    folder = hs.store.RunFolder.open("run")
    for name in names:
        assert any(line.startswith("table: ") and line.endswith(f"{name}.csv") for line in lines)
        with open(tmp_path / "run" / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        measured = folder.read_results(name)
        if name != "mlp_weights":  # whose values are one per layer
            measured = hs.stats.reduce_replicates(measured)
        assert not {"sample", "neuron"} & set(rows[0])
        for column in set(rows[0]) & set(map(str, measured.data_vars)):
            values = measured[column]
            found = [row for row in rows if row[column] != ""]
            assert len(found) == values.size
            for row in found:
                place = {axis: values[axis].dtype.type(row[axis]) for axis in values.dims}
                assert float(row[column]) == pytest.approx(float(values.sel(place)), nan_ok=True, rel=1e-12)
        assert {
            "nu_token_sampling",
            "nu_token_sampling_low",
            "nu_token_sampling_high",
            "total_nu_token_sampling",
            "layer",
            "head",
        } <= set(rows[0]) or name != "attention_diffusion"
