"""The report shows every claim and its whole verdict, escaped, in one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import urllib.parse
from dataclasses import replace
from xml.etree import ElementTree

import msgspec
import pytest
import xarray as xr

import helmscope as hs
from helmscope.claims.entry import Change, Condition, ControlCase, Entry, PrintedForm, SubjectKind
from helmscope.claims.reading import read_catalogue
from helmscope.claims.sources import sources
from helmscope.claims.trial import Trial, run_trial
from helmscope.plots.trial import NARROW, trial_figure
from helmscope.plots.web import SVG, XLINK, web_svg
from helmscope.report.board import BADGES, expected_false
from helmscope.report.page import page
from helmscope.types import (
    Attachment,
    Control,
    HelmscopeError,
    Interval,
    JudgedCondition,
    Judgment,
    PrintedStatement,
    Provenance,
    Region,
    Ruling,
    Verdict,
    region_text,
)
from support.children import run_python
from support.html_tree import Element, tree

CATALOGUE = read_catalogue()
KURAMOTO = run_trial("kuramoto", quick=True)
REGION = Region(text="at least 0", low=0.0)
MEASURED = Interval(1.0, 0.9, 1.1, n=32)
NASTY = """<script>alert("1")</script> & 'quoted' "twice" </article><img src=x onerror=y> {{ 7*7 }}"""


def cards(text: str) -> dict[str, Element]:
    articles = tree(text).all("article")
    names = [article.attrs["data-claim"] for article in articles]
    assert len(names) == len(set(names)) == text.count("data-claim=")
    return dict(zip(names, articles, strict=True))


def made_up(claim: str, ruling: Ruling, subject: str = "simulation", **more) -> Trial:
    conditions = (
        () if ruling is Ruling.IMPOSSIBLE else (JudgedCondition("slope", REGION, MEASURED, ruling, "from 32 seeds"),)
    )
    verdict = Verdict(
        **{"claim": claim, "ruling": ruling, "conditions": conditions, "subject": subject, **more},
        provenance=Provenance(entry=CATALOGUE[claim].hash, version=2, code="c0de", weights="3e16", texts="7e87"),
    )
    return Trial(verdict, KURAMOTO.data)


FAILED = Control("the null & co", REGION, MEASURED, Ruling.SUPPORTED, expected=(Ruling.REFUTED,))
ON_PAPER = PrintedStatement("lambda = O(e^-beta)", "slide 9", Judgment.NOT_SHARP, "the rate is 1")


@pytest.fixture(scope="module")
def text() -> str:
    described = JudgedCondition("a spread", Region(text="described"), MEASURED, Ruling.DESCRIBED)
    trials = [
        KURAMOTO,
        made_up("rate", Ruling.INCONCLUSIVE, controls=(FAILED,), printed=ON_PAPER, sentence="Failed."),
        made_up("no-mean-drift", Ruling.IMPOSSIBLE, "A", sentence="A has no such kernel."),
        made_up("tokens-cluster", Ruling.SUPPORTED, "A", described=(described,)),
        made_up("tokens-cluster", Ruling.REFUTED, "B"),
    ]
    return page(
        CATALOGUE, trials, seed=7, quick=True, date="2026-01-31", files={("rate", "simulation"): "units/rate.nc"}
    )


def table_rows(card: Element, table: int = 0) -> list[list[str]]:
    rows = card.all("table")[table].all("tr")
    return [[cell.text for cell in row.children if isinstance(cell, Element)] for row in rows]


def test_every_claim_appears_once_sorted_by_news_with_identities_last(text):
    names = list(cards(text))
    assert set(names) == set(CATALOGUE)
    assert names[:4] == ["tokens-cluster", "no-mean-drift", "rate", "kuramoto"]
    assert names[4:] == sorted(names[4:], key=lambda claim: (CATALOGUE[claim].source, claim))


def test_a_tried_claim_shows_all_of_its_verdict(text):
    entry, verdict, card = CATALOGUE["kuramoto"], KURAMOTO.verdict, cards(text)["kuramoto"]
    assert card.all("h3")[0].text == "kuramoto"
    conditions = [part for condition in entry.conditions for part in (condition.statistic, condition.text)]
    for part in (
        *("true by construction", entry.statement, entry.corrected, entry.experiment, entry.null, *conditions),
        *(verdict.sentence, verdict.setting, entry.hash, f"version {entry.version}", hs.__version__),
        *("Mean-field notes", "helmscope claims test kuramoto --seed 7 --quick"),
        *(f"code {verdict.provenance.code[:16]}", *(line.change for line in entry.history if len(entry.history) > 1)),
    ):
        assert re.sub(r"\s+", " ", part) in card.text, part
    header, *rows = table_rows(card)
    assert header == ["Part", "What", "Value", "Interval", "n", "Region", "Ruling", "As expected?"]
    judged = [*verdict.conditions, *verdict.controls, *verdict.described]
    roles = ["condition"] * len(verdict.conditions) + ["control"] * len(verdict.controls)
    assert [row[0] for row in rows[: len(roles)]] == roles
    assert [row[1] for row in rows] == [case.name for case in judged]
    for row, case in zip(rows, judged, strict=True):
        if case.interval is not None:
            assert row[4] == f"{case.interval.n:,}"
        region = f"{region_text(case.region)} {case.region.comment}".rstrip()
        assert row[5] == (region if case.region.bounded else "")
        assert row[6].endswith(case.ruling.value)
        assert row[7] == ("yes" if isinstance(case, Control) else "")


def test_a_control_that_comes_out_as_expected_does_not_look_like_a_finding(text):
    """A control that must be refuted has no badge of a refutation, and a quantity without region no empty label."""
    seen = set()
    for card in cards(text).values():
        for table in card.all("table"):
            for row in table.all("tr")[1:]:
                (role,), (region, ruling) = row.all("th"), row.all("td")[4:6]
                assert bool(ruling.all("span")) == (role.text != "control")
                assert bool(region.all("span")) == bool(region.text)  # the label of an empty cell is hidden on a phone
                seen.add((role.text, ruling.text))
    assert ("control", "refuted") in seen
    assert ("described", "\u2022 described") in seen


def embedded_svg(address: str) -> str:
    """The canonical XML of an SVG in an attribute, which must not contain what ends it or an address in srcset."""
    kind, _, data = address.partition(",")
    assert kind == "data:image/svg+xml"
    assert not set(data) & set('"& #\n')
    return ElementTree.canonicalize(urllib.parse.unquote(data))


def test_the_figure_is_embedded_in_two_widths_and_has_an_alternative_text(text):
    (picture,) = cards(text)["kuramoto"].all("picture")
    (narrow,), (image,) = picture.all("source"), picture.all("img")
    wide_figure, narrow_figure = (trial_figure(KURAMOTO.verdict, KURAMOTO.data, width=width) for width in (8.0, NARROW))
    assert embedded_svg(image.attrs["src"]) == ElementTree.canonicalize(web_svg(wide_figure))
    assert embedded_svg(narrow.attrs["srcset"]) == ElementTree.canonicalize(web_svg(narrow_figure))
    assert narrow.attrs["media"] == "(max-width: 40rem)"
    alt = image.attrs["alt"]
    first = KURAMOTO.verdict.conditions[0]
    assert alt.startswith(f"Intervals on the region, {region_text(first.region)}: {first.name} ")
    assert " Below: " in alt


def test_there_is_one_verdict_for_each_subject_of_a_claim(text):
    card = cards(text)["tokens-cluster"]
    assert [heading.text for heading in card.all("h4")] == ["A \u2713 supported", "B \u2717 refuted"]
    assert "Supported on A 1 [0.9, 1.1] (slope); refuted on B 1 [0.9, 1.1] (slope)." in card.text
    assert card.attrs["data-rulings"] == "supported refuted"
    assert table_rows(card)[-1][:2] == ["described", "a spread"]
    assert "helmscope claims test tokens-cluster --seed 7 --quick --model B" in card.text
    assert "code c0de, weights 3e16, texts 7e87" in card.text


def test_a_failed_control_an_impossible_premise_and_an_untried_claim_are_shown(text):
    found = cards(text)
    failed = next(cell for cell in found["rate"].all("td") if cell.text == "no: refuted was expected")
    assert failed.attrs["class"] == "warning"
    assert "premise impossible here" in found["no-mean-drift"].text
    assert "A has no such kernel." in found["no-mean-drift"].text
    assert found["no-mean-drift"].all("img") == found["no-mean-drift"].all("table") == []
    untried = found["mixture"]
    assert "not yet tried" in untried.text
    assert CATALOGUE["mixture"].conditions[0].text in untried.text
    assert untried.all("img") == []
    assert "another version of the entry" not in text
    old = replace(KURAMOTO.verdict, provenance=Provenance(entry="0ld"))
    other = page(CATALOGUE, [Trial(old, KURAMOTO.data)])
    assert "another version of the entry, 0ld" in cards(other)["kuramoto"].text.replace(" :", ":")


def test_what_a_source_prints_is_judged_apart(text):
    entry, card = CATALOGUE["rate"], cards(text)["rate"]
    assert f"As printed {entry.printed.text} ({entry.printed.place}): true, not sharp" in card.text
    assert entry.printed.reason in card.text
    board = {row[0]: row for row in table_rows(tree(text))}
    assert board["rate"][-1] == "true, not sharp"
    measured = replace(ON_PAPER, measured=Judgment.FALSE, interval=MEASURED, region=REGION)
    other = page(CATALOGUE, [made_up("rate", Ruling.SUPPORTED, printed=measured)])
    assert {row[0]: row for row in table_rows(tree(other))}["rate"][-1] == "false"


def test_the_board_has_a_column_for_each_subject_with_ruling_and_number(text):
    header, *rows = table_rows(tree(text))
    assert header == ["Claim", "Statement", "simulation", "A", "B", "As printed"]
    assert [row[0] for row in rows] == ["tokens-cluster", "no-mean-drift", "rate", "kuramoto"]
    assert rows[0][1] == CATALOGUE["tokens-cluster"].statement
    assert rows[0][2:5] == ["", "\u2713 supported 1 [0.9, 1.1] slope", "\u2717 refuted 1 [0.9, 1.1] slope"]


def test_the_number_on_the_board_is_that_of_the_deciding_condition():
    first = JudgedCondition("slope", REGION, MEASURED, Ruling.SUPPORTED)
    second = JudgedCondition("offset", REGION, Interval(-2.0, -2.1, -1.9, n=32), Ruling.REFUTED)
    trial = made_up("rate", Ruling.REFUTED, conditions=(first, second))
    (_, row) = table_rows(tree(page(CATALOGUE, [trial])))
    assert row[2] == "\u2717 refuted -2 [-2.1, -1.9] offset"


def test_a_number_carries_its_statistic():
    """Its name beside it, which a phone shows too, and what it is in the words of the entry as a tooltip."""
    (condition,) = CATALOGUE["tokens-cluster"].conditions
    growth = JudgedCondition(condition.name, REGION, MEASURED, Ruling.REFUTED)
    trials = [made_up("tokens-cluster", Ruling.REFUTED, model, conditions=(growth,)) for model in "AB"]
    root = tree(page(CATALOGUE, trials))
    smalls = list(root.all("table")[0].all("small"))
    assert [small.attrs["title"] for small in smalls] == [condition.statistic] * 2
    assert all(small.text.endswith(condition.name) for small in smalls)
    (finding,) = [part for part in root.all("p") if part.attrs.get("class") == "finding"]
    assert finding.text == "Refuted on A 1 [0.9, 1.1], B 1 [0.9, 1.1] (growth of the share)."


def test_one_sentence_per_claim_is_visible_first(text):
    """Verdicts with tables and pictures open on a click; before that a card has its statement and one finding."""
    card = cards(text)["tokens-cluster"]
    shown = [part.attrs.get("class") or part.tag for part in card.children if isinstance(part, Element)]
    assert shown == ["header", "statement", "finding", "case", "case", "details"]
    assert "open" not in card.all("details")[0].attrs


def test_on_a_phone_every_cell_is_below_the_other_with_the_name_of_its_column(text):
    for table in tree(text).all("table"):
        header, *rows = table.all("tr")
        names = [cell.text for cell in header.all("th")]
        for row in rows:
            first, what, *others = [cell for cell in row.children if isinstance(cell, Element)]
            assert (first.tag, what.attrs["class"]) == ("th", "what")
            assert [cell.attrs["data-label"] for cell in others] == names[2:]
            assert {cell.attrs["role"] for cell in (what, *others)} == {"cell"}  # kept where CSS makes it a block
    (style,) = tree(text).all("style")
    assert "td[data-label]::before { content: attr(data-label)" in style.text


def test_the_page_begins_with_the_findings_and_says_how_many_may_be_false(text):
    root = tree(text)
    assert [heading.text for heading in root.all("h2")][:2] == ["What was found", "How to read a verdict"]
    rests = "3 verdicts rest on a 95 % interval"
    assert f"{rests}: if every truth were exactly on its threshold, about 0.2 of them would be false" in root.text
    verdicts = [Verdict(claim="rate", ruling=ruling) for ruling in Ruling for _ in range(20)]
    assert "60 verdicts" in expected_false(verdicts)  # those that rest on an interval: not identities, not descriptions
    assert "about 3.0 of them" in expected_false(verdicts)


def test_the_summary_counts_and_links(text):
    root = tree(text)
    labels = [label.text for label in root.all("label")]
    assert labels == [
        *("Search the claims", "all", "\u2713 supported 1", "\u2717 refuted 1", "? inconclusive 1"),
        *("\u2022 described 0", "\u2205 premise impossible here 1", "\u2261 true by construction 1"),
    ]
    ids = {element.attrs.get("id") for tag in ("article", "h2") for element in root.all(tag)}
    links = [link.attrs["href"] for link in root.all("a")]
    assert {link[1:] for link in links if link.startswith("#")} <= ids
    assert "units/rate.nc" in links
    intro = root.all("header")[0].text
    assert f"4 of {len(CATALOGUE)} claims tried with seed 7, in quick mode" in intro
    assert "2026-01-31" in intro
    assert "helmscope report --seed 7 --quick" in intro
    assert hs.__version__ in intro


def test_sources_have_authors_titles_and_links(text):
    card, source = cards(text)["rate"], sources()["perspective"]
    assert source.citation in card.text
    assert source.authors in source.citation
    assert source.title in source.citation
    assert source.link in [link.attrs["href"] for link in card.all("a")]
    assert CATALOGUE["rate"].place in card.text


def test_the_legend_explains_every_badge_and_rulings_do_not_look_like_alarms(text):
    root = tree(text)
    legend = next(part for part in root.all("dl") if part.attrs.get("class") == "legend")
    assert [part.text for part in legend.all("dt")] == [
        *(f"{badge.sign} {badge.text}" for badge in BADGES.values()),
        "\u2013 not yet tried",
    ]
    assert all(part.text for part in legend.all("dd"))
    for palette in re.findall(r":root \{(.*?)\}", text, re.S):
        colors = dict(re.findall(r"--([\w-]+): (#\w{6})", palette))
        assert is_red(colors["warning"])
        for badge in BADGES.values():
            assert not is_red(colors[badge.key]), badge.key
            assert not is_red(colors[f"{badge.key}-back"]), badge.key


def is_red(color: str) -> bool:
    """Whether red exceeds both other channels by far, and these hardly differ."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return red - max(green, blue) > 15 and abs(green - blue) < 20


