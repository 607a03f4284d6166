"""The house stands: rooms import only from rooms above them, exports are lazy and complete, versions agree."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import helmscope as hs
from support.children import run_python

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "helmscope"
ORDER = (
    *("types", "store", "runs", "stats", "geometry", "theory", "kernels", "fields", "solve", "nn", "transport"),
    *("meanfield", "models", "intervene", "observe", "steer", "plots", "claims", "report", "jobs", "app", "cli"),
)


# the one joint that reaches down: it draws an object, when it is asked to, and names the type of the picture
REACHES_DOWN = {
    ("types/display.py", "helmscope.plots.draw"),
    ("types/display.py", "helmscope.plots.figure.Figure"),
}


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every helmscope module that a file imports, for typing, inside functions and by its name too, with its line."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    package = parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            stem = ".".join(part for part in (base, node.module or "") if part)
            names = [f"{stem}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            names = [each.value for each in node.args[:1] if isinstance(each, ast.Constant)]
        for name in names:
            if name.split(".")[0] == "helmscope":
                yield name, node.lineno


def misplaced(root: Path) -> list[str]:
    """What breaks the order: a room that is not in it, an import from below, an import through the front door."""
    faults = []
    for path in sorted(root.rglob("*.py")):
        room = path.relative_to(root).with_suffix("").parts[0]
        if room in ("__init__", "__main__"):
            continue
        if room not in ORDER:
            faults.append(f"{path.name}: '{room}' is no room of the house")
            continue
        for name, line in imported(path):
            parts = name.split(".")
            if (path.relative_to(root).as_posix(), name) in REACHES_DOWN:
                continue
            if len(parts) < 2 or parts[1] not in ORDER:
                faults.append(f"{path.name}:{line}: {name} is not in a room")
            elif ORDER.index(parts[1]) > ORDER.index(room):
                faults.append(f"{path.name}:{line}: {room} imports {parts[1]}")
    return faults


def test_rooms_import_only_from_above() -> None:
    assert {("types/display.py", name) for name, _ in imported(SOURCE / "types" / "display.py")} >= REACHES_DOWN
    assert misplaced(SOURCE) == []
    assert len(list(SOURCE.rglob("*.py"))) > 40


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("theory/bad.py", "from helmscope.fields.attention import SA"),
        ("store/bad.py", "def f():\n    import helmscope.geometry.sphere"),
        ("geometry/bad.py", "from ..solve import integrate"),
        ("stats/bad.py", "from helmscope.geometry import sphere"),
        ("intervene/bad.py", "from helmscope.observe.rank import stable_rank"),
        ("types/bad.py", "from helmscope.store.atomic import write_bytes"),
        ("types/bad.py", "import importlib\nimportlib.import_module('helmscope.plots.draw')"),
        ("types/display.py", "import importlib\nimportlib.import_module('helmscope.plots.trial')"),
        ("solve/display.py", "from importlib import import_module\nimport_module('helmscope.plots.draw')"),
        ("solve/bad.py", "import helmscope"),
        ("solve/bad.py", "from helmscope import SA"),
        ("cellar/bad.py", ""),
        ("cellar.py", ""),
    ],
)
def test_a_misplaced_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, text: str) -> None:
    house = tmp_path / "helmscope"
    (house / where).parent.mkdir(parents=True, exist_ok=True)
    (house / where).write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", house)
    assert len(misplaced(house)) == 1


COMPUTING = ("geometry", "theory", "kernels", "fields", "solve", "observe")
PRODUCTS = {"addmm", "baddbmm", "bmm", "einsum", "matmul", "mm", "tensordot"}
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor"}
FACTORIES |= {"zeros"}
# what multiplies arrays of NumPy, and a part of a decorated function
SAFE = {
    "equiangular._decay_integral",
    "hodge_gaussian._energy_terms",
    "hodge_profile._chebyshev",
    "hull._distance_from_origin",
}
SAFE |= {"jacobian._deflated", "surface.hessian"}


def called_of_torch(node: ast.AST) -> str:
    """NAME where the node is a call torch.NAME(...), else nothing."""
    function = node.func if isinstance(node, ast.Call) else None
    plain = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return function.attr if plain and function.value.id == "torch" else ""


def exposed_products(tree: ast.AST, inside: str = "", safe: bool = False) -> Iterator[str]:
    """Functions that multiply matrices and are not decorated with ``full_precision``."""
    for node in ast.iter_child_nodes(tree):
        name, shielded = inside, safe
        if isinstance(node, ast.FunctionDef):
            name = node.name
            shielded = safe or "full_precision" in map(ast.unparse, node.decorator_list)
        product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        if (product or called_of_torch(node) in PRODUCTS) and not shielded:
            yield name
        yield from exposed_products(node, name, shielded)


@pytest.mark.parametrize("room", COMPUTING)
def test_autocast_reaches_no_matrix_product(room: str) -> None:
    found = {
        f"{path.stem}.{name}"
        for path in (SOURCE / room).glob("*.py")
        for name in exposed_products(ast.parse(path.read_text()))
    }
    assert found - SAFE == set(), "decorate them with full_precision"


@pytest.mark.parametrize("room", COMPUTING)
def test_new_tensors_name_their_device(room: str) -> None:
    """Else they would lie on the caller's default device, beside tokens on another."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in (SOURCE / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if called_of_torch(node) in FACTORIES and not {"device", None} & {word.arg for word in node.keywords}
    ]
    assert found == []


ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
PUBLIC = [room for room in ROOMS if room in hs.__all__]


