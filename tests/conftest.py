"""What several tests of the command line share."""

from __future__ import annotations

import sys

import pytest

from helmscope import cli


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
