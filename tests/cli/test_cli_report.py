"""``helmscope report``: trials, verdicts and one page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helmscope.claims.reading import read_catalogue
from helmscope.store.run_folder import RunFolder
from helmscope.types import MissingExtra

PLANTED = Path(__file__).parents[1] / "claims" / "planted"
TRIED = ["kuramoto", "radial"]


@pytest.fixture
def two_trials(monkeypatch):
    """Try only two claims: the others have their own tests."""
    from helmscope.claims.run_trials import plan_trials

    monkeypatch.setattr("helmscope.jobs.trials.plan", lambda spec, subjects: plan_trials(TRIED))


@pytest.mark.usefixtures("two_trials")
def test_a_full_report_uses_all_replicates(helmscope):
    code, _, err = helmscope("report", "--full", "--out", "page")
    assert code == 0
    assert err.startswith("2 trials: roughly ")


@pytest.mark.usefixtures("two_trials")
def test_one_page_with_every_claim(helmscope, tmp_path):
    code, out, err = helmscope("report", "--quick", "--out", "page")
    assert code == 0
    assert out == "2 true by construction\nreport: page/report.html\n"
    assert err.startswith("2 quick trials: roughly ")
    html = (tmp_path / "page" / "report.html").read_text()
    assert sorted(re.findall(r'data-claim="([^"]+)"', html)) == sorted(read_catalogue())
    assert html.count("<picture>") == 2
    assert html.count("not yet tried") >= len(read_catalogue()) - 2
    assert "helmscope claims test kuramoto --seed 0 --quick" in html
    verdicts = RunFolder.open(tmp_path / "page").read_verdicts()
    assert [verdict.claim for verdict in verdicts] == TRIED
    for verdict in verdicts:
        assert verdict.provenance.entry in html
        assert verdict.provenance.code[:16] in html
    for claim in TRIED:
        assert f'href="units/{claim}.nc"' in html
        assert (tmp_path / "page" / "units" / f"{claim}.nc").is_file()
    code, out, _ = helmscope("report", "--quick", "--json")
    report = json.loads(out)
    assert report["rulings"] == {"true by construction": 2}
    assert [verdict["claim"] for verdict in report["verdicts"]] == TRIED
    assert (tmp_path / report["report"]).read_text() == html


@pytest.mark.parametrize(
    ("words", "models"),
    [(("A", "tied"), ["A", "tied"]), (("--model", "A", "--model", "tied"), ["A", "tied"]), ((), [])],
)
def test_models_are_named_as_arguments_or_as_in_claims_test(monkeypatch, helmscope, words, models):
    specs = []
    monkeypatch.setattr("helmscope.cli.output.run_and_show", lambda spec, *args, **options: specs.append(spec))
    assert helmscope("report", *words)[0] == 0
    assert list(specs[0].models) == models


def test_models_named_both_ways_are_refused(helmscope):
    code, _, err = helmscope("report", "B", "--model", "A")
    assert code == 2
    assert "--model is A, but B is named without it: name all models one way" in err


@pytest.mark.usefixtures("no_picture")
def test_a_users_claims_have_a_page_too(helmscope, tmp_path):
    code, out, err = helmscope("report", "--from", str(PLANTED), "--out", "mine")
    assert (code, out.splitlines()[0]) == (0, "1 refuted, 1 supported")
    assert "running the code in" in err
    html = (tmp_path / "mine" / "report.html").read_text()
    assert sorted(re.findall(r'data-claim="([^"]+)"', html)) == ["planted-false", "planted-true"]


def test_missing_packages_are_reported_before_the_work(helmscope, tmp_path, monkeypatch):
    def missing(*_, **__):
        raise MissingExtra("jinja2", "report")

    monkeypatch.setattr("helmscope.report.page.page", missing)
    code, out, err = helmscope("report")
    assert (code, out) == (2, "")
    assert err == f"helmscope: {MissingExtra('jinja2', 'report')}\n"
    assert list(tmp_path.iterdir()) == []
