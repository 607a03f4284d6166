"""Claims of the theory and their trials: each claim is a catalogue entry whose region is fixed before each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.claims.curves import curve as curve
    from helmscope.claims.entry import Entry as Entry
    from helmscope.claims.entry import SubjectKind as SubjectKind
    from helmscope.claims.evidence import AbsoluteDifference as AbsoluteDifference
    from helmscope.claims.evidence import AbsoluteDifferenceInEveryCase as AbsoluteDifferenceInEveryCase
    from helmscope.claims.evidence import Count as Count
    from helmscope.claims.evidence import Evidence as Evidence
    from helmscope.claims.evidence import IdentityErrors as IdentityErrors
    from helmscope.claims.evidence import Inconclusive as Inconclusive
    from helmscope.claims.evidence import PairedDifferences as PairedDifferences
    from helmscope.claims.evidence import PremiseImpossible as PremiseImpossible
    from helmscope.claims.evidence import Replicates as Replicates
    from helmscope.claims.evidence import ReplicatesInEveryCase as ReplicatesInEveryCase
    from helmscope.claims.evidence import ReplicatesInSomeCase as ReplicatesInSomeCase
    from helmscope.claims.finding import Finding as Finding
    from helmscope.claims.prompts import ChosenPrompts as ChosenPrompts
    from helmscope.claims.prompts import prompts_or_finding as prompts_or_finding
    from helmscope.claims.reading import read_catalogue as read_catalogue
    from helmscope.claims.registry import TrialCase as TrialCase
    from helmscope.claims.registry import experiment as experiment
    from helmscope.claims.run_trials import run_trials as run_trials
    from helmscope.claims.sources import Source as Source
    from helmscope.claims.sources import sources as sources
    from helmscope.claims.trial import Trial as Trial
    from helmscope.claims.trial import run_trial as run_trial
    from helmscope.claims.twin_contrast import TwinContrast as TwinContrast

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
