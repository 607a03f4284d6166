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
from helmscope.claims.entry import Entry, Ground, parse_entry
from helmscope.claims.reading import entry, read_catalogue
from helmscope.claims.trial import run_trials
from helmscope.store.run_folder import RunFolder
from helmscope.types import HelmscopeError, Region
from support.children import run_python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# id: what decides it (S simulation, M model), source by source
CLAIMS = {
    "000": """generator SM, small-steps M, attention-diffuses SM, clt-sharp M, no-mean-drift M, mlp-conservative M,
        low-coherence M, elliptic M, scalar-diffusion M, curvature-drift S, mobility SM, whitening SM,
        free-energy-descends SM, entropy-identity SM, diffuse-then-compress M, decision-points M, jko-step SM,
        bridge-is-minimal M, couple-at-decisions M""",
    "001": """energy-rises SM, tokens-cluster M, phase-curve S, rate S, finite-time S, one-cluster S, extremes S,
        z-metric S, metastability S, mixture SM, encoder-decoder SM""",
    "002": """measure-flow SM, mean-field-limit S, residual-flow SM, kuramoto S, repulsive S, norm-confines SM,
        heads-average S, steady-order SM, meaning-clusters M""",
    "003": """probe-metric M, key-norm M, qk-metric M, sinks-are-anchors M, value-roles M, spectral SM, low-pass M,
        breathing M, early-fragile M, heads-compete M, grammar-tradeoff M, convex-hull SM, interference M, caustics M,
        bending M, radial SM, mlp-reconditions M""",
}
EXPECTED = {
    words.split()[0]: (source, words.split()[1]) for source, line in CLAIMS.items() for words in line.split(",")
}

# regions that claims.md gives as numbers, typed here a second time
INTERVALS = {
    "generator": (0.9, None),
    "small-steps": (None, 0.1),
    "attention-diffuses": (0.5, 2),
    "clt-sharp": (0.9, None),
    "no-mean-drift": (None, 0.1),
    "mlp-conservative": (None, 0.05),
    "elliptic": (1e-3, None),
    "scalar-diffusion": (0.5, None),
    "mobility": (None, 0.05),
    "entropy-identity": (0.9, 1.1),
    "jko-step": (0.5, None),
    "phase-curve": (None, 0.02),
    "rate": (1 - 1e-6, 1 + 1e-6),
    "z-metric": (None, 1e-10),
    "metastability": (0.99, 1.01),
    "mean-field-limit": (-0.6, -0.4),
    "residual-flow": (0.9, 1.1),
    "sinks-are-anchors": (0.95, None),
    "caustics": (0.5, None),
}
NO_INTERVAL = {"mixture", "encoder-decoder", "value-roles", "heads-compete"}
CORRECTED = [
    "attention-diffuses",
    "no-mean-drift",
    "mlp-conservative",
    "curvature-drift",
    "whitening",
    "free-energy-descends",
    "entropy-identity",
    "bridge-is-minimal",
    "rate",
    "finite-time",
    "z-metric",
    "repulsive",
    "steady-order",
    "probe-metric",
    "sinks-are-anchors",
    "spectral",
    "breathing",
    "radial",
    "scalar-diffusion",
    "measure-flow",
]

GOOD = """
id = "mine"
statement = "Tokens meet."
source = "a note of my own"
printed = ""
corrected = ""
decided = ["simulation"]
experiment = "Run it."
statistic = "A share."
null = "A coin."
version = 1
region = { text = "At least half.", low = 0.5 }
"""


def test_the_catalogue_holds_exactly_the_claims() -> None:
    letters = {Ground.SIMULATION: "S", Ground.MODEL: "M"}
    found = {
        name: (claim.source, "".join(letters[ground] for ground in claim.decided))
        for name, claim in read_catalogue().items()
    }
    assert len(EXPECTED) == 56
    assert found == EXPECTED
    assert list(found) == sorted(found)


