"""Exports of packages and modules (PEP 562): imported on first use, so that importing a package stays fast, and listed
by ``dir`` without the imports of the module itself.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from helmscope.types.errors import HelmscopeError
from helmscope.types.similar import similar_names

OTHER_WORDS = {"simulate": "hs.integrate"}  # what other libraries and our command line call a function


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` for a package that exports what its ``__init__.py``, ``file``,
    imports under ``if TYPE_CHECKING:``. Type checkers and readers see those imports; each runs when its name is first
    used.

    An export has precedence over a submodule of the same name: ``observe.track`` is the function, also after the module
    ``helmscope.observe.track`` is imported. An unknown name raises an AttributeError that says which package exports
    it, or suggests the closest name.

    >>> import helmscope
    >>> get, _, names = lazy_exports("helmscope", helmscope.__file__)
    >>> "integrate" in names, get("sphere").__name__
    (True, 'helmscope.geometry.sphere')
    """
    modules = _module_of_each_name(Path(file).read_text(encoding="utf8"))

    def get(name: str) -> object:
        if name not in modules:
            raise _unknown(package, name, modules)
        source = importlib.import_module(modules[name])
        if source.__name__ != package and name in vars(source):
            return vars(source)[name]
        return importlib.import_module(f"{modules[name]}.{name}")  # a subpackage or module

    class Package(ModuleType):
        """The package, to which the import system binds its submodules unless they would hide an export."""

        def __setattr__(self, name: str, value: object) -> None:
            if not (isinstance(value, ModuleType) and modules.get(name, package) != package):
                super().__setattr__(name, value)

        def __call__(self, *args: object, **options: object) -> NoReturn:
            raise _not_a_function(self.__name__)

    sys.modules[package].__class__ = Package
    names = sorted(modules)
    return get, lambda: names, names


def listed_exports(
    module: str, names: Sequence[str], example: str = ""
) -> tuple[Callable[[str], NoReturn], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a module that imports everything at once and lists its exports in
    ``__all__``: ``dir`` shows these ``names`` only, and an unknown name suggests the closest one. Calling the module
    itself, which stands among functions as ``hs.rank``, raises a HelmscopeError that names its function ``example``.

    >>> get, names = listed_exports("helmscope.store", ["RunFolder", "Manifest"])
    >>> names()
    ['Manifest', 'RunFolder']
    >>> get("Runfolder")
    Traceback (most recent call last):
    AttributeError: module 'helmscope.store' has no attribute 'Runfolder': did you mean 'RunFolder'?
    """

    def get(name: str) -> NoReturn:
        raise _unknown(module, name, names)

    class Functions(ModuleType):
        """The module, which is no function."""

        def __call__(self, *args: object, **options: object) -> NoReturn:
            raise _not_a_function(module, example)

    if module in sys.modules:
        sys.modules[module].__class__ = Functions
    return get, lambda: sorted(names)


def _not_a_function(module: str, example: str = "") -> HelmscopeError:
    """The error of calling a module; ``example`` is one of its functions."""
    places = (name for name, place in _places().items() if place == f"hs.{name}")
    short = module.rpartition(".")[2]
    name = f"hs.{short}" if short in places else module.replace("helmscope", "hs", 1)
    hint = (
        f"call one of its functions, such as {name}.{example}(...)" if example else f"dir({name}) lists its functions"
    )
    return HelmscopeError(f"{name} is a module, but only a function can be called: {hint}")


def _unknown(module: str, name: str, names: Iterable[str]) -> AttributeError:
    message, own = f"module '{module}' has no attribute '{name}'", set(names)
    places = {} if name.startswith("_") else _places()
    if name in places:
        return AttributeError(f"{message}: it is {places[name]}")
    if name in OTHER_WORDS and not name.startswith("_"):
        return AttributeError(f"{message}: it is {OTHER_WORDS[name]}")
    contained = similar_names(name, own, cutoff=1.0)  # here, before anything elsewhere
    close = contained or similar_names(name, own | set(places))
    if not close:
        return AttributeError(message)
    return AttributeError(f"{message}: did you mean '{close[0] if close[0] in own else places[close[0]]}'?")


@cache
def _places() -> dict[str, str]:
    """How to write each public name: ``hs.NAME``, or else ``hs.PACKAGE.NAME``. Read from the sources, since importing
    all packages would take seconds.
    """
    root = Path(__file__).parents[1]
    top = _module_of_each_name((root / "__init__.py").read_text(encoding="utf8"))
    places = {name: f"hs.{name}" for name in top}
    for package, module in top.items():
        folder = root.joinpath(*module.split(".")[1:])
        for file in (folder / package / "__init__.py", folder / f"{package}.py"):
            # a disk that ignores case has types/interval.py also for the class types.Interval
            if package.islower() and file.is_file():
                for name in _exports(file.read_text(encoding="utf8")):
                    places.setdefault(name, f"hs.{package}.{name}")
    return places


def _exports(source: str) -> list[str]:
    """The names in a literal ``__all__``, or else those imported under ``if TYPE_CHECKING:``."""
    for node in ast.parse(source).body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List)
        ):
            return list(ast.literal_eval(node.value))
    return list(_module_of_each_name(source))


def _module_of_each_name(source: str) -> dict[str, str]:
    """The module that each name is imported from under ``if TYPE_CHECKING:``."""
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}