def test_few_names_stand_at_the_top() -> None:
    assert len(hs.__all__) < 80
    assert set(hs.__all__) <= {*dir(hs), "__version__"}


@pytest.mark.parametrize("room", ["", *PUBLIC])
def test_every_export_is_there_and_documented_with_an_example(room: str) -> None:
    package = getattr(hs, room) if room else hs
    exported = [name for name in package.__all__ if not name.startswith("__")]
    assert exported
    bare = []
    for name in exported:
        thing = getattr(package, name)
        documented = isinstance(thing, ModuleType) or ">>>" in (thing.__doc__ or "")
        if not documented or not thing.__doc__:
            bare.append(name)
    assert bare == []


# the rooms whose classes have an example in every method
WITH_EXAMPLES = {"models", "intervene"}


def methods_without_example(kind: type) -> Iterator[str]:
    """The public methods that a class itself introduces, and whose docstrings have no example.

    Overridden methods are documented where the base class introduces them, and properties by the class.
    """
    for name, member in vars(kind).items():
        introduced = not any(hasattr(base, name) for base in kind.__bases__)
        method = isinstance(member, FunctionType | classmethod | staticmethod)
        if method and introduced and not name.startswith("_") and ">>>" not in (member.__doc__ or ""):
            yield f"{kind.__name__}.{name}"


@pytest.mark.parametrize("room", sorted(WITH_EXAMPLES))
def test_every_method_of_an_exported_class_has_an_example(room: str) -> None:
    package = getattr(hs, room)
    kinds = [thing for name in package.__all__ if isinstance(thing := getattr(package, name), type)]
    assert len(kinds) > 5
    assert [name for kind in kinds for name in methods_without_example(kind)] == []


def test_a_method_without_example_is_seen() -> None:
    class Base:
        def shared(self) -> None: ...

    class Bare(Base):
        def shared(self) -> None: ...

        def bare(self) -> None:
            """Does nothing."""

        @classmethod
        def made(cls) -> None: ...

        def shown(self) -> None:
            """
            >>> Bare().shown()
            """

        @property
        def size(self) -> int:
            return 0

        def _private(self) -> None: ...

    assert list(methods_without_example(Bare)) == ["Bare.bare", "Bare.made"]


def test_an_unknown_export_offers_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'integrate'"):
        _ = hs.integrat


MODULES = [name for name in hs.__all__ if isinstance(getattr(hs, name), ModuleType)]


