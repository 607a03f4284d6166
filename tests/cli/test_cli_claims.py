"""``helmscope claims``: the catalogue as text and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

import helmscope as hs
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import experiments
from helmscope.claims.sources import sources
from helmscope.store.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
PLANTED = ROOT / "tests" / "claims" / "planted"


def test_list(helmscope):
    code, out, err = helmscope("claims", "list")
    assert (code, err) == (0, "")
    first, *heads = [line for line in out.splitlines() if not line.startswith(" ")]
    assert first == "Sources:"
    assert [head.split()[0] for head in heads] == list(read_catalogue())
    for head in heads:
        assert head.endswith("; can be tried)" if head.split()[0] in experiments() else "; no experiment yet)")
    assert sum("no experiment yet" in head for head in heads) == len(heads) - len(experiments())
    code, out, _ = helmscope("claims", "list", "--json")
    assert code == 0
    records = json.loads(out)["claims"]
    assert {record["id"]: record["hash"] for record in records} == {e.id: e.hash for e in read_catalogue().values()}
    conditions = {record["id"]: record["conditions"][0] for record in records}
    assert set(conditions["jko-step"]) == {"name", "statistic", "text", "low"}  # a bound that is not there is not null


def test_list_begins_with_the_sources(helmscope):
    """Authors, titles and links, in the text and in each claim's data; each title once, and claims name the key."""
    _, out, _ = helmscope("claims", "list")
    listed, whole = (" ".join(text.split()) for text in (out.partition("\nattention-")[0], out))
    for source in {entry.source for entry in read_catalogue().values()}:
        assert f"{source}: {sources()[source].authors}" in listed
        assert sources()[source].link in listed
        assert listed.count(sources()[source].title) == whole.count(sources()[source].title) == 1
    heads = [line for line in out.splitlines() if line.endswith(")") and not line.startswith(" ")]
    assert max(map(len, heads)) <= 100
    record = next(
        each for each in json.loads(helmscope("claims", "list", "--json")[1])["claims"] if each["id"] == "rate"
    )
    assert record["cited"] == msgspec.to_builtins(sources()["perspective"])


@pytest.mark.parametrize("claim", sorted(read_catalogue()))
def test_show(helmscope, claim):
    entry = read_catalogue()[claim]
    code, out, err = helmscope("claims", "show", claim)
    assert (code, err) == (0, "")
    assert out.startswith(f"{claim}, version {entry.version}, entry {entry.hash[:12]}")
    flat = " ".join(out.split())
    source = sources()[entry.source]
    shown = [entry.statement, entry.corrected, entry.experiment, source.authors, source.title, source.link, entry.place]
    shown += [text for case in entry.conditions for text in (case.statistic, case.text)]
    shown += [case.text for case in entry.controls]
    shown += [text for line in entry.history for text in (line.change, line.reason, line.before, line.look)]
    if entry.printed is not None:
        shown += [entry.printed.text, entry.printed.place, entry.printed.judgment, entry.printed.reason]
    for text in shown:
        assert " ".join(text.split()) in flat
    assert all(flat.count(f"Version {line.version}:") == 1 for line in entry.history)
    code, out, _ = helmscope("claims", "show", claim, "--json")
    assert json.loads(out)["statement"] == entry.statement


def test_an_unknown_claim_suggests_the_closest(helmscope):
    code, out, err = helmscope("claims", "show", "rat")
    assert (code, out) == (2, "")
    assert "did you mean 'rate'?" in err
    assert err.count("\n") == 1


