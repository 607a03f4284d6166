"""Claims of the theory and their trials: each claim is a catalogue entry whose region is fixed before its first run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.claims.curves import curve as curve
    from helmscope.claims.entry import Entry as Entry
    from helmscope.claims.entry import Ground as Ground
    from helmscope.claims.finding import Check as Check
    from helmscope.claims.finding import Count as Count
    from helmscope.claims.finding import Described as Described
    from helmscope.claims.finding import EveryLayer as EveryLayer
    from helmscope.claims.finding import Finding as Finding
    from helmscope.claims.finding import Identity as Identity
    from helmscope.claims.finding import Impossible as Impossible
    from helmscope.claims.finding import Paired as Paired
    from helmscope.claims.finding import Replicates as Replicates
    from helmscope.claims.finding import SomeLayer as SomeLayer
    from helmscope.claims.reading import read_catalogue as read_catalogue
    from helmscope.claims.registry import Case as Case
    from helmscope.claims.registry import experiment as experiment
    from helmscope.claims.trial import Trial as Trial
    from helmscope.claims.trial import run_trials as run_trials
    from helmscope.claims.trial import try_claim as try_claim

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
