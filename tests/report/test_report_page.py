"""The report shows every claim and its whole verdict, escaped, in one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import msgspec
import pytest
import xarray as xr

import helmscope as hs
from helmscope.claims.entry import Entry, Ground
from helmscope.claims.reading import read_catalogue
from helmscope.claims.trial import Trial, try_claim
from helmscope.plots.style import svg
from helmscope.plots.trial import trial_figure
from helmscope.report.page import SOURCES, page
from helmscope.types import Control, Exhibit, HelmscopeError, Interval, Region, Ruling, Verdict, region_text
from support.children import run_python

CATALOGUE = read_catalogue()
KURAMOTO = try_claim("kuramoto", quick=True)
VOID = {"meta", "img", "input", "br", "link"}
NASTY = """<script>alert("1")</script> & 'quoted' "twice" </article><img src=x onerror=y> {{ 7*7 }}"""


@dataclass
class Element:
    tag: str
    attrs: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        """All descendants with this tag, in document order."""
        below = [child for child in self.children if isinstance(child, Element)]
        return [hit for child in below for hit in ([child] if child.tag == tag else []) + child.all(tag)]

    @property
    def text(self) -> str:
        parts = [child if isinstance(child, str) else child.text for child in self.children]
        return re.sub(r"\s+", " ", " ".join(parts)).strip()


class Tree(HTMLParser):
    """Parse the page into elements; fails on an unmatched closing tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open = [Element("", {})]
        self.feed(text)
        self.close()
        assert len(self.open) == 1, [element.tag for element in self.open]

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)


def tree(text: str) -> Element:
    return Tree(text).open[0]


def cards(text: str) -> dict[str, Element]:
    articles = tree(text).all("article")
    names = [article.attrs["data-claim"] for article in articles]
    assert len(names) == len(set(names)) == text.count("data-claim=")
    return dict(zip(names, articles, strict=True))


def made_up(claim: str, ruling: Ruling, **more) -> Trial:
    return Trial(
        replace(KURAMOTO.verdict, claim=claim, ruling=ruling, entry_hash=CATALOGUE[claim].hash, **more), KURAMOTO.data
    )


@pytest.fixture(scope="module")
def text() -> str:
    seen, region = Interval(1.0, 0.9, 1.1, n=32), Region(text="at least 0", low=0.0)
    failed = Control("the null & co", Ruling.SUPPORTED, Ruling.REFUTED, seen, region)
    trials = [
        KURAMOTO,
        made_up("rate", Ruling.INCONCLUSIVE, null=failed, printed=replace(failed, what="e^-beta"), sentence="Failed."),
        made_up("no-mean-drift", Ruling.IMPOSSIBLE, interval=None, null=None, also=()),
    ]
    return page(CATALOGUE, trials, seed=7, quick=True)


def test_every_claim_appears_once_with_tried_claims_first_sorted_by_source_and_id(text):
    found = cards(text)
    assert set(found) == set(CATALOGUE)
    names = list(found)
    assert names[:3] == ["no-mean-drift", "rate", "kuramoto"]
    assert names[3:] == sorted(names[3:], key=lambda claim: (CATALOGUE[claim].source, claim))


def test_a_tried_claim_shows_all_of_its_verdict(text):
    entry, verdict, card = CATALOGUE["kuramoto"], KURAMOTO.verdict, cards(text)["kuramoto"]
    assert card.all("h3")[0].text == "kuramoto"
    for part in (
        *("true by construction", entry.statement, entry.corrected, entry.experiment, entry.statistic, entry.null),
        *(entry.region.text, "at most 1e-12", verdict.sentence, verdict.where, entry.hash, "version 1", hs.__version__),
        *("002 Mean-field notes", "helmscope claims test kuramoto --seed 7 --quick"),
    ):
        assert part in card.text, part
    header, *rows = [[cell.text for cell in row.children if isinstance(cell, Element)] for row in card.all("tr")]
    assert header == ["Part", "What", "Value", "Interval", "n", "Region", "Ruling", "As expected?"]
    assert rows[0][:2] == ["the claim", "its statistic"]
    assert rows[0][2] == f"{verdict.interval.estimate:.3g}"
    assert rows[0][3] == f"[{verdict.interval.low:.3g}, {verdict.interval.high:.3g}]"
    assert rows[0][4:] == ["2,048", "at most 1e-12", "\u2261 true by construction", ""]
    assert [row[:2] for row in rows[1:]] == [
        ["null", verdict.null.what],
        *(["also", each.what] for each in verdict.also),
    ]
    for row, control in zip(rows[1:], (verdict.null, *verdict.also), strict=True):
        own = "" if control.region == verdict.region else f" {control.region.text}"
        assert row[4:6] == [f"{control.interval.n:,}", region_text(control.region) + own]
        assert row[6].endswith(control.ruling.value)
        assert row[7] == "yes"


