"""The folder ``training/`` as its own commands see it, and not a moment longer."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "training"


@pytest.fixture(scope="module")
def training():
    """Its modules by name. They find each other by bare names such as ``data``, which nobody else is to find."""
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in names:
            del sys.modules[name]
