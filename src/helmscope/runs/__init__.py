"""Run units of work on an engine and store their results, with progress and resume. Independent of what a unit
computes; no torch. ``hs.jobs`` describes whole jobs, and ``hs.store`` the folders that hold their results.
"""

from typing import TYPE_CHECKING

from helmscope.runs.bar import ProgressBar, progress_reporting
from helmscope.runs.limits import parse_size
from helmscope.runs.listing import RunState, RunSummary, list_runs
from helmscope.runs.on_ray import Ray
from helmscope.runs.processes import Processes
from helmscope.runs.run_units import RunResult, UnitsFailed, run_units
from helmscope.runs.serial import Serial
from helmscope.runs.unit import Unit
from helmscope.types.lazy import listed_exports

__all__ = [
    "Processes",
    "ProgressBar",
    "Ray",
    "RunResult",
    "RunState",
    "RunSummary",
    "Serial",
    "Unit",
    "UnitsFailed",
    "list_runs",
    "parse_size",
    "progress_reporting",
    "run_units",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)
