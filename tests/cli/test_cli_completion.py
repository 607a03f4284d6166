"""Shell completion: the scripts of ``helmscope --completion``, run by bash, and by zsh and fish if installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.main import get_command

from helmscope.claims.reading import read_catalogue
from helmscope.cli import app
from helmscope.cli.completion import ZSH_SETUP, completion_script
from support.children import run_child

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _helmscope; printf '%s\\n' "${COMPREPLY[@]}"
"""


ZSH_SESSION = """
zmodload zsh/zpty
zpty session zsh -f -i
wait_for() {
    local tries part; all=
    for ((tries = 0; tries < 300; tries++)); do
        while zpty -r -t session part; do all+=$part; done
        [[ $all == *$1* ]] && return
        sleep 0.1
    done
}
zpty -w session "PS1= RPS1=; source ${(q)1} && echo lo''aded"; wait_for loaded
zpty -n -w session "$2"$'\\t'; wait_for "$3"
print -r -- "$all"
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
    assert offered(script, "density", "--field", "") == ["sa", "usa", "force", "none"]
    assert offered(script, "density", "--process", "s") == ["stratonovich"]
    assert offered(script, "density", "--start", "") == ["uniform", "vmf"]
    assert offered(script, "simulate", "--start", "o") == ["orthonormal"]
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
    assert (code, zsh) == (0, ZSH_SETUP + out)
    code, out, err = helmscope("--completion", "bsh")
    assert (code, out) == (2, "")
    assert err == "helmscope: unknown shell 'bsh': did you mean 'bash'? Allowed: bash, fish, zsh\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_verbs_options_and_names(tmp_path: Path) -> None:
    path = tmp_path / "helmscope.fish"
    path.write_text(completion_script("fish", get_command(app)))

    def completed(line: str) -> list[str]:
        code = 'source $argv[1]; complete -C "$argv[2]"'
        out = run_child(["fish", "--no-config", "-c", code, str(path), line], check=True).stdout
        return [row.split("\t")[0] for row in out.splitlines()]

    assert completed("helmscope sim") == ["simulate"]
    assert completed("helmscope simulate --be") == ["--beta"]
    assert completed("helmscope phase --field ") == ["sa", "sinkhorn", "usa"]
    assert completed("helmscope claims ") == ["list", "show", "test"]
    assert completed("helmscope claims test kuram") == ["kuramoto"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(
    ("line", "completed"),
    [("helmscope sim", "simulate"), ("helmscope simulate --be", "--beta"), ("helmscope claims test kuram", "kuramoto")],
)
def test_zsh_completes_without_any_setup(tmp_path: Path, line: str, completed: str) -> None:
    path = tmp_path / "helmscope.zsh"
    path.write_text(completion_script("zsh", get_command(app)))
    out = run_child(["zsh", "-f", "-c", ZSH_SESSION, "zsh", str(path), line, completed], check=True).stdout
    assert "not found" not in out
    assert completed in out
