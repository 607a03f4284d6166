"""The catalogue of claims: complete, strict, hashed by content, and data alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import tomllib
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
import pytest

from helmscope.claims import reading
from helmscope.claims.entry import ControlCase, Entry, PrintedForm, SubjectKind, parse_entry
from helmscope.claims.reading import entry, read_catalogue
from helmscope.claims.run_trials import plan_trials, run_trials
from helmscope.claims.sources import sources
from helmscope.store.run_folder import RunFolder
from helmscope.types import HelmscopeError, Region
from support.children import run_python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# id: what decides it (S simulation, M model), source by source
CLAIMS = {
    "helmholtz-transformer": """generator SM, small-steps M, attention-diffuses SM, clt-sharp M, no-mean-drift M,
        mlp-conservative M, low-coherence M, elliptic M, scalar-diffusion M, curvature-drift S, mobility SM,
        whitening SM, free-energy-descends SM, entropy-identity SM, diffuse-then-compress M, decision-points M,
        jko-step SM, bridge-is-minimal M, couple-at-decisions M, transport-map M""",
    "perspective": """energy-rises SM, tokens-cluster M, phase-curve S, rate S, finite-time S, one-cluster S,
        extremes S, z-metric S, metastability S, mixture SM, encoder-decoder SM, histogram-width S, stability S,
        stable-softmax S""",
    "mean-field-notes": """measure-flow SM, mean-field-limit S, residual-flow SM, kuramoto S, repulsive S,
        norm-confines SM, heads-average S, steady-order SM, settles SM, meaning-clusters M, related-words M""",
    "additive-transport": """probe-metric M, key-norm M, qk-metric M, sinks-are-anchors M, value-roles M, spectral SM,
        low-pass M, breathing M, early-fragile M, heads-compete M, grammar-tradeoff M, convex-hull SM, interference M,
        caustics M, bending M, radial SM, mlp-reconditions M, gradient-shaped M, operator-class M, dimensional-lift M,
        sharp-unstable M, mlp-projects M""",
    "helmscope": "attention-clusters M, mlp-prevents M",
}
EXPECTED = {
    words.split()[0]: (source, words.split()[1]) for source, line in CLAIMS.items() for words in line.split(",")
}

# conditions that claims.md gives as numbers, typed here a second time; (subject_kind, bounds) of each, in order
S, M = "simulation", "model"
BOUNDS = {
    "small-steps": [(None, {"high": 0.1})],
    "attention-diffuses": [(M, {"low": 0.5, "high": 2}), (M, {"low": 0.5})],
    "clt-sharp": [(None, {"low": 0.9})],
    "no-mean-drift": [(None, {"below": 0.1})],
    "mlp-conservative": [(None, {"high": 0.05})],
    "elliptic": [(None, {"above": 1e-3})],
    "scalar-diffusion": [(None, {"low": 0.5})],
    "mobility": [(None, {"high": 0.05})],
    "entropy-identity": [(None, {"low": 0.9, "high": 1.1})],
    "jko-step": [(None, {"low": 0.5})],
    "transport-map": [(None, {"low": 0.9})],
    "tokens-cluster": [(None, {"low": 0.05})],
    "attention-clusters": [(None, {"low": 0.05})],
    "mlp-prevents": [(None, {"high": -0.05})],
    "rate": [(None, {"low": 1 - 1e-6, "high": 1 + 1e-6})] * 2,
    "z-metric": [(None, {"high": 1e-10})],
    "metastability": [(None, {"low": 0.99, "high": 1.01})],
    "phase-curve": [(None, {"high": 0.02}), (None, {"below": 1})],
    "finite-time": [(None, {"low": 2})],
    "steady-order": [(S, {"low": 1 - 1e-6, "high": 1 + 1e-6}), (None, {"high": 2})],
    "histogram-width": [(None, {"low": -0.55, "high": -0.45})],
    "stable-softmax": [(None, {"low": -0.1, "high": 0.1}), (None, {"below": -0.3})],
    "encoder-decoder": [(None, {"low": 0.1})],
    "mean-field-limit": [(None, {"low": -0.6, "high": -0.4})],
    "residual-flow": [(S, {"high": 0.1}), (M, {"high": 0.1})],
    "sinks-are-anchors": [(None, {"low": 0.95}), (None, {"low": 0.9})],
    "caustics": [(None, {"above": 0.5})],
    "sharp-unstable": [(None, {"above": 1})],
    "mlp-projects": [(None, {"below": 1})],
    "bending": [(None, {"above": 1})],
    "key-norm": [(None, {"above": 1})],
    "probe-metric": [(None, {"above": 1})],
}
DESCRIBED = {"mixture", "value-roles", "dimensional-lift"}
FALSE_AS_PRINTED = [
    "attention-diffuses",
    "no-mean-drift",
    "curvature-drift",
    "whitening",
    "free-energy-descends",
    "bridge-is-minimal",
    "finite-time",
    "z-metric",
    "repulsive",
]
NOT_FALSE_AS_PRINTED = {  # what a source says and means, where an objection would be to something else
    "rate": "true, not sharp",  # an upper bound that holds
    "histogram-width": "true, not sharp",
    "norm-confines": "true",
    "convex-hull": "true",
    "radial": "true",  # of normalizing; an eps is not mentioned
    "residual-flow": "true",  # as a limit
    "generator": "true",  # as a limit
    "scalar-diffusion": "true",  # whatever the value of nu
    "extremes": "true",
    "metastability": "true",
    "heads-average": "not testable",  # a definition
    "tokens-cluster": "not testable",
}

GOOD = """
id = "mine"
version = 1
statement = "Tokens meet."
source = "a note of my own"
decided = ["simulation"]
experiment = "Run it."
null = "A coin."
[[conditions]]
name = "share"
statistic = "A share."
text = "At least half."
low = 0.5
"""


def test_the_catalogue_holds_exactly_the_claims() -> None:
    letters = {SubjectKind.SIMULATION: "S", SubjectKind.MODEL: "M"}
    found = {
        name: (claim.source, "".join(letters[subject_kind] for subject_kind in claim.decided))
        for name, claim in read_catalogue().items()
    }
    assert len(EXPECTED) == 69
    assert found == EXPECTED
    assert list(found) == sorted(found)


def test_the_data_are_in_the_package() -> None:
    files = [file.name for file in (resources.files("helmscope.claims") / "catalogue").iterdir()]
    assert sorted(files) == sorted(f"{name}.toml" for name in EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_text_is_a_sentence(name: str) -> None:
    claim = entry(name)
    conditions = [text for case in claim.conditions for text in (case.statistic, case.text)]
    controls = [case.text for case in claim.controls]
    for text in (claim.statement, claim.experiment, claim.null, *conditions, *controls):
        assert re.match(r"\S.*[.]$", text), text
        assert len(text) > 15
    assert len(claim.statement.split()) >= 7
    assert claim.place or claim.source == "helmscope"
    assert all(not case.region.bounded for case in claim.conditions) == (name in DESCRIBED)


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_printed_has_a_place_and_a_fair_judgment(name: str) -> None:
    """A judgment needs its reason, and a false one the corrected form."""
    claim = entry(name)
    if claim.printed is None:
        return
    assert claim.printed.place
    assert claim.printed.reason.endswith(".")
    assert claim.printed.judgment != "not decided" or claim.printed.region.bounded
    assert claim.printed.judgment != "false" or claim.corrected


@pytest.mark.parametrize("name", EXPECTED)
def test_a_changed_entry_has_a_history(name: str) -> None:
    claim = entry(name)
    changes = [line for line in claim.history if not line.look]  # the others are looks at the held-out texts
    assert [line.version for line in changes] == list(range(1, claim.version + 1))
    for line in changes[1:]:
        assert line.change
        assert line.reason


def test_wording_and_bounds_agree() -> None:
    """Words such as "above" and "below" are exclusive bounds; "at least" and "at most" are not."""
    for claim in read_catalogue().values():
        for case in claim.conditions:
            words, bounds = case.text.lower(), case.region.bounds
            if re.search(r"\babove\b|\bpositive\b", words) and "at least" not in words:
                assert "low" not in bounds, (claim.id, case.text)
            if re.search(r"\bbelow\b|\bnegative\b", words) and "at most" not in words:
                assert "high" not in bounds, (claim.id, case.text)
            if bounds.get("low") == 0 or bounds.get("high") == 0:
                pytest.fail(f"{claim.id}: {case.text} has a closed bound at 0")


def test_no_condition_hides_one_of_two_quantities_behind_the_other() -> None:
    """Two quantities are two conditions, or must hold in every case: the smaller of two has no interval of its own."""
    for claim in read_catalogue().values():
        for case in claim.conditions:
            assert not re.search(r"\b(smaller|larger|better|worse|minimum|maximum) of\b", case.statistic), claim.id


def test_regions_are_those_of_the_law() -> None:
    catalogue = read_catalogue()
    found = {
        name: [
            (case.on and case.on.value, case.region.bounds)
            for case in catalogue[name].conditions
            if case.region.bounded
        ]
        for name in BOUNDS
    }
    for name, bounds in BOUNDS.items():
        assert found[name][: len(bounds)] == bounds, name


def test_what_is_false_as_printed_is_kept_beside_its_correction() -> None:
    catalogue = read_catalogue()
    judged = {name: catalogue[name].printed and catalogue[name].printed.judgment for name in FALSE_AS_PRINTED}
    assert judged == dict.fromkeys(FALSE_AS_PRINTED, "false")
    assert len({claim.hash for claim in catalogue.values()}) == 69
    assert len({claim.statement for claim in catalogue.values()}) == 69


def test_no_source_is_refuted_for_what_it_does_not_say() -> None:
    catalogue = read_catalogue()
    judged = {name: catalogue[name].printed and catalogue[name].printed.judgment for name in NOT_FALSE_AS_PRINTED}
    assert judged == NOT_FALSE_AS_PRINTED


def test_every_source_has_a_title_authors_and_a_date() -> None:
    assert set(CLAIMS) == set(sources())
    for source in sources().values():
        assert source.title
        assert source.authors
        assert source.date
        assert not source.link or source.link.startswith("https://")
    assert sources()["perspective"].link == "https://arxiv.org/abs/2312.10794"


ON_MODELS = [name for name, (_, kinds) in EXPECTED.items() if "M" in kinds]


@pytest.mark.parametrize("name", ON_MODELS)
def test_a_claim_about_models_has_the_control_of_blocks_that_write_nothing(name: str) -> None:
    """Also if it has no experiment yet; a claim that such a model would meet says nothing about dynamics."""
    (control,) = [case for case in entry(name).controls_on(SubjectKind.MODEL) if "write nothing" in case.name]
    assert control.name == "blocks that write nothing"
    assert control.expected
    by_norms = "radial"  # the one claim about norms alone, which holds whatever blocks write
    own = control.region.bounded and control.of is None
    assert own or name == by_norms or "true by construction" not in control.expected


CONTROLLED = {  # controls that two arms of one forward pass could not fail, and the condition that they are about
    "mlp-prevents": "growth of attention alone",
}


@pytest.mark.parametrize(("name", "condition"), CONTROLLED.items())
def test_the_control_tests_a_condition_that_can_fail(name: str, condition: str) -> None:
    (control,) = [case for case in entry(name).controls if case.name == "blocks that write nothing"]
    assert control.of == condition
    assert [case.premise for case in entry(name).conditions if case.name == condition] == [True]


def test_quotations_mark_what_they_leave_out() -> None:
    """What is joined from several passages is not a quotation."""
    for name in ("curvature-drift", "norm-confines"):
        printed = entry(name).printed
        assert printed is not None
        assert "[...]" in printed.text
        assert ";" not in printed.place


def test_constants_that_decide_are_in_the_entries() -> None:
    gathering = {"least_prompts", "described_prompts", "described_prompts_quick", "twin_prompts", "twin_prompts_quick"}
    wanted = {
        "encoder-decoder": {"beta_of_shape"},
        "mixture": {"most_components", "largest_kappa"},
        "measure-flow": {"bias_slope"},
        "settles": {"rotating_starts", "nudge", "prompts", "prompts_quick", "least_prompts"},
        "residual-flow": {"prompts", "prompts_quick", "least_prompts"},
        "tokens-cluster": gathering,
        "attention-clusters": gathering,
        "mlp-prevents": gathering,
    }
    for name, constants in wanted.items():
        assert constants <= set(entry(name).constants), name


def test_a_control_allows_no_more_than_what_decides() -> None:
    claim = entry("encoder-decoder")
    (control,) = [case for case in claim.controls if case.name == "two sets of starts, both full"]
    assert control.region.ends == (-claim.conditions[0].low, claim.conditions[0].low)


def test_no_entry_names_code() -> None:
    assert set(Entry.__struct_fields__) == {
        *("id", "version", "statement", "source", "place", "corrected", "decided", "experiment", "null", "printed"),
        *("conditions", "controls", "constants", "history"),
    }
    for claim in read_catalogue().values():
        assert importlib.util.find_spec(claim.id) is None
        for text in (claim.statement, claim.experiment, claim.null, claim.corrected):
            # a dotted name, module:function or path is one word; every text here is a sentence
            assert not text or " " in text


@pytest.mark.parametrize("name", EXPECTED)
def test_a_packaged_entry_leaves_nothing_to_defaults(name: str) -> None:
    """A user's entry may be brief; one of the package states everything in its file."""
    text = (resources.files("helmscope.claims") / "catalogue" / f"{name}.toml").read_text(encoding="utf-8")
    stated = tomllib.loads(text)
    assert {"id", "version", "statement", "source", "decided", "experiment", "null", "controls"} <= set(stated)
    for condition in stated["conditions"]:
        assert {"name", "statistic", "text"} <= set(condition)
    for control in stated["controls"]:
        assert {"name", "text", "expected"} <= set(control)


