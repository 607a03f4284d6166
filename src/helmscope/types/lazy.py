"""Exports that are imported on first use (PEP 562), so that importing a package stays cheap."""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Callable
from pathlib import Path


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package that exports what its ``__init__.py``, the ``file``,
    imports under ``if TYPE_CHECKING:``. Type checkers and readers see those imports; nothing runs until a name is used.

    An unknown name is an AttributeError that offers the nearest one.

    >>> import helmscope
    >>> get, _, names = lazy_exports("helmscope", helmscope.__file__)
    >>> "integrate" in names, get("sphere").__name__
    (True, 'helmscope.geometry.sphere')
    """
    homes = _listed(Path(file).read_text(encoding="utf8"))

    def get(name: str) -> object:
        if name not in homes:
            near = difflib.get_close_matches(name, homes, n=1)
            hint = f": did you mean '{near[0]}'?" if near else ""
            raise AttributeError(f"module '{package}' has no attribute '{name}'{hint}")
        home = homes[name]
        if home == package:  # a subpackage or module of its own
            return importlib.import_module(f"{home}.{name}")
        try:
            return getattr(importlib.import_module(home), name)
        except AttributeError:
            return importlib.import_module(f"{home}.{name}")

    names = sorted(homes)
    return get, lambda: names, names


def _listed(source: str) -> dict[str, str]:
    """The module that each name is imported from under ``if TYPE_CHECKING:``."""
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}