def test_the_search_box_filters_board_and_cards(text):
    root = tree(text)
    (box,) = [element for element in root.all("input") if element.attrs["type"] == "search"]
    (script,) = root.all("script")
    assert f'getElementById("{box.attrs["id"]}")' in script.text
    searched = [element for tag in ("tr", "article") for element in root.all(tag) if "data-search" in element.attrs]
    assert len(searched) == len(CATALOGUE) + 4
    words = {element.attrs["data-search"].split()[0]: element.attrs["data-search"] for element in searched}
    assert set(words) == set(CATALOGUE)
    assert words["tokens-cluster"].endswith(" A B supported refuted")
    assert words["rate"].endswith(" simulation inconclusive printed true, not sharp")
    (output,) = root.all("output")
    assert f'getElementById("{output.attrs["id"]}")' in script.text
    assert output.attrs["for"] == box.attrs["id"]
    assert "[hidden] { display: none !important; }" in text


def test_figures_fit_their_screen_and_are_light_on_dark_in_the_dark(text):
    (style,) = tree(text).all("style")
    rule = re.search(r"figure img \{(.*?)\}", style.text).group(1)
    assert "width: 100%" in rule
    assert "min-width" not in rule
    assert "background" not in rule  # that of the card shows through, light or dark
    assert re.search(r"prefers-color-scheme: dark\) \{ figure img \{ filter: invert", style.text)


