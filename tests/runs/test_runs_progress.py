"""Progress: a bar on a terminal, plain lines elsewhere, with an estimate of the time left."""

from __future__ import annotations

import errno
import io
import re
import sys

import pytest

from helmscope.runs import Processes, Unit, UnitsFailed, progress, run_units
from helmscope.runs.progress import TimeLeft, import_announced, unit_progress
from helmscope.store import RunFolder
from support.toy_units import divide, manifest, mixture

MANIFEST = manifest()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def screen_lines(screen: Terminal) -> list[str]:
    """The lines that a terminal would show over time, without colors and cursor movements."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_plain_lines_report_the_first_unit_and_every_tenth(clock, capsys):
    with unit_progress("sweep", total=40, done=4, workers=1) as tick:
        for _ in range(36):
            clock[0] += 20.0
            tick()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "sweep: 40 units, 4 already done",
        "sweep: 5 of 40 units, about 12 min left",
        *(f"sweep: {done} of 40 units, about {left} left" for done, left in [(8, "11 min"), (12, "9 min")]),
        *(f"sweep: {done} of 40 units, about {left} min left" for done, left in [(16, 8), (20, 7), (24, 5), (28, 4)]),
        *("sweep: 32 of 40 units, about 3 min left", "sweep: 36 of 40 units, about 80 s left"),
        "sweep: 40 of 40 units, in 12 min",
    ]


def test_a_bar_on_a_terminal(clock, monkeypatch):
    screen = terminal(monkeypatch)
    with unit_progress("sweep", total=4, done=1, workers=1) as tick:
        for _ in range(3):
            clock[0] += 7200.0
            tick()
    lines = screen_lines(screen)
    assert lines[0] == "sweep: 4 units, 1 already done"
    assert re.fullmatch(r"sweep ━+ 4 of 4 units, in 6\.0 h", lines[-1])


def test_a_slow_import_is_announced_on_a_terminal_only(monkeypatch, tmp_path, capsys):
    for name in ("slow_one", "slow_two"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import_announced("slow_one")
    assert capsys.readouterr() == ("", "")
    screen = terminal(monkeypatch)
    import_announced("slow_two")
    import_announced("slow_two")  # imported already: nothing to announce
    line = "importing slow_two ..."
    assert screen.getvalue() == f"{line}\r{' ' * len(line)}\r"
    assert {"slow_one", "slow_two"} <= set(sys.modules)


@pytest.mark.parametrize("costs", [None, "equal"])
def test_the_estimate_accounts_for_parallel_jobs(costs):
    def remaining(seconds, *, done, left, workers):
        names = [str(k) for k in range(done + left)]
        ahead = TimeLeft(dict.fromkeys(names, 10.0) if costs else None, count=done + left, workers=workers)
        for name in names[:done]:
            ahead.finish(name)
        return ahead.seconds(seconds)

    # 8 units of 10 s on 4 processes: one is done, the other three are about to finish
    assert remaining(10.0, done=1, left=7, workers=4) == pytest.approx(17.5)
    assert remaining(10.0, done=4, left=4, workers=4) == pytest.approx(10.0)
    # fewer units than processes
    assert remaining(10.0, done=1, left=1, workers=8) == pytest.approx(5.0)
    assert remaining(30.0, done=3, left=5, workers=1) == pytest.approx(50.0)
    assert remaining(30.0, done=3, left=0, workers=1) == 0.0


def test_units_count_by_their_cost(clock, capsys):
    """Units that take twice what was estimated, the cheap ones first: 8 of 10 units are done in 1.6 % of the time."""
    costs = {f"cheap-{k}": 1.0 for k in range(8)} | {"dear-0": 192.0, "dear-1": 300.0}
    with unit_progress("trying", total=10, done=0, workers=1, costs=costs) as tick:
        for name, cost in costs.items():
            clock[0] += 2 * cost
            tick(name)
    truth = [2 * sum(list(costs.values())[k:]) for k in range(1, 10)]
    assert truth[-1] == 600
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert (first, last) == ("trying: 10 units, 0 already done", "trying: 10 of 10 units, in 17 min")
    said = [60 * int(re.search(r"about (\d+) min left", line).group(1)) for line in lines]
    # 0.5 at first, from the estimate; 0.79 when two fifths are done
    assert all(0.45 * true < each < 1.05 * true for each, true in zip(said, truth, strict=True))
    assert said[-1] == 60 * round(300 * (400 + 150) / (200 + 150) / 60)


def test_while_little_is_done_the_estimate_decides():
    """One unit of 0.1 s by the estimate took 0.02 s, or 10 s with the start of the process: by its speed alone the
    570 s left would become 114 s, or 16 hours."""
    ahead = TimeLeft({"tiny": 0.1, "half": 30.0, "rest": 540.0})
    ahead.finish("tiny")
    assert ahead.seconds(0.02) == pytest.approx(570.0, rel=1e-3)
    assert ahead.seconds(10.0) == pytest.approx(590.0, rel=2e-3)
    ahead.finish("half")
    ahead.finish("rest")
    assert ahead.seconds(6.02) == 0.0
    # four processes share what is left
    parallel = TimeLeft({str(k): 100.0 for k in range(40)}, workers=4)
    parallel.finish("0")
    assert parallel.seconds(100.0) == pytest.approx(3900 / 4)


@pytest.mark.parametrize("costs", [{"a": 1.0}, {"a": 0.0, "b": 5.0}])
def test_without_an_estimate_of_every_unit_they_count_equally(costs):
    ahead = TimeLeft(costs, count=2)
    ahead.finish("a")
    assert (ahead.share, ahead.seconds(3.0)) == (0.5, 3.0)


def test_a_bar_advances_by_cost(clock, monkeypatch):
    screen = terminal(monkeypatch)
    with unit_progress("sweep", total=2, done=0, workers=1, costs={"a": 1.0, "b": 99.0}) as tick:
        clock[0] += 3.0
        tick("a")
        clock[0] += 297.0
        tick("b")
    assert re.fullmatch(r"sweep ━+ 2 of 2 units, in 5 min", screen_lines(screen)[-1])


def test_a_run_weights_its_units(clock, tmp_path, capsys):
    """The first of two units has 1 % of the cost, and the clock stands still: 99 * 49.5 / 50.5 s are left."""
    units = [Unit("a", divide, {"a": 1.0, "b": 2.0}), Unit("b", divide, {"a": 1.0, "b": 4.0})]
    folder = RunFolder.new(tmp_path, "run")
    run_units(units, folder, manifest=MANIFEST, heading="dividing", costs={"a": 1.0, "b": 99.0})
    assert "dividing: 1 of 2 units, about 97 s left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.6, "60 s"),
        (99.0, "99 s"),
        (120.0, "2 min"),
        (5900.0, "98 min"),
        (6000.0, "1.7 h"),
        (1e6, "277.8 h"),
    ],
)
def test_durations(seconds, text):
    assert progress.format_duration(seconds) == text


@pytest.mark.parametrize("engine", [None, Processes(2)], ids=["serial", "processes"])
def test_a_run_reports_its_progress(tmp_path, capsys, engine):
    folder = RunFolder.create(tmp_path / "run")
    run_units(mixture(4), folder, manifest=MANIFEST, engine=engine)
    assert capsys.readouterr() == ("", "")
    (folder.path / "units" / "numbers-0.json").unlink()
    (folder.path / "units" / "noise-1.bin").unlink()
    run_units(mixture(4), folder, manifest=MANIFEST, engine=engine, heading="toys")
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = err.splitlines()
    assert first == "toys: 4 units, 2 already done"
    assert re.fullmatch(r"toys: 3 of 4 units, about \d+ s left", second)
    assert re.fullmatch(r"toys: 4 of 4 units, in \d+ s", third)


def test_failed_units_count_as_processed(tmp_path, capsys):
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(UnitsFailed):
        run_units([Unit("a", divide, {"a": 1, "b": 0})], folder, manifest=MANIFEST, heading="toys")
    assert capsys.readouterr().err.splitlines()[-1].startswith("toys: 1 of 1 unit, in ")


class Full(io.StringIO):
    """Standard error on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Gone(Terminal, Full):
    """A terminal that hung up."""


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [Full, Gone, closed, lambda: None], ids=["full", "gone", "closed", "none"])
def test_progress_that_cannot_be_written_is_dropped(tmp_path, monkeypatch, capsys, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    result = run_units(mixture(3), RunFolder.create(tmp_path / "run"), manifest=MANIFEST, heading="toys")
    assert list(result) == ["numbers-0", "noise-1", "dataset-2"]
    assert capsys.readouterr().out == ""
