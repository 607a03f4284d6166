"""The code that an experiment depends on: the modules of this package that its file imports, and theirs.

Imports are read from the source, so that nothing is imported to find them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from helmscope.store.manifest import hash_bytes, hash_file

PACKAGE = "helmscope"
ROOT = Path(__file__).parents[1]


def imported_modules(files: Iterable[Path], root: Path = ROOT) -> list[Path]:
    """The modules of the package in ``root`` that the given files import, directly or through other modules, sorted.

    Imports inside functions count; those for type checkers only do not, except where a package lists a name that is
    imported on first use. ``import helmscope`` counts as all modules of the package.

    >>> rate = ROOT / "claims" / "experiments" / "rate.py"
    >>> {"types", "stats", "solve"} <= {path.parent.name for path in imported_modules([rate])}
    True
    """
    found: set[Path] = set()
    waiting = [path for file in files for path in _imports(file, root)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imports(path, root)
    return sorted(found)


def imported_hash(files: Iterable[Path], root: Path = ROOT) -> str:
    """SHA-256 of the contents of ``imported_modules``, with their paths inside the package.

    >>> len(imported_hash([ROOT / "claims" / "experiments" / "rate.py"]))
    64
    """
    lines = [f"{path.relative_to(root).as_posix()} {hash_file(path)}" for path in imported_modules(files, root)]
    return hash_bytes("\n".join(lines).encode())


def _imports(file: Path, root: Path) -> tuple[Path, ...]:
    stat = file.stat()
    return _parsed_imports(file, root, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4096)
def _parsed_imports(file: Path, root: Path, modified: int, size: int) -> tuple[Path, ...]:
    """The modules that one file imports; the time and size of the file make an edit known to the cache."""
    tree = ast.parse(file.read_bytes())
    return tuple(path for node in _import_statements(tree) for path in _targets(node, root))


def _import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports of a module but those for type checkers only."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and _names(node.test, "TYPE_CHECKING"):
            waiting += node.orelse
        elif not isinstance(node, ast.expr):  # an import is a statement, and no expression holds one
            waiting += ast.iter_child_nodes(node)


def _names(node: ast.expr, name: str) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) == name


def _targets(node: ast.Import | ast.ImportFrom, root: Path) -> Iterator[Path]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _module_files(alias.name, root)
        return
    if node.level or node.module is None:
        return
    for alias in node.names:
        submodule = list(_module_files(f"{node.module}.{alias.name}", root))
        yield from submodule or _module_files(node.module, root)
        if not submodule:
            yield from _exported(node.module, alias.name, root)


def _module_files(name: str, root: Path) -> Iterator[Path]:
    """The file of a module of the package; all files for the package itself."""
    top, *parts = name.split(".")
    if top != PACKAGE:
        return
    if not parts:
        yield from sorted(root.rglob("*.py"))
        return
    path = root.joinpath(*parts)
    yield from (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file())


def _exported(module: str, name: str, root: Path) -> Iterator[Path]:
    """The module from which a package takes a name that it lists for type checkers and imports on first use."""
    init = root.joinpath(*module.split(".")[1:], "__init__.py")
    if module == PACKAGE or not init.is_file():
        return
    for node in ast.walk(ast.parse(init.read_bytes())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and name in [each.asname or each.name for each in node.names]
        ):
            yield from list(_module_files(f"{node.module}.{name}", root)) or _module_files(node.module, root)
