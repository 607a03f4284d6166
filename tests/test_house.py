"""The house stands: packages import only from packages above them, exports are lazy and complete, versions agree."""

import ast
import io
import operator
import re
import shlex
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Protocol

import pytest
import typer
from typer.main import get_command

import helmscope as hs
from helmscope import cli
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import experiments
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
    """What breaks the order: a package that is not in it, an import from below, an import through the front door."""
    faults = []
    for path in sorted(root.rglob("*.py")):
        package = path.relative_to(root).with_suffix("").parts[0]
        if package in ("__init__", "__main__"):
            continue
        if package not in ORDER:
            faults.append(f"{path.name}: '{package}' is not a package of the library")
            continue
        for name, line in imported(path):
            parts = name.split(".")
            if (path.relative_to(root).as_posix(), name) in REACHES_DOWN:
                continue
            if len(parts) < 2 or parts[1] not in ORDER:
                faults.append(f"{path.name}:{line}: {name} is not in a package")
            elif ORDER.index(parts[1]) > ORDER.index(package):
                faults.append(f"{path.name}:{line}: {package} imports {parts[1]}")
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


COMPUTING = ("geometry", "theory", "kernels", "fields", "solve", "meanfield", "observe")
PRODUCTS = {"addmm", "baddbmm", "bmm", "einsum", "matmul", "mm", "tensordot"}
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor"}
FACTORIES |= {"zeros"}
# what multiplies arrays of NumPy, and a part of a decorated function
SAFE = {
    "committor_chain.estimate_transition_matrix",
    "equiangular._decay_integral",
    "hodge_gaussian._energy_terms",
    "hodge_profile._chebyshev",
    "hull._distance_from_origin",
}
SAFE |= {"krylov._deflated", "surface.hessian"}


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


@pytest.mark.parametrize("package", COMPUTING)
def test_autocast_reaches_no_matrix_product(package: str) -> None:
    found = {
        f"{path.stem}.{name}"
        for path in (SOURCE / package).glob("*.py")
        for name in exposed_products(ast.parse(path.read_text()))
    }
    assert found - SAFE == set(), "decorate them with full_precision"


