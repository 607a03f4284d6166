"""The types that every room of the house shares, and the errors. Imports nothing of ours, no torch and no msgspec.

``Trajectory`` is where theory and model meet: a simulation and a recorded transformer both give one, so every
observable runs on both. ``System`` is a trajectory with the mechanism that made it, replayed for any ``Instrument``. A
Measurement is an xarray Dataset that keeps the rules of ``types.measurement``; a ``Verdict`` holds the ``Interval`` of
a statistic against a ``Region``.
"""

from helmscope.types.arguments import (
    counted,
    fits_memory,
    increasing_times,
    known_name,
    real_number,
    seed_number,
    shown,
    whole_number,
)
from helmscope.types.errors import HelmscopeError, MissingExtra
from helmscope.types.instrument import (
    AttentionPass,
    Half,
    Instrument,
    MlpPass,
    Moment,
    Needs,
    ReplayPlan,
    results,
    start_instruments,
)
from helmscope.types.interval import Interval, Region, interval_text, region_text
from helmscope.types.measurement import COMPANIONS, check_measurement, check_replicates, replicate_axis
from helmscope.types.system import System
from helmscope.types.trajectory import Outcome, Status, Trajectory
from helmscope.types.verdict import Control, Exhibit, Ruling, Verdict

__all__ = [
    "COMPANIONS",
    "AttentionPass",
    "Control",
    "Exhibit",
    "Half",
    "HelmscopeError",
    "Instrument",
    "Interval",
    "MissingExtra",
    "MlpPass",
    "Moment",
    "Needs",
    "Outcome",
    "Region",
    "ReplayPlan",
    "Ruling",
    "Status",
    "System",
    "Trajectory",
    "Verdict",
    "check_measurement",
    "check_replicates",
    "counted",
    "fits_memory",
    "increasing_times",
    "interval_text",
    "known_name",
    "real_number",
    "region_text",
    "replicate_axis",
    "results",
    "seed_number",
    "shown",
    "start_instruments",
    "whole_number",
]
