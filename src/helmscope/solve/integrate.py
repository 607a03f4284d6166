"""``integrate``: numerical integration of a field from initial states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, StateSpace, as_field
from helmscope.fields.noise import Noise
from helmscope.fields.parameters import flattened, selected
from helmscope.fields.weights import check_weights, fill_padding
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.solve.events import Event, check_options
from helmscope.solve.fixed import check_grid
from helmscope.solve.heun import Heun
from helmscope.solve.layer import Layer
from helmscope.solve.noisy import check_noise
from helmscope.solve.problem import Problem, check_start
from helmscope.solve.simulation import Simulation
from helmscope.solve.stepper import NOISY_STEP, AdaptiveStepper, FixedStepper, NoisyStepper, Stepper
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_memory,
    check_progress,
    check_real,
    check_times,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.kernels.request import Summation
    from helmscope.types.progress import ProgressOption


def integrate(
    field: Field | Callable[..., Tensor],
    x0: Float[Tensor, "*batch n d"],
    times: Sequence[float],
    *,
    stepper: Stepper | None = None,
    events: Iterable[Event] = (),
    merge: float | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    normalize: bool = False,
    noise: Noise | None = None,
    seed: int = 0,
    summation: Summation | None = None,
    progress: ProgressOption = None,
) -> Simulation:
    """Integrate x' = f(x, t) from x0 at time 0 and return the states at ``times``.

    The states are on the sphere, or in the field's own state space. ``field`` is a field, or a function f(x) or
    f(x, t=...) of the tokens. Its parameters may have batch axes, with one value per system. Gradients with respect to
    the parameters and x0 are those of the steps taken.

    ``stepper`` defaults to ``DormandPrince()``: adaptive, local error 1e-9 in float64. For a discontinuous field,
    ``Hardmax``, the default is ``Heun(0.01)``, because no step size meets a tolerance where tokens slide along a
    discontinuity. If a system cannot reach the last time, its states are NaN from there on, and ``outcome`` gives the
    reason and a remedy. Under an adaptive stepper a system that has stopped moving is not integrated further, and its
    later states are equal: no token would move by more than the tolerance in the remaining time, and no perturbation
    would grow (``solve/rest.py``). Fixed steps are taken up to the last time in any case, unless a terminal event such
    as ``ClusterMerge(max_angle, terminal=True)`` ends them.

    ``merge`` replaces tokens within so many radians of each other by one weighted token, which removes the fast rates
    within clusters from stiff flows (see ``merge_tokens`` for when that is valid). ``weights`` and ``mask`` make the
    cloud a weighted measure with padding. ``normalize=True`` scales x0 to unit vectors.

    The times of ``events`` are in ``event_times`` of the result. An event with ``terminal=True`` ends the systems to
    which it happens, each at its own time, which is 0 if it holds at the start; if it has several components, as
    ``ClusterMerge`` does, when the last of them happens. States at later requested times are NaN, later events do not
    count, and the ``outcome`` of such a system is ``Status.STOPPED``, which is not ok, unless it has reached the last
    time. An event with ``sampled=True`` is evaluated only at the requested times. ``progress`` is called with the share
    of the work done.

    ``summation`` fixes how sums over tokens are computed, such as ``Blockwise()``; the default depends on device, n, d,
    dtype and gradient. A flow that commutes with rotations is integrated in R^n if n < d, with the same result.

    ``noise`` makes the flow stochastic; ``stepper`` then defaults to ``EulerMaruyama(h=0.02)``, of weak order 1. With
    this step size the mean inner product of tokens on S^2 is off by at most 0.004 under SA and 0.01 under USA, beta <=
    4 (``solve/stepper.py``); faster flows, such as USA with a larger beta, need a smaller h. System k has its own
    random stream, keyed by ``seed`` and k. Each interval between requested times is divided into equal steps, so that
    requesting a time that is not a multiple of h changes the path. If the field's state is a residual stream (a
    pre-norm block), x0 may have any radius, and the trajectory holds directions and ``radius``.

    On a CPU the result of a system does not depend on its batch, not even by rounding. On some processors MKL ensures
    this only with MKL_CBWR=AUTO in the environment, which the command line sets. Raises ``HelmscopeError`` for invalid
    arguments before any work is done.

    >>> from helmscope.fields.attention import SA
    >>> x0 = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> final = integrate(SA(beta=0.0), x0, times=[1.0]).states[-1]
    >>> round(float(final[0] @ final[1]), 9)  # tanh 1
    0.761594156
    """
    check_progress(progress)
    problem = make_problem(
        field,
        x0,
        times,
        stepper=stepper,
        events=events,
        merge=merge,
        weights=weights,
        mask=mask,
        normalize=normalize,
        noise=noise,
        seed=seed,
        summation=summation,
    )
    return problem.run(progress=progress)


def make_problem(
    field: Field | Callable[..., Tensor],
    x0: Float[Tensor, "*batch n d"],
    times: Sequence[float],
    *,
    stepper: Stepper | None = None,
    events: Iterable[Event] = (),
    merge: float | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    normalize: bool = False,
    noise: Noise | None = None,
    seed: int = 0,
    summation: Summation | None = None,
    stores: bool = True,
) -> Problem:
    """Check the arguments of ``integrate`` and return the problem to be solved; raises ``HelmscopeError`` for all
    invalid arguments, before any work is done.

    With ``stores=False`` the states at all requested times need not fit in memory, for use with ``Problem.read``.

    >>> from helmscope.fields.attention import SA
    >>> make_problem(SA(beta=1.0), torch.eye(2), times=[1.0]).run().states.shape
    torch.Size([1, 2, 2])
    """
    if not isinstance(normalize, bool):
        raise HelmscopeError(f"normalize is {normalize!r}, but it must be True or False")
    field = as_field(field)
    x = check_start(field, fill_padding(x0, weights, mask), normalize=normalize)
    clock = check_times(times)
    stepper = _check_stepper(stepper, field, noise)
    if not isinstance(stepper, AdaptiveStepper):
        check_grid(clock, stepper)
    events = _as_tuple(events)
    for event in events:
        if isinstance(event, type) or not isinstance(event, Event):
            raise HelmscopeError(f"events holds {event!r}, but an event has a signal(x), such as HittingTime(1e-3)")
        check_options(event)
    combined = check_weights(x, weights, mask)
    field.check_size(x)
    field.check_times(clock, reads_end=stepper.reads_end)
    _check_declared(field, x)
    if combined is not None and not field.takes_weights:
        raise HelmscopeError(f"weights or mask is given, but the field {field.name} does not take token weights")
    _check_merge(merge, field, noise)
    if noise is not None:
        noise.check_size(x)
    stored = len(clock) * x.numel() if stores else x.numel()
    check_memory(f"times holds {len(clock)} and x0 has shape {tuple(x.shape)}", stored)
    count = x[..., 0, 0].numel()
    problem = Problem(
        field=field.with_parameters(flattened(x.shape[:-2])),
        start=x.reshape(count, *x.shape[-2:]),
        times=torch.tensor(clock, dtype=torch.float64, device=x.device),
        stepper=stepper,
        batch=tuple(x.shape[:-2]),
        systems=tuple(range(count)),
        events=events,
        merge=merge,
        weights=None if combined is None else combined.reshape(count, x.shape[-2]),
        mask=None if mask is None else mask.expand(x.shape[:-1]).reshape(count, x.shape[-2]),
        noise=noise,
        seed=check_integer("seed", seed, at_least=0, below=2**128),
        summation=summation,
    )
    if summation is not None:
        _check_summation(problem)
    return problem


def _check_declared(field: Field, x: Float[Tensor, "*batch n d"]) -> None:
    """Raise ``HelmscopeError`` for a tensor with one value per system that is not declared in ``parameters`` of the
    field: it would keep its length when systems that have ended are dropped.
    """
    lead = tuple(x.shape[:-2])
    declared = {*field.parameters, *field.parts}
    suspects = {
        name: value
        for name, value in vars(field).items()
        if name not in declared and isinstance(value, torch.Tensor) and tuple(value.shape[: len(lead)]) == lead
    }
    if not suspects or x[..., 0, 0].numel() < 2:
        return
    first = selected(torch.tensor([0], device=x.device))
    alone = x.reshape(-1, *x.shape[-2:])[:1]
    try:  # a matrix may have the shape of the batch by chance, and then one system can be integrated alone
        with torch.no_grad():
            fits = field.with_parameters(flattened(x.shape[:-2])).with_parameters(first).velocity(alone, weights=None)
    except RuntimeError:
        fits = None
    if fits is None or fits.shape != alone.shape:
        name, value = next(iter(suspects.items()))
        raise HelmscopeError(
            f"{name} of {field.name} has shape {tuple(value.shape)}, one value per system, but parameters does not "
            f"declare it: let {field.name} be a frozen dataclass with parameters = {{{name!r}: "
            f"{value.ndim - len(lead)}}}"
        )


def _check_summation(problem: Problem) -> None:
    """Raise ``HelmscopeError`` if the summation method cannot compute the sums over tokens, or if there are none."""
    if not problem.summations():
        name = type(problem.field).__name__
        raise HelmscopeError(
            f"summation is {problem.summation!r}, but this {name} does not sum over tokens: leave it out"
        )


def _as_tuple(events: Iterable[Event]) -> tuple[Event, ...]:
    try:
        return tuple(events)
    except TypeError:
        raise HelmscopeError(
            f"events is {events!r}, but it must be a list of events, such as [HittingTime(1e-3)]"
        ) from None


def _check_stepper(stepper: Stepper | None, field: Field, noise: Noise | None) -> Stepper:
    """The stepper or its default; raises ``HelmscopeError`` if it cannot integrate this field or this noise."""
    if noise is not None and not isinstance(noise, Noise):
        raise HelmscopeError(f"noise is {noise!r}, but it must be a noise such as IsotropicNoise(nu=0.1)")
    if stepper is None:
        stepper = default_stepper(field, noise)
    if not isinstance(stepper, AdaptiveStepper | FixedStepper | NoisyStepper):
        examples = "DormandPrince() or RK4(h=0.01)" if noise is None else "EulerMaruyama(h=0.01)"
        raise HelmscopeError(f"stepper is {stepper!r}, but it must be a stepper such as {examples}")
    name = type(stepper).__name__
    if isinstance(stepper, NoisyStepper) != (noise is not None):
        allowed = (
            f"{name} needs noise=, such as IsotropicNoise(nu=0.1)"
            if noise is None
            else "noise needs a stochastic stepper, such as EulerMaruyama(h=0.01)"
        )
        raise HelmscopeError(f"stepper is {stepper!r} and noise is {noise!r}, but {allowed}")
    if isinstance(stepper, NoisyStepper) and noise is not None:
        check_noise(field, noise, stepper)
    if isinstance(stepper, FixedStepper) and stepper.geodesic and field.space is not StateSpace.SPHERE:
        raise HelmscopeError(
            f"stepper is {name}, which follows great circles, but the states of this field are {field.space.value}"
        )
    if field.discrete_only and not isinstance(stepper, Layer):
        raise HelmscopeError(
            f"stepper is {name}, but this {type(field).__name__} is a map, not a flow (its norm changes the state "
            "even if nothing is added): use Layer()"
        )
    return stepper


def default_stepper(field: Field, noise: Noise | None) -> Stepper:
    """The stepper of ``integrate`` where none is chosen.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.fields.noise import IsotropicNoise
    >>> default_stepper(SA(beta=4.0), None), default_stepper(SA(beta=4.0), IsotropicNoise(nu=0.1))
    (DormandPrince(tol=None, max_steps=200000), EulerMaruyama(h=0.02))
    """
    if noise is not None:
        return EulerMaruyama(NOISY_STEP)
    return DormandPrince() if field.continuous else Heun(0.01)


def _check_merge(merge: float | None, field: Field, noise: Noise | None) -> None:
    if merge is None:
        return
    if check_real("merge", merge, at_least=0) > 0.5:
        raise HelmscopeError(f"merge is {merge:g}, but tokens that far apart have not met: use at most 0.5 radians")
    if noise is not None or field.space is not StateSpace.SPHERE:
        raise HelmscopeError(
            f"merge is {merge:g}, but under noise or with individual radii tokens that met separate again"
        )
    if not field.exchangeable:
        raise HelmscopeError(
            f"merge is {merge:g}, but merging needs attention without causal mask and bias, not this {field.name}"
        )