@pytest.mark.parametrize("package", COMPUTING)
def test_new_tensors_name_their_device(package: str) -> None:
    """Else they would lie on the caller's default device, beside tokens on another."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in (SOURCE / package).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if called_of_torch(node) in FACTORIES and not {"device", None} & {word.arg for word in node.keywords}
    ]
    assert found == []


PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
PUBLIC = [package for package in PACKAGES if package in hs.__all__]


def exports(module: ModuleType) -> list[str]:
    """The public names of a module: those in ``__all__``, or else those that it defines."""
    own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
    return [name for name in getattr(module, "__all__", own) if not name.startswith("_")]


def modules_below(module: ModuleType) -> dict[str, ModuleType]:
    """The module and all modules that it exports, and those export, by name: hs, hs.fields, hs.geometry.sphere, ..."""
    found, queue = {}, [module]
    while queue:
        module = queue.pop()
        if module.__name__ not in found:
            found[module.__name__] = module
            queue += [part for name in exports(module) if isinstance(part := getattr(module, name), ModuleType)]
    return found


EXPORTED = modules_below(hs)


def test_few_names_stand_at_the_top() -> None:
    assert len(hs.__all__) < 80
    assert set(hs.__all__) <= {*dir(hs), "__version__"}


@pytest.mark.parametrize("module", EXPORTED.values(), ids=EXPORTED)
def test_every_export_is_there_and_documented_with_an_example(module: ModuleType) -> None:
    assert module.__doc__
    things = {name: getattr(module, name) for name in exports(module)}
    assert things
    named = {name: thing.__doc__ or "" for name, thing in things.items() if not isinstance(thing, ModuleType)}
    assert [name for name, text in named.items() if ">>>" not in text] == []


def test_modules_within_packages_are_checked_too() -> None:
    names = {"helmscope", "helmscope.fields", "helmscope.fields.noise", "helmscope.geometry.sphere"}
    assert names <= set(EXPORTED)
    assert {f"helmscope.{package}" for package in PUBLIC} <= set(EXPORTED)


def methods_without_example(kind: type, protocols: Sequence[type] = ()) -> Iterator[str]:
    """The public methods that a class itself introduces, and whose docstrings have no example.

    Overridden methods are documented where the base class, or a protocol of the package, introduces them, and
    properties by the class.
    """
    bases = (*kind.__bases__, *(protocol for protocol in protocols if protocol is not kind))
    for name, member in vars(kind).items():
        introduced = not any(hasattr(base, name) for base in bases)
        method = isinstance(member, FunctionType | classmethod | staticmethod)
        if method and introduced and not name.startswith("_") and ">>>" not in (member.__doc__ or ""):
            yield f"{kind.__name__}.{name}"


@pytest.mark.parametrize("module", EXPORTED.values(), ids=EXPORTED)
def test_every_method_of_an_exported_class_has_an_example(module: ModuleType) -> None:
    kinds = [thing for name in exports(module) if isinstance(thing := getattr(module, name), type)]
    protocols = [kind for kind in kinds if getattr(kind, "_is_protocol", False)]
    assert [name for kind in kinds for name in methods_without_example(kind, protocols)] == []


def test_all_rooms_together_have_many_classes() -> None:
    """Else the test above would check nothing."""
    exported = {getattr(getattr(hs, package), name) for package in PUBLIC for name in getattr(hs, package).__all__}
    assert sum(isinstance(thing, type) for thing in exported) > 100


def test_a_method_without_example_is_seen() -> None:
    class Base:
        def shared(self) -> None: ...

    class Bare(Base):
        def shared(self) -> None: ...

        def bare(self) -> None:
            """Does nothing."""

        @classmethod
        def made(cls) -> None: ...

        def short_repr(self) -> None:
            """
            >>> Bare().shown()
            """

        @property
        def size(self) -> int:
            return 0

        def _private(self) -> None: ...

    class Promised(Protocol):
        def bare(self) -> None: ...

    assert list(methods_without_example(Bare)) == ["Bare.bare", "Bare.made"]
    assert list(methods_without_example(Bare, [Promised])) == ["Bare.made"]
    assert list(methods_without_example(Promised, [Promised])) == ["Promised.bare"]


def test_an_unknown_export_offers_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'integrate'"):
        _ = hs.integrat


@pytest.mark.parametrize(
    ("package", "name", "hint"),
    [
        ("", "AblateHead", ": it is hs.intervene.AblateHead"),
        ("", "IsotropicNoise", ": it is hs.fields.IsotropicNoise"),
        ("", "head_ablation_loss", ": it is hs.observe.head_ablation_loss"),
        ("", "untrained_twin", ": it is hs.models.untrained_twin"),
        ("claims", "Verdict", ": it is hs.Verdict"),
        ("store", "integrate", ": it is hs.integrate"),
        ("", "AblateHed", ": did you mean 'hs.intervene.AblateHead'?"),
        ("", "simulate", ": it is hs.integrate"),
        ("", "sa", ": did you mean 'SA'?"),
        ("", "usa", ": did you mean 'USA'?"),
        ("", "mlp", ": did you mean 'MLP'?"),
        ("", "loss", ": did you mean 'next_token_loss'?"),
        ("", "xyzzyx", ""),
    ],
)
def test_an_unknown_name_says_which_package_has_it(package: str, name: str, hint: str) -> None:
    module = getattr(hs, package) if package else hs
    with pytest.raises(AttributeError) as error:
        getattr(module, name)
    assert str(error.value) == f"module '{module.__name__}' has no attribute '{name}'{hint}"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rank", "call one of its functions, such as hs.rank.effective_rank(...)"),
        ("kernel", "call one of its functions, such as hs.kernel.row_entropy(...)"),
        ("noise", "call one of its functions, such as hs.noise.IsotropicNoise(...)"),
        ("sphere", "call one of its functions, such as hs.sphere.angle(...)"),
        ("activations", "call one of its functions, such as hs.activations.GELU(...)"),
        ("observe", "dir(hs.observe) lists its functions"),
        ("types", "dir(hs.types) lists its functions"),
        ("geometry.linkage", "dir(hs.geometry.linkage) lists its functions"),
    ],
)
def test_a_module_that_is_called_names_a_function(name: str, hint: str) -> None:
    module = operator.attrgetter(name)(hs)
    with pytest.raises(hs.HelmscopeError) as error:
        module(1, key=2)
    assert str(error.value) == f"hs.{name} is a module, but only a function can be called: {hint}"
    if "such as" in hint:
        assert hasattr(module, hint.split(".")[2].removesuffix("("))


def test_a_function_is_never_hidden_by_the_module_of_the_same_name() -> None:
    """In a new process, before and after the import of the modules."""
    code = """
