"""Claims of the theory and their trials: each claim is a catalogue entry whose region is fixed before its first run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.claims import factorial as factorial
    from helmscope.claims.curves import curve as curve
    from helmscope.claims.entry import Entry as Entry
    from helmscope.claims.entry import Ground as Ground
    from helmscope.claims.evidence import Count as Count
    from helmscope.claims.evidence import EveryLayer as EveryLayer
    from helmscope.claims.evidence import EveryMagnitude as EveryMagnitude
    from helmscope.claims.evidence import Identity as Identity
    from helmscope.claims.evidence import Impossible as Impossible
    from helmscope.claims.evidence import Magnitude as Magnitude
    from helmscope.claims.evidence import Paired as Paired
    from helmscope.claims.evidence import Replicates as Replicates
    from helmscope.claims.evidence import SomeLayer as SomeLayer
    from helmscope.claims.finding import Finding as Finding
    from helmscope.claims.reading import constants as constants
    from helmscope.claims.reading import read_catalogue as read_catalogue
    from helmscope.claims.registry import Case as Case
    from helmscope.claims.registry import experiment as experiment
    from helmscope.claims.run_trials import run_trials as run_trials
    from helmscope.claims.sources import Source as Source
    from helmscope.claims.sources import sources as sources
    from helmscope.claims.trial import Trial as Trial
    from helmscope.claims.trial import try_claim as try_claim

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
