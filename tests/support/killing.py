"""Kill a process that runs units, at every call that changes files and at random moments, and check the files it left.

    python tests/support/killing.py FOLDER KILLS SEED

Prints its counts as JSON. It is a separate program because it forks: it imports ``store`` and ``runs``, but no torch
and nothing that starts threads. Most of its time it waits for the moment of a kill, so that it makes several series of
kills at once, each in a process and a folder of its own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path

from helmscope.runs import Unit, run_units
from helmscope.runs.plan import read_plan
from helmscope.store import RunFolder
from helmscope.store.atomic import is_temporary
from support.toy_units import manifest, mixture, results

MANIFEST = manifest()
CALLS = ("open", "fsync", "replace", "mkdir", "unlink")
COUNTED = ("kills", "torn", "foreign", "temporaries", "completed", "unequal")


def fork_run(folder: RunFolder, units: list[Unit], last: int = 0) -> int:
    """Start a process that runs the units and exits with 0, or kills itself at its ``last`` call that changes files."""
    process = os.fork()
    if process == 0:
        try:
            if last:
                kill_at(last)
            else:
                Path.write_bytes = slow_write
                os.fsync = lambda descriptor: None  # a kill loses nothing that was written, and disks are slow
            run_units(units, folder, manifest=MANIFEST)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return process


def kill_at(last: int) -> None:
    calls = count(1)

    def deadly(function):
        def call(*arguments, **options):
            if next(calls) == last:
                if function is write:  # in the middle of it
                    write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    write = Path.write_bytes
    Path.write_bytes = deadly(write)
    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))


def slow_write(path: Path, data: bytes) -> None:
    """Write in four pieces, as a slow disk does, so that some kills happen during a write."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), -(-len(data) // 4)):
            file.write(data[start : start - (-len(data) // 4)])
            time.sleep(0.001)


class Watch:
    """Counts of what the kills left in one folder."""

    def __init__(self, root: Path, units: list[Unit]) -> None:
        self.units, self.folder = units, RunFolder(root / "killed")
        calm = RunFolder.create(root / "calm")
        run_units(units, calm, manifest=MANIFEST)
        self.expected = results(calm.path)
        self.counts = dict.fromkeys(COUNTED, 0)
        self.states = set()
        self.reset()

    def reset(self) -> None:
        shutil.rmtree(self.folder.path, ignore_errors=True)
        RunFolder.create(self.folder.path)

    def check(self) -> None:
        """After a kill: files with a final name are complete and correct; others are temporary files or the lock."""
        self.counts["kills"] += 1
        temporaries = []
        for path in (path for path in self.folder.path.rglob("*") if path.is_file()):
            if is_temporary(path.name):
                temporaries.append((path.name[:-13], path.stat().st_size))
            elif not self.is_correct(path):
                self.counts["torn" if path.name in {*self.expected, "manifest.json", "units.json"} else "foreign"] += 1
        self.counts["temporaries"] += len(temporaries)
        self.states.add((self.done(), *temporaries))

    def is_correct(self, path: Path) -> bool:
        if path.parent.name == "units":
            return path.read_bytes() == self.expected.get(path.name)
        if path.name == "manifest.json":
            return self.folder.read_manifest() == MANIFEST
        if path.name == "units.json":
            return set(read_plan(self.folder).units) == {unit.name for unit in self.units}
        return path.name == ".lock"

    def done(self) -> int:
        return sum(not is_temporary(name) for name in results(self.folder.path))

    def finish(self) -> None:
        """After a complete run: its files equal those of the undisturbed run, and there are no others."""
        self.counts["completed"] += 1
        self.counts["unequal"] += results(self.folder.path) != self.expected
        self.counts["foreign"] += set(os.listdir(self.folder.path)) != {"manifest.json", "units.json", "units"}
        self.reset()


def at_every_call(root: Path) -> Watch:
    """One kill at every call that changes files, and a resume after each."""
    watch = Watch(root, mixture(3))
    for last in count(1):
        _, status = os.waitpid(fork_run(watch.folder, watch.units, last), 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return watch
        watch.check()
        run_units(watch.units, watch.folder, manifest=MANIFEST)
        watch.finish()
    raise AssertionError


def duration(watch: Watch) -> float:
    """Seconds that an undisturbed run takes."""
    started = time.monotonic()
    os.waitpid(fork_run(watch.folder, watch.units), 0)
    seconds = time.monotonic() - started
    watch.finish()
    return seconds


def at_random(root: Path, kills: int, seed: int) -> Watch:
    """Kills at random moments; each new process resumes where the killed one stopped, until the run is complete."""
    rng, watch = random.Random(seed), Watch(root, mixture(12, size=300_000))
    length = min(duration(watch) for _ in range(4))
    while watch.counts["kills"] < kills:
        process = fork_run(watch.folder, watch.units)
        time.sleep(rng.uniform(0, 0.6 * length))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status):
            watch.check()
        else:
            assert os.waitstatus_to_exitcode(status) == 0
            watch.finish()
    run_units(watch.units, watch.folder, manifest=MANIFEST)
    watch.finish()
    return watch


SERIES = 3  # of random kills, at once


def start(series: Callable[..., Watch], root: Path, *arguments: int) -> tuple[int, Path]:
    """Start a process that makes a series of kills in a folder; its counts and states are left in a file beside it."""
    left = root.with_suffix(".json")
    process = os.fork()
    if process == 0:
        try:
            watch = series(root, *arguments)
            left.write_text(json.dumps([watch.counts, sorted(watch.states)]))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return process, left


def report(*started: tuple[int, Path]) -> dict[str, int]:
    """Wait for series of kills; their counts together, and how many states they left: with how many results, and with
    which temporary files.
    """
    counts, states = dict.fromkeys(COUNTED, 0), set()
    for process, left in started:
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        counted, seen = json.loads(left.read_text())
        counts = {name: number + counted[name] for name, number in counts.items()}
        states |= {json.dumps(state) for state in seen}
    return {**counts, "states": len(states), "stages": len({json.loads(state)[0] for state in states})}


if __name__ == "__main__":
    where, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    assert "torch" not in sys.modules
    shares = [kills // SERIES + (k < kills % SERIES) for k in range(SERIES)]
    every = start(at_every_call, where / "calls")
    random_ones = [start(at_random, where / f"random-{k}", share, SERIES * seed + k) for k, share in enumerate(shares)]
    print(json.dumps({"calls": report(every), "random": report(*random_ones)}))