BRIEF = """
statement = "Tokens meet."
conditions = [{ low = 0.8 }]
controls = [{ name = "the starts" }]
"""


def test_a_brief_entry_is_completed() -> None:
    claim = parse_entry(BRIEF, "tokens-meet.toml")
    assert (claim.id, claim.version, claim.source, claim.decided) == ("tokens-meet", 1, "own work", ())
    assert (claim.experiment, claim.null, claim.controls[0].text) == ("", "", "")
    (condition,) = claim.conditions
    assert (condition.name, condition.statistic) == ("tokens meet", "")
    assert condition.region == Region(text="At least 0.8.", low=0.8)
    for subject_kind in SubjectKind:
        assert claim.conditions_on(subject_kind) == (condition,)
    described = parse_entry(BRIEF.replace("low = 0.8", ""), "tokens-meet.toml")
    assert described.conditions[0].text == "Described, not judged."


def test_stating_the_defaults_does_not_change_the_hash() -> None:
    full = """
        id = "tokens-meet"
        version = 1
        source = "own work"
        statement = "Tokens meet."
        conditions = [{ name = "tokens meet", text = "At least 0.8.", low = 0.8 }]
        controls = [{ name = "the starts" }]
    """
    assert parse_entry(full, "tokens-meet.toml").hash == parse_entry(BRIEF, "tokens-meet.toml").hash


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[{ low = 0.8 }]", "[]", "conditions of mine.toml is [], but it must hold at least one, such as [{ low ="),
        ("[{ low = 0.8 }]", "[{ low = 0.8 }, { high = 1 }]", "a condition of mine.toml has no name, but each of"),
        ("low = 0.8", "low = inf", "mine.toml is not a valid entry: low of the region is inf, but it must be"),
        ("low = 0.8", "low = 2, high = 1", "mine.toml is not a valid entry: region is 2 to 1, but its bounds must"),
        ("low = 0.8", 'text = " ", low = 0.8', "text of one of the conditions in mine.toml is empty, but it must"),
        ('name = "the starts"', 'nmae = "the starts"', "unknown key of controls of mine.toml 'nmae': did you mean 'n"),
        (
            'name = "the starts"',
            'text = "Random."',
            "controls[0] of mine.toml has no name, but it must have one, such as name = ",
        ),
    ],
)
def test_a_bad_brief_entry_is_refused_in_one_sentence(old: str, new: str, says: str) -> None:
    with pytest.raises(HelmscopeError) as refusal:
        parse_entry(BRIEF.replace(old, new), "mine.toml")
    assert says in str(refusal.value)


