"""The code that an experiment depends on, read from the imports in its source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helmscope.claims.imported_code import ROOT, imported_hash, imported_modules
from helmscope.claims.registry import code_file, experiments
from helmscope.claims.trial import code_hash
from support.children import run_python


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, whose files may be edited."""
    return Path(
        shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "helmscope", ignore=shutil.ignore_patterns("bundled"))
    )


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        ("observe/pairs.py", True),
        ("intervene/arms.py", True),
        ("stats/intervals.py", True),
        ("claims/arm_statistics.py", True),
        ("claims/evidence.py", True),
        ("models/subject.py", True),
        ("observe/hitting_curve.py", False),
        ("cli/claims.py", False),
        ("report/page.py", False),
    ],
)
def test_a_change_of_what_an_experiment_uses_changes_its_hash(package: Path, module: str, changes: bool) -> None:
    file = package / "claims" / "experiments" / "tokens_cluster.py"
    before = imported_hash([file], package)
    text = (package / module).read_text()
    (package / module).write_text(f"{text}\n# changed\n")
    assert (imported_hash([file], package) != before) == changes
    (package / module).write_text(text)
    assert imported_hash([file], package) == before


def test_the_modules_are_those_that_python_imports() -> None:
    """A fresh process that imports the experiment loads no module of the package but those found, ``__init__``, and
    ``runs``, whose ``__init__`` imports all of it and which computes nothing.
    """
    file = code_file(experiments()["tokens-cluster"].function)
    found = {path.relative_to(ROOT).as_posix() for path in imported_modules([file])}
    script = (
        "import sys, helmscope.claims.experiments.tokens_cluster\n"
        "print(*(m.__file__ for n, m in list(sys.modules.items()) if n.startswith('helmscope.')))"
    )
    loaded = {Path(path).relative_to(ROOT).as_posix() for path in run_python(script).stdout.split()}
    missing = {path for path in loaded - found if not path.endswith("__init__.py") and not path.startswith("runs/")}
    assert missing == {"claims/experiments/tokens_cluster.py"}
    assert {"observe/pairs.py", "models/record.py", "types/__init__.py"} <= found


def test_imports_of_every_kind(tmp_path: Path) -> None:
    root = tmp_path / "helmscope"
    files = {
        "__init__.py": "",
        "a/__init__.py": "if TYPE_CHECKING:\n  from helmscope.a.lazy import name\n  from helmscope.a.other import x\n",
        "a/lazy.py": "",
        "a/other.py": "",
        "a/deferred.py": "",
        "a/types_only.py": "",
        "a/through.py": "def f():\n    import helmscope.a.deferred\n",
        "a/unused.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import os\nfrom typing import TYPE_CHECKING\nfrom helmscope.a import name\nfrom helmscope.a import through\n"
        "if TYPE_CHECKING:\n    from helmscope.a import types_only\n"
    )
    found = [path.relative_to(root).as_posix() for path in imported_modules([mine], root)]
    assert found == ["a/__init__.py", "a/deferred.py", "a/lazy.py", "a/through.py"]
    mine.write_text("import helmscope as hs\n")
    assert len(imported_modules([mine], root)) == len(files)


def test_finding_the_code_needs_no_torch() -> None:
    script = (
        "import sys; from helmscope.claims.imported_code import *; from helmscope.claims.imported_code import ROOT\n"
        "imported_hash([ROOT / 'claims' / 'experiments' / 'tokens_cluster.py']); print('torch' in sys.modules)"
    )
    assert run_python(script).stdout.strip() == "False"


def test_the_hash_of_a_trial_covers_them() -> None:
    assert code_hash("tokens-cluster", None) != code_hash("attention-clusters", None)
