"""Exports that are imported on first use (PEP 562), so that importing a package stays fast."""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Callable
from pathlib import Path


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` for a package that exports what its ``__init__.py``, ``file``,
    imports under ``if TYPE_CHECKING:``. Type checkers and readers see those imports; each runs when its name is first
    used.

    An unknown name raises an AttributeError that suggests the closest one.

    >>> import helmscope
    >>> get, _, names = lazy_exports("helmscope", helmscope.__file__)
    >>> "integrate" in names, get("sphere").__name__
    (True, 'helmscope.geometry.sphere')
    """
    modules = _module_of_each_name(Path(file).read_text(encoding="utf8"))

    def get(name: str) -> object:
        if name not in modules:
            close = difflib.get_close_matches(name, modules, n=1)
            hint = f": did you mean '{close[0]}'?" if close else ""
            raise AttributeError(f"module '{package}' has no attribute '{name}'{hint}")
        module = modules[name]
        if module == package:  # a subpackage or module of the package
            return importlib.import_module(f"{module}.{name}")
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            return importlib.import_module(f"{module}.{name}")

    names = sorted(modules)
    return get, lambda: names, names


def _module_of_each_name(source: str) -> dict[str, str]:
    """The module that each name is imported from under ``if TYPE_CHECKING:``."""
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}