def test_the_figure_is_embedded_and_has_an_alternative_text(text):
    (image,) = cards(text)["kuramoto"].all("img")
    kind, _, data = image.attrs["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == svg(trial_figure(KURAMOTO.verdict, KURAMOTO.data))
    alt = image.attrs["alt"]
    assert alt.startswith("Intervals on the region, at most 1e-12: the claim ")
    assert f"null ({KURAMOTO.verdict.null.what}) " in alt
    assert alt.endswith(" Below: largest |difference of angular velocity| over beta and against.")


def test_a_failed_control_an_impossible_premise_and_an_untried_claim_are_shown(text):
    found = cards(text)
    assert "no: refuted was expected" in found["rate"].text
    assert "as printed e^-beta" in found["rate"].text
    assert CATALOGUE["rate"].printed in found["rate"].text
    assert "premise impossible here" in found["no-mean-drift"].text
    assert "no interval" in found["no-mean-drift"].text
    untried = found["mixture"]
    assert "not yet tried" in untried.text
    assert CATALOGUE["mixture"].region.text in untried.text
    assert untried.all("img") == []
    assert "another version of the entry" not in text
    other = page(CATALOGUE, [Trial(replace(KURAMOTO.verdict, entry_hash="0ld"), KURAMOTO.data)])
    assert "another version of the entry, 0ld" in cards(other)["kuramoto"].text


def test_the_summary_counts_and_links(text):
    root = tree(text)
    labels = [label.text for label in root.all("label")]
    assert labels == [
        *("all: 56", "\u2713 supported 0", "\u2717 refuted 0", "? inconclusive 1", "\u2261 true by construction 1"),
        *("\u2205 premise impossible here 1", "\u2013 not yet tried 53"),
    ]
    rows = root.all("table")[0].all("tr")[1:]
    assert [row.all("a")[0].attrs["href"] for row in rows] == ["#claim-no-mean-drift", "#claim-rate", "#claim-kuramoto"]
    ids = {element.attrs.get("id") for tag in ("article", "h2") for element in root.all(tag)}
    assert {link.attrs["href"][1:] for link in root.all("a")} <= ids
    intro = root.all("header")[0].text
    assert "3 of 56 claims tried with seed 7, in quick mode" in intro
    assert "helmscope report --seed 7 --quick" in intro
    assert hs.__version__ in intro
    assert len(root.all("ol")[0].all("li")) == 5
    assert SOURCES["000"] in text


def test_it_loads_nothing_and_runs_nothing(text):
    root = tree(text)
    policy = next(meta for meta in root.all("meta") if meta.attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.attrs["content"] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    for tag in ("script", "link", "iframe", "object", "embed", "base", "form", "video", "audio"):
        assert root.all(tag) == []
    everything = [element for tag in set(re.findall(r"<([a-z0-9]+)", text)) for element in root.all(tag)]
    for element in everything:
        for name, value in element.attrs.items():
            assert not name.startswith("on")
            if name in ("src", "href", "srcset", "action", "data", "poster", "style"):
                assert value.startswith(("data:image/svg+xml;base64,", "#")), (element.tag, name)
    (style,) = root.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    assert "http://" not in text
    assert "https://" not in text


def test_a_hostile_entry_of_a_users_catalogue_is_escaped():
    fields = dict.fromkeys(("statement", "source", "printed", "corrected", "experiment", "statistic", "null"), NASTY)
    entry = Entry(id=NASTY, decided=(Ground.MODEL,), region=Region(text=NASTY), version=1, **fields)
    seen, region = Interval(1.0, 0.5, 1.5, n=3), Region(text=NASTY)
    shown = Control(NASTY, Ruling.REFUTED, Ruling.REFUTED, seen, region)
    verdict = Verdict(NASTY, Ruling.REFUTED, seen, region, NASTY, NASTY, NASTY, null=shown, also=(shown,))
    verdict = replace(verdict, exhibits=(Exhibit(NASTY, NASTY),))
    data = xr.Dataset({"a": 1.0, "a_stderr": 0.1}, attrs={"n": 3})
    data.a.attrs["long_name"] = NASTY
    text = page({NASTY: entry}, [Trial(verdict, data)], folder=NASTY, title=NASTY)
    root = tree(text)
    assert root.all("script") == []
    assert "{{ 7*7 }}" in root.all("title")[0].text
    assert len(root.all("img")) == len(root.all("article")) == 1
    card = cards(text)[NASTY]
    shown_text = re.sub(r"\s+", " ", NASTY)
    assert card.text.count(shown_text) >= 16
    assert card.all("pre")[0].text == shown_text
    assert NASTY in card.all("img")[0].attrs["alt"]
    untried = page({NASTY: entry}, [], title=NASTY)
    assert tree(untried).all("script") == tree(untried).all("img") == []


def test_a_users_catalogue_has_its_own_sources_and_commands():
    entry = msgspec.structs.replace(CATALOGUE["rate"], id="my-rate", source="my notes", printed="", corrected="")
    trial = Trial(replace(KURAMOTO.verdict, claim="my-rate"), KURAMOTO.data)
    card = cards(page({"my-rate": entry}, [trial], seed=3, folder="my claims"))["my-rate"]
    assert "helmscope claims test my-rate --seed 3 --from 'my claims'" in card.text
    assert "Source my notes" in card.text
    assert "As printed" not in card.text


def test_the_page_is_well_formed_and_accessible(text):
    root = tree(text)
    assert text.startswith("<!DOCTYPE html>")
    assert root.all("html")[0].attrs["lang"] == "en"
    assert len(root.all("h1")) == 1
    for table in root.all("table"):
        assert all(cell.attrs.get("scope") in ("col", "row") for cell in table.all("th"))
    for box in [
        element for element in [*root.all("div"), *root.all("figure")] if element.attrs.get("class") == "scroll"
    ]:
        assert box.attrs["tabindex"] == "0"
        assert box.attrs["aria-label"]
    ids = [element.attrs["id"] for tag in ("article", "h2", "input") for element in root.all(tag)]
    assert len(ids) == len(set(ids))


def luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_light_and_dark_colors_have_wcag_aa_contrast(text):
    palettes = [dict(re.findall(r"--([\w-]+): (#\w{6})", root)) for root in re.findall(r":root \{(.*?)\}", text, re.S)]
    assert len(palettes) == 2
    for palette in palettes:
        pairs = [(ink, back) for ink in ("ink", "soft", "link") for back in ("page", "card")]
        pairs += [(name.removesuffix("-back"), name) for name in palette if name.endswith("-back")]
        assert len(pairs) == 12
        for ink, back in pairs:
            dark, light = sorted([luminance(palette[ink]), luminance(palette[back])])
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, back)


def test_equal_input_gives_equal_bytes_in_another_process_too():
    assert page(CATALOGUE, [], seed=0) != page(CATALOGUE, [], seed=1)
    code = (
        "import hashlib, helmscope\n"
        "from helmscope.claims.reading import read_catalogue\n"
        "from helmscope.claims.trial import try_claim\n"
        "from helmscope.report.page import page\n"
        "text = page(read_catalogue(), [try_claim('kuramoto', quick=True)])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digest = run_python(code, check=True).stdout.strip()
    assert digest == hashlib.sha256(page(CATALOGUE, [KURAMOTO]).encode()).hexdigest()


def test_twenty_pictures_stay_below_four_megabytes(text):
    """The text contains three figures; with seventeen more of the largest size it would be 2.5 MB."""
    pictures = [len(card.all("img")[0].attrs["src"]) for card in cards(text).values() if card.all("img")]
    assert len(pictures) == 3
    assert len(text.encode()) + 17 * max(pictures) < 4e6


def test_bad_trials_are_refused_with_one_sentence(monkeypatch):
    unknown = Trial(replace(KURAMOTO.verdict, claim="kuramoti"), KURAMOTO.data)
    with pytest.raises(HelmscopeError, match="did you mean 'kuramoto'"):
        page(CATALOGUE, [unknown])
    with pytest.raises(HelmscopeError, match=r"^trials holds claim 'kuramoto' twice, but a page shows one trial"):
        page(CATALOGUE, [KURAMOTO, KURAMOTO])
    with pytest.raises(HelmscopeError, match="seed"):
        page(CATALOGUE, [], seed=-1)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        HelmscopeError, match=r"^jinja2 is not installed, and this needs it: pip install 'helmscope\[rep"
    ):
        page(CATALOGUE, [])
