"""Claims on a subject: one recording for all of them, premises that cannot hold, and what is refused."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import helmscope as hs
from helmscope.claims.registry import TrialCase, experiments
from helmscope.claims.run_trials import _decode_subject, plan_trials, run_trials, trial_unit
from helmscope.claims.trial import run_trial
from helmscope.models import subject as home
from helmscope.models.cache import RecordingCache
from helmscope.models.subject import Subject
from helmscope.runs.processes import Processes
from helmscope.store.run_folder import RunFolder
from helmscope.types import HelmscopeError, Ruling
from support.model_families import tiny_model

recording_module = import_module("helmscope.models.record")  # the package has the function by this name

PLANTED = Path(__file__).parent / "planted"
ROWS = [[k % 90 + 3, (7 * k) % 90 + 3, 5, k % 11 + 3, 9, 11] for k in range(8)]
CODE = """
import helmscope as hs

def finding(case):
    radius = case.subject.recording.trajectory.radius
    growth = (radius[-1] - radius[0]).mean(-1)
    data = hs.claims.curve("growth", growth[:, None], {"end": [0]}, label="growth of the radius")
    evidence = hs.claims.Replicates(growth, of="prompts")
    still = hs.claims.Replicates(growth - growth.mean() - 1, of="prompts")
    return hs.claims.Finding(evidence=evidence, controls={"mean -2": still}, data=data)

@hs.claims.experiment("planted-true", subjects=("model", "simulation"), default_subjects=(hs.Subject.simulation(),))
def one(case):
    why = None if case.subject.is_simulation else case.subject.unmet_premise(causal=True)
    if case.subject.is_simulation or why is not None:
        return hs.claims.Finding.impossible(why or "nothing was simulated")
    return finding(case)

@hs.claims.experiment("planted-false", subjects=("model",))
def two(case):
    return finding(case)
"""


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of texts in every recording that is made in this process, with an empty cache."""
    made, record = [], recording_module.record

    def counting(loaded: Any, texts: Any, **options: Any) -> Any:
        made.append(len(texts))
        return record(loaded, texts, **options)

    monkeypatch.setattr(recording_module, "record", counting)
    monkeypatch.setattr(home, "_CACHE", RecordingCache())
    return made


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in PLANTED.glob("*.toml"):
        (folder / path.name).write_text(path.read_text().replace('["simulation"]', '["model"]'))
    (folder / "mine.py").write_text(CODE)
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Subject:
    tiny_model("gpt2").save_pretrained(tmp_path / "tiny")
    return Subject(tmp_path / "tiny", ROWS)


BOTH = ["planted-false", "planted-true"]


@pytest.mark.parametrize("workers", [1, 2])
def test_two_claims_on_one_model_record_it_once(
    tmp_path: Path, mine: Path, tiny: Subject, made: list[int], workers: int
) -> None:
    engine = None if workers == 1 else Processes(workers)
    trials = run_trials(BOTH, RunFolder.create(tmp_path / "run"), claims_folder=mine, subjects=[tiny], engine=engine)
    assert made == [8, 2]  # all texts once, and two of them for what the model can do
    for trial in trials:
        assert trial.verdict.subject == "tiny"
        assert (trial.verdict.provenance.weights, trial.verdict.provenance.texts) == (tiny.weights, tiny.text_hash)
    again = run_trial("planted-true", claims_folder=mine, subject=tiny)
    assert "looks untrained" in again.verdict.sentence
    assert again.verdict == trials[1].verdict
    assert again.data.identical(trials[1].data)


def test_a_single_claim_on_a_model_runs_in_another_process(
    tmp_path: Path, mine: Path, tiny: Subject, made: list[int]
) -> None:
    to = RunFolder.create(tmp_path / "run")
    (trial,) = run_trials(["planted-true"], to, claims_folder=mine, subjects=[tiny], engine=Processes(2))
    assert made == []  # in this process
    assert trial.verdict == run_trial("planted-true", claims_folder=mine, subject=tiny).verdict


