"""``integrate``: from a field and a start to a Simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, Space, as_field
from helmscope.fields.noise import Noise
from helmscope.fields.parameters import flattened
from helmscope.fields.weights import check_weights
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.events import Event, check_options
from helmscope.solve.fixed import check_grid
from helmscope.solve.heun import Heun
from helmscope.solve.layer import Layer
from helmscope.solve.noisy import check_noise
from helmscope.solve.problem import Problem, check_start
from helmscope.solve.simulation import Simulation
from helmscope.solve.stepper import AdaptiveStepper, FixedStepper, NoisyStepper, Stepper
from helmscope.types import (
    HelmscopeError,
    Progress,
    check_progress,
    fits_memory,
    increasing_times,
    real_number,
    whole_number,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.kernels.kernel import Kernel


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
    kernel: Kernel | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Carry tokens by x' = f(x, t) from time 0, on the sphere or where the field's states live, and look at them at
    ``times``.

    ``field`` is a field, or a function of tokens f(x) or f(x, t=...). Its parameters may have gradients, which go
    through the steps taken as that of x0 does, and batch axes: a value per system.
    ``stepper`` is ``DormandPrince()`` where None: adaptive, local error 1e-9 in float64. A field that jumps,
    ``Hardmax``, gets ``Heun(0.01)``: where tokens slide along a jump no step meets a tolerance. A system that cannot
    reach its last time keeps NaN from there on, and ``outcome`` says why and what would help. One that has stopped
    moving under an adaptive stepper ends there, and its later states are that one: no token would move by more than the
    tolerance in the time that remains, and no disturbance grow (``solve/rest.py``). Steps of fixed size are taken up to
    the last time, at rest or not: a terminal event such as ``ClusterMerge(radius, terminal=True)`` can end them.

    ``merge`` carries tokens closer than so many radians as one weighted token, which frees stiff flows from the fast
    rates inside clusters (see ``merge_tokens`` for when that is right). ``weights`` and ``mask`` make the cloud a
    weighted measure with padding.
    ``events`` are timed, in the ``event_times`` of the result. An event with ``terminal=True`` ends the systems it
    happens to, each at its own time, which is 0 where it holds at the start; one with several components, such as
    ``ClusterMerge``, when the last of them happens. States at later asked times are NaN, later events do not count, and
    the ``outcome`` of such a system is ``Status.STOPPED``, which is not ok, unless it has reached the last time. An
    event with ``sampled=True`` is looked at only at the asked times. ``progress`` is called with the share of the work
    done. A gradient with respect to x0 goes through the steps taken.

    ``kernel`` pins how sums over tokens are computed, such as ``Blockwise()``; where None it is chosen by device, n, d,
    dtype and gradient. A flow that commutes with rotations carries n < d tokens in R^n, which gives the same.

    ``noise`` makes it a stochastic flow, carried by a stepper made for one, such as ``EulerMaruyama(h=0.01)``; system k
    draws from a stream of its own, keyed by ``seed`` and k; each interval between asked times is cut into equal steps,
    so that asking for a time off the grid of h changes the path. A field whose state is a residual stream (a block with
    pre-norm) takes x0 of any radius, and the trajectory holds directions and ``radius``.

    A system's result does not depend, to the bit on a CPU, on the batch it runs in. On some processors MKL keeps that
    promise only with MKL_CBWR=AUTO in the environment, which the command line sets by itself.

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
        kernel=kernel,
    )
    return problem.run(progress)


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
    kernel: Kernel | None = None,
    stores: bool = True,
) -> Problem:
    """Everything ``integrate`` refuses is refused here, before any work is done; the arguments are the same.

    With ``stores=False`` the states at all asked times need not fit the memory: for ``Problem.read``.

    >>> from helmscope.fields.attention import SA
    >>> make_problem(SA(beta=1.0), torch.eye(2), times=[1.0]).run().states.shape
    torch.Size([1, 2, 2])
    """
    if not isinstance(normalize, bool):
        raise HelmscopeError(f"normalize is {normalize!r}, but it must be True or False")
    field = as_field(field)
    x = check_start(field, x0, normalize=normalize)
    clock = increasing_times(times)
    stepper = _check_stepper(stepper, field, noise)
    if not isinstance(stepper, AdaptiveStepper):
        check_grid(clock, stepper)
    events = _listed(events)
    for event in events:
        if isinstance(event, type) or not isinstance(event, Event):
            raise HelmscopeError(f"events holds {event!r}, but an event has a signal(x), such as HittingTime(1e-3)")
        check_options(event)
    combined = check_weights(x, weights, mask)
    field.check_size(x)
    if combined is not None and not field.takes_weights:
        raise HelmscopeError(f"weights or mask is given, but the field {field.name} knows no token weights")
    _check_merge(merge, field, noise)
    if noise is not None:
        noise.check_size(x)
    stored = len(clock) * x.numel() if stores else x.numel()
    fits_memory(f"times holds {len(clock)} and x0 has shape {tuple(x.shape)}", stored)
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
        seed=whole_number("seed", seed, at_least=0, below=2**128),
        kernel=kernel,
    )
    if kernel is not None:
        _check_kernel(problem)
    return problem


def _check_kernel(problem: Problem) -> None:
    """Refuse a kernel that cannot serve, or that nobody asks."""
    if not problem.kernels():
        name = type(problem.field).__name__
        raise HelmscopeError(f"kernel is {problem.kernel!r}, but this {name} sums over no tokens: leave it out")


def _listed(events: Iterable[Event]) -> tuple[Event, ...]:
    try:
        return tuple(events)
    except TypeError:
        raise HelmscopeError(
            f"events is {events!r}, but it must be a list of events, such as [HittingTime(1e-3)]"
        ) from None


def _check_stepper(stepper: Stepper | None, field: Field, noise: Noise | None) -> Stepper:
    """The stepper, the default where None; refused where it cannot carry this field or this noise."""
    if noise is not None and not isinstance(noise, Noise):
        raise HelmscopeError(f"noise is {noise!r}, but it must be a noise such as IsotropicNoise(nu=0.1)")
    if stepper is None and noise is None:
        stepper = DormandPrince() if field.continuous else Heun(0.01)
    if not isinstance(stepper, AdaptiveStepper | FixedStepper | NoisyStepper):
        examples = "DormandPrince() or RK4(h=0.01)" if noise is None else "EulerMaruyama(h=0.01)"
        raise HelmscopeError(f"stepper is {stepper!r}, but it must be a stepper such as {examples}")
    name = type(stepper).__name__
    if isinstance(stepper, NoisyStepper) != (noise is not None):
        allowed = (
            f"{name} needs noise=, such as IsotropicNoise(nu=0.1)"
            if noise is None
            else "noise needs a stepper made for it, such as EulerMaruyama(h=0.01)"
        )
        raise HelmscopeError(f"stepper is {stepper!r} and noise is {noise!r}, but {allowed}")
    if isinstance(stepper, NoisyStepper) and noise is not None:
        check_noise(field, noise, stepper)
    if isinstance(stepper, FixedStepper) and stepper.geodesic and field.space is not Space.SPHERE:
        raise HelmscopeError(
            f"stepper is {name}, which follows great circles, but the states of this field are {field.space.value}"
        )
    if field.only_layers and not isinstance(stepper, Layer):
        raise HelmscopeError(
            f"stepper is {name}, but this {type(field).__name__} is a map and no flow (its norm changes the state "
            "even where nothing is added): use Layer()"
        )
    return stepper


def _check_merge(merge: float | None, field: Field, noise: Noise | None) -> None:
    if merge is None:
        return
    if real_number("merge", merge, at_least=0) > 0.5:
        raise HelmscopeError(f"merge is {merge:g}, but tokens that far apart have not met: take at most 0.5 radians")
    if noise is not None or field.space is not Space.SPHERE:
        raise HelmscopeError(
            f"merge is {merge:g}, but tokens that met part again under noise or with radii of their own"
        )
    if not field.exchangeable:
        raise HelmscopeError(
            f"merge is {merge:g}, but merging needs attention without causal mask and bias, not this {field.name}"
        )
