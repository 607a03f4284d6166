"""What several tests share."""

from __future__ import annotations

import importlib
import os
import signal
import sys

os.environ.setdefault("MKL_CBWR", "AUTO")  # which MKL reads when it is first used; the command line sets it too

import pytest
import torch

from helmscope import cli
from helmscope.kernels import flash
from support.children import end_workers

if not torch.cuda.is_available():  # before anything imports triton: GPU kernels run under its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _loop_bounds():
    """The interpreter of Triton 3.6 takes int() of arrays of one element, which NumPy 2.4 refuses.

    Mended when ``Flash`` first asks for its kernel, so that no other test imports triton.
    """

    def whole(*bounds):
        return range(*(b.handle.data.item() if hasattr(b, "handle") else b for b in bounds))

    def mended(*given, split=flash._split):
        importlib.import_module("triton.runtime.interpreter").range = whole
        return split(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "_split", mended)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_workers_left():
    """joblib keeps its workers from one test to the next, but not beyond the last."""
    yield
    end_workers()


@pytest.fixture
def on_signal():
    """Sets what this process does on a signal, until the end of the test."""
    earlier = {}

    def set_handler(number: signal.Signals, handler: object) -> None:
        earlier[number] = signal.signal(number, handler)

    yield set_handler
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.fixture
def helmscope(monkeypatch, capsys, tmp_path):
    """Runs ``helmscope WORDS...`` in this process, in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["helmscope", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def no_picture(monkeypatch):
    """Drawing takes most of the time of a small run."""
    monkeypatch.setattr("helmscope.plots.style.png", lambda figure: b"")
