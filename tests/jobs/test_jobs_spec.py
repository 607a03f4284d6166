"""Specs: one canonical form per job, the round trip through TOML, and error messages."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import helmscope as hs
from helmscope.jobs import (
    DensitySpec,
    MeasurementSpec,
    PhaseSpec,
    ReportSpec,
    SimulationSpec,
    Spec,
    TrialsSpec,
    read_spec,
    spec_from_dict,
    spec_to_toml,
    write_spec,
)
from helmscope.jobs import names as registry
from helmscope.jobs.spec import spec_from_toml
from support.children import run_python
from support.refusal import refused

GOLDEN = Path(__file__).parent / "golden"
KINDS = {
    "simulate": SimulationSpec,
    "density": DensitySpec,
    "phase": PhaseSpec,
    "measure": MeasurementSpec,
    "trials": TrialsSpec,
    "report": ReportSpec,
}


# TOML -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.toml")))
def test_the_documented_format(name: str) -> None:
    """Each file has every field of its spec in the order of writing, and the round trip preserves it."""
    path = GOLDEN / f"{name}.toml"
    spec = read_spec(path)
    assert type(spec) is KINDS[name]
    plain = [line.partition("#")[0].rstrip() for line in path.read_text().splitlines()]
    assert spec_to_toml(spec).splitlines() == [line for line in plain if line]
    left_out = set(spec.__struct_fields__) - set(tomllib.loads(spec_to_toml(spec)))
    # the adaptive stepper of the simulation has no step; the density has no force, no anisotropic noise, and its
    # uniform start no kappa
    without = {"kappa", "strength", "swirl", "nu_axis", "process"}
    assert left_out == {"simulate": {"step"}, "density": without}.get(name, set())
    written = [field for field in spec.__struct_fields__ if field not in left_out]
    assert list(tomllib.loads(spec_to_toml(spec))) == ["job", *written]


def test_every_job_is_documented() -> None:
    assert {path.stem for path in GOLDEN.glob("*.toml")} == set(KINDS)


finite = st.floats(0, 1e6, allow_nan=False)
grids = st.one_of(
    st.lists(finite, min_size=1, max_size=5, unique=True).map(sorted),
    st.tuples(st.integers(0, 5), st.integers(6, 99), st.integers(2, 9)).map(lambda ends: ":".join(map(str, ends))),
)
seeds = st.integers(0, 2**32 - 1)
words = st.text(min_size=1).filter(lambda text: text.strip() and text.isprintable())
paths = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip))
simulations = st.builds(
    SimulationSpec,
    field=st.sampled_from(sorted(registry.FIELDS)),
    beta=finite,
    value=st.floats(-9, 9),
    causal=st.booleans(),
    n=st.integers(1, 10**6),
    dim=st.integers(2, 10**6),
    batch=st.integers(1, 10**6),
    times=grids,
    tol=st.one_of(st.none(), st.floats(1e-12, 1)),
    merge=st.one_of(st.none(), finite),
    chunk=st.one_of(st.none(), st.integers(1, 99)),
    seed=seeds,
    dtype=st.sampled_from(["float64", "float32"]),
)
densities = st.builds(
    DensitySpec,
    field=st.sampled_from(sorted(registry.DENSITY_FIELDS)),
    nu=st.floats(1e-6, 9),
    dim=st.integers(2, 10**6),
    degree=st.one_of(st.none(), st.integers(1, 999)),
    times=grids,
    positive=st.booleans(),
    tol=st.floats(1e-12, 1),
)
phases = st.builds(
    PhaseSpec,
    nu=st.sampled_from([0.0, 0.25]),
    dims=st.one_of(st.none(), st.lists(st.integers(2, 999), min_size=1, max_size=4, unique=True)),
    betas=grids,
    times=grids,
    samples=st.integers(1, 10**9),
    seed=seeds,
)
fields_of_trials = {
    "claims": st.lists(words, max_size=4),
    "quick": st.booleans(),
    "claims_folder": paths,
    "models": st.lists(st.sampled_from(["A", "B", "tied", "a folder"]), min_size=1, max_size=3),
    "texts": paths,
    "other": paths,
    "truncate": st.booleans(),
    "held_out": st.booleans(),
    "seed": seeds,
}


trials = st.builds(TrialsSpec, **fields_of_trials)
reports = st.builds(ReportSpec, **fields_of_trials)


@given(st.one_of(simulations, densities, phases, trials, reports))
def test_the_round_trip_through_toml_preserves_every_spec(spec: Spec) -> None:
    assert spec_from_toml(spec_to_toml(spec)) == spec
    data = {"job": spec.job, **msgspec.structs.asdict(spec)}
    assert spec_from_dict(data) == spec
    assert spec_from_dict(msgspec.json.decode(msgspec.json.encode(data))) == spec


def test_files_and_run_folders_are_read(tmp_path: Path) -> None:
    spec = TrialsSpec(claims=["rate"], claims_folder='a "quoted"\n\x7f\\folder')
    write_spec(spec, tmp_path / "spec.toml")
    assert read_spec(tmp_path / "spec.toml") == read_spec(tmp_path) == spec
    refused(lambda: read_spec(tmp_path / "none.toml"), "cannot read", "none.toml", "No such file")
    (tmp_path / "latin.toml").write_bytes(b'job = "\xe9"')
    refused(lambda: read_spec(tmp_path / "latin.toml"), "latin.toml is not UTF-8 text")
    refused(lambda: spec_to_toml(TrialsSpec(claims_folder="\udcff")), "claims_folder of the trials spec", "UTF-8")


def test_equal_jobs_have_equal_specs() -> None:
    assert SimulationSpec(times=[0, 1], n=8) == SimulationSpec(times=(0.0, 1.0), n=8.0)
    assert SimulationSpec(start="vmf") == SimulationSpec(start="vmf", kappa=1)
    assert SimulationSpec(nu=0.1).step == 0.02
    assert DensitySpec() == DensitySpec(
        beta=4, value=1, perturbation=0.1, perturbation_degree=1, zonal=False, degree=64
    )
    assert DensitySpec(dim=8) == DensitySpec(dim=8, zonal=True, degree=64)
    assert DensitySpec(start="vmf") == DensitySpec(start="vmf", kappa=1)
    assert DensitySpec(dim=3).degree == 32
    assert PhaseSpec(spectrum=[1, 2, 3]) == PhaseSpec(spectrum=(1.0, 2.0, 3.0), dims=[3])
    assert PhaseSpec() == PhaseSpec(dims=[8, 32], published=True)
    assert PhaseSpec(nu=0.1).published is PhaseSpec(field="usa").published is False
    assert TrialsSpec(claims=["rate", "rate"]) == TrialsSpec(claims=("rate",))
    assert TrialsSpec(models=["A", "B", "A"]) == TrialsSpec(models=("A", "B"))
    with pytest.raises(AttributeError):
        SimulationSpec().beta = 3.0


def test_a_schema_for_forms() -> None:
    """A web form can be generated from the JSON schema of a spec."""
    schema = msgspec.json.schema(SimulationSpec)["$defs"]["SimulationSpec"]
    assert schema["properties"]["beta"] == {"type": "number", "default": 4.0}
    assert schema["additionalProperties"] is False


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("beta = ", "x.toml is not TOML: "),
        (
            "beta = 1",
            "job of x.toml is missing, but it must be one of density, measure, phase, report, simulate, trials",
        ),
        ("job = 3", "job of x.toml is 3, but it must be one of"),
        ('job = "simulat"', "unknown job of x.toml 'simulat': did you mean 'simulate'?"),
        ('job = "simulate"\nbta = 1', "unknown key of x.toml 'bta': did you mean 'beta'?"),
        ('job = "simulate"\nbeta = "hot"', "x.toml is not valid: beta is 'hot', but it must be a finite number >= 0"),
        ('job = "simulate"\nbeta = nan', "x.toml is not valid: beta is nan"),
        ('job = "simulate"\nversion = 2', "version is 2, but this helmscope reads only version 1 of the format"),
        ('job = "phase"\n[field]\nname = 1', "field is a dict, but it must be one of sa, usa, sinkhorn"),
        ('job = "trials"\nclaims = "rate"', "claims is 'rate', but it must be a list, such as ['rate']"),
    ],
)
def test_bad_toml_is_one_sentence(text: str, sentence: str) -> None:
    assert sentence in refused(lambda: spec_from_toml(text, "x.toml"), sentence.split(",")[0][:40])


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        (SimulationSpec, {"feild": "sa"}, "unknown keyword of SimulationSpec 'feild': did you mean 'field'?"),
        (TrialsSpec, {"claim": ["rate"]}, "unknown keyword of TrialsSpec 'claim': did you mean 'claims'?"),
        (SimulationSpec, {"n": 2.5}, "n is 2.5, but it must be a whole number >= 1"),
        (SimulationSpec, {"causal": 1}, "causal is 1, but it must be true or false"),
        (SimulationSpec, {"field": "sb"}, "unknown field 'sb': did you mean 'sa'?"),
        (SimulationSpec, {"stepper": "rk5"}, "unknown stepper 'rk5': did you mean 'rk4'?"),
        (
            SimulationSpec,
            {"times": "0:1"},
            "times is '0:1', but it must be numbers such as 0,1,5 or a range FROM:TO:COUNT",
        ),
        (SimulationSpec, {"times": "0:1:" + "9" * 5000}, "with COUNT from 2 to 1000000"),
        (SimulationSpec, {"times": 3}, "times is 3, but it must be a list"),
        (SimulationSpec, {"device": ""}, "device is '', but it must be a nonempty string"),
        (
            SimulationSpec,
            {"nu": 0.1, "stepper": "rk4"},
            "noise requires euler-maruyama, stochastic-heun or noisy-layer",
        ),
        (DensitySpec, {"field": "sinkhorn"}, "field is 'sinkhorn', but it must be one of sa, usa, force, none"),
        (DensitySpec, {"field": "force", "swirl": 1, "dim": 8}, "swirl is 1 and zonal is true, but a rotation"),
        (DensitySpec, {"field": "none", "beta": 1}, "beta is 1, but the field 'none' has no attention: omit it"),
        (DensitySpec, {"field": "none", "nu": 0}, "field is 'none' and nu is 0, but then no token moves: set nu"),
        (DensitySpec, {"nu": -1}, "nu is -1, but it must be a finite number >= 0"),
        (DensitySpec, {"kappa": 2}, "kappa is 2, but it belongs to the start 'vmf', not to 'uniform': omit it"),
        (
            DensitySpec,
            {"start": "vmf", "perturbation_degree": 2},
            "perturbation_degree is 2, but it belongs to the start 'uniform', not to 'vmf'",
        ),
        (DensitySpec, {"perturbation": 2}, "perturbation is 2, but it must be in [-1, 1]"),
        (DensitySpec, {"dim": 1}, "dim is 1, but it must be a whole number >= 2"),
        (DensitySpec, {"dim": 4, "zonal": False}, "in more than 3 dimensions only zonal densities can be evolved"),
        (DensitySpec, {"degree": 0}, "degree is 0, but it must be a whole number >= 1"),
        (DensitySpec, {"tol": 0}, "tol is 0, but it must be a finite number > 0"),
        (PhaseSpec, {"dims": []}, "dims is [], but it must have a length of at least 1"),
        (PhaseSpec, {"betas": [2, 1]}, "betas[1] is 1 after 2, but betas must increase"),
        (PhaseSpec, {"spectrum": [1, 2], "dims": [3]}, "spectrum has 2 eigenvalues, but B has 3 in dimension 3"),
        (PhaseSpec, {"nu": 1, "published": True}, "nu is 1, but the published scheme has no noise"),
        (TrialsSpec, {"texts": "a.txt"}, "texts is set without a model: add models=['A']"),
        (TrialsSpec, {"seed": -1}, "seed is -1, but it must be a whole number >= 0"),
        (ReportSpec, {"claims": ["rate", 3]}, "claims[1] is 3, but it must be a nonempty string"),
    ],
)
def test_bad_values_are_rejected_by_name(kind: type[Spec], values: dict[str, object], sentence: str) -> None:
    assert sentence in refused(lambda: kind(**values))


def test_a_value_without_its_name_is_rejected() -> None:
    assert refused(lambda: PhaseSpec("usa")) == (
        "PhaseSpec is given 'usa' without a name, but its fields must be named, such as PhaseSpec(seed=0)"
    )


def test_errors_of_preparation_occur_before_a_folder_is_created(tmp_path: Path) -> None:
    where = tmp_path / "run"
    for spec, sentence in (
        (SimulationSpec(start="orthonormal", n=4, dim=3), "n is 4, but at most dim = 3 tokens can be orthonormal"),
        (SimulationSpec(device="nosuch"), "device is 'nosuch', but torch cannot use it here"),
        (DensitySpec(beta=400), "degree is 64, but the kernel e^(beta <x, y>) with beta=400 needs a grid with"),
        (DensitySpec(start="vmf", kappa=900), "degree is 64, but a density with kappa=900 needs a grid with degree="),
        (DensitySpec(perturbation_degree=65), "perturbation_degree is 65, but it must be at most degree, 64"),
        (DensitySpec(dim=3, degree=10**6), "degree is 1000000, but"),
        (PhaseSpec(samples=10**12), "samples is 1000000000000, n is 32 and times has 61 values, but that makes"),
        (TrialsSpec(claims=["kuramto"]), "unknown claim 'kuramto': did you mean 'kuramoto'?"),
        (TrialsSpec(models=["A"], texts="none.txt"), "texts is 'none.txt', but it cannot be read"),
    ):
        assert sentence in refused(lambda spec=spec: hs.jobs.run(spec, folder=where))
    assert not where.exists()


def test_an_unknown_claim_suggests_the_closest_or_lists_all() -> None:
    near = refused(lambda: TrialsSpec(claims=["kuramto"]).prepare())
    assert near == "unknown claim 'kuramto': did you mean 'kuramoto'?"
    far = refused(lambda: TrialsSpec(claims=["zzz"]).prepare())
    assert far == (
        "unknown claim 'zzz' (`helmscope claims list` prints all 69); for your own claim pass `claims_folder=` "
        "(`--from` on the command line)"
    )
    similar = refused(lambda: TrialsSpec(claims=["mean"]).prepare())
    assert similar.startswith("unknown claim 'mean'; similar: no-mean-drift, ")
    assert "breathing" not in similar  # spelled a little alike, but others contain the word
    assert " (`helmscope claims list` prints all 69); for your own" in similar


# The registry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [registry.FIELDS, registry.STARTS, registry.DENSITY_STARTS, registry.STEPPERS, registry.MODEL_DTYPES]
)
def test_every_name_loads_its_object(names: registry.Names) -> None:
    assert len({id(names.load(name)) for name in names}) == len(list(names))


def test_importing_jobs_does_not_import_torch() -> None:
    code = "import sys, helmscope as hs; hs.jobs.SimulationSpec(beta=1.0); print({'torch', 'scipy'} & set(sys.modules))"
    assert run_python(code, check=True).stdout.strip() == "set()"


def test_a_spec_shows_the_fields_that_were_given(tmp_path: Path) -> None:
    assert repr(SimulationSpec(field="usa", beta=4.0)) == "SimulationSpec(field='usa', beta=4.0)"
    assert repr(spec_from_toml('job = "simulate"\nbeta = 4')) == "SimulationSpec(beta=4.0)"
    assert repr(SimulationSpec()) == "SimulationSpec()"
    assert repr(PhaseSpec(seed=0)) == "PhaseSpec(seed=0)"
    # what was given is no part of the value
    plain, given = SimulationSpec(), SimulationSpec(beta=4)
    assert plain == given
    assert hash(plain) == hash(given)
    assert spec_to_toml(plain) == spec_to_toml(given)
    assert plain.fields == given.fields
    # a copy and a pickle have the same value, and show at least what differs from the defaults
    spec = SimulationSpec(field="usa", beta=4.0)
    assert repr(msgspec.structs.replace(spec)).startswith("SimulationSpec(field='usa'")
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_spec_read_from_a_written_file_shows_its_main_fields(tmp_path: Path) -> None:
    write_spec(SimulationSpec(seed=7), tmp_path / "spec.toml")
    assert repr(read_spec(tmp_path / "spec.toml")) == (
        "SimulationSpec(field='sa', beta=4.0, nu=0.0, n=32, dim=3, batch=16, times='0:10:101', seed=7)"
    )


@pytest.mark.parametrize("kind", [SimulationSpec, DensitySpec, PhaseSpec, MeasurementSpec, TrialsSpec, ReportSpec])
def test_a_notebook_shows_the_main_fields_of_every_spec(kind: type[Spec]) -> None:
    spec = kind()
    assert kind.main_fields
    assert [name for name, _ in spec.rows][: len(kind.main_fields)] == list(kind.main_fields)
    text = spec._repr_html_()
    for name in kind.main_fields:
        assert f">{name}</td>" in text
    assert "\n" not in repr(spec)


def test_the_table_of_a_simulation_says_what_was_computed() -> None:
    rows = dict(SimulationSpec(field="usa", times=[0, 5], merge=0.01).rows)
    assert rows == {
        "field": "usa", "beta": 4.0, "nu": 0.0, "n": 32, "dim": 3, "batch": 16, "times": "0.0, 5.0", "merge": 0.01
    }  # fmt: skip


def test_a_list_is_shown_by_example_and_a_file_is_read_first() -> None:
    assert refused(lambda: PhaseSpec(dims=2)) == "dims is 2, but it must be a list, such as [2]"
    assert refused(lambda: TrialsSpec(claims="rate")) == "claims is 'rate', but it must be a list, such as ['rate']"
    assert refused(lambda: PhaseSpec(dims="2-8")) == "dims is '2-8', but it must be a list"
    assert refused(lambda: PhaseSpec(dims={2: 3})) == "dims is {2: 3}, but it must be a list"
    for file in ("usa.toml", Path("usa.toml")):
        assert refused(lambda file=file: hs.jobs.run(file)).endswith(
            "but it must be a spec of hs.jobs, such as PhaseSpec(): read a file with hs.jobs.read_spec('usa.toml')"
        )