def test_the_data_lie_in_the_package() -> None:
    files = [file.name for file in (resources.files("helmscope.claims") / "catalogue").iterdir()]
    assert sorted(files) == sorted(f"{name}.toml" for name in EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_text_is_there(name: str) -> None:
    claim = entry(name)
    for text in (claim.statement, claim.experiment, claim.statistic, claim.null, claim.region.text):
        assert re.match(r"\S.*[.]$", text), text
        assert len(text) > 15
    assert len(claim.statement.split()) >= 7
    assert claim.version == (2 if claim.id == "radial" else 1)
    assert (claim.region.low is None and claim.region.high is None) == (name in NO_INTERVAL)


def test_regions_are_those_of_the_law() -> None:
    catalogue = read_catalogue()
    found = {name: (catalogue[name].region.low, catalogue[name].region.high) for name in INTERVALS}
    assert found == INTERVALS


def test_what_is_wrong_as_printed_is_kept_beside_its_correction() -> None:
    catalogue = read_catalogue()
    assert [name for name in CORRECTED if not (catalogue[name].printed and catalogue[name].corrected)] == []
    assert len({claim.hash for claim in catalogue.values()}) == 56
    assert len({claim.statement for claim in catalogue.values()}) == 56


def test_no_entry_names_code() -> None:
    keys = " ".join(sorted(Entry.__struct_fields__))
    assert keys == "corrected decided experiment id null printed region source statement statistic version"
    for claim in read_catalogue().values():
        for value in msgspec.to_builtins(claim).values():
            # a dotted name, module:function or path is one word; every text here is a sentence
            if isinstance(value, str) and value and value not in (claim.id, claim.source):
                assert " " in value
        assert importlib.util.find_spec(claim.id) is None
        assert importlib.util.find_spec(claim.source) is None


def test_a_good_text_is_read() -> None:
    claim = parse_entry(GOOD, "mine.toml")
    assert claim.decided == (Ground.SIMULATION,)
    assert claim.region == Region(text="At least half.", low=0.5)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('null = "A coin."', 'nul = "A coin."', "unknown key of mine.toml 'nul': did you mean 'null'?"),
        ("version = 1", "version = 1\nmodule = 'os'", "unknown key of mine.toml 'module'"),
        ("low = 0.5", "lwo = 0.5", "unknown key of region of mine.toml 'lwo': did you mean 'low'?"),
        ("version = 1", "", "mine.toml is not a valid entry: Object missing required field `version`"),
        ("version = 1", "version = '1'", "mine.toml is not a valid entry: Expected `int`, got `str` - at `$.version`"),
        ("version = 1", "version = true", "mine.toml is not a valid entry: Expected `int`, got `bool`"),
        ("version = 1", "version = 0", "version of mine.toml is 0, but it must be a whole number >= 1"),
        (
            "low = 0.5",
            "low = 'half'",
            "mine.toml is not a valid entry: Expected `float | null`, got `str` - at `$.region.low`",
        ),
        (
            "low = 0.5",
            "low = inf",
            "mine.toml is not a valid entry: region is [inf, None], but its bounds must be finite",
        ),
        (
            "low = 0.5",
            "high = nan",
            "mine.toml is not a valid entry: region is [None, nan], but its bounds must be finite",
        ),
        (
            "low = 0.5",
            "low = 2, high = 1",
            "mine.toml is not a valid entry: region is [2.0, 1.0], but its bounds must be",
        ),
        ('text = "At least half."', 'text = " "', "region.text of mine.toml is empty"),
        (
            'region = { text = "At least half.", low = 0.5 }',
            "region = 3",
            "Expected `object`, got `int` - at `$.region",
        ),
        ('statement = "Tokens meet."', 'statement = ""', "statement of mine.toml is empty"),
        ('["simulation"]', '["simulations"]', "'simulations': did you mean 'simulation'?"),
        ('["simulation"]', "[]", "decided of mine.toml is [], but it must hold 'simulation', 'model' or both"),
        ('["simulation"]', '["model", "model"]', "decided of mine.toml is ['model', 'model'], but"),
        ('["simulation"]', '"model"', "Expected `array`, got `str` - at `$.decided`"),
        ('["simulation"]', "[1]", "Expected `str`, got `int` - at `$.decided[0]`"),
        ('id = "mine"', 'id = "yours"', "id of mine.toml is 'yours', but it must be the file's name without .toml"),
        ('id = "mine"', 'id = "mine', "mine.toml is not TOML: "),
        ('id = "mine"', 'id = "mine"\nid = "mine"', "mine.toml is not TOML: "),
    ],
)
def test_a_bad_text_is_refused_in_one_sentence(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(HelmscopeError) as refusal:
        parse_entry(GOOD.replace(old, new), "mine.toml")
    assert says in str(refusal.value)
    assert "mine.toml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_id_is_a_plain_name() -> None:
    with pytest.raises(HelmscopeError, match="lower-case words"):
        parse_entry(GOOD.replace('"mine"', '"My Claim"'), "My Claim.toml")


def test_the_hash_is_of_the_content_alone() -> None:
    first = parse_entry(GOOD, "mine.toml").hash
    lines = GOOD.strip().splitlines()
    other = "# a remark\n" + "\n\n".join(reversed(lines)).replace("low = 0.5", "low = 0.50")
    plain = json.dumps(tomllib.loads(GOOD), sort_keys=True, separators=(",", ":"))
    assert first == hashlib.sha256(plain.encode()).hexdigest()
    assert parse_entry(other, "mine.toml").hash == first
    table = "\n".join(lines[:-1]) + '\n[region]\nlow = 5e-1 # half\ntext = "At least half."\n'
    assert parse_entry(table, "mine.toml").hash == first


def test_the_hashes_of_the_frozen_entries_do_not_move() -> None:
    """One SHA-256 of all 56: verdicts carry these hashes, and a change of code must not look like one of a claim."""
    hashes = "\n".join(claim.hash for claim in read_catalogue().values())
    found = hashlib.sha256(hashes.encode()).hexdigest()
    assert found == "692419bc3a5c64c7f20eafe02128018ab818bc163ef19291aa67a89da00c6dac"


def test_a_region_is_hashed_alike_whoever_made_it() -> None:
    """msgspec leaves out what it did not decode; a Region of one's own holds every bound, None or not."""
    claim = parse_entry(GOOD, "mine.toml")
    again = msgspec.structs.replace(claim, region=Region(text="At least half.", low=0.5, high=None))
    assert (again, again.hash) == (claim, claim.hash)


def test_any_value_changes_the_hash() -> None:
    claim = parse_entry(GOOD, "mine.toml")
    changes: dict[str, object] = {name: f"{getattr(claim, name)} x" for name in Entry.__struct_fields__}
    changes |= {"version": 2, "decided": (Ground.MODEL,), "region": Region(text="At least half.", low=0.6)}
    variants = [msgspec.structs.replace(claim, **{name: value}) for name, value in changes.items()]
    variants += [
        msgspec.structs.replace(claim, region=Region(text="At least half.", high=0.5)),
        msgspec.structs.replace(claim, region=Region(text="At least half", low=0.5)),
    ]
    assert len({claim.hash, *(variant.hash for variant in variants)}) == len(variants) + 1 == 14


def test_an_entry_is_frozen() -> None:
    claim = entry("rate")
    with pytest.raises(AttributeError):
        claim.version = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        claim.region.low = 0.0  # type: ignore[misc]


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
    monkeypatch.setattr("helmscope.jobs.trials.claims_to_try", lambda spec, on: ["kuramoto"])
    monkeypatch.setattr("helmscope.report.page.trial_figure", lambda verdict, data: None)
    monkeypatch.setattr("helmscope.report.page.svg", lambda figure: b"")
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
            assert read_catalogue(tmp_path)["mine"].region.low == low
    assert len(parsed) == 2


def test_a_catalogue_that_a_caller_changes_is_his_own() -> None:
    read_catalogue().clear()
    assert len(read_catalogue()) == 56


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys; from helmscope.claims.reading import read_catalogue as r; print(len(r()), 'torch' in sys.modules)"
    )
    done = run_python(code, check=True)
    assert done.stdout.split() == ["56", "False"]