def test_a_model_in_memory_is_tried_in_this_process_whatever_the_engine(tmp_path: Path, mine: Path) -> None:
    subject = Subject(tiny_model("gpt2"), ROWS)
    (trial,) = run_trials(
        ["planted-true"],
        RunFolder.create(tmp_path / "run"),
        claims_folder=mine,
        subjects=[subject],
        engine=Processes(2),
    )
    assert trial.verdict.subject == "GPT2LMHeadModel"
    assert trial.verdict.provenance.weights == subject.weights
    with pytest.raises(HelmscopeError, match="a model in memory, but it can only be tried in the process that"):
        trial_unit("planted-true", {}, 0, False, str(mine), subject={"identity": subject.identity})


def test_an_impossible_premise_is_reported(mine: Path) -> None:
    trial = run_trial("planted-true", claims_folder=mine, subject=Subject(tiny_model("bert"), ROWS))
    assert trial.verdict.ruling is Ruling.IMPOSSIBLE
    assert trial.verdict.interval is None
    assert trial.verdict.sentence.startswith("The claim needs attention that is causal, but that of BertForMaskedLM")
    assert trial.verdict.conditions == trial.verdict.controls == ()
    assert trial.verdict.provenance.weights
    assert run_trial("planted-true", claims_folder=mine).verdict.subject == "simulation"


def test_a_run_resumes_only_with_the_same_model_and_texts(tmp_path: Path, mine: Path, tiny: Subject) -> None:
    to = RunFolder.create(tmp_path / "run")
    first = run_trials(["planted-false"], to, claims_folder=mine, subjects=[tiny])
    assert run_trials(["planted-false"], to, claims_folder=mine, subjects=[tiny])[0].verdict == first[0].verdict
    with pytest.raises(HelmscopeError, match="has another function or other parameters"):
        run_trials(["planted-false"], to, claims_folder=mine, subjects=[Subject(tiny.model, ROWS[:-1])])
    data = {**tiny.as_data(), "identity": "0" * 64}
    with pytest.raises(HelmscopeError, match=r"subject is tiny .*, but when the run began it had the hash 0000"):
        _decode_subject(data)


def test_unsuitable_subjects_raise(tmp_path: Path, mine: Path) -> None:
    a, tied = Subject("A"), Subject("tied")
    simulated = "subject of claim 'rate' is A, but this claim can be tried on a simulation only"
    with pytest.raises(HelmscopeError, match=simulated):
        run_trial("rate", subject=a)
    with pytest.raises(HelmscopeError, match=simulated):
        run_trials(["rate"], RunFolder.create(tmp_path / "run"), subjects=[a])
    with pytest.raises(
        HelmscopeError, match="'planted-false' is simulation, but this claim can be tried on a model only"
    ):
        run_trial("planted-false", claims_folder=mine, subject=Subject.simulation())
    with pytest.raises(HelmscopeError, match="other is given, but subject is not"):
        run_trial("planted-false", claims_folder=mine, other=tied)
    with pytest.raises(HelmscopeError, match="other is A, but it must differ from subject"):
        run_trial("planted-false", claims_folder=mine, subject=a, other=Subject("A"))
    with pytest.raises(HelmscopeError, match=r"subject is a str, but it must be a Subject: Subject\('A'\)"):
        run_trial("planted-false", claims_folder=mine, subject="A")
    with pytest.raises(HelmscopeError, match="other is an int, but it must be a Subject"):
        TrialCase(subject=a, other=3)


def test_a_second_subject_raises_unless_the_claim_takes_two(mine: Path, tiny: Subject) -> None:
    with pytest.raises(
        HelmscopeError, match="other of claim 'planted-false' is A, but this claim is tried on one subject"
    ):
        run_trial("planted-false", claims_folder=mine, subject=tiny, other=Subject("A"))


def test_default_subjects(mine: Path) -> None:
    known = experiments(mine)
    assert [subject.name for subject in known["planted-false"].default_subjects] == ["A", "B", "tied"]
    assert known["planted-false"].case(3, quick=True) == TrialCase(3, True, Subject("A"))
    assert experiments()["rate"].case() == TrialCase()
    assert TrialCase().subject.is_simulation


