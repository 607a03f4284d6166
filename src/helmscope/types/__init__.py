"""The types and errors that all packages of helmscope share. Imports none of the other packages, torch or msgspec.

``Trajectory`` is what theory and models have in common: a simulation and a recorded transformer both produce one, so
every observable runs on both. ``System`` is a trajectory with the mechanism that produced it, which can be replayed for
any ``Instrument``. A Measurement is an xarray Dataset that satisfies the rules of ``types.measurement``; a ``Verdict``
compares the ``Interval`` of a statistic with a ``Region``.
"""

from typing import TYPE_CHECKING

from helmscope.types.arguments import (
    check_memory,
    counted,
    increasing_times,
    known_name,
    real_number,
    seed_number,
    shown,
    type_with_article,
    whole_number,
)
from helmscope.types.display import (
    ConciseRepr,
    Plottable,
    brief,
    figure_of,
    html_stack,
    html_table,
    one_line_repr,
    shortened,
)
from helmscope.types.errors import HelmscopeError, MissingExtra
from helmscope.types.instrument import (
    AttentionPass,
    CrossPass,
    Half,
    Instrument,
    MlpPass,
    Moment,
    Needs,
    ReplayPlan,
)
from helmscope.types.interval import Interval, Region, interval_text, region_text
from helmscope.types.lazy import listed_exports
from helmscope.types.measurement import (
    check_measurement,
    check_reduced,
    check_replicates,
    identity_coordinates,
    keeps_replicates,
    replicate_axis,
)
from helmscope.types.progress import Progress, check_progress, part_of
from helmscope.types.system import System
from helmscope.types.trajectory import Outcome, Status, Trajectory
from helmscope.types.verdict import Control, Exhibit, Judged, Judgment, Printed, Provenance, Ruling, Verdict

__all__ = [
    "AttentionPass",
    "ConciseRepr",
    "Control",
    "CrossPass",
    "Exhibit",
    "Half",
    "HelmscopeError",
    "Instrument",
    "Interval",
    "Judged",
    "Judgment",
    "MissingExtra",
    "MlpPass",
    "Moment",
    "Needs",
    "Outcome",
    "Plottable",
    "Printed",
    "Progress",
    "Provenance",
    "Region",
    "ReplayPlan",
    "Ruling",
    "Status",
    "System",
    "Trajectory",
    "Verdict",
    "brief",
    "check_measurement",
    "check_memory",
    "check_progress",
    "check_reduced",
    "check_replicates",
    "counted",
    "figure_of",
    "html_stack",
    "html_table",
    "identity_coordinates",
    "increasing_times",
    "interval_text",
    "keeps_replicates",
    "known_name",
    "one_line_repr",
    "part_of",
    "real_number",
    "region_text",
    "replicate_axis",
    "seed_number",
    "shortened",
    "shown",
    "type_with_article",
    "whole_number",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)
