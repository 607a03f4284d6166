"""The types and errors that all packages of helmscope share. Imports none of the other packages, torch or msgspec.

``Trajectory`` is what theory and models have in common: a simulation and a recorded transformer both produce one, so
every observable runs on both. ``System`` is a trajectory with the mechanism that produced it, which can be replayed for
any ``Instrument``. A Measurement is an xarray Dataset that satisfies the rules of ``types.measurement``; a ``Verdict``
compares the ``Interval`` of a statistic with a ``Region``.

The other packages also import helpers from here (argument checks, short texts, HTML). They are not in ``__all__`` and
not public.
"""

from typing import TYPE_CHECKING

from helmscope.types.arguments import check_integer as check_integer
from helmscope.types.arguments import check_memory as check_memory
from helmscope.types.arguments import check_name as check_name
from helmscope.types.arguments import check_real as check_real
from helmscope.types.arguments import check_seed as check_seed
from helmscope.types.arguments import check_times as check_times
from helmscope.types.arguments import pluralized as pluralized
from helmscope.types.arguments import record_first as record_first
from helmscope.types.arguments import short_repr as short_repr
from helmscope.types.arguments import type_with_article as type_with_article
from helmscope.types.display import ConciseRepr as ConciseRepr
from helmscope.types.display import Plottable as Plottable
from helmscope.types.display import figure_of as figure_of
from helmscope.types.display import html_stack as html_stack
from helmscope.types.display import html_table as html_table
from helmscope.types.display import one_line_repr as one_line_repr
from helmscope.types.display import short_description as short_description
from helmscope.types.display import shortened as shortened
from helmscope.types.errors import HelmscopeError, MissingExtra
from helmscope.types.instrument import Instrument
from helmscope.types.interval import Interval, Region
from helmscope.types.interval import interval_text as interval_text
from helmscope.types.interval import region_text as region_text
from helmscope.types.lazy import listed_exports
from helmscope.types.measurement import as_measurement as as_measurement
from helmscope.types.measurement import check_measurement, check_reduced, check_replicates
from helmscope.types.measurement import identity_coordinates as identity_coordinates
from helmscope.types.measurement import keeps_replicates as keeps_replicates
from helmscope.types.measurement import replicate_axis as replicate_axis
from helmscope.types.progress import Progress
from helmscope.types.progress import check_progress as check_progress
from helmscope.types.progress import sub_progress as sub_progress
from helmscope.types.replay_context import (
    AttentionTensors,
    CrossAttentionTensors,
    Half,
    MlpTensors,
    Needs,
    ReplayContext,
    ReplayPlan,
)
from helmscope.types.system import HasTrajectory as HasTrajectory
from helmscope.types.system import System
from helmscope.types.trajectory import Outcome, Status, Trajectory
from helmscope.types.verdict import (
    Attachment,
    Control,
    JudgedCondition,
    Judgment,
    PrintedStatement,
    Provenance,
    Ruling,
    Verdict,
)

__all__ = [
    "Attachment",
    "AttentionTensors",
    "Control",
    "CrossAttentionTensors",
    "Half",
    "HelmscopeError",
    "Instrument",
    "Interval",
    "JudgedCondition",
    "Judgment",
    "MissingExtra",
    "MlpTensors",
    "Needs",
    "Outcome",
    "PrintedStatement",
    "Progress",
    "Provenance",
    "Region",
    "ReplayContext",
    "ReplayPlan",
    "Ruling",
    "Status",
    "System",
    "Trajectory",
    "Verdict",
    "check_measurement",
    "check_reduced",
    "check_replicates",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)
