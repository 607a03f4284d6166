"""Engines: equal bytes from each, limits on threads and memory, processes that die, and interruptions."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from helmscope.runs import Processes, Ray, Serial, Unit, UnitsFailed, parse_size, run_units
from helmscope.runs.attempt import attempt
from helmscope.runs.limits import FLOOR, VARIABLES, Limits, _bytes_in_use, _thread_controls
from helmscope.runs.processes import DIED
from helmscope.store import RunFolder, is_locked
from helmscope.types import HelmscopeError, MissingExtra
from support.children import alive_in_session, child, is_alive, run_python, wait_for, with_tests_on_path
from support.toy_units import (
    complain,
    die,
    divide,
    hoard,
    manifest,
    mixture,
    noise,
    numbers,
    product,
    received,
    rest,
    results,
    torch_product,
)

MANIFEST = manifest()


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run")


# Equal bytes ----------------------------------------------------------------------------------------------------------


def test_processes_give_the_bytes_of_serial(tmp_path):
    large = np.random.default_rng(0).normal(size=(600, 600))  # joblib would pass it as a read-only memory map
    units = [
        *mixture(12),
        *(Unit(f"product-{i}", product, {"seed": i, "size": 300}) for i in range(3)),
        Unit("torch", torch_product, {"seed": 1, "size": 300}),
        Unit("large", received, {"values": large}),
    ]
    folders = {}
    with Limits(threads=2).applied():  # the threads of this process do not affect those of the units
        for name, engine in {"serial": Serial(), "processes": Processes(2)}.items():
            folders[name] = RunFolder.create(tmp_path / name)
            result = run_units(units, folders[name], manifest=MANIFEST, engine=engine)
            assert list(result) == [unit.name for unit in units]
    assert results(folders["serial"].path) == results(folders["processes"].path)
    assert len(results(folders["serial"].path)) == 17


def test_one_engine_can_finish_the_run_of_another(tmp_path):
    calm, begun = RunFolder.create(tmp_path / "calm"), RunFolder.create(tmp_path / "begun")
    run_units(mixture(6), calm, manifest=MANIFEST)
    run_units(mixture(6), begun, manifest=MANIFEST)
    for name in ("numbers-0.json", "dataset-5.nc"):
        (begun.path / "units" / name).unlink()
    run_units(mixture(6), begun, manifest=MANIFEST, engine=Processes(2))
    assert results(begun.path) == results(calm.path)


# Threads --------------------------------------------------------------------------------------------------------------


def test_the_number_of_threads_is_set_and_restored(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    environment = dict(os.environ)
    pools = list(_thread_controls())
    assert len(pools) >= 2  # torch, and the OpenBLAS of NumPy
    before = [get() for get, _ in pools]
    for threads in (1, 2):
        with Limits(threads=threads).applied():
            assert [get() for get, _ in pools] == [threads] * len(pools)
            assert [os.environ[name] for name in VARIABLES] == [str(threads)] * 3
            assert torch.get_num_threads() == threads
        assert [get() for get, _ in pools] == before
        assert dict(os.environ) == environment


def test_the_number_of_threads_changes_the_last_bits():
    unit = Unit("a", product, {"seed": 0, "size": 700})
    one, again, two = (attempt(unit, Limits(threads=threads)).data for threads in (1, 1, 2))
    assert one == again
    assert one != two
    assert np.allclose(np.frombuffer(one), np.frombuffer(two), rtol=1e-10, atol=1e-10)


# Memory ---------------------------------------------------------------------------------------------------------------


def test_serial_limits_memory_and_restores_the_limit(folder):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _bytes_in_use() + 10**9
    units = [Unit("large", hoard, {"size": 2 * 10**9}), Unit("small", hoard, {"size": 10**6})]
    with pytest.raises(UnitsFailed) as caught:
        run_units(units, folder, manifest=MANIFEST, engine=Serial(max_memory=limit))
    reason = f"it needs more memory than its {limit / 1e6:.0f} MB, max_memory: raise max_memory"
    assert caught.value.result.failed == {"large": reason}
    assert caught.value.result["small"] == 10**6
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert run_units(units, folder, manifest=MANIFEST)["large"] == 2 * 10**9


def test_processes_share_memory(folder):
    units = [Unit("large", hoard, {"size": 10**9}), Unit("small", hoard, {"size": 10**6})]
    with pytest.raises(UnitsFailed) as caught:
        run_units(units, folder, manifest=MANIFEST, engine=Processes(2, max_memory=parse_size("max_memory", "1GB")))
    assert str(caught.value) == (
        "unit 'large' failed: it needs more memory than its 500 MB, which is max_memory over 2 workers: lower workers "
        f"or raise max_memory; 1 result is kept in {folder.path}/units"
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        OSError("Can't synchronously write data (memory allocation failed for chunk)"),
        OSError(errno.ENOMEM, "no room", "x.so"),
    ],
)
def test_every_kind_of_memory_error_is_recognized(monkeypatch, error):
    def failing(*arguments):
        try:
            raise error
        except Exception as cause:
            raise HelmscopeError("cannot keep the result: x") from cause

    monkeypatch.setattr(sys.modules["helmscope.runs.attempt"], "encode_result", failing)
    unit = Unit("a", divide, {"a": 1, "b": 2})
    assert attempt(unit, Limits()).reason == "memory ran out: lower workers or make the unit smaller"


def test_the_memory_error_of_torch_is_recognized():
    unit = Unit("a", torch_product, {"seed": 0, "size": 20_000})  # 3.2 GB per matrix
    assert attempt(unit, Limits(max_memory=_bytes_in_use() + 10**9)).reason.startswith("it needs more memory than its ")


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'h5py'"), SystemError("returned NULL")])
def test_a_failed_import_counts_as_lack_of_memory_only_near_the_limit(monkeypatch, error):
    def failing(*arguments):
        raise HelmscopeError("cannot keep the result: x") from error

    monkeypatch.setattr(sys.modules["helmscope.runs.attempt"], "encode_result", failing)
    unit = Unit("a", divide, {"a": 1, "b": 2})
    used = _bytes_in_use()
    assert attempt(unit, Limits(max_memory=used + used // 2)).reason.startswith("it needs more memory than its ")
    for limits in (Limits(), Limits(max_memory=3 * used)):
        assert attempt(unit, limits).reason == "cannot keep the result: x"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("1", 1), ("4GB", 4 * 10**9), ("4 gb", 4 * 10**9), ("4g", 4 * 10**9), ("500MB", 5 * 10**8), ("8k", 8000)),
        *(("2GiB", 2**31), ("1.5GiB", 3 * 2**29), ("1TiB", 2**40), ("3Ki", 3072), ("0.5MiB", 2**19), ("10B", 10)),
    ],
)
def test_sizes(text, size):
    assert parse_size("max_memory", text) == size


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-4GB", "0", "0.1", "4GBB", "1e9", "nan", "4,5GB", "٣GB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(HelmscopeError) as caught:
        parse_size("max_memory", text)
    assert str(caught.value) == f"max_memory is '{text}', but it must be a size such as 500MB, 4GB or 2GiB"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Processes(0), "workers is 0, but it must be a whole number >= 1"),
        (lambda: Processes(1.5), "workers is 1.5, but it must be a whole number >= 1"),
        (lambda: Processes(2, max_memory=0), "max_memory is 0, but it must be a whole number >= 1"),
        (lambda: Processes(2, threads=0), "threads is 0, but it must be a whole number >= 1"),
        (lambda: Serial(threads=True), "threads is True, but it must be a whole number >= 1"),
        (lambda: Serial(max_memory="4GB"), "max_memory is '4GB', but it must be a whole number >= 1"),
        (
            lambda: Serial(max_memory=FLOOR - 1),
            "max_memory is 63999999 bytes and workers is 1, but each worker needs at least 64 MB for Python "
            "and NumPy alone: raise max_memory",
        ),
        (
            lambda: Processes(4, max_memory=10**8),
            "max_memory is 100000000 bytes and workers is 4, but each worker needs at least 64 MB for Python "
            "and NumPy alone: lower workers or raise max_memory",
        ),
    ],
)
def test_bad_engines_are_refused(make, sentence):
    with pytest.raises(HelmscopeError) as caught:
        make()
    assert str(caught.value) == sentence


def test_a_missing_package_is_said_before_any_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = r"ray is not installed, and this needs it: pip install 'helmscope\[cluster\]', in a clone '\.\[cluster\]'$"
    with pytest.raises(MissingExtra, match=said):
        Ray(2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("shapes differ:\n  (2, 3)\n  (4,)", "ValueError: shapes differ: (2, 3) (4,)"),
        ("\n\nshapes differ\nhelp", "ValueError: shapes differ"),
        ("\n", "ValueError"),
    ],
)
def test_an_error_of_several_lines_is_one_sentence(text, reason):
    assert attempt(Unit("a", complain, {"text": text}), Limits()).reason == reason


# Processes that die ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_unit_that_kills_its_process_is_named_and_the_others_complete(folder, workers):
    units = [*mixture(4), Unit("die", die), *(Unit(f"later-{i}", numbers, {"seed": i}) for i in range(4))]
    with pytest.raises(UnitsFailed) as caught:
        run_units(units, folder, manifest=MANIFEST, engine=Processes(workers))
    assert str(caught.value) == f"unit 'die' failed: {DIED}; 8 results are kept in {folder.path}/units"
    assert caught.value.result["later-3"] == numbers(3)


def test_the_error_of_a_unit_that_dies_mentions_the_memory_limit(folder):
    with pytest.raises(UnitsFailed) as caught:
        run_units([Unit("die", die)], folder, manifest=MANIFEST, engine=Processes(1, max_memory=10**9))
    assert caught.value.result.failed == {"die": f"{DIED} or raise max_memory"}


def test_fail_fast_stops_the_workers(folder, tmp_path):
    (tmp_path / "started").mkdir()
    slow = {"seconds": 600.0, "started": str(tmp_path / "started")}
    units = [Unit("slow", rest, slow), Unit("bad", divide, {"a": 1, "b": 0}), Unit("other", rest, slow)]
    begun = time.monotonic()
    with pytest.raises(UnitsFailed, match="unit 'bad' failed: ZeroDivisionError"):
        run_units(units, folder, manifest=MANIFEST, engine=Processes(2), fail_fast=True)
    assert time.monotonic() - begun < 60
    assert_gone(tmp_path / "started")


# Interruptions --------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from helmscope.runs import Processes, Serial, Unit, run_units
from helmscope.store import RunFolder
from support.toy_units import manifest, numbers, rest
units = [Unit("quick", numbers, {"seed": 1})]
units += [Unit(f"slow-{i}", rest, {"seconds": 600.0 + i, "started": sys.argv[3]}) for i in range(3)]
engine = Serial() if sys.argv[2] == "serial" else Processes(2)
run_units(units, RunFolder(Path(sys.argv[1])), manifest=manifest(), engine=engine, heading="toys")
"""


