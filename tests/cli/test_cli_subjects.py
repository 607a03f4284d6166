"""``--model``, ``--texts`` and ``--other`` of ``helmscope claims test`` and ``helmscope report``."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from helmscope.jobs.texts import trial_subjects
from helmscope.models import subject as subject_module
from helmscope.models.cache import RecordingCache
from helmscope.models.subject import Subject
from helmscope.store.run_folder import RunFolder
from support.model_families import tiny_model

recording_module = import_module("helmscope.models.record")  # the package has the function by this name

PLANTED = Path(__file__).parents[1] / "claims" / "planted"
ROWS = [[k % 90 + 3, (7 * k) % 90 + 3, 5, k % 11 + 3, 9, 11] for k in range(32)]
CODE = """
import helmscope as hs

@hs.claims.experiment("planted-true", subjects=("model",), seconds=8)
@hs.claims.experiment("planted-false", subjects=("model",), seconds=2)
def radius(case):
    if why := case.subject.unmet_premise(causal=True):
        return hs.claims.Finding.impossible(why)
    growth = case.subject.recording.trajectory.radius[0].mean(-1)
    data = hs.claims.curve("radius", growth[:, None], {"depth": [0]}, label="radius")
    null = hs.claims.Replicates(growth - growth.mean() - 1, of="prompts")
    return hs.claims.Finding(evidence=hs.claims.Replicates(growth, of="prompts"), controls={"mean -2": null}, data=data)
