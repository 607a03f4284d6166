"""Trials, one at a time or as units of work in a run folder; equal seeds give identical bytes."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from helmscope.claims.prompts import choose_prompts
from helmscope.claims.reading import entry
from helmscope.claims.registry import experiments
from helmscope.claims.run_trials import TrialsFailed, run_trials
from helmscope.claims.trial import code_hash, run_trial, sources
from helmscope.models.subject import Subject
from helmscope.runs.processes import Processes
from helmscope.store.run_folder import RunFolder
from helmscope.types import HelmscopeError, Ruling, check_measurement

PLANTED = Path(__file__).parent / "planted"
DOCS = Path(__file__).parents[2] / "docs"
CHEAP = ["kuramoto", "measure-flow"]


def test_a_trial_is_judged_by_the_packaged_entry() -> None:
    trial = run_trial("kuramoto", quick=True)
    provenance = trial.verdict.provenance
    assert (provenance.entry, provenance.version) == (entry("kuramoto").hash, entry("kuramoto").version)
    assert provenance.code == code_hash("kuramoto", None)
    assert (provenance.weights, provenance.texts) == ("", "")  # a simulation has neither
    assert trial.verdict.ruling is Ruling.BY_CONSTRUCTION
    check_measurement(trial.data)


def test_the_same_seed_gives_the_same_bytes_whatever_the_engine(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path / name) for name in "abc"]
    trials = run_trials(CHEAP, folders[0], quick=True)
    run_trials(CHEAP, folders[1], quick=True, engine=Processes(2))
    run_trials(CHEAP, folders[2], quick=True, seed=1)
    files = ["verdicts.json", *(f"units/{claim}.nc" for claim in CHEAP)]
    one, two, other = ([(folder.path / name).read_bytes() for name in files] for folder in folders)
    assert one == two
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert folders[0].read_verdicts() == tuple(trial.verdict for trial in trials)
    for claim, trial in zip(CHEAP, trials, strict=True):
        again = run_trial(claim, quick=True)
        assert again.verdict == trial.verdict
        assert again.data.identical(trial.data)


def test_a_run_resumes_unless_its_claims_have_changed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(PLANTED, mine, ignore=shutil.ignore_patterns("__pycache__"))
    to = RunFolder.create(tmp_path / "run")
    first = run_trials(["planted-true"], to, claims_folder=mine)
    assert run_trials(["planted-true"], to, claims_folder=mine)[0].verdict == first[0].verdict
    path = mine / "planted-true.toml"
    path.write_text(path.read_text().replace("above = 0", "above = 0.5"))
    with pytest.raises(HelmscopeError, match="unit 'planted-true' has another function or other parameters"):
        run_trials(["planted-true"], to, claims_folder=mine)


def test_sources_hash_the_entry_and_its_code() -> None:
    packaged = sources("rate", None)
    assert list(packaged) == ["rate.toml", "rate.py", "imported by rate"]
    assert packaged["rate.toml"] == entry("rate").hash
    mine = ["planted-true.toml", "planted.py", "imported by planted-true"]
    assert list(sources("planted-true", str(PLANTED))) == mine


def test_the_code_hash_of_a_users_claim_covers_all_files_of_the_folder(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(PLANTED, mine, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_hash("planted-true", mine)
    assert before == run_trial("planted-true", claims_folder=mine, quick=True).verdict.provenance.code
    (mine / "helper.py").write_text("LEVEL = 1.0\n")
    added = code_hash("planted-true", mine)
    (mine / "helper.py").write_text("LEVEL = 2.0\n")
    assert len({before, added, code_hash("planted-true", mine)}) == 3


def test_the_entry_is_read_before_the_experiment_runs(tmp_path: Path) -> None:
    """An experiment that rewrites its own entry is still judged by the one that was there before."""
    mine = tmp_path / "mine"
    shutil.copytree(PLANTED, mine, ignore=shutil.ignore_patterns("__pycache__"))
    path = mine / "planted-false.toml"
    lenient = path.read_text().replace("above = 0", "above = -9")
    rewrite = f"__import__('pathlib').Path({str(path)!r}).write_text({lenient!r})"
    code = (
        (mine / "planted.py")
        .read_text()
        .replace("    return trial(case, -0.6)", f"    {rewrite}\n    return trial(case, -0.6)")
    )
    (mine / "planted.py").write_text(code)
    assert run_trial("planted-false", claims_folder=mine).verdict.ruling is Ruling.REFUTED


@pytest.mark.parametrize(
    ("claim", "sentence"),
    [
        ("kuramto", "unknown claim 'kuramto': did you mean 'kuramoto'?"),
        ("zzzz", "for your own claim pass `claims_folder=`"),
        ("bridge-is-minimal", "claim 'bridge-is-minimal' has no experiment yet: `helmscope claims list` shows which"),
    ],
)
def test_claims_that_cannot_be_tried_raise_before_any_work(tmp_path: Path, claim: str, sentence: str) -> None:
    with pytest.raises(HelmscopeError, match=sentence):
        run_trial(claim)
    with pytest.raises(HelmscopeError, match=sentence):
        run_trials(["kuramoto", claim], RunFolder.create(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("claims", ["kuramoto", None, 3])
def test_claims_must_be_a_list(tmp_path: Path, claims: object) -> None:
    with pytest.raises(HelmscopeError, match="but it must be a list of ids"):
        run_trials(claims, RunFolder.create(tmp_path))
    with pytest.raises(HelmscopeError, match="claim is an int, but it must be an id"):
        run_trials(["kuramoto", 3], RunFolder.create(tmp_path))
    with pytest.raises(HelmscopeError, match="claim is a NoneType, but it must be an id"):
        run_trial(None)


def test_a_failing_experiment_is_reported_with_its_line_and_the_others_are_kept(tmp_path: Path, capsys) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(PLANTED, mine, ignore=shutil.ignore_patterns("__pycache__"))
    code = (mine / "planted.py").read_text()
    (mine / "planted.py").write_text(code.replace("return trial(case, -0.6)", "print('hello'); assert case is None"))
    to = RunFolder.create(tmp_path / "run")
    with pytest.raises(TrialsFailed) as failed:
        run_trials(["planted-false", "planted-true"], to, claims_folder=mine)
    assert "experiment of 'planted-false' failed in planted.py, line 20: AssertionError" in str(failed.value)
    assert [trial.verdict.claim for trial in failed.value.trials] == ["planted-true"]
    assert [verdict.claim for verdict in to.read_verdicts()] == ["planted-true"]
    assert capsys.readouterr() == ("", "hello\n")


def test_the_published_rulings_do_not_depend_on_the_seed() -> None:
    """At seeds 0 to 9 no trial is both supported and refuted, and at least 9 agree with the full run of trials.md."""
    seeds = runpy.run_path(str(DOCS / "seeds.py"))
    stored, published = json.loads((DOCS / "seeds.json").read_text()), seeds["published_rulings"]()
    assert stored.keys() == published.keys()
    shown = (DOCS / "seeds.md").read_text()
    for name, row in stored.items():
        assert len(row["rulings"]) == 10, name
        assert not seeds["contradictory"](row["rulings"]), name
        assert row["rulings"].count(published[name]) >= 9, name
        (line,) = [line for line in shown.splitlines() if line.startswith(f"| {name} |")]
        assert row["entry"] == entry(name.partition(" | ")[0]).hash or "*stale*" in line, name


def test_rows_of_another_entry_or_code_are_stale() -> None:
    """So are those made before a module was changed from which the experiment imports."""
    is_stale = runpy.run_path(str(DOCS / "seeds.py"))["is_stale"]
    row = {"entry": entry("rate").hash, "code": code_hash("rate", None), "rulings": []}
    assert not is_stale("rate | simulation", row)
    assert is_stale("rate | simulation", {**row, "code": code_hash("kuramoto", None)})
    assert is_stale("rate | simulation", {**row, "entry": entry("kuramoto").hash})


def test_planted_rulings_of_another_entry_code_or_model_are_made_again(tmp_path: Path) -> None:
    planted = runpy.run_path(str(DOCS / "planted.py"))
    stored, hashes = planted["stored"], planted["hashes"]()
    table = {kind: {claim: ["refuted"] for claim in planted["CLAIMS"]} for kind in planted["RULINGS"]}
    stored.__globals__["HERE"] = tmp_path
    stored.__globals__["hashes"] = lambda: hashes
    for changed in ({}, *({name: "other"} for name in hashes)):
        (tmp_path / "planted.json").write_text(json.dumps({"hashes": hashes | changed, "rulings": table}))
        kept = [rulings for claims in stored().values() for rulings in claims.values() if rulings]
        assert bool(kept) == (not changed), changed
    assert {"planted models", "mlp-prevents, entry", "mlp-prevents, code"} <= hashes.keys()


def test_planted_cases_of_another_hash_are_made_again(tmp_path: Path) -> None:
    planted = runpy.run_path(str(DOCS / "planted.py"))
    stored, case_hash, cases = planted["stored_cases"], planted["case_hash"], planted["CASES"]
    stored.__globals__["HERE"] = tmp_path
    stored.__globals__["case_hash"] = lambda case: f"hash of {case.claim}"
    rows = {case.name: {"hash": f"hash of {case.claim}", "rulings": ["refuted"]} for case in cases}
    rows[cases[0].name]["hash"] = "other"
    (tmp_path / "planted.json").write_text(json.dumps({"cases": rows | {"gone | case": {"hash": "", "rulings": []}}}))
    found = stored()
    assert list(found) == [case.name for case in cases]
    assert [name for name, row in found.items() if not row["rulings"]] == [cases[0].name]
    stored.__globals__["HERE"] = DOCS
    assert entry(cases[0].claim).hash in case_hash(cases[0])


def test_another_seed_takes_other_prompts() -> None:
    redrawn = runpy.run_path(str(DOCS / "seeds.py"))["redrawn"]
    first, second, again = (choose_prompts(32, redrawn(Subject("A"), seed), gap=16) for seed in (0, 1, 0))
    assert (first[1], second[1]) == (32, 32)
    assert first == again
    assert len(set(first[0]) & set(second[0])) < 24
    assert redrawn(Subject.simulation(), 3) == Subject.simulation()


def test_seeds_that_contradict_each_other_are_noticed() -> None:
    contradictory = runpy.run_path(str(DOCS / "seeds.py"))["contradictory"]
    assert contradictory(["supported", "inconclusive", "refuted"])
    assert not contradictory(["supported", "inconclusive", "true by construction"])


@pytest.mark.slow
def test_all_verdicts_are_reproducible_to_the_byte(tmp_path: Path) -> None:
    """Full runs, with one process and with two."""
    one, two = (RunFolder.create(tmp_path / name) for name in "ab")
    run_trials(list(experiments()), one)
    run_trials(list(experiments()), two, engine=Processes(2))
    assert (one.path / "verdicts.json").read_bytes() == (two.path / "verdicts.json").read_bytes()
