"""Exports of packages and modules (PEP 562): imported on first use, so that importing a package stays fast, and listed
by ``dir`` without the imports of the module itself.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn


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
            raise _unknown(package, name, modules)
        module = modules[name]
        if module == package:  # a subpackage or module of the package
            return importlib.import_module(f"{module}.{name}")
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            return importlib.import_module(f"{module}.{name}")

    names = sorted(modules)
    return get, lambda: names, names


def listed_exports(module: str, names: Sequence[str]) -> tuple[Callable[[str], NoReturn], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a module that imports everything at once and lists its exports in
    ``__all__``: ``dir`` shows these ``names`` only, and an unknown name suggests the closest one.

    >>> get, names = listed_exports("helmscope.store", ["RunFolder", "Manifest"])
    >>> names()
    ['Manifest', 'RunFolder']
    >>> get("Runfolder")
    Traceback (most recent call last):
    AttributeError: module 'helmscope.store' has no attribute 'Runfolder': did you mean 'RunFolder'?
    """

    def get(name: str) -> NoReturn:
        raise _unknown(module, name, names)

    return get, lambda: sorted(names)


def _unknown(module: str, name: str, names: Iterable[str]) -> AttributeError:
    close = difflib.get_close_matches(name, list(names), n=1)
    hint = f": did you mean '{close[0]}'?" if close else ""
    return AttributeError(f"module '{module}' has no attribute '{name}'{hint}")


def _module_of_each_name(source: str) -> dict[str, str]:
    """The module that each name is imported from under ``if TYPE_CHECKING:``."""
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}