def test_there_is_one_verdict_for_each_claim_and_subject(
    tmp_path: Path, mine: Path, tiny: Subject, made: list[int]
) -> None:
    tiny_model("gpt_neox").save_pretrained(tmp_path / "other")
    other = Subject(tmp_path / "other", ROWS)
    trials = run_trials(BOTH, RunFolder.create(tmp_path / "run"), claims_folder=mine, subjects=[tiny, other])
    pairs = [(trial.verdict.subject, trial.verdict.claim) for trial in trials]
    assert pairs == [(name, claim) for name in ("tiny", "other") for claim in BOTH]
    assert made == [8, 2, 8, 2]  # subject by subject: each model is recorded once for both claims
    hashes = {(trial.verdict.provenance.weights, trial.verdict.provenance.texts) for trial in trials}
    assert hashes == {(subject.weights, subject.text_hash) for subject in (tiny, other)}


def test_held_out_texts_replace_those_of_the_box_only(mine: Path) -> None:
    bundled, held_out = (plan_trials(["planted-false"], claims_folder=mine, held_out=held) for held in (False, True))
    for plain, published in zip(bundled, held_out, strict=True):
        assert (plain.subject.name, plain.name) == (published.subject.name, published.name)
        assert not set(plain.subject.texts) & set(published.subject.texts)
    assert [plain.subject for plain in bundled] == [Subject("A"), Subject("B"), Subject("tied")]
    own = Subject("A", ["my text", "another text"])
    assert plan_trials(["planted-false"], [own], claims_folder=mine, held_out=True)[0].subject == own


def test_subjects_with_the_same_name_have_units_with_different_names(tmp_path: Path, mine: Path) -> None:
    for name in ("early", "late"):
        model = tiny_model("gpt2")
        model.transformer.wte.weight.data.mul_(1 if name == "early" else 2)
        model.save_pretrained(tmp_path / name / "model")
    subjects = [Subject(tmp_path / name / "model", ROWS) for name in ("early", "late")]
    planned = plan_trials(["planted-false"], subjects, claims_folder=mine)
    expected = [f"planted-false--model-{subject.identity[:8]}" for subject in subjects]
    assert [each.name for each in planned] == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"subjects": "model"}, r"subjects of 'a' is 'model', but it must be a tuple such as \('model',\)"),
        ({"subjects": ("modle",)}, "unknown subject of 'a' 'modle': did you mean 'model'?"),
        ({"seconds": {}}, r"subjects of 'a' is \[\], but it must hold"),
        ({"seconds": {"simulation": 1, "modle": 2}}, "unknown subject of 'a' 'modle': did you mean 'model'?"),
        ({"seconds": {"model": 0}}, "seconds is 0, but it must be"),
        ({"default_subjects": (3,)}, r"default_subjects of 'a' is \(3,\), but it must hold Subjects"),
        (
            {"default_subjects": (Subject("A"),)},
            "subject of claim 'a' is A, but this claim can be tried on a simulation only",
        ),
        (
            {"subjects": ("model",), "compares_models": True, "default_subjects": (Subject("A"),)},
            "default_subjects of 'a' holds 1 subjects, but a comparison needs 2",
        ),
    ],
)
def test_invalid_subjects_of_an_experiment_raise(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HelmscopeError, match=sentence):
        hs.claims.experiment("a", **options)(lambda case: None)


def test_two_subjects_with_the_same_name_are_labelled_by_their_hash(tmp_path: Path) -> None:
    for name in ("early", "late"):
        model = tiny_model("gpt2")
        model.transformer.wte.weight.data.mul_(1 if name == "early" else 2)
        model.save_pretrained(tmp_path / name / "model")
    subjects = [Subject(tmp_path / name / "model", ROWS) for name in ("early", "late")]
    names = TrialCase(0, False, *subjects).names
    assert names == tuple(f"model {subject.identity[:8]}" for subject in subjects)
    assert names[0] != names[1]
