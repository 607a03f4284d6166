"""Experiments register themselves by the id of their claim; errors in a user's files are reported."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch

import helmscope as hs
from helmscope.claims import experiments as package
from helmscope.claims.entry import Ground
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import Case, experiments
from helmscope.types import HelmscopeError
from support.children import run_python

PLANTED = Path(__file__).parent / "planted"
FOLDER = Path(package.__file__).parent
TRIED = (
    *("attention-clusters", "convex-hull", "curvature-drift", "encoder-decoder", "energy-rises", "extremes"),
    *("finite-time", "heads-average", "histogram-width", "kuramoto", "measure-flow", "metastability", "mixture"),
    *("mlp-prevents", "norm-confines", "one-cluster", "phase-curve", "radial", "rate", "repulsive", "residual-flow"),
    *("settles", "stable-softmax", "steady-order", "tokens-cluster", "z-metric"),
)


def test_packaged_experiments_are_discovered() -> None:
    assert tuple(experiments()) == TRIED
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__"} == {claim.replace("-", "_") for claim in TRIED}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_experiments_use_only_public_names(path: Path) -> None:
    """A user's experiment can import everything that a packaged one does, from ``helmscope`` or one of its rooms."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("helmscope"):
            room = importlib.import_module(".".join(str(node.module).split(".")[:2]))
            for alias in node.names:
                public = {*dir(hs), *room.__all__}
                within_public_module = str(node.module).split(".")[-1] in public  # such as geometry.sphere
                assert alias.name in public or within_public_module, f"{node.module}.{alias.name}"
                assert not alias.name.startswith("_")
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr != "__name__":
            pytest.fail(f"{path.name}:{node.lineno} uses {node.attr}")


def test_samples_of_a_case_depend_only_on_its_seed() -> None:
    assert torch.equal(Case(3).normal(4, stream=1), Case(3).normal(4, stream=1))
    seeds = {Case(seed).seed_for(k) for seed in range(20) for k in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**32 for seed in seeds)
    for seed, quick, sentence in (
        (-1, False, "seed is -1, but it must be a whole number >= 0"),
        (2**32, False, r"seed is 4294967296, but it must be a whole number below 2\^32"),
        (0, "no", "quick is 'no', but it must be True or False"),
    ):
        with pytest.raises(HelmscopeError, match=sentence):
            Case(seed, quick)


def write_folder(folder: Path, code: str, *, claim: str = "planted-true") -> Path:
    text = (PLANTED / "planted-true.toml").read_text().replace("planted-true", claim)
    (folder / f"{claim}.toml").write_text(text)
    (folder / "mine.py").write_text(code)
    return folder


TWICE = """
import helmscope as hs

@hs.claims.experiment("registry-claim")
def f(case): ...

@hs.claims.experiment("registry-claim")
def g(case): ...
"""


FACTORY = """
import helmscope as hs

def make():
    @hs.claims.experiment("registry-claim")
    def f(case): ...

make(), make()
"""


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("1 / 0", "mine.py cannot be run: ZeroDivisionError: division by zero"),
        ("def f(:", "mine.py cannot be run: SyntaxError"),
        (
            "import helmscope as hs\n@hs.claims.experiment('other')\ndef f(case): ...",
            "unknown claim of an experiment 'other'",
        ),
        ("raise SystemExit(3)", "mine.py cannot be run: SystemExit: 3"),
        ("import helmscope as hs\n@hs.claims.experiment(3)\ndef f(case): ...", "claim is an int, but it must be an id"),
        (
            "import helmscope as hs\n@hs.claims.experiment\ndef f(case): ...",
            "claim is a function, but it must be an id",
        ),
        ("import helmscope as hs\nhs.claims.experiment('registry-claim')(3)", "is an int, but it must be a function"),
        (FACTORY, "claim 'registry-claim' has two experiments, make"),
        (TWICE, "claim 'registry-claim' has two experiments, f \\(mine.py, line 4\\) and g \\(mine.py, line 7\\), but"),
        (
            "import helmscope as hs\n@hs.claims.experiment('a', seconds=0)\ndef f(case): ...",
            "seconds is 0, but it must be",
        ),
    ],
)
def test_a_faulty_user_file_raises_one_sentence(tmp_path: Path, code: str, sentence: str) -> None:
    with pytest.raises(HelmscopeError, match=sentence):
        experiments(write_folder(tmp_path, code, claim="registry-claim"))


def test_a_users_folder_holds_only_its_own_claims(tmp_path: Path) -> None:
    assert list(experiments(PLANTED)) == ["planted-false", "planted-true"]
    assert "planted-true" not in experiments()
    assert list(read_catalogue(PLANTED)) == ["planted-false", "planted-true"]
    assert experiments(write_folder(tmp_path, "", claim="silent")) == {}


def test_a_file_may_import_its_neighbor(tmp_path: Path) -> None:
    (tmp_path / "neighbor_of_mine.py").write_text("SECONDS = 7.0")
    code = "import helmscope as hs\nfrom neighbor_of_mine import SECONDS\n"
    code += "@hs.claims.experiment('registry-claim', seconds=SECONDS)\ndef f(case): ..."
    assert experiments(write_folder(tmp_path, code, claim="registry-claim"))["registry-claim"].seconds == {
        Ground.SIMULATION: 7.0
    }


def test_functions_with_the_same_name_are_both_registered(tmp_path: Path) -> None:
    code = "import helmscope as hs\n" + "".join(
        f"@hs.claims.experiment('{claim}')\ndef f(case): ...\n" for claim in ("one-claim", "other-claim")
    )
    write_folder(tmp_path, code, claim="one-claim")
    assert list(experiments(write_folder(tmp_path, code, claim="other-claim"))) == ["one-claim", "other-claim"]


def test_a_file_that_changed_is_run_again(tmp_path: Path) -> None:
    code = "import helmscope as hs\n@hs.claims.experiment('registry-claim', seconds={})\ndef f(case): ..."
    for seconds in (2.0, 3.0):
        folder = write_folder(tmp_path, code.format(seconds), claim="registry-claim")
        assert experiments(folder)["registry-claim"].seconds == {Ground.SIMULATION: seconds}


def test_a_packaged_claim_is_one_entry_and_one_function(tmp_path: Path) -> None:
    """A copy of the package, one TOML and one Python file more: listed, tried and in the catalogue."""
    import shutil

    copy = tmp_path / "helmscope"
    shutil.copytree(FOLDER.parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (PLANTED / "planted-true.toml").read_text()
    (copy / "claims" / "catalogue" / "planted-true.toml").write_text(text)
    code = (PLANTED / "planted.py").read_text().split('@hs.claims.experiment("planted-false")')[0]
    (copy / "claims" / "experiments" / "planted_true.py").write_text(code)
    code = "from helmscope.claims.trial import try_claim; print(try_claim('planted-true').verdict.ruling.value)"
    done = run_python(code, check=True, env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "supported\n"