def test_it_loads_nothing_and_its_only_script_is_the_search(text):
    root = tree(text)
    policy = next(meta for meta in root.all("meta") if meta.attrs.get("http-equiv") == "Content-Security-Policy")
    code = re.search(r"<script>(.*?)</script>", text, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert policy.attrs["content"] == (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    assert [script.attrs for script in root.all("script")] == [{}]
    for tag in ("link", "iframe", "object", "embed", "base", "form", "video", "audio"):
        assert root.all(tag) == []
    everything = [element for tag in set(re.findall(r"<([a-z0-9]+)", text)) for element in root.all(tag)]
    for element in everything:
        for name, value in element.attrs.items():
            assert not name.startswith("on")
            if name in ("src", "srcset", "action", "data", "poster", "style"):
                assert value.startswith("data:image/svg+xml,"), (element.tag, name)
            if name == "href":  # followed only if the reader clicks
                allowed = ("#", "units/", *(source.link for source in sources().values() if source.link))
                assert value.startswith(allowed), value
    (style,) = root.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    assert set(re.findall(r"http://[^'\" ]*", text)) == {SVG, XLINK}  # names of formats, which are not loaded


def hostile_entry() -> Entry:
    fields = dict.fromkeys(("statement", "source", "place", "corrected", "experiment", "null"), NASTY)
    return Entry(
        id=NASTY,
        decided=(SubjectKind.MODEL,),
        version=1,
        conditions=(Condition(name=NASTY, statistic=NASTY, text=NASTY),),
        controls=(ControlCase(name=NASTY, text=NASTY),),
        printed=PrintedForm(text=NASTY, place=NASTY, judgment="false", reason=NASTY),
        history=tuple(Change(version=1, change=NASTY, reason=NASTY, before=NASTY) for _ in range(2)),
        **fields,
    )


def test_a_hostile_entry_of_a_users_catalogue_is_escaped():
    entry, region = hostile_entry(), Region(text=NASTY, low=0.0)
    seen = Interval(1.0, 0.5, 1.5, n=3)
    verdict = Verdict(
        claim=NASTY,
        ruling=Ruling.REFUTED,
        conditions=(JudgedCondition(NASTY, region, seen, Ruling.REFUTED, NASTY),),
        controls=(Control(NASTY, region, seen, Ruling.REFUTED, NASTY),),
        described=(JudgedCondition(NASTY, region, seen, Ruling.DESCRIBED, NASTY),),
        printed=PrintedStatement(NASTY, NASTY, Judgment.FALSE, NASTY),
        sentence=NASTY,
        setting=NASTY,
        subject=NASTY,
        attachments=(Attachment(NASTY, NASTY),),
        provenance=Provenance(*(NASTY, 1, NASTY, NASTY, NASTY)),
    )
    data = xr.Dataset({"a": 1.0, "a_stderr": 0.1}, attrs={"n": 3})
    data.a.attrs["long_name"] = NASTY
    text = page({NASTY: entry}, [Trial(verdict, data)], claims_folder=NASTY, title=NASTY, options=[NASTY], date=NASTY)
    root = tree(text)
    assert len(root.all("script")) == 1
    assert "{{ 7*7 }}" in root.all("title")[0].text
    assert len(root.all("img")) == len(root.all("article")) == 1
    card = cards(text)[NASTY]
    shown_text = re.sub(r"\s+", " ", NASTY)
    assert card.text.count(shown_text) >= 16
    assert card.all("pre")[0].text == shown_text
    assert NASTY in card.all("img")[0].attrs["alt"]
    drawn = ElementTree.fromstring(embedded_svg(card.all("img")[0].attrs["src"]))
    assert '"twice"' in " ".join(drawn.itertext())
    assert not [element for element in drawn.iter() if element.tag.endswith("script")]
    untried = page({NASTY: entry}, [], title=NASTY)
    assert len(tree(untried).all("script")) == 1
    assert tree(untried).all("img") == []


def test_a_users_catalogue_has_its_own_sources_and_commands():
    entry = msgspec.structs.replace(CATALOGUE["rate"], id="my-rate", source="my notes", printed=None, corrected="")
    trial = Trial(replace(KURAMOTO.verdict, claim="my-rate", subject="my model"), KURAMOTO.data)
    words = {("my-rate", "my model"): ["--model", "my model/", "--texts", "a.txt"]}
    text = page({"my-rate": entry}, [trial], seed=3, claims_folder="my claims", options=["my model/"], selections=words)
    card = cards(text)["my-rate"]
    command = "helmscope claims test my-rate --seed 3 --from 'my claims' --model 'my model/' --texts a.txt"
    assert command in card.text
    assert "helmscope report --seed 3 --from 'my claims' 'my model/'" in tree(text).all("header")[0].text
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
        assert len(pairs) == 14
        for ink, back in pairs:
            dark, light = sorted([luminance(palette[ink]), luminance(palette[back])])
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, back)


def test_equal_input_gives_equal_bytes_in_another_process_too():
    assert page(CATALOGUE, [], seed=0) != page(CATALOGUE, [], seed=1)
    code = (
        "import hashlib, helmscope\n"
        "from helmscope.claims.reading import read_catalogue\n"
        "from helmscope.claims.trial import run_trial\n"
        "from helmscope.report.page import page\n"
        "text = page(read_catalogue(), [run_trial('kuramoto', quick=True)])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digest = run_python(code, check=True).stdout.strip()
    assert digest == hashlib.sha256(page(CATALOGUE, [KURAMOTO]).encode()).hexdigest()


def test_the_pictures_of_a_trial_stay_below_fifty_kilobytes(text):
    """With text as outlines in base64 they would be 300 kB; the report of the catalogue has 36 trials."""
    for picture in tree(text).all("picture"):
        assert len(picture.all("img")[0].attrs["src"]) + len(picture.all("source")[0].attrs["srcset"]) < 5e4


def test_bad_trials_are_refused_with_one_sentence(monkeypatch):
    unknown = Trial(replace(KURAMOTO.verdict, claim="kuramoti"), KURAMOTO.data)
    with pytest.raises(HelmscopeError, match="did you mean 'kuramoto'"):
        page(CATALOGUE, [unknown])
    with pytest.raises(
        HelmscopeError, match=r"^trials holds claim 'kuramoto' on simulation twice, but a page shows one"
    ):
        page(CATALOGUE, [KURAMOTO, KURAMOTO])
    with pytest.raises(HelmscopeError, match="seed"):
        page(CATALOGUE, [], seed=-1)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        HelmscopeError, match=r"^jinja2 is not installed, and this needs it: pip install 'helmscope\[rep"
    ):
        page(CATALOGUE, [])