def test_a_trial_as_text_and_json_with_the_same_bytes(helmscope, tmp_path):
    code, out, err = helmscope("claims", "test", "kuramoto", "radial", "--quick", "--out", "one")
    assert code == 0
    assert out.startswith("kuramoto: true by construction\n    True by construction (SA at beta = 0): ")
    assert "\nradial: true by construction\n" in out
    assert err.startswith("2 quick trials: roughly ")
    assert err.endswith("folder: one\n")
    assert [verdict.claim for verdict in RunFolder.open(tmp_path / "one").read_verdicts()] == ["kuramoto", "radial"]
    twice = [helmscope("claims", "test", "kuramoto", "--quick", "--json", "--seed", "3")[1] for _ in range(2)]
    assert twice[0] == twice[1]
    data = json.loads(twice[0])
    assert (data["seed"], data["quick"], len(data["verdicts"])) == (3, True, 1)
    verdict = data["verdicts"][0]
    entry = read_catalogue()["kuramoto"]
    assert (verdict["provenance"]["entry"], verdict["provenance"]["version"]) == (entry.hash, entry.version)
    assert [control["name"] for control in verdict["controls"]] == [case.name for case in entry.controls]
    assert all(control["ruling"] in control["expected"] for control in verdict["controls"])
    first = verdict["conditions"][0]
    assert set(first["interval"]) == {"estimate", "low", "high", "n"}
    unset = dict.fromkeys(("low", "high", "above", "below"))
    assert first["region"] == {**unset, "text": entry.conditions[0].text, **entry.conditions[0].region.bounds}


def test_users_claims_are_run_with_a_notice(helmscope):
    code, out, err = helmscope("claims", "test", "--from", str(PLANTED), "--json")
    assert code == 0
    assert [verdict["ruling"] for verdict in json.loads(out)["verdicts"]] == ["refuted", "supported"]
    assert err.startswith(f"running the code in {PLANTED}: planted.py\n")


def documented_claims(document: str) -> list[dict[str, str]]:
    """The files of each claim in a document, by name: an entry, and then its experiment."""
    text = (ROOT / "docs" / document).read_text()
    files = re.findall(r"`order/(\S+)`:\n\n```\w+\n(.*?)```", text, re.DOTALL)
    return [dict(files[k : k + 2]) for k in range(0, len(files), 2)]


