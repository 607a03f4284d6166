"""``python -m helmscope``."""

from __future__ import annotations

import sys

from support.children import run_child


def test_the_module_is_the_command():
    answer = run_child([sys.executable, "-m", "helmscope", "--help"], check=True)
    assert "simulate" in answer.stdout