"""


@pytest.fixture
def tiny(tmp_path):
    """A folder with a tiny model, a file of token ids and a folder with two claims about models."""
    tiny_model("gpt2").save_pretrained(tmp_path / "tiny")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "mine").mkdir()
    for path in PLANTED.glob("*.toml"):
        (tmp_path / "mine" / path.name).write_text(path.read_text().replace('["simulation"]', '["model"]'))
    (tmp_path / "mine" / "mine.py").write_text(CODE)
    return ("--from", "mine", "--texts", "rows.json", "--quick")


def test_claims_on_a_model_in_a_folder(helmscope, tmp_path, tiny):
    code, out, err = helmscope("claims", "test", *tiny, "--model", "tiny", "--out", "one")
    assert code == 0, err
    assert "2 quick trials: roughly " in err
    subject = Subject(tmp_path / "tiny", ROWS)
    assert out.startswith("planted-false: supported\n")
    assert "    subject: tiny\n" in out
    verdicts = RunFolder.open(tmp_path / "one").read_verdicts()
    assert [(verdict.claim, verdict.subject) for verdict in verdicts] == [
        ("planted-false", "tiny"),
        ("planted-true", "tiny"),
    ]
    for verdict in verdicts:
        assert verdict.interval.n == 32
        assert (verdict.provenance.weights, verdict.provenance.texts) == (subject.weights, subject.text_hash)
    manifest = RunFolder.open(tmp_path / "one").read_manifest()
    assert manifest.inputs["tiny"] == subject.identity
    assert manifest.parameters["subjects"] == ["tiny"]


def test_several_models_share_recordings_and_have_a_verdict_each(helmscope, tmp_path, tiny, monkeypatch):
    recorded, record = [], recording_module.record

    def counting(loaded, texts, **options):
        recorded.append((loaded.origin.name, len(texts)))
        return record(loaded, texts, **options)

    monkeypatch.setattr(recording_module, "record", counting)
    monkeypatch.setattr(subject_module, "_CACHE", RecordingCache())
    tiny_model("bert").save_pretrained(tmp_path / "encoder")
    words = ("claims", "test", *tiny, "--model", "tiny", "--model", "encoder", "--out", "two")
    code, _, err = helmscope(*words)
    assert code == 0, err
    verdicts = RunFolder.open(tmp_path / "two").read_verdicts()
    rulings = {(verdict.claim, verdict.subject): verdict.ruling.value for verdict in verdicts}
    assert rulings == {
        (claim, model): ruling
        for claim in ("planted-false", "planted-true")
        for model, ruling in (("tiny", "supported"), ("encoder", "premise impossible here"))
    }
    assert sorted(recorded) == [("encoder", 2), ("tiny", 2), ("tiny", 32)]  # two texts to check the premise
    before = (tmp_path / "two" / "verdicts.json").read_bytes()
    (tmp_path / "two" / "units" / "planted-true--tiny.nc").unlink()
    code, _, err = helmscope(*words, "--resume")
    assert code == 0, err
    assert (tmp_path / "two" / "verdicts.json").read_bytes() == before


def test_a_report_on_a_model_names_it(helmscope, tmp_path, tiny):
    code, out, err = helmscope("report", "no such model", *tiny, "--out", "page")
    assert (code, out) == (2, "")
    assert "model is 'no such model'" in err
    assert not (tmp_path / "page").exists()
    code, out, err = helmscope("report", "tiny", *tiny, "--out", "page", "--json")
    assert code == 0, err
    html = (tmp_path / "page" / "report.html").read_text()
    assert {verdict["subject"] for verdict in json.loads(out)["verdicts"]} == {"tiny"}
    common = "--seed 0 --quick --from mine"
    assert f"helmscope claims test planted-true {common} --model tiny --texts rows.json<" in html
    assert f"helmscope report {common} --texts rows.json tiny<" in html
    assert html.count("<picture>") == 2


def test_texts_of_fewer_than_two_tokens_are_rejected(helmscope, tmp_path, tiny):
    (tmp_path / "short.json").write_text(json.dumps([[5], [7], [9]]))
    before = sorted(tmp_path.iterdir())
    code, out, err = helmscope("claims", "test", "--from", "mine", "--model", "tiny", "--texts", "short.json")
    assert (code, out) == (2, "")
    assert err.endswith("texts[0] is (5,), which has 1 token for model tiny, but a trial needs at least 2 in each\n")
    assert sorted(tmp_path.iterdir()) == before


def test_a_memory_limit_below_the_estimate_is_refused_before_the_run(helmscope, tmp_path):
    before = sorted(tmp_path.iterdir())
    for words in (("claims", "test", "tokens-cluster"), ("report", "A")):
        model = ("--model", "A") if words[0] == "claims" else ()
        code, out, err = helmscope(*words, *model, "--quick", "--max-memory", "100MB")
        assert (code, out) == (2, "")
        assert re.search(r"max_memory is 100 MB, but the trials need about [\d,]+ MB: raise it, or pass fewer", err)
    code, _, err = helmscope("claims", "test", "kuramoto", "--quick", "--max-memory", "100MB")
    assert (code, err.splitlines()[-1]) == (
        2,
        "helmscope: max_memory is 100 MB, but the trials need about 450 MB: raise it",
    )
    assert sorted(tmp_path.iterdir()) == before


def test_texts_for_a_model_without_a_tokenizer_are_rejected(helmscope, tmp_path, tiny):
    (tmp_path / "lines.txt").write_text("Once upon a time\nThe cat sat\n")
    code, out, err = helmscope("claims", "test", "--from", "mine", "--model", "tiny", "--texts", "lines.txt")
    assert (code, out) == (2, "")
    assert "model is 'tiny', which has no tokenizer, but the texts are strings" in err
    assert err.endswith("on the command line --texts IDS.json\n")  # and not an argument of Python
    assert "tokenizer=" not in err


def test_token_ids_beyond_the_vocabulary_are_rejected(helmscope, tmp_path, tiny):
    (tmp_path / "high.json").write_text("[[5, 999999]]")
    code, out, err = helmscope("claims", "test", "--from", "mine", "--model", "tiny", "--texts", "high.json")
    assert (code, out) == (2, "")
    assert "texts contain the token id 999999, but the model has embeddings" in err


def test_few_texts_are_noticed(helmscope, tmp_path, tiny):
    (tmp_path / "few.json").write_text(json.dumps(ROWS[:8]))
    code, out, err = helmscope("claims", "test", "--from", "mine", "--model", "tiny", "--texts", "few.json")
    assert code == 0
    assert "tiny has 8 texts: with fewer than 32 different ones, or distinct first tokens, claims about" in err
    assert "Fewer than 32 replicates" in " ".join(out.split())
    assert "with fewer than" not in helmscope("claims", "test", *tiny, "--model", "tiny")[2]


def test_a_model_too_large_for_the_memory_is_refused_with_an_estimate(helmscope, tmp_path, tiny, monkeypatch):
    def small_machine(name: str) -> int:
        return {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 30}[name]

    monkeypatch.setattr("helmscope.types.arguments.os.sysconf", small_machine)
    code, out, err = helmscope("claims", "test", *tiny, "--model", "tiny")
    assert (code, out) == (2, "")
    assert "model is 'tiny' with " in err
    assert err.endswith(" GB, and this machine has 0.000123 GB\n")
    assert not (tmp_path / "runs").exists()


def test_report_uses_the_held_out_texts_and_claims_test_does_not() -> None:
    from helmscope.jobs import ReportSpec, TrialsSpec

    trials, report = (trial_subjects(kind(models=["A"])).subjects[0] for kind in (TrialsSpec, ReportSpec))
    assert (TrialsSpec().held_out, ReportSpec().held_out) == (False, True)
    assert trials == Subject("A")
    assert report == Subject("A").held_out()
    assert not set(trials.texts) & set(report.texts)
    assert trial_subjects(TrialsSpec(models=["A"], held_out=True)).subjects == (report,)


def test_texts_one_per_line(helmscope, tmp_path):
    (tmp_path / "lines.txt").write_text("Once upon a time\n\n  The cat sat on a mat.  \n")
    from helmscope.jobs import TrialsSpec

    helmscope("claims", "list")  # which goes into the folder
    subjects = trial_subjects(TrialsSpec(models=["A"], texts="lines.txt", other="B", truncate=True))
    assert subjects.subjects == (Subject("A", ["Once upon a time", "The cat sat on a mat."], truncate=True),)
    assert subjects.other == Subject("B", subjects.subjects[0].texts, truncate=True)
    assert subjects.models == ("A",)
    assert subjects.options == ("--texts", "lines.txt", "--other", "B", "--truncate")


@pytest.mark.parametrize("verb", [("claims", "test"), ("report",)])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--texts", "x.txt"], "on the command line --model A, where A may also be B, tied, a folder"),
        (["--other", "B"], "other is set without a model"),
        (["--truncate"], "truncate is set without a model"),
        (["--model", ""], "models[0] is '', but it must be a nonempty name"),
        (["--model", "A", "--texts", "nowhere.txt"], "texts is 'nowhere.txt', but it cannot be read: No such file"),
        (["--model", "A", "--texts", "{bad.json}"], "but it is not valid JSON"),
        (["--model", "A", "--texts", "{object.json}"], "its JSON must be a list of strings or of rows"),
        (["--model", "A", "--texts", "{empty.txt}"], "texts is empty, but it must hold at least one text"),
        (["--model", "A", "--texts", "{mixed.json}"], "texts[0] is 'One', but texts must be all strings"),
        (["--model", "A", "--other", "B"], "other is 'B', but no claim that can be tried compares two models"),
    ],
)
def test_bad_subjects_are_rejected_in_one_sentence(helmscope, tmp_path, tmp_path_factory, verb, words, sentence):
    files = tmp_path_factory.mktemp("files")
    texts = {"bad.json": "[", "object.json": "{}", "empty.txt": "\n", "mixed.json": '["One", 2]'}
    for name, text in texts.items():
        (files / name).write_text(text)
    given = [str(files / word[1:-1]) if word.startswith("{") else word for word in words]
    if verb == ("report",):
        given = [word for word in given if word != "--model"]
    code, out, err = helmscope(*verb, *given, "--out", "run")
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_simulated_claim_is_rejected_for_a_model(helmscope, tmp_path):
    code, out, err = helmscope("claims", "test", "rate", "--model", "A", "--quick")
    assert (code, out) == (2, "")
    assert err == ("helmscope: subject of claim 'rate' is A, but this claim can be tried on a simulation only\n")
    assert list(tmp_path.iterdir()) == []


def test_show_lists_the_subjects_of_a_claim(helmscope):
    assert "can be tried on:\n    a simulation (by default simulation)\n" in helmscope("claims", "show", "rate")[1]
    assert "can be tried on" not in helmscope("claims", "show", "bridge-is-minimal")[1]