def assert_gone(started: Path) -> None:
    """Wait until the processes that registered in ``started`` have ended."""
    wait_for(lambda: not any(is_alive(int(process)) for process in os.listdir(started)), seconds=20)


@pytest.mark.parametrize("engine", ["serial", "processes"])
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name
)
def test_an_interrupted_run_keeps_its_results_and_leaves_no_process(folder, tmp_path, engine, number):
    started = tmp_path / "started"
    started.mkdir()
    command = [sys.executable, "-c", PROGRAM, folder.path, engine, started]
    slow, quick = 1 if engine == "serial" else 2, folder.path / "units" / "quick.json"
    with open(tmp_path / "stderr", "w") as stderr, child(command, stderr=stderr, env=with_tests_on_path()) as process:
        wait_for(lambda: len(os.listdir(started)) >= slow and quick.exists(), process)
        if number in (signal.SIGINT, signal.SIGHUP):
            os.killpg(process.pid, number)  # a terminal sends SIGINT and SIGHUP to the workers too
        else:
            process.send_signal(number)
        assert process.wait(60) == (-signal.SIGKILL if number == signal.SIGKILL else -signal.SIGINT)
        wait_for(lambda: not alive_in_session(process.pid), seconds=20)
    assert not is_locked(folder.path)
    assert os.listdir(folder.path / "units") == ["quick.json"]
    printed = (tmp_path / "stderr").read_text()
    note = f"finished units are kept in {folder.path}, and a run of the same units resumes there"
    if number != signal.SIGKILL:
        assert f"\ntoys: interrupted; {note}\nTraceback" in printed
        assert f"\n{note}\n" in printed
        assert printed.count("Traceback") == 1


