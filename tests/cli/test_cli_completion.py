"""Shell completion: the script of ``helmscope --completion``, run by bash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.main import get_command

from helmscope.claims.reading import read_catalogue
from helmscope.cli import app
from helmscope.cli.completion import completion_script
from support.children import run_child

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _helmscope; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "helmscope.bash"
    path.write_text(completion_script("bash", get_command(app)))
    return path


def offered(script: Path, *words: str) -> list[str]:
    """The completions that bash suggests for the last word."""
    command = ["bash", "--norc", "-eu", "-c", ASK, "bash", script, "helmscope", *words]
    return run_child(command, check=True).stdout.split()


def test_bash_completes_verbs_options_and_names(script: Path) -> None:
    assert {"report", "simulate", "phase", "run", "runs", "claims", "--version"} <= set(offered(script, ""))
    assert offered(script, "s") == ["simulate"]
    assert offered(script, "simulate", "--be") == ["--beta"]
    assert offered(script, "simulate", "--beta", "4", "--stepper", "geo") == [
        *("geodesic-euler", "geodesic-heun", "geodesic-rk4")
    ]
    assert offered(script, "phase", "--no-p") == ["--no-published"]
    assert offered(script, "phase", "--field", "") == ["sa", "usa", "sinkhorn"]
    assert offered(script, "claims", "")[:3] == ["list", "show", "test"]
    assert offered(script, "claims", "test", "kuram") == ["kuramoto"]
    assert set(read_catalogue()) <= set(offered(script, "claims", "show", ""))
    assert offered(script, "simulate", "--out", "simu") == []  # a file, which bash itself completes
    assert offered(script, "simulate", "--out", "report", "--see") == ["--seed"]  # no second verb


def test_every_option_of_the_parser_is_suggested(script: Path) -> None:
    for name, verb in get_command(app).commands.items():
        if not hasattr(verb, "commands"):
            options = {each for param in verb.params for each in (*param.opts, *param.secondary_opts) if each[0] == "-"}
            assert options | {"--help"} == set(offered(script, name, "-"))


def test_the_command_prints_it(helmscope, tmp_path: Path) -> None:
    code, out, err = helmscope("--completion", "bash")
    assert (code, err) == (0, "")
    assert "complete -o default -F _helmscope helmscope" in out
    code, fish, _ = helmscope("--completion", "fish")
    assert code == 0
    assert "-l stepper -x -a 'adaptive euler heun rk4" in fish
    assert all(line.startswith("complete -c helmscope -n '") for line in fish.splitlines())
    code, zsh, _ = helmscope("--completion", "zsh")
    assert (code, zsh) == (0, f"autoload -U +X bashcompinit && bashcompinit\n{out}")
    code, out, err = helmscope("--completion", "bsh")
    assert (code, out) == (2, "")
    assert err == "helmscope: unknown shell 'bsh': did you mean 'bash'? Allowed: bash, fish, zsh\n"
    assert os.listdir(tmp_path) == []
