"""The theory's attention flow from the first states of a model, at the model's own effective beta and arc length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from helmscope.claims.arm_statistics import token_ids
from helmscope.fields.attention import SA
from helmscope.models.premise import CAUSAL, attention_of
from helmscope.models.recording import Recording
from helmscope.observe.arcs import arc_length, matched_flow_times
from helmscope.observe.depth_steps import unit_states
from helmscope.observe.effective_beta import effective_beta
from helmscope.observe.pairs import PairSet, cloud_statistics
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.types import Trajectory

FIRST, HORIZON, TIMES, TOLERANCE = 0.05, 50.0, 32, 1e-3


@dataclass(frozen=True, eq=False)
class TheoryFlow:
    """SA with V = I from the first states of some prompts, with the mask of the model and ``beta``, the median over
    layers, heads and prompts of the effective beta without the query's own token.

    ``mean`` is the mean inner product of distant pairs over (depth, prompt), at the time when the flow has the arc
    length of the model at this depth; NaN where the whole arc of the flow is shorter. ``end`` is that at the end of the
    flow. ``arc`` and ``model_arc`` are the mean whole arc lengths in radians.

    >>> from helmscope.models.bundled_models import story_texts
    >>> from helmscope.models.record import record
    >>> flow = TheoryFlow.of(record("A", story_texts()[:1]), prompts=1, gap=16)
    >>> flow.causal, flow.mean.shape, bool(flow.model_arc > flow.arc)
    (True, (25, 1), True)
    """

    beta: float
    causal: bool
    mean: np.ndarray
    end: np.ndarray
    arc: float
    model_arc: float

    @classmethod
    def of(cls, recording: Recording, *, prompts: int, gap: int) -> TheoryFlow:
        """The flow from the first states of the first prompts of a recording; raises HelmscopeError if its attention
        cannot be read.

        >>> from helmscope.models.bundled_models import story_texts
        >>> from helmscope.models.record import record
        >>> flow = TheoryFlow.of(record("A", [text[:99] for text in story_texts()[:2]]), prompts=1, gap=4)
        >>> flow.end.shape
        (1,)
        """
        beta = float(effective_beta(recording).beta_without_self.median())
        causal = attention_of(recording.certificate) == CAUSAL
        path, ids = _first_prompts(recording.on_sphere, prompts), token_ids(recording)
        start = unit_states(path, 0)
        weights = None if path.weights is None else path.weights[0].double()
        times = np.concatenate([[0.0], np.geomspace(FIRST, HORIZON, TIMES)]).tolist()
        field = SA(beta=max(beta, 0.0), causal=causal)
        flow = integrate(field, start, times, weights=weights, stepper=DormandPrince(TOLERANCE)).trajectory
        measured = cloud_statistics(flow, ids=None if ids is None else ids[:prompts], gap=gap, ranks=False)
        by_time = measured.mean_inner_product.sel(pairs=PairSet.DISTANT.value).values
        matched = matched_flow_times(path, flow)
        at = matched.flow_time.values
        mean = np.stack([np.interp(at[:, k], times, by_time[:, k]) for k in range(at.shape[1])], 1)
        arcs = arc_length(flow).arc_length.values[-1].mean(), matched.arc_length.values[-1].mean()
        return cls(beta, causal, np.where(np.isnan(at), np.nan, mean), by_time[-1], float(arcs[0]), float(arcs[1]))

    @property
    def label(self) -> str:
        """A label of its curve."""
        return f"theory's flow, beta = {self.beta:.2g}"

    @property
    def sentence(self) -> str:
        """What the flow does, as a sentence."""
        reached = np.isfinite(self.mean).mean(1) >= 0.5
        last = int(np.flatnonzero(reached)[-1])
        return (
            f"The theory's flow (V = I, {'causal' if self.causal else 'full'} attention) from the same first states at "
            f"the effective beta {self.beta:.2f}, the median over heads and layers, moves the tokens by {self.arc:.2f} "
            f"radians until t = {HORIZON:g}, when their mean inner product is {self.end.mean():.3f}; the model moves "
            f"them by {self.model_arc:.2f}, and as far as the flow at depth {last} of {len(self.mean) - 1}."
        )


def _first_prompts(path: Trajectory, count: int) -> Trajectory:
    weights = None if path.weights is None else path.weights[:, :count]
    return Trajectory(path.times, path.states[:, :count], weights, axis=path.axis, replicate=path.replicate)