def write_claim(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir()
    for name, block in files.items():
        (folder / name).write_text(block)


def test_a_claim_takes_ten_lines(helmscope, tmp_path):
    """The entry and the function exactly as documented: listed, shown, tried, on the page, and in Python."""
    brief = documented_claims("claims.md")[0]
    assert brief == documented_claims("tour.md")[0]
    assert sum(len(block.splitlines()) for block in brief.values()) <= 10
    write_claim(tmp_path / "order", brief)
    code, out, _ = helmscope("claims", "list", "--from", "order")
    assert (code, out.splitlines()[0]) == (0, "tokens-gather  (own work)")
    code, shown, _ = helmscope("claims", "show", "tokens-gather", "--from", "order")
    assert "condition tokens gather:\n    At least 0.8.\ncontrol the starts:\n    Expected: refuted.\n" in shown
    code, out, err = helmscope("claims", "test", "--from", "order")
    assert (code, out.splitlines()[0]) == (0, "tokens-gather: supported")
    assert "running the code in order: gather.py" in err
    code, out, _ = helmscope("report", "--from", "order", "--out", "page")
    assert (code, out.splitlines()[0]) == (0, "1 supported")
    html = (tmp_path / "page" / "report.html").read_text()
    assert "<dt>Condition</dt><dd>tokens gather: At least 0.8.</dd>" in html
    for text in (out, shown, html):
        assert "None" not in text
        assert "<dd></dd>" not in text
    snippet = re.search(r"In Python:\n\n```python\n(.*?)```", (ROOT / "docs" / "claims.md").read_text(), re.DOTALL)[1]
    names = {"hs": hs}
    exec(snippet, names)
    for line in snippet.splitlines()[1:3]:
        expression, comment = re.split(" +# ", line, maxsplit=1)
        assert comment == repr(eval(expression, names))
    (panel,) = names["trial"].plot().axes
    assert panel.get_xlabel() == "tokens gather"


def test_the_same_claim_in_full(helmscope, tmp_path):
    _, full = documented_claims("claims.md")
    assert full["tokens-gather.toml"] == (ROOT / "examples" / "claim" / "tokens-gather.toml").read_text()
    write_claim(tmp_path / "order", full)
    code, out, _ = helmscope("claims", "test", "--from", "order", "--quick")
    assert (code, out.splitlines()[0]) == (0, "tokens-gather: supported")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            '"the starts": start',
            '"starts": start',
            "experiment of 'tokens-gather' in gather.py returned the controls 'starts', but tokens-gather.toml names",
        ),
        (
            "return hs.claims.Finding(evidence=end",
            "return dict(evidence=end",
            "experiment of 'tokens-gather' in gather.py returned a dict, but it must return a Finding",
        ),
        (
            'experiment("tokens-gather")',
            'experiment("tokens-gathr")',
            "gather (gather.py, line 2) is the experiment of 'tokens-gathr', but there is no tokens-gathr.toml",
        ),
        (
            '@hs.claims.experiment("tokens-gather")',
            "",
            "tokens-gather.toml in order has no experiment: no function is decorated with @experiment('tokens-gather')",
        ),
    ],
)
def test_a_mistake_in_an_own_claim_is_one_sentence_with_its_file(tmp_path, monkeypatch, old, new, sentence):
    monkeypatch.chdir(tmp_path)
    brief = documented_claims("claims.md")[0]
    assert old in brief["gather.py"]
    brief["gather.py"] = brief["gather.py"].replace(old, new).replace("batch=128", "batch=8")
    write_claim(tmp_path / "order", brief)
    with pytest.raises(hs.HelmscopeError) as raised:
        hs.run_trial("tokens-gather", claims_folder="order")
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["kuramto"], "unknown claim 'kuramto': did you mean 'kuramoto'?"),
        (["bridge-is-minimal"], "claim 'bridge-is-minimal' has no experiment yet: `helmscope claims list` shows which"),
        (["kuramoto", "--seed", "-1"], "seed is -1, but it must be a whole number >= 0"),
        (["kuramoto", "--workers", "0"], "workers is 0, but it must be a whole number >= 1"),
        (["--from", "nowhere"], "folder is 'nowhere', but it must be a folder that holds one ID.toml per claim"),
        (["kuramoto", "--from", str(PLANTED)], "unknown claim 'kuramoto'"),
        (["kuramoto", "--resume"], "--resume is given, but the folder of the run is not: add --out FOLDER"),
    ],
)
def test_rejected_input_leaves_no_files(helmscope, tmp_path, words, sentence):
    code, out, err = helmscope("claims", "test", *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "running the code" not in err  # nothing is announced that is not done
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["claims", "test"], ["report"]])
def test_a_folder_without_claims_is_refused_before_its_code_is_announced(helmscope, tmp_path, words):
    (tmp_path / "empty").mkdir()
    for folder, sentence in (("nowhere", "folder is 'nowhere', but it must be"), ("empty", "but it holds no ID.toml")):
        code, out, err = helmscope(*words, "--from", folder)
        assert (code, out) == (2, "")
        assert sentence in err
        assert "running the code" not in err


def test_a_users_entries_are_listed_without_running_their_code(helmscope):
    code, out, err = helmscope("claims", "list", "--from", str(PLANTED))
    assert (code, err) == (0, "")
    heads = [line.split()[0] for line in out.splitlines() if line[0] != " "]
    assert heads == ["planted-false", "planted-true"]
    assert "planted-true  (planted, by simulation)\n" in out  # whether it can be tried is known only to its code
    code, out, _ = helmscope("claims", "show", "planted-true", "--from", str(PLANTED), "--json")
    shown = json.loads(out)
    assert shown["hash"] == read_catalogue(PLANTED)["planted-true"].hash
    assert shown["trial"] == f"helmscope claims test planted-true --from {PLANTED}"