import importlib, helmscope as hs
names = ["observe.track", "observe.overview", "observe.measure", "models.load", "models.record", "solve.integrate",
         "stats.summary", "theory.equiangular", "fields.helmholtz", "claims.sources", "claims.run_trials"]
for name in names:
    package, own = name.split(".")
    before = getattr(getattr(hs, package), own)
    module = importlib.import_module(f"helmscope.{name}")
    assert before is getattr(getattr(hs, package), own) is getattr(module, own), name
"""
    run_python(code, check=True)


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


def test_types_lists_no_helpers() -> None:
    """Argument checks and text helpers are shared by the packages, but users neither see nor rely on them."""
    assert not {"check_integer", "pluralized", "html_table", "type_with_article", "ConciseRepr"} & set(dir(hs.types))
    assert {"Trajectory", "System", "Instrument", "Interval", "Region", "Verdict", "Ruling"} <= set(dir(hs.types))


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
    assert f"version = {{{hs.__version__}}}" in (ROOT / "docs" / "references.md").read_text()
    assert hs.__version__.split(".dev")[0] in (ROOT / "CHANGELOG.md").read_text()


def run_blocks(text: str, names: dict[str, object]) -> None:
    """Run the Python blocks of a document in their order; ``names`` receives what they define."""
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, "document", "exec"), names)


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, names = (ROOT / "README.md").read_text(), {}
    run_blocks(text, names)
    assert names["sim"].outcome.ok
    assert (tmp_path / "clustering.png").read_bytes().startswith(b"\x89PNG")
    assert text.count("\n") <= 80
    assert text.count("![") == 1
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    code = [line for line in block.splitlines() if line and not line.startswith(("#", "import"))]
    assert len(code) == 3
    assert "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" in text
    assert "source .venv/bin/activate" in text
    for command in re.findall(r"^make ([\w-]+)", text, re.M):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), command
    for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
        assert (ROOT / link).exists(), link
    assert f"{len(read_catalogue())} claims, of which {len(experiments())} have an experiment" in text


def commands(path: Path) -> list[list[str]]:
    """The words of every ``helmscope ...`` line in the code blocks of a document, without comments."""
    blocks = re.findall(r"```\w*\n(.*?)```", path.read_text(), re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("helmscope ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


WITH_COMMANDS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if commands(path)]


def parse(words: Sequence[str]) -> None:
    """Parse a command line without running it; unknown verbs and options, and bad values, raise."""
    command, rest, context = get_command(cli.app), list(words), None
    while True:
        context = command.make_context(command.name, rest, parent=context)
        if not hasattr(command, "commands"):
            return
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_documented_commands_can_be_parsed(path: Path) -> None:
    for words in commands(path):
        if not {"-h", "--help", "--version", "--completion"} & set(words):
            parse(words)


@pytest.mark.parametrize(
    "line",
    ["phase --dims 2 --sampels 3", "phse", "claims tset rate", "phase --samples", "claims list rate", "runs a b c"],
)
def test_a_command_that_does_not_exist_is_seen(line: str) -> None:
    with pytest.raises(typer.TyperException):
        parse(line.split())


def test_the_commands_of_the_readme(helmscope: Callable[..., tuple[object, str, str]], tmp_path: Path) -> None:
    """The quick one runs; the others, whose verbs have tests of their own, name what there is."""
    measure, trials, phase, density = commands(ROOT / "README.md")
    code, out, err = helmscope(*density)
    assert (code, density[0]) == (0, "density"), err
    assert "order_parameter" in out
    assert (tmp_path / density[-1]).read_bytes().startswith(b"\x89PNG")
    assert measure == ["measure", "A", "--quick"]
    assert phase[0] == "phase"
    assert trials[:2] == ["claims", "test"]
    assert trials[-2:] == ["--model", "A"]
    assert set(trials[2:-2]) <= set(read_catalogue())


def test_the_comments_of_the_tour_stand_in_one_column() -> None:
    """61, or two spaces behind code that is longer."""
    for block in re.findall(r"```python\n(.*?)```", TOUR, re.S):
        lines = block.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(block).readline):
            if token.type == tokenize.COMMENT and (code := token.line[: token.start[1]].rstrip()):
                column = 61 if len(code) < 60 else len(code) + 2
                assert token.start[1] == column, lines[token.start[0] - 1]


TOUR = (ROOT / "docs" / "tour.md").read_text()
# the second section goes on with the tokens of the first; the others need only its imports
FIRST, SECOND, *OTHERS = [part for part in re.split(r"(?m)^(?=## )", TOUR) if "```python" in part]
SECTIONS = [f"{FIRST}{SECOND}", *OTHERS]
SHOWN = ("hs.hitting_time", 'result["', "table.s", "tuple(")  # the comment of such a line begins with what is printed
PRINTED = {"## Simulate": ("finished at t=10", "\n1.13077034"), "## Densities": ("finished at t=12",)}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.split("\n")[0])
def test_the_tour_runs(
    section: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec("import torch\nimport helmscope as hs", names)
    run_blocks(section, names)
    printed = capsys.readouterr().out
    for heading, words in PRINTED.items():
        if section.startswith(heading):
            assert all(word in printed for word in words)
    if section.startswith("## A real transformer"):
        assert names["table"].shape == (12, 6)
    for line in section.splitlines():
        if line.startswith(SHOWN):
            code, comment = re.split(" +# ", line, maxsplit=1)
            assert comment.startswith(repr(eval(code, names))), line


def test_the_sections_of_the_tour() -> None:
    assert len(SECTIONS) == 7
    assert sum(section.count("```python") for section in SECTIONS) == TOUR.count("```python")
    assert len([line for line in TOUR.splitlines() if line.startswith(SHOWN)]) == 5
    assert all(any(section.startswith(heading) for section in SECTIONS) for heading in PRINTED)


def documented(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The docstrings of the exports of a module, and of the members of its classes."""
    for name in exports(module):
        thing = getattr(module, name)
        if isinstance(thing, ModuleType):
            continue
        yield name, thing.__doc__ or ""
        for member, value in vars(thing).items() if isinstance(thing, type) else ():
            if isinstance(doc := getattr(value, "__doc__", None), str):
                yield f"{name}.{member}", doc


