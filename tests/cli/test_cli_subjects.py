"""``--model``, ``--texts`` and ``--other`` of ``helmscope claims test`` and ``helmscope report``."""

from __future__ import annotations

import json
import shlex

import pytest

from helmscope.models.subject import Subject
from helmscope.store.run_folder import RunFolder
from support.model_families import tiny_model

ROWS = [[k % 90 + 3, (7 * k) % 90 + 3, 5, k % 11 + 3, 9, 11] for k in range(32)]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with a tiny model and a file of token ids; the trial keeps its shape with fewer of everything."""
    tiny_model("gpt2").save_pretrained(tmp_path / "tiny")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    monkeypatch.setattr("helmscope.claims.experiments.tokens_cluster.FLOW_PROMPTS", 2)
    return ("--model", "tiny", "--texts", "rows.json", "--quick")


def test_a_claim_on_a_model_in_a_folder(helmscope, tmp_path, tiny):
    code, out, err = helmscope("claims", "test", *tiny, "--out", "one")
    assert code == 0, err
    assert err.startswith("1 quick trial: ")
    subject = Subject(tmp_path / "tiny", ROWS)
    assert out.startswith("tokens-cluster: ")
    assert f"    subject: tiny (sha256 {subject.identity})\n" in out
    (verdict,) = RunFolder.open(tmp_path / "one").read_verdicts()
    assert verdict.subject == subject.label
    assert verdict.where.startswith("model tiny, 32 texts with 32 distinct first tokens;")
    assert verdict.interval.n == 32
    manifest = RunFolder.open(tmp_path / "one").read_manifest()
    assert manifest.inputs["subject"] == subject.identity
    assert manifest.parameters["subject"] == "tiny"


def test_a_report_on_a_model_names_it(helmscope, tmp_path, tiny):
    code, out, err = helmscope("report", *tiny, "--other", "tied model", "--out", "page")
    assert (code, out) == (2, "")
    assert "model is 'tied model'" in err
    assert not (tmp_path / "page").exists()
    code, out, err = helmscope("report", *tiny, "--out", "page", "--json")
    assert code == 0, err
    html = (tmp_path / "page" / "report.html").read_text()
    (verdict,) = json.loads(out)["verdicts"]
    assert verdict["subject"] in html
    command = f"helmscope claims test tokens-cluster --seed 0 --quick {shlex.join(tiny[:4])}"
    assert command in html
    assert html.count("data:image/svg+xml;base64,") == 1


def test_a_premise_that_cannot_hold_has_a_page(helmscope, tmp_path, monkeypatch, tiny):
    monkeypatch.setattr(Subject, "needs", lambda self, *parts, **kinds: f"{self.name} has no sphere")
    code, out, err = helmscope("report", *tiny, "--out", "page")
    assert code == 0, err
    assert out.splitlines()[0] == "1 premise impossible here"
    assert "Tiny has no sphere." in (tmp_path / "page" / "report.html").read_text()


def test_texts_without_a_pair_of_tokens_are_rejected(helmscope, tmp_path, tiny):
    (tmp_path / "short.json").write_text(json.dumps([[5, 6], [7, 8], [9, 10]]))
    code, out, err = helmscope("claims", "test", "--model", "tiny", "--texts", "short.json", "--quick")
    assert (code, out) == (2, "")
    assert "texts[0] has 2 tokens, but the claim needs 3 or more in each" in err


def test_texts_one_per_line(helmscope, tmp_path):
    (tmp_path / "lines.txt").write_text("Once upon a time\n\n  The cat sat on a mat.  \n")
    from helmscope.jobs import Trials
    from helmscope.jobs.texts import trial_subjects

    helmscope("claims", "list")  # which goes into the folder
    subjects = trial_subjects(Trials(model="A", texts="lines.txt", other="B", truncate=True))
    assert subjects.subject == Subject("A", ["Once upon a time", "The cat sat on a mat."], truncate=True)
    assert subjects.other == Subject("B", subjects.subject.texts, truncate=True)
    assert subjects.options == ("--model", "A", "--texts", "lines.txt", "--other", "B", "--truncate")


@pytest.mark.parametrize("verb", [("claims", "test"), ("report",)])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--texts", "x.txt"], "texts is set, but model is not: set it to A, B, tied, a folder or a Hub id"),
        (["--other", "B"], "other is set, but model is not"),
        (["--truncate"], "truncate is set, but model is not"),
        (["--model", ""], "model is '', but it must be a nonempty name"),
        (["--model", "A", "--texts", "nowhere.txt"], "texts is 'nowhere.txt', but it cannot be read: No such file"),
        (["--model", "A", "--texts", "{bad.json}"], "but it is not valid JSON"),
        (["--model", "A", "--texts", "{object.json}"], "its JSON must be a list of strings or of rows"),
        (["--model", "A", "--texts", "{empty.txt}"], "texts is empty, but it must hold at least one text"),
        (["--model", "A", "--texts", "{mixed.json}"], "texts[0] is 'One', but texts must be all strings"),
        (["--model", "A", "--texts", "{high.json}"], "texts contain the token id 999999, but the model has embeddings"),
        (["--model", "A", "--other", "A"], "other is A, but it must differ from subject"),
    ],
)
def test_bad_subjects_are_rejected_in_one_sentence(helmscope, tmp_path, tmp_path_factory, verb, words, sentence):
    files = tmp_path_factory.mktemp("files")
    texts = {"bad.json": "[", "object.json": "{}", "empty.txt": "\n", "mixed.json": '["One", 2]'}
    for name, text in (texts | {"high.json": "[[999999]]"}).items():
        (files / name).write_text(text)
    given = [str(files / word[1:-1]) if word.startswith("{") else word for word in words]
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
    assert "can be tried on:\n    model (usually A and tied)\n" in helmscope("claims", "show", "tokens-cluster")[1]
    assert "can be tried on:\n    simulation (usually simulation)\n" in helmscope("claims", "show", "rate")[1]
    assert "can be tried on" not in helmscope("claims", "show", "breathing")[1]
