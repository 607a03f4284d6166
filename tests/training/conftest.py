"""Imports the modules of ``training/`` as its commands do, for one test module at a time."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "training"


@pytest.fixture(scope="module")
def training():
    """The modules of ``training/``. They import each other by bare names such as ``data``, hidden from other tests."""
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in names:
            del sys.modules[name]