# help() shows a docstring without the module around it
ELSEWHERE = re.compile(r"\b(?:see|as|formulas?|equations?|forms?|ranks|generator|table|defined|given)\s+above\b")


@pytest.mark.parametrize("module", EXPORTED.values(), ids=EXPORTED)
def test_docstrings_contain_the_formulas_that_they_mention(module: ModuleType) -> None:
    assert [name for name, text in documented(module) if ELSEWHERE.search(text)] == []


def test_a_docstring_that_refers_elsewhere_is_seen() -> None:
    texts = ("term by term; see above.", "(equations above)", "logits as\n    above).", "the closed form above, with")
    assert all(ELSEWHERE.search(text) for text in texts)
    assert not ELSEWHERE.search("the share of inner products above each of ``levels``")


def test_errors_name_types_with_their_article() -> None:
    """``type_with_article``: "an int", not "a int"."""
    bare = re.compile(r"\ban? \{type\([^{}]*\)\.__name__\}")
    assert [path.name for path in SOURCE.rglob("*.py") if bare.search(path.read_text())] == []
    assert bare.search('f"x is a {type(x).__name__}, but it must be a tensor"')


DOTTED = re.compile(r"(?<![\w.])hs((?:\.[A-Za-z_]\w*)+)")


def unknown_names(text: str) -> list[str]:
    """The names ``hs.A.B...`` in a text that do not exist; attributes of functions and classes are not followed."""
    faults = []
    for dotted in sorted(set(DOTTED.findall(text))):
        thing: object = hs
        for name in dotted.split(".")[1:]:
            if name == "NAME" or not isinstance(thing, ModuleType):  # NAME stands for any name
                break
            if not hasattr(thing, name):
                faults.append(f"hs{dotted}")
                break
            thing = getattr(thing, name)
    return faults


WITH_NAMES = [".ci/wheel-check", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "training/README.md"]
WITH_NAMES += sorted(
    path.relative_to(ROOT).as_posix()
    for folder, pattern in (("docs", "*.md"), ("docs", "*.py"), ("examples", "**/*.py"))
    for path in (ROOT / folder).glob(pattern)
)


@pytest.mark.parametrize("path", WITH_NAMES)
def test_documents_and_scripts_use_names_that_exist(path: str) -> None:
    assert unknown_names((ROOT / path).read_text()) == []


def test_a_name_that_does_not_exist_is_seen() -> None:
    text = "hs.load, `hs.models.bundled_texts()`, (hs.intervene.Reweigh), hs.integrate.nothing, shs.no, hs.Sitee.MLP"
    assert unknown_names(text) == ["hs.Sitee.MLP", "hs.intervene.Reweigh", "hs.models.bundled_texts"]


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
