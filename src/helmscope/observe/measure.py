"""Measurements of many instruments from a single replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.observe.attention_drift import AttentionDrift
from helmscope.observe.attention_noise import AttentionNoise
from helmscope.observe.drift import DriftAndSwirl
from helmscope.observe.kernel import KernelStatistics
from helmscope.observe.track import check_system
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, Instrument, System

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.types.progress import ProgressOption


def streaming_instruments() -> list[Instrument]:
    """New instances of all instruments of this library that need no forward besides the replay.

    >>> [instrument.name for instrument in streaming_instruments()]
    ['kernel_statistics', 'attention_drift', 'attention_noise', 'drift_and_swirl']
    """
    return [KernelStatistics(), AttentionDrift(), AttentionNoise(), DriftAndSwirl()]


@shows_progress("measuring")
def measure(system: System, *instruments: Instrument, progress: ProgressOption = None) -> dict[str, xr.Dataset]:
    """Measurements of many instruments from a single replay of the system, by the names of the instruments.

    A replay of a model is one forward for each chunk of its prompts. The Measurements keep their replicates;
    ``reduce_replicates`` turns each into means with intervals. Without instruments, all streaming instruments that the
    system supports are used. Raises HelmscopeError for an instrument that the system does not support. ``progress`` is
    called with the share of the work done.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> measured = measure(integrate(SA(beta=0.0), torch.eye(3).expand(2, 3, 3), times=[0.0, 1.0]))
    >>> list(measured), measured["kernel_statistics"].row_mass.dims
    (['kernel_statistics', 'attention_drift', 'attention_noise'], ('time', 'system'))
    """
    if instruments:
        return check_system(system).replay(*instruments, progress=progress)
    reasons = {instrument: check_system(system).refusal(instrument) for instrument in streaming_instruments()}
    supported = [instrument for instrument, reason in reasons.items() if reason is None]
    if not supported:
        raise HelmscopeError(f"system supports no streaming instrument: {'; '.join(filter(None, reasons.values()))}")
    return system.replay(*supported, progress=progress)