def test_control_characters_of_an_entry_are_escaped(helmscope, tmp_path):
    (tmp_path / "mine").mkdir()
    text = (PLANTED / "planted-true.toml").read_text()
    for plain, hostile in (('"planted"', '"a\\u001b[2J\\u202e\\nb"'), ("The mean", "\\u009b31mThe mean")):
        text = text.replace(plain, hostile)
    (tmp_path / "mine" / "planted-true.toml").write_text(text)
    for words in (("list",), ("show", "planted-true")):
        code, out, _ = helmscope("claims", *words, "--from", "mine")
        assert code == 0
        assert r"\x9b31mThe mean is above 0" in out
        assert r"a\x1b[2J\u202e" in out
        assert all(line.isprintable() for line in out.splitlines())


@pytest.mark.parametrize("verb", [("claims", "test"), ("report",)])
@pytest.mark.usefixtures("no_picture")
def test_a_run_resumes_with_the_same_claims_in_a_consistent_folder(helmscope, tmp_path, monkeypatch, verb):
    assert helmscope(*verb, "--from", str(PLANTED), "--out", "run")[0] == 0
    monkeypatch.chdir(PLANTED)
    words = ("--out", str(tmp_path / "run"), "--resume")
    claims = ("planted-true", "planted-false") if verb[0] == "claims" else ()  # in another order, by another path
    assert helmscope(*verb, *claims, "--from", ".", *words)[0] == 0
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 99'))
    code, out, err = helmscope(*verb, "--from", ".", *words)
    assert (code, out) == (2, "")
    assert "disagree: seed is 99 in manifest.json, but 0 in units.json" in err
    (tmp_path / "run" / "units.json").unlink()
    code, out, err = helmscope(*verb, "--from", ".", "--seed", "99", *words)
    assert (code, out) == (2, "")
    assert "disagree: units holds the result 'planted-false.nc', but units.json is missing" in err


def test_one_bad_experiment_does_not_lose_the_others(helmscope, tmp_path):
    (tmp_path / "mine").mkdir()
    for path in PLANTED.glob("*.*"):
        (tmp_path / "mine" / path.name).write_text(path.read_text().replace("return trial(case, -0.6)", "1 / 0"))
    code, out, err = helmscope("claims", "test", "--from", "mine", "--json")
    assert (code, [verdict["claim"] for verdict in json.loads(out)["verdicts"]]) == (2, ["planted-true"])
    assert "experiment of 'planted-false' failed in planted.py, line 20: ZeroDivisionError: division by zero" in err
    code, out, err = helmscope("report", "--from", "mine", "--out", "page")
    assert (code, out.splitlines()[0]) == (2, "1 supported")
    assert "not yet tried" in (tmp_path / "page" / "report.html").read_text()


def test_a_folder_without_an_experiment_is_rejected(helmscope, tmp_path):
    (tmp_path / "mine").mkdir()
    text = (PLANTED / "planted-true.toml").read_text()
    (tmp_path / "mine" / "planted-true.toml").write_text(text)
    code, _, err = helmscope("claims", "test", "--from", "mine")
    assert code == 2
    assert "running the code in mine: no Python file" in err
    assert "planted-true.toml in mine has no experiment: no function is decorated with @experiment('planted" in err


def test_a_claim_without_an_experiment_is_named_and_the_others_are_tried(helmscope, tmp_path):
    (tmp_path / "mine").mkdir()
    for path in PLANTED.glob("*.*"):
        (tmp_path / "mine" / path.name).write_text(path.read_text())
    (tmp_path / "mine" / "idle.toml").write_text('statement = "Nothing happens."\nconditions = [{ low = 1 }]\n')
    code, out, err = helmscope("claims", "test", "--from", "mine", "--json")
    assert (code, len(json.loads(out)["verdicts"])) == (0, 2)
    assert "idle.toml has no experiment and is not tried\n" in err


def test_every_verb_has_a_summary_of_one_sentence(helmscope):
    _, out, _ = helmscope("claims", "--help")
    rows = [line.split(maxsplit=1) for line in out.partition("Commands:\n")[2].splitlines()]
    assert [verb for verb, _ in rows] == ["list", "show", "test"]
    for _, summary in rows:
        assert re.fullmatch(r"[^.:]+\.", summary)
