"""The integrations behind a phase diagram: the share of pairs that have met in every sample, one beta at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from helmscope.fields.field import Field
from helmscope.kernels.choose import pinned
from helmscope.observe.fused_shares import FusedShares
from helmscope.observe.inner_products import close_pair_share
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import default_stepper, make_problem
from helmscope.solve.threads import fitting_threads
from helmscope.theory.starts import Start, in_span
from helmscope.types import HelmscopeError, check_integer, check_memory, check_real, check_times, type_with_article
from helmscope.types.progress import Progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.solve.stepper import Stepper

# measured for beta <= 9, d = 2, 8, 32 and 48 samples: every cell equals that at tolerance 1e-9; at 1e-5 some differ by
# 8e-5, still far below their standard errors of about 1e-2
TOL = 1e-6
PAIRS = {"cpu": 2**18}  # entries of the pair matrices integrated at once, which fit in a cache
PAIRS_ELSEWHERE = 2**24


def _check_any_shape(flow: Field, *shapes: tuple[int, int]) -> None:
    """Raises the error for the first shape unless the flow accepts tokens of at least one of the shapes."""
    errors: list[HelmscopeError] = []
    for shape in shapes:
        try:
            return flow.check_size(torch.empty((), device="meta").expand(shape))  # a meta tensor takes no memory
        except HelmscopeError as error:
            errors.append(error)
    raise errors[0]


def _check_delta(delta: object) -> float:
    value = check_real("delta", delta, at_least=0)
    if value > 2:
        raise HelmscopeError(f"delta is {value:g}, but it must be at most 2: inner products are between -1 and 1")
    return value


@dataclass(frozen=True, eq=False, kw_only=True)
class Sweep:
    """The arguments that all betas of a diagram have in common."""

    times: list[float]
    start: Start
    samples: int
    delta: float
    seed: int
    device: str
    dtype: torch.dtype | None
    stepper: Stepper | None
    noise: Noise | None
    merge: float | None

    @classmethod
    def checked(cls, **arguments: Any) -> Sweep:
        """Checks what ``sample`` and ``make_problem`` do not check later."""
        start = arguments["start"]
        if isinstance(start, type) or not isinstance(start, Start):
            shown = start.__name__ if isinstance(start, type) else type_with_article(start)
            raise HelmscopeError(f"start is {shown}, but it must be a distribution such as Uniform(n=32, dim=128)")
        if start.n < 2:
            raise HelmscopeError(f"n of start is {start.n}, but a pair needs two tokens")
        times, samples = check_times(arguments["times"]), check_integer("samples", arguments["samples"], at_least=1)
        entries = samples * max(start.n * min(start.n, start.dim), len(times))
        check_memory(f"samples is {samples}, n of start is {start.n} and times has {len(times)} entries", entries)
        return cls(**arguments | {"times": times, "samples": samples, "delta": _check_delta(arguments["delta"])})

    def shares(self, flows: dict[float, Field], progress: Progress) -> Iterator[Float[Tensor, "beta sample time"]]:
        """Share of pairs that have met in each sample, one beta at a time; NaN where a sample was lost."""
        starts: dict[bool, Tensor] = {}
        for done, flow in enumerate(flows.values()):
            restricted = self.in_span(flow)
            spanned = restricted is not None
            if spanned not in starts:
                starts[spanned] = self.tokens(spanned=spanned, dtype=self.dtype or torch.float64)
            x = starts[spanned]
            size = max(1, PAIRS.get(x.device.type, PAIRS_ELSEWHERE) // self.start.n**2)
            chunks = []
            for first in range(0, len(x), size):
                systems = range(first, min(first + size, len(x)))
                integrated = flow if restricted is None else restricted
                with fitting_threads(integrated, x[first : systems.stop]):  # also covers counting the pairs
                    chunks.append(self._integrate_shares(integrated, x, systems))
                progress((done + systems.stop / len(x)) / len(flows))
            yield torch.cat(chunks).unsqueeze(0)

    def fused(self, flows: dict[float, Field]) -> FusedShares | None:
        """All flows by the fused kernel, or None where it does not support them or the requested method."""
        dtype = self.dtype or (torch.float32 if str(self.device).startswith("cuda") else torch.float64)
        requested = (self.stepper, self.noise, self.merge, pinned())
        if dtype != torch.float32 or any(choice is not None for choice in requested):
            return None
        spans = {self.in_span(flow) is not None for flow in flows.values()}
        if len(spans) > 1:
            return None
        spanned = spans.pop()
        x = self.tokens(spanned=spanned, dtype=dtype)
        for flow in flows.values():
            if not spanned:
                flow.check_size(x)
        return FusedShares.of(list(flows.values()), x, self.times, self.delta)

    def in_span(self, flow: Field) -> Field | None:
        """The flow on R^n where it commutes with rotations and dim > n; else None."""
        n, dim = self.start.n, self.start.dim
        restricted = None if self.noise is not None or dim <= n else flow.restricted(n)
        if restricted is not None:
            _check_any_shape(flow, (n, dim), (n, n))  # V = c I may be n x n: dim x dim may not fit into memory
        return restricted

    def tokens(self, *, spanned: bool, dtype: torch.dtype) -> Float[Tensor, "sample n d"]:
        """The starts of all samples."""
        options: Any = {"seed": self.seed, "dtype": dtype, "device": self.device}
        sample_in_span: Callable[..., Tensor] | None = getattr(self.start, "sample_in_span", None) if spanned else None
        if sample_in_span is not None:
            return sample_in_span(self.samples, **options)
        x = self.start.sample(self.samples, **options)
        return in_span(x) if spanned else x

    def method(self, flow: Field, dtype: torch.dtype) -> Stepper:
        """The requested stepper, or the default of a phase diagram."""
        if self.stepper is not None:
            return self.stepper
        if self.noise is not None or not flow.continuous:
            return default_stepper(flow, self.noise)
        return DormandPrince(tol=TOL if dtype == torch.float64 else None)

    def _integrate_shares(self, flow: Field, x: Tensor, systems: range) -> Float[Tensor, "sample time"]:
        """Shares of the samples ``systems``. A system ends once all its pairs have met and cannot separate again."""
        met = _AllMet(self.delta)
        problem = make_problem(
            flow,
            x[systems.start : systems.stop],
            self.times,
            stepper=self.method(flow, x.dtype),
            events=[met] if self._meeting_is_final(flow) else [],
            merge=self.merge,
            noise=self.noise,
            seed=self.seed,
            stores=False,
        )
        share, outcome = replace(problem, systems=tuple(systems)).read(met.share)
        share = share.to("cpu", torch.float64).mT
        failed = torch.tensor([[status.failed] for status in outcome.statuses], device="cpu")
        return torch.where(failed, torch.nan, share.nan_to_num(nan=1.0))  # NaN: ended early, all pairs have met

    def _meeting_is_final(self, flow: Field) -> bool:
        """Whether pairs that have all met stay together: V = c I with c > 0 attracts the two most distant tokens to
        each other as long as their angle is at most 90 degrees, and there is no noise.
        """
        value = getattr(flow, "value_scale", None)
        return self.noise is None and value is not None and value > 0 and self.delta <= 1


@dataclass(frozen=True)
class _AllMet:
    """Event: all pairs have met at a requested time."""

    delta: float
    terminal: ClassVar[bool] = True
    sampled: ClassVar[bool] = True

    def share(self, x: Float[Tensor, "system n d"]) -> Float[Tensor, " system"]:
        """The share of pairs that have met."""
        return close_pair_share(x, delta=self.delta)

    def signal(self, x: Float[Tensor, "system n d"]) -> Float[Tensor, " system"]:
        """0 where all pairs have met, negative elsewhere."""
        return self.share(x) - 1