IDLE = """
import sys
from pathlib import Path
from helmscope.runs import Processes, Unit, run_units
from helmscope.store import RunFolder
from support.toy_units import manifest, rest
unit = Unit("slow", rest, {"seconds": 600.0, "started": sys.argv[2]})
run_units([unit], RunFolder(Path(sys.argv[1])), manifest=manifest(), engine=Processes(1))
"""


def test_an_idle_worker_ends_when_the_run_is_killed(folder, tmp_path):
    """``Processes(1)`` has a second worker, which never gets a unit here."""
    (tmp_path / "started").mkdir()
    command = [sys.executable, "-c", IDLE, folder.path, tmp_path / "started"]
    with child(command, env=with_tests_on_path()) as process:
        wait_for(lambda: os.listdir(tmp_path / "started"), process)
        process.kill()
        wait_for(lambda: not alive_in_session(process.pid), seconds=20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_handler_of_the_caller_is_kept(folder, on_signal, number):
    received_signals = []
    on_signal(number, lambda *arguments: received_signals.append(arguments))
    run_units([Unit("a", os.kill, {})], folder, manifest=MANIFEST, engine=Signaling(number=number))
    assert len(received_signals) == 1


def test_a_run_under_nohup_ignores_sighup(folder, on_signal):
    on_signal(signal.SIGHUP, signal.SIG_IGN)
    assert (
        len(run_units([Unit("a", os.kill, {})], folder, manifest=MANIFEST, engine=Signaling(number=signal.SIGHUP))) == 1
    )
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@dataclass(frozen=True)
class Signaling(Serial):
    """Sends a signal to this process during the run."""

    number: signal.Signals = signal.SIGTERM

    def attempts(self, units):
        os.kill(os.getpid(), self.number)
        yield from (attempt(Unit(unit.name, noise, {"seed": 0, "size": 1}), Limits()) for unit in units)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_interrupts_the_run_and_its_handler_is_restored(folder, on_signal, number):
    on_signal(number, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_units(mixture(3), folder, manifest=MANIFEST, engine=Signaling(number=number))
    note = f"finished units are kept in {folder.path}, and a run of the same units resumes there"
    assert caught.value.__notes__ == [note]
    assert signal.getsignal(number) == signal.SIG_DFL


TRACKER = """
import statistics, sys, tempfile
import helmscope as hs
from joblib.externals.loky.backend.resource_tracker import _resource_tracker

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        unit = hs.runs.Unit("a", statistics.fmean, {"data": [1]})
        hs.runs.run_units([unit], hs.store.RunFolder.new(root, "a"), engine=hs.runs.Processes(2))
        status = open(f"/proc/{_resource_tracker._pid}/status").read()
    print(int(status.split("SigIgn:")[1].split()[0], 16) & 1)
"""


def test_the_resource_tracker_ignores_sighup():
    """If it died, its warnings would bury the last messages of a run. SIGHUP is the lowest bit of SigIgn."""
    assert run_python(TRACKER, check=True).stdout == "1\n"