@pytest.mark.parametrize("name", MODULES)
def test_modules_list_only_their_own_names(name: str) -> None:
    """No torch, ABC, annotations or internal modules; what is listed exists, and a misspelt name is corrected."""
    module = getattr(hs, name)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, export) for export in module.__all__)
    export = max(module.__all__, key=len)
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no .*did you mean '{export}'"):
        getattr(module, export[:-1] + "_")


@pytest.mark.parametrize(
    "module", ["helmscope", "helmscope.types", "helmscope.store", "helmscope.jobs", "helmscope.cli"]
)
def test_importing_stays_light(module: str) -> None:
    """No torch, no xarray, and no environment, seed or handler touched."""
    code = (
        f"import logging, sys; import {module}\n"
        "heavy = {'torch', 'xarray', 'scipy', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not logging.getLogger().handlers\n"
        "assert [type(h).__name__ for h in logging.getLogger('helmscope').handlers] == ['NullHandler']\n"
    )
    run_python(code, check=True)


def test_statistics_need_no_torch() -> None:
    modules = sorted(f"helmscope.stats.{path.stem}" for path in (SOURCE / "stats").glob("[a-z]*.py"))
    assert "helmscope.stats.reduce" in modules
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}"
    run_python(code, check=True)


def test_trials_load_neither_torch_nor_pictures_until_they_need_them() -> None:
    code = "import sys, helmscope.claims.trial; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    run_python(code, check=True)


def requirements(lines: list[str]) -> set[str]:
    names = {re.split(r"[<>=!~;\[ ]", line)[0].lower() for line in lines}
    return names - {"helmscope"}


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    direct = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    direct += [line for lines in extras.values() for line in lines]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert requirements(pins) == requirements(direct)
    assert "torch==2.13.0" in pins
    assert "torch>=2.11" in direct
    assert set(extras) == {"models", "ot", "report", "cluster", "test", "slow", "docs"}


def test_versions_agree() -> None:
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M).group(1) == hs.__version__
    assert hs.__version__.split(".dev")[0] in (ROOT / "CHANGELOG.md").read_text()


def run_blocks(path: Path) -> tuple[str, dict[str, object]]:
    """The text of a document, and the names that its Python blocks define, run in their order."""
    text, names = path.read_text(), {}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, path.name, "exec"), names)
    return text, names


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, names = run_blocks(ROOT / "README.md")
    assert names["recording"].certificate.ok
    assert (tmp_path / "clustering.png").read_bytes().startswith(b"\x89PNG")
    assert text.count("\n") <= 100
    for command in re.findall(r"^make ([\w-]+)", text, re.M):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), command
    for link in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (ROOT / link).exists(), link


def test_the_tour_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, names = run_blocks(ROOT / "docs" / "tour.md")
    assert names["table"].shape == (12, 6)
    printed = capsys.readouterr().out
    assert printed.startswith("finished at t=10")
    assert "\n1.13077034" in printed
    shown = [
        line for line in text.splitlines() if line.startswith(("hs.hitting_time", 'result["', "table.s", "tuple("))
    ]
    assert len(shown) == 5
    for line in shown:  # the comment begins with what is printed
        code, comment = re.split(" +# ", line, maxsplit=1)
        assert comment.startswith(repr(eval(code, names))), line


STARTING = {
    *(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output", "getoutput")),
    *(f"os.{name}" for name in ("fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp")),
    *("pty.fork", "pty.spawn", "multiprocessing.Process", "multiprocessing.Pool"),
}


def starting(path: Path) -> list[str]:
    """Where a file starts a process itself."""
    faults = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        names = [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        faults += [f"{path.name}:{node.lineno}: {name}" for name in names if name in STARTING]
    return faults


def test_tests_start_processes_through_children_alone() -> None:
    """Which ends them whatever happens. ``killing.py``, a program of its own, forks; who starts it ends those too."""
    alone = {"children.py", "killing.py"}
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in alone]
    assert [fault for path in paths for fault in starting(path)] == []
    assert starting(ROOT / "tests" / "support" / "children.py") != []
