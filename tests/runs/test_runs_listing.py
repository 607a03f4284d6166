"""``list_runs``: runs in every possible state."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import xarray as xr

from helmscope.runs import RunState, RunSummary, Unit, UnitsFailed, list_runs, run_units
from helmscope.store import RunFolder
from helmscope.types import HelmscopeError
from support.toy_units import divide, manifest, mixture

DAYS = [f"2025-01-0{day}T12:00:00+00:00" for day in range(1, 9)]


def begun(root: Path, name: str, day: int) -> RunFolder:
    folder = RunFolder.create(root / name)
    folder.write_manifest(replace(manifest(command=["helmscope", name]), created=DAYS[day]))
    return folder


def test_every_state(tmp_path):
    complete, stopped, failed = (begun(tmp_path, name, day) for day, name in enumerate(("z", "y", "x")))
    run_units(mixture(3), complete, manifest=manifest())
    run_units(mixture(3), stopped, manifest=manifest())
    (stopped.path / "units" / "noise-1.bin").unlink()
    (stopped.path / "units" / ".noise-1.bin.0a1b2c3d.tmp").write_bytes(b"half")
    (stopped.path / ".lock").write_text("process 1 on nowhere")
    with pytest.raises(UnitsFailed):
        run_units([Unit("a", divide, {"a": 1, "b": 0})], failed, manifest=manifest())
    begun(tmp_path, "w", 3)
    plain, judged = begun(tmp_path, "v", 4), begun(tmp_path, "u", 5)
    plain.write_data("trajectory", xr.Dataset({"x": 1.0}))
    judged.write_verdicts([])
    running = begun(tmp_path, "t", 6)
    damaged, wrong = begun(tmp_path, "s", 7), begun(tmp_path, "r", 7)
    (damaged.path / "manifest.json").write_text("{")
    (wrong.path / "units.json").write_text("[]")
    link, torn, mixed = (begun(tmp_path, name, 7) for name in ("q", "p", "o"))
    (link.path / ".lock").symlink_to(tmp_path / "thesis" / "thesis.tex")
    for folder in (torn, mixed):
        run_units(mixture(3), folder, manifest=manifest())
    (torn.path / "units.json").unlink()
    mixed.write_manifest(manifest(seed=8))
    (tmp_path / "empty").mkdir()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    with running.lock():
        listed = list_runs(tmp_path)
        assert os.listdir(running.path) != []
    assert [(run.name, run.state.value, run.done, run.total) for run in listed] == [
        *((name, "damaged", 0, 0) for name in "opq"),
        ("r", "damaged", 0, 0),
        ("s", "damaged", 0, 0),
        ("z", "complete", 3, 3),
        ("y", "interrupted", 2, 3),
        ("x", "interrupted", 0, 1),
        ("w", "interrupted", 0, 0),
        ("v", "complete", 0, 0),
        ("u", "complete", 0, 0),
        ("t", "running", 0, 0),
    ]
    assert "o disagree: seed is 8 in manifest.json, but 0 in units.json" in listed[0].reason
    assert "p disagree: units holds the result 'dataset-2.nc', but units.json is missing" in listed[1].reason
    assert "q/.lock is a symbolic link" in listed[2].reason
    del listed[:3]
    assert listed[2] == RunSummary(tmp_path / "z", RunState.COMPLETE, DAYS[0], ("helmscope", "z"), 3, 3)
    assert "r/units.json is a list, but it must be an object" in listed[0].reason
    assert "s/manifest.json is not valid JSON" in listed[1].reason
    assert all((run.reason != "") == (run.state is RunState.DAMAGED) for run in listed)


def test_listing_changes_nothing(tmp_path):
    folder = begun(tmp_path, "a", 0)
    run_units(mixture(3), folder, manifest=manifest())
    (folder.path / ".lock").write_text("process 1 on nowhere")
    before = sorted(os.listdir(folder.path))
    assert list_runs(tmp_path) == list_runs(str(tmp_path))
    assert sorted(os.listdir(folder.path)) == before


def test_a_folder_that_vanishes_meanwhile_is_not_an_error(tmp_path, monkeypatch):
    folder = begun(tmp_path, "a", 0)
    read = RunFolder.read_manifest

    def vanishing(self):
        shutil.rmtree(folder.path)
        return read(self)

    monkeypatch.setattr(RunFolder, "read_manifest", vanishing)
    (listed,) = list_runs(tmp_path)
    assert listed.state is RunState.DAMAGED
    assert listed.reason.endswith("manifest.json: No such file or directory")


def test_a_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(HelmscopeError, match=r"^cannot read .*/none: No such file or directory$"):
        list_runs(tmp_path / "none")
    with pytest.raises(HelmscopeError, match=r"^root is an int, but it must be a path, as a str or a Path$"):
        list_runs(3)


def test_a_run_folder_lists_itself(tmp_path):
    folder = begun(tmp_path, "w", 3)
    (alone,) = list_runs(folder.path)
    assert [alone] == list_runs(tmp_path)
    assert alone.name == "w"
