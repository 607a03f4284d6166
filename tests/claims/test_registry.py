"""Experiments register themselves by the id of their claim; errors in a user's files are reported."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch

import helmscope as hs
from helmscope.claims import experiments as package
from helmscope.claims.arm_statistics import Factorial
from helmscope.claims.attention_trials import AttentionTrial
from helmscope.claims.entry import SubjectKind
from helmscope.claims.prompts import ChosenPrompts
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import TrialCase, experiments
from helmscope.types import HelmscopeError
from support.children import run_python

PLANTED = Path(__file__).parent / "planted"
FOLDER = Path(package.__file__).parent
TRIED = (
    *("attention-clusters", "attention-diffuses", "breathing", "clt-sharp", "convex-hull", "curvature-drift"),
    *("diffuse-then-compress", "early-fragile", "elliptic"),
    *("encoder-decoder", "energy-rises", "entropy-identity", "extremes", "finite-time", "free-energy-descends"),
    *(
        "generator",
        "gradient-shaped",
        "heads-average",
        "heads-compete",
        "histogram-width",
        "jko-step",
        "key-norm",
        "kuramoto",
        "low-coherence",
        "low-pass",
        "mean-field-limit",
    ),
    *("measure-flow", "metastability", "mixture", "mlp-conservative", "mlp-prevents", "mlp-projects"),
    *("mlp-reconditions", "mobility"),
    "no-mean-drift",
    *("norm-confines", "one-cluster", "operator-class"),
    *("phase-curve", "probe-metric", "qk-metric"),
    *("radial", "rate", "repulsive", "residual-flow", "scalar-diffusion", "settles"),
    *("sharp-unstable", "sinks-are-anchors", "small-steps", "spectral"),
    *("stability", "stable-softmax", "steady-order", "tokens-cluster", "transport-map", "value-roles"),
    *("whitening", "z-metric"),
)


def test_packaged_experiments_are_discovered() -> None:
    assert tuple(experiments()) == TRIED
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__"} == {claim.replace("-", "_") for claim in TRIED}


# their conditions on a model are identities, which hold whatever the blocks write, or only described
NOT_ABOUT_WRITES = {"convex-hull", "measure-flow", "mixture", "norm-confines", "radial"}


@pytest.mark.parametrize(
    "claim", [claim for claim, entry in read_catalogue().items() if SubjectKind.MODEL in entry.decided]
)
def test_blocks_that_write_nothing_are_a_control_of_every_trial_on_a_model(claim: str) -> None:
    """By the region of the claim they must not come out supported: what is supported there is not about the dynamics.
    A control with a region of its own may state what they do instead.
    """
    controls = {control.name: control for control in read_catalogue()[claim].controls_on(SubjectKind.MODEL)}
    if claim in NOT_ABOUT_WRITES:
        assert claim not in experiments() or SubjectKind.MODEL not in experiments()[claim].subject_kinds
        return
    control = controls["blocks that write nothing"]
    assert control.region.bounded or "supported" not in control.expected


# constants of claims that are so far tried by simulation only, for their trials on models
OF_TRIALS_ON_MODELS = {"twins", "least_prompts", "least_groups", "rank_tolerance", "inputs"}


@pytest.mark.parametrize("claim", TRIED)
def test_an_experiment_reads_every_constant_of_its_entry(claim: str) -> None:
    """A constant that decides is in the entry, under its version and hash, and not a second time in code."""
    code = (FOLDER / f"{claim.replace('-', '_')}.py").read_text()
    if "Factorial.of(case)" in code:
        code += inspect.getsource(Factorial.of)
    if "AttentionTrial.of(case)" in code:
        code += inspect.getsource(AttentionTrial.of)
    if "Factorial.of(case)" in code or "ChosenPrompts.of(case" in code or "prompts_or_finding(" in code:
        code += inspect.getsource(ChosenPrompts.of)
    entry = read_catalogue()[claim]
    only_simulated = SubjectKind.MODEL in entry.decided and SubjectKind.MODEL not in experiments()[claim].subject_kinds
    # one-cluster has a constant for each of several regimes, and makes up their names
    composed = 'f"{key}_{what}"' in code
    unread = {
        name
        for name in entry.constants
        if f'"{name}"' not in code and f"'{name}'" not in code
        if not (composed and name.split("_")[-1] in ("betas", "tokens", "dims"))
    }
    assert unread <= (OF_TRIALS_ON_MODELS if only_simulated else set())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_experiments_use_only_public_names(path: Path) -> None:
    """A user's experiment can import everything that a packaged one does, from ``helmscope``, one of its rooms, or the
    modules of ``helmscope.claims`` that experiments share.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("helmscope"):
            package = importlib.import_module(".".join(str(node.module).split(".")[:2]))
            for alias in node.names:
                public = {*dir(hs), *package.__all__}
                within_public_module = str(node.module).split(".")[-1] in public  # such as geometry.sphere
                shared = str(node.module).startswith("helmscope.claims.")
                assert alias.name in public or within_public_module or shared, f"{node.module}.{alias.name}"
                assert not alias.name.startswith("_")
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr != "__name__":
            pytest.fail(f"{path.name}:{node.lineno} uses {node.attr}")


def test_samples_of_a_case_depend_only_on_its_seed() -> None:
    assert torch.equal(TrialCase(3).normal(4, index=1), TrialCase(3).normal(4, index=1))
    seeds = {TrialCase(seed).seed_for(k) for seed in range(20) for k in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**32 for seed in seeds)
    for seed, quick, sentence in (
        (-1, False, "seed is -1, but it must be a whole number >= 0"),
        (2**32, False, r"seed is 4294967296, but it must be a whole number below 2\^32"),
        (0, "no", "quick is 'no', but it must be True or False"),
    ):
        with pytest.raises(HelmscopeError, match=sentence):
            TrialCase(seed, quick)


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
            r"f \(mine.py, line 2\) is the experiment of 'other', but there is no other.toml in \S+, which "
            "has entries of registry-claim",
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
        SubjectKind.SIMULATION: 7.0
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
        assert experiments(folder)["registry-claim"].seconds == {SubjectKind.SIMULATION: seconds}


def test_a_packaged_claim_is_one_entry_and_one_function(tmp_path: Path) -> None:
    """A copy of the package, one TOML and one Python file more: listed, tried and in the catalogue."""
    import shutil

    copy = tmp_path / "helmscope"
    shutil.copytree(FOLDER.parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (PLANTED / "planted-true.toml").read_text()
    (copy / "claims" / "catalogue" / "planted-true.toml").write_text(text)
    code = (PLANTED / "planted.py").read_text().split('@hs.claims.experiment("planted-false")')[0]
    (copy / "claims" / "experiments" / "planted_true.py").write_text(code)
    code = "from helmscope.claims.trial import run_trial; print(run_trial('planted-true').verdict.ruling.value)"
    done = run_python(code, check=True, env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "supported\n"
