"""``helmscope claims``: the catalogue in words and as JSON."""

from __future__ import annotations

import json

import pytest

from helmscope.claims.reading import read_catalogue


def test_list(helmscope):
    code, out, err = helmscope("claims", "list")
    assert (code, err) == (0, "")
    heads = [line for line in out.splitlines() if not line.startswith(" ")]
    assert [head.split()[0] for head in heads] == list(read_catalogue())
    assert len(heads) == 56
    assert all("not yet tried" in head for head in heads)
    code, out, _ = helmscope("claims", "list", "--json")
    assert code == 0
    records = json.loads(out)["claims"]
    assert {record["id"]: record["hash"] for record in records} == {e.id: e.hash for e in read_catalogue().values()}


@pytest.mark.parametrize("claim", sorted(read_catalogue()))
def test_show(helmscope, claim):
    entry = read_catalogue()[claim]
    code, out, err = helmscope("claims", "show", claim)
    assert (code, err) == (0, "")
    assert out.startswith(f"{claim}, version {entry.version}, entry {entry.hash[:12]}")
    flat = " ".join(out.split())
    for text in (entry.statement, entry.printed, entry.corrected, entry.experiment, entry.statistic, entry.region.text):
        assert " ".join(text.split()) in flat
    code, out, _ = helmscope("claims", "show", claim, "--json")
    assert json.loads(out)["statement"] == entry.statement


def test_an_unknown_claim_offers_the_nearest(helmscope):
    code, out, err = helmscope("claims", "show", "rat")
    assert (code, out) == (2, "")
    assert "did you mean 'rate'?" in err
    assert err.count("\n") == 1