def test_a_good_text_is_read() -> None:
    claim = parse_entry(GOOD, "mine.toml")
    assert claim.decided == (SubjectKind.SIMULATION,)
    assert claim.conditions[0].region == Region(text="At least half.", low=0.5)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('null = "A coin."', 'nul = "A coin."', "unknown key of mine.toml 'nul': did you mean 'null'?"),
        ("version = 1", "version = 1\nmodule = 'os'", "unknown key of mine.toml 'module'"),
        ("low = 0.5", "lwo = 0.5", "unknown key of conditions of mine.toml 'lwo': did you mean 'low'?"),
        ('statement = "Tokens meet."', "", "mine.toml has no statement, but it must have one, such as statement = "),
        ("version = 1", "version = '1'", "version of mine.toml is '1', but it must be a whole number"),
        ("version = 1", "version = true", "version of mine.toml is True, but it must be a whole number"),
        ("version = 1", "version = 0", "version of mine.toml is 0, but it must be a whole number >= 1"),
        ("low = 0.5", "low = 'half'", "conditions[0].low of mine.toml is 'half', but it must be a number"),
        ("low = 0.5", "low = inf", "low of region 'At least half.' is inf, but it must be a finite number"),
        ("low = 0.5", "low = 2\nhigh = 1", "region is 2 to 1, but its bounds must be finite and in order"),
        ("low = 0.5", "low = 2\nabove = 1", "but it must have at most one of the two"),
        ('text = "At least half."', 'text = " "', "text of share in mine.toml is empty"),
        ('name = "share"', 'name = "share"\non = "modle"', "'modle': did you mean 'model'?"),
        ('name = "share"', 'name = "share"\non = "model"', "is decided by a simulation, but none of its conditions is"),
        ("low = 0.5", 'low = 0.5\n[[controls]]\nname = "a"\ntext = "b"\nof = "shar"', "'shar': did you mean 'share'?"),
        ("low = 0.5", 'low = 0.5\n[[controls]]\nname = "a"\ntext = "b"\nexpected = ["refute"]', "mean 'refuted'?"),
        (
            "low = 0.5",
            "low = 0.5\n[[history]]\nversion = 2",
            "history of mine.toml has versions [2], but they must rise",
        ),
        ("low = 0.5", "low = 0.5\n[printed]\ntext = 'a'", "printed of mine.toml has no place, but it must have one"),
        ('statement = "Tokens meet."', 'statement = ""', "statement of mine.toml is empty"),
        ('["simulation"]', '["simulations"]', "'simulations': did you mean 'simulation'?"),
        ('["simulation"]', "[]", "decided of mine.toml is [], but it must hold 'simulation', 'model' or both"),
        ('["simulation"]', '["model", "model"]', "decided of mine.toml is ['model', 'model'], but"),
        ('["simulation"]', '"model"', "decided of mine.toml is 'model', but it must be a list"),
        ('["simulation"]', "[1]", "decided[0] of mine.toml is 1, but it must be "),
        ('id = "mine"', 'id = "yours"', "id of mine.toml is 'yours', but it must be the file's name without .toml"),
        ("version = 1", "version = 1\nconstants = { a = true }", "a value in constants of mine.toml is of type bool"),
        (
            "low = 0.5",
            "low = 0.5\n[[controls]]\nname = 'a'\non = 'modle'",
            "controls[0].on of mine.toml is 'modle', but it must be",
        ),
        ('id = "mine"', 'id = "mine', "mine.toml is not TOML: "),
        ('id = "mine"', 'id = "mine"\nid = "mine"', "mine.toml is not TOML: "),
    ],
)
def test_a_bad_text_is_refused_in_one_sentence(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(HelmscopeError) as refusal:
        parse_entry(GOOD.replace(old, new), "mine.toml")
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_id_is_a_plain_name() -> None:
    with pytest.raises(HelmscopeError, match="lower-case words"):
        parse_entry(GOOD.replace('"mine"', '"My Claim"'), "My Claim.toml")


def test_the_hash_is_of_what_decides_alone() -> None:
    first = parse_entry(GOOD, "mine.toml").hash
    head, _, conditions = GOOD.strip().partition("[[conditions]]")
    other = "# a remark\n" + "\n\n".join(reversed(head.strip().splitlines())) + "\n[[conditions]]\n"
    other += "\n".join(reversed(conditions.replace("low = 0.5", "low = 0.50 # half").splitlines()))
    plain = json.dumps(tomllib.loads(GOOD), sort_keys=True, separators=(",", ":"))
    assert first == hashlib.sha256(plain.encode()).hexdigest()
    assert parse_entry(other, "mine.toml").hash == first
    looked = GOOD + '\n[[history]]\nversion = 1\nlook = "seed 0: supported"\n'
    assert parse_entry(looked, "mine.toml").hash == first


def test_any_value_that_decides_changes_the_hash() -> None:
    claim = parse_entry(GOOD, "mine.toml")
    (condition,) = claim.conditions
    changes: dict[str, object] = {
        **dict.fromkeys(("id", "statement", "source", "place", "corrected", "experiment", "null"), "x"),
        "version": 2,
        "decided": (SubjectKind.MODEL,),
        "conditions": (msgspec.structs.replace(condition, low=0.6),),
        "printed": PrintedForm(text="a", place="b", judgment="true", reason="c"),
        "controls": (ControlCase(name="a", text="b"),),
        "constants": {"level": 0.9},
    }
    variants = [msgspec.structs.replace(claim, **{name: value}) for name, value in changes.items()]
    variants += [
        msgspec.structs.replace(claim, conditions=(msgspec.structs.replace(condition, low=None, above=0.5),)),
        msgspec.structs.replace(claim, conditions=(condition, msgspec.structs.replace(condition, name="x"))),
    ]
    assert len({claim.hash, *(variant.hash for variant in variants)}) == len(variants) + 1 == 16


def test_an_entry_is_frozen() -> None:
    claim = entry("rate")
    with pytest.raises(AttributeError):
        claim.version = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        claim.conditions[0].low = 0.0  # type: ignore[misc]


def test_an_unknown_id_offers_the_nearest() -> None:
    with pytest.raises(HelmscopeError, match="unknown claim 'finit-time': did you mean 'finite-time'"):
        entry("finit-time")


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    (tmp_path / "another.toml").write_text(GOOD.replace('"mine"', '"another"'))
    (tmp_path / "trial.py").write_text("raise SystemExit")
    assert list(read_catalogue(tmp_path)) == ["another", "mine"]
    assert read_catalogue(str(tmp_path))["mine"] == parse_entry(GOOD, "mine.toml")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "rate.toml",
            GOOD.replace('"mine"', '"rate"'),
            "id of rate.toml in .* but a packaged claim has that id already",
        ),
        ("other.toml", GOOD, "id of other.toml is 'mine'"),
        ("latin.toml", GOOD.replace("meet", "m\xe9et"), "latin.toml is not UTF-8 text"),
    ],
)
def test_a_bad_folder_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(HelmscopeError, match=says):
        read_catalogue(tmp_path)


