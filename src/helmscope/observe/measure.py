"""Many instruments, one replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.observe.drift import DriftAndSwirl
from helmscope.observe.kernel import KernelStatistics
from helmscope.observe.track import check_system
from helmscope.types import HelmscopeError, Instrument, Progress, System

if TYPE_CHECKING:
    import xarray as xr


def streaming_instruments() -> list[Instrument]:
    """New objects of all instruments of this library that take no forward beside the replay. Derivatives of the MLP,
    d of them at every token, are left to ``DriftAndSwirl()``.

    >>> [instrument.name for instrument in streaming_instruments()]
    ['kernel_statistics', 'drift_and_swirl']
    """
    return [KernelStatistics(), DriftAndSwirl(derivatives=False)]


def measure(system: System, *instruments: Instrument, progress: Progress | None = None) -> dict[str, xr.Dataset]:
    """The Measurements of many instruments by their names, with their replicates, from one replay of the system: one
    forward of a model for each chunk of its prompts. ``reduce_replicates`` makes means with intervals of each.

    Without instruments it takes every streaming one that the system can serve; one that is named and that the system
    cannot serve is refused. ``progress`` is called with the share of the work done.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> seen = measure(integrate(SA(beta=0.0), torch.eye(3).expand(2, 3, 3), times=[0.0, 1.0]))
    >>> list(seen), seen["kernel_statistics"].row_mass.dims
    (['kernel_statistics'], ('time', 'system'))
    """
    if instruments:
        return check_system(system).replay(*instruments, progress=progress)
    reasons = {each: check_system(system).refusal(each) for each in streaming_instruments()}
    fitting = [each for each, reason in reasons.items() if reason is None]
    if not fitting:
        raise HelmscopeError(f"system can serve no instrument: {'; '.join(filter(None, reasons.values()))}")
    return system.replay(*fitting, progress=progress)
