"""All measurements of a system: those of instruments from a single replay, and standalone ones, which run the model
more often or need no run at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from helmscope.models.recording import Recording
from helmscope.observe.arcs import arc_length
from helmscope.observe.attention_diffusion import AttentionDiffusion, AttentionDiffusionSpectrum
from helmscope.observe.attention_drift import AttentionDrift
from helmscope.observe.attention_surface_divergence import attention_surface_divergence, divergence_unsupported
from helmscope.observe.bistochasticity import Bistochasticity
from helmscope.observe.block_steps import steps_unsupported
from helmscope.observe.context_noise import context_noise, context_unsupported, own_contexts
from helmscope.observe.depth_steps import depth_steps
from helmscope.observe.effective_beta import EffectiveBeta, effective_beta
from helmscope.observe.entropy import entropy_along_depth, entropy_unsupported
from helmscope.observe.free_energy import free_energy_along_depth, free_energy_unsupported
from helmscope.observe.generator_test import generator_test
from helmscope.observe.interventions import INTERVENTIONS, intervention_measurements
from helmscope.observe.jko_step_test import jko_step_test, jko_unsupported
from helmscope.observe.kernel import KernelStatistics
from helmscope.observe.layer_whitening import LayerWhitening
from helmscope.observe.mlp_entropy_change import entropy_change_unsupported, mlp_entropy_change
from helmscope.observe.mlp_force import MlpForce
from helmscope.observe.mlp_jacobian import MlpJacobian
from helmscope.observe.mlp_swirl_bound import mlp_swirl_bound, swirl_bound_unsupported
from helmscope.observe.mlp_weights import GateSparsity, mlp_weights, weights_unsupported
from helmscope.observe.mobility_test import mobility_test, mobility_unsupported
from helmscope.observe.perturbation_growth import growth_unsupported, perturbation_growth
from helmscope.observe.standalone import StandaloneMeasurement
from helmscope.observe.track import check_system, origin_attributes, replayed
from helmscope.observe.transport_ratio import transport_ratio
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    Instrument,
    System,
    as_measurement,
    check_name,
    check_progress,
    check_seed,
    short_repr,
    type_with_article,
)
from helmscope.types.dataset import Measurements

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption

REPLAY_FORWARDS = 3.7  # time of a replay of all streaming instruments, in eager forward passes


def streaming_instruments() -> list[Instrument]:
    """New instances of all instruments of this library that need no forward pass besides the replay.

    >>> [instrument.name for instrument in streaming_instruments()]
    ['kernel_statistics', 'attention_drift', 'attention_diffusion', 'mlp_force']
    """
    return [KernelStatistics(), AttentionDrift(), AttentionDiffusion(), MlpForce()]


def standalone_measurements() -> tuple[StandaloneMeasurement, ...]:
    """The standalone measurements of this library, by increasing cost; ``streaming_instruments`` are the others.

    >>> [each.name for each in standalone_measurements()][:4]
    ['arc_length', 'depth_steps', 'mlp_weights', 'bistochasticity']
    """
    return (
        StandaloneMeasurement(
            "arc_length", lambda system, quick, seed, progress: arc_length(system, progress=progress), (0.2, 0.2)
        ),
        StandaloneMeasurement(
            "depth_steps", lambda system, quick, seed, progress: depth_steps(system, progress=progress), (0.3, 0.3)
        ),
        StandaloneMeasurement("mlp_weights", _mlp_weights, (0.5, 0.5), weights_unsupported),
        _replayed(lambda quick, seed: Bistochasticity(), (1, 1)),
        _replayed(lambda quick, seed: GateSparsity(), (1.5, 1.5)),
        StandaloneMeasurement(
            "effective_beta",
            lambda system, quick, seed, progress: effective_beta(system, progress=progress),
            (2, 2),
            _no_kernel,
        ),
        StandaloneMeasurement(
            "transport_ratio", lambda system, quick, seed, progress: transport_ratio(system, progress=progress), (3, 3)
        ),
        StandaloneMeasurement("context_noise", _context_noise, (5, 4), context_unsupported),
        _replayed(lambda quick, seed: AttentionDiffusionSpectrum(sampled_tokens=1 if quick else 2, seed=seed), (4, 4)),
        StandaloneMeasurement(
            "attention_surface_divergence", _attention_surface_divergence, (5, 3), divergence_unsupported
        ),
        _replayed(lambda quick, seed: MlpJacobian(), (10, 12)),
        StandaloneMeasurement("free_energy_along_depth", _free_energy, (13, 18), free_energy_unsupported),
        StandaloneMeasurement(
            "entropy_along_depth",
            lambda system, quick, seed, progress: entropy_along_depth(system, progress=progress),
            (16, 14),
            entropy_unsupported,
        ),
        StandaloneMeasurement("mlp_entropy_change", _mlp_entropy_change, (18, 10), entropy_change_unsupported),
        StandaloneMeasurement("generator_test", _generator_test, (15, 27), steps_unsupported),
        _replayed(lambda quick, seed: LayerWhitening(sampled_tokens=2 if quick else 4, seed=seed), (17, 20)),
        StandaloneMeasurement("perturbation_growth", _perturbation_growth, (24, 14), growth_unsupported),
        StandaloneMeasurement("jko_step_test", _jko_step_test, (37, 89), jko_unsupported),
        StandaloneMeasurement("mobility_test", _mobility_test, (68, 66), mobility_unsupported),
        StandaloneMeasurement("mlp_swirl_bound", _mlp_swirl_bound, (38, 32), swirl_bound_unsupported),
    )


def _replayed(make: Callable[[bool, int], Instrument], forward_passes: tuple[float, float]) -> StandaloneMeasurement:
    """The measurement of an instrument that takes a replay of its own, since it is slower than the streaming ones."""

    def function(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
        return replayed(system, make(quick, seed), progress)

    instrument = make(True, 0)
    return StandaloneMeasurement(
        instrument.name, function, forward_passes, lambda system: system.unsupported_reason(instrument)
    )


def _attention_surface_divergence(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return attention_surface_divergence(system, random_signs=1 if quick else 2, seed=seed, progress=progress)


def _context_noise(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    assert isinstance(system, Recording)
    contexts = own_contexts(system)[: 256 if quick else None]
    return context_noise(system, contexts, groups=32 if quick else 256, seed=seed, progress=progress)


def _perturbation_growth(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return perturbation_growth(system, directions=2, iterations=1 if quick else 2, seed=seed, progress=progress)


def _free_energy(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return free_energy_along_depth(system, sampled_tokens=4 if quick else 16, progress=progress)


def _mlp_entropy_change(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return mlp_entropy_change(system, sampled_tokens=4 if quick else 16, progress=progress)


def _generator_test(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return generator_test(system, sampled_tokens=4 if quick else 16, seed=seed, progress=progress)


def _jko_step_test(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return jko_step_test(system, whole_layer_only=quick, seed=seed, progress=progress)


def _mobility_test(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return mobility_test(system, sampled_tokens=1 if quick else 2, seed=seed, progress=progress)


def _mlp_weights(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return mlp_weights(system, seed=seed, progress=progress)


def _mlp_swirl_bound(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return mlp_swirl_bound(system, neurons=256 if quick else 768, progress=progress)


def _no_kernel(system: System) -> str | None:
    """Why a system has no effective beta; its states on the sphere are not needed to know that."""
    return system.unsupported_reason(EffectiveBeta(on_sphere=system.trajectory))


def measurement_names() -> tuple[str, ...]:
    """The names of all measurements of ``measure``, in the order of its result.

    >>> measurement_names()[:2]
    ('kernel_statistics', 'attention_drift')
    """
    return (*(each.name for each in streaming_instruments()), *(each.name for each in standalone_measurements()))


def unsupported_measurements(system: System, *, only: Sequence[str] | None = None) -> dict[str, str | None]:
    """Why a system does not have each measurement of ``measure``, in one sentence; None where it has it. ``only`` names
    the measurements, such as ``observe.intervention_names()``; by default they are all but these.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> reasons = unsupported_measurements(integrate(SA(beta=0.0), torch.eye(3).expand(2, 3, 3), times=[0.0, 1.0]))
    >>> [name for name, reason in reasons.items() if reason is not None]
    ['mlp_force', 'mlp_weights', 'gate_sparsity', 'context_noise', ..., 'jko_step_test', 'mlp_swirl_bound']
    """
    names = measurement_names() if only is None else only
    return {name: _unsupported(check_system(system), name) for name in names}


def _unsupported(system: System, name: str) -> str | None:
    """Why a system does not have the measurement of a name."""
    for instrument in streaming_instruments():
        if instrument.name == name:
            return system.unsupported_reason(instrument)
    each = next(each for each in (*standalone_measurements(), *intervention_measurements()) if each.name == name)
    return None if each.unsupported_reason is None else each.unsupported_reason(system)


@shows_progress("measuring")
def measure(
    system: System,
    *instruments: Instrument,
    only: Sequence[str] | None = None,
    interventions: bool = False,
    quick: bool = False,
    seed: int = 0,
    progress: ProgressOption = None,
) -> Measurements:
    """All measurements of a system by name, or those of some instruments from a single replay.

    Without instruments these are all measurements that the system supports (``unsupported_measurements`` says why
    others are missing): the streaming instruments from one replay, and those of ``standalone_measurements``, with the
    steps over depth, the growth of perturbations and the transport ratios; ``only`` selects some of them by name. With
    ``interventions`` they are ``observe.intervention_measurements`` instead, which run a model under many edits and
    take hundreds of forward passes; ``only`` may name these too. With ``quick`` those that sample take smaller samples;
    ``seed`` draws them. With instruments, only these are used. A replay of a model is one forward pass for each chunk
    of its prompts. The Measurements keep their replicates; ``reduce_replicates`` turns each into means with intervals,
    and ``hs.plot`` draws all of them over depth. A measurement that fails is left out with a warning, unless it is
    named in ``only``. Raises HelmscopeError for an instrument or a name in ``only`` that the system does not support.
    ``progress`` is called with the share of the work done.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> measured = measure(integrate(SA(beta=0.0), torch.eye(3).expand(2, 3, 3), times=[0.0, 1.0]))
    >>> list(measured), measured["kernel_statistics"].row_mass.dims
    (['kernel_statistics', 'attention_drift', ..., 'mobility_test'], ('time', 'system'))
    """
    if instruments:
        if only is not None or quick or interventions:
            raise HelmscopeError(
                "only, interventions and quick apply to all measurements, but instruments are given: omit them"
            )
        _refuse_functions(instruments)
        return check_system(system).replay(*instruments, progress=progress)
    for argument, value in (("quick", quick), ("interventions", interventions)):
        if not isinstance(value, bool):
            raise HelmscopeError(f"{argument} is {short_repr(value)}, but it must be True or False")
    names, seed = _chosen(system, only, interventions), check_seed(seed)
    streaming = [each for each in streaming_instruments() if each.name in names]
    standalone = [each for each in (*standalone_measurements(), *intervention_measurements()) if each.name in names]
    report, done = check_progress(progress), 0.0
    total = (REPLAY_FORWARDS if streaming else 0.0) + sum(each.cost(system, quick=quick) for each in standalone)
    measured = Measurements()
    if streaming:
        measured |= system.replay(*streaming, progress=_share(report, done, REPLAY_FORWARDS, total))
        done += REPLAY_FORWARDS
    for each in standalone:
        cost = each.cost(system, quick=quick)
        share = _share(report, done, cost, total)
        try:
            found = each.function(system, quick=quick, seed=seed, progress=share)
            measured[each.name] = as_measurement(found)
        except HelmscopeError as error:  # what nobody asked for by name must not cost the other results
            if only is not None:
                raise
            warnings.warn(f"{each.name} is left out: {error}", stacklevel=2)
        done += cost
        report(done / total)
    for name, data in measured.items():
        measured[name] = as_measurement(data.assign_attrs(origin_attributes(system)))
    return measured


def _refuse_functions(instruments: Sequence[object]) -> None:
    """Raise HelmscopeError for a function that takes a measurement of its own."""
    classes = {each.name: f"`{type(each).__name__}()`, or " for each in streaming_instruments()}
    for k, each in enumerate(instruments):
        name = getattr(each, "__name__", "")
        if name in measurement_names():
            raise HelmscopeError(f"instruments[{k}] is a function: pass {classes.get(name, '')}only=['{name}']")


def _chosen(system: System, only: Sequence[str] | None, interventions: bool) -> list[str]:
    """The names of the measurements to take; raises HelmscopeError for one that the system does not support."""
    if isinstance(system, str):
        raise HelmscopeError(
            f"system is {short_repr(system)}, but it must be a System: record the model first, "
            f"hs.measure(hs.record({short_repr(system)}))"
        )
    if only is None:
        reasons = unsupported_measurements(system, only=INTERVENTIONS if interventions else None)
        supported = [name for name, reason in reasons.items() if reason is None]
        if not supported:
            raise HelmscopeError(f"system supports no measurement: {'; '.join(filter(None, reasons.values()))}")
        return supported
    if interventions:
        raise HelmscopeError("interventions is True and only is given, but only one of them can choose: omit one")
    if isinstance(only, str) or not isinstance(only, Sequence):
        raise HelmscopeError(f"only is {type_with_article(only)}, but it must be a list of names of measurements")
    if not only:
        raise HelmscopeError("only is empty, but it must hold at least one name of a measurement: omit it for all")
    for i, name in enumerate(only):
        if not isinstance(name, str):
            raise HelmscopeError(f"only[{i}] is {short_repr(name)}, but it must be the name of a measurement")
        reason = _unsupported(system, check_name("measurement", name, (*measurement_names(), *INTERVENTIONS)))
        if reason is not None:
            raise HelmscopeError(reason)
    return list(only)


def _share(report: Progress, done: float, part: float, total: float) -> Progress:
    return lambda share: report((done + part * share) / total)