def test_a_folder_without_entries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HelmscopeError, match=r"holds no ID\.toml"):
        read_catalogue(tmp_path)
    with pytest.raises(HelmscopeError, match="must be a folder"):
        read_catalogue(tmp_path / "nowhere")
    (tmp_path / "sub.toml").mkdir()
    with pytest.raises(HelmscopeError, match=r"'sub\.toml' in .* is a stray file"):
        read_catalogue(tmp_path)


def test_the_packaged_files_are_read_once_whatever_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helmscope: Callable[..., tuple[object, str, str]]
) -> None:
    """In a report too, which asks for entries at every turn."""
    read_catalogue()
    reads: list[str] = []
    monkeypatch.setattr(reading, "_read_text", lambda file: reads.append(file.name))
    monkeypatch.setattr("helmscope.jobs.trials.plan", lambda spec, on: plan_trials(["kuramoto"]))
    monkeypatch.setattr("helmscope.report.page.trial_figure", lambda verdict, data, width: None)
    monkeypatch.setattr("helmscope.report.page.web_svg", lambda figure: b"")
    assert helmscope("report", "--quick")[0] == 0
    assert len(run_trials(["kuramoto"], RunFolder.create(tmp_path / "run"), quick=True)) == 1
    assert reads == []


def test_a_file_of_ones_own_is_parsed_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where neither its size nor its time tells that it has changed."""
    parsed: list[str] = []
    loads = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or loads(text))
    path = tmp_path / "mine.toml"
    text = GOOD.replace("Tokens meet.", f"Tokens meet in {tmp_path.name}.")
    for low in (0.5, 0.6):
        path.write_text(text.replace("0.5", str(low)))
        os.utime(path, (0, 0))
        for _ in range(3):
            assert read_catalogue(tmp_path)["mine"].conditions[0].low == low
    assert len(parsed) == 2


def test_a_catalogue_that_a_caller_changes_is_his_own() -> None:
    read_catalogue().clear()
    assert len(read_catalogue()) == 69


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys; from helmscope.claims.reading import read_catalogue as r; print(len(r()), 'torch' in sys.modules)"
    )
    done = run_python(code, check=True)
    assert done.stdout.split() == ["69", "False"]
