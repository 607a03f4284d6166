"""What a model would say if it stopped early: the lens, and how far it is from what the model says in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from helmscope.observe.track import AT_LEAST_0, state_axes, token_weights, with_bounds, with_replicates
from helmscope.types import HelmscopeError, Progress, Trajectory, check_progress

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

PASSING = 1 << 22  # logits that the head gives at a time
WORKED = 1 << 18  # those that are summed at a time: what a cache holds


@runtime_checkable
class HasLogits(Protocol):
    """A system with a head: what it makes of the state at a depth, or of its last one."""

    @property
    def trajectory(self) -> Trajectory:
        """What the tokens did."""

    def logits(self, *, depth: int | None = None, rows: slice = slice(None)) -> Tensor:
        """The head's logits (batch, n, vocabulary), of the texts ``rows``."""


def lens_divergence(system: HasLogits, *, progress: Progress | None = None) -> xr.Dataset:
    """For each text at each depth, the mean over its tokens by their weights, in nats, of

        ``divergence``  KL(p | p_t) = sum_w p(w) log p(w) / p_t(w)      ``entropy``  -sum_w p_t(w) log p_t(w)

    with p_t the softmax of what the head makes of the state at depth t, p that of the model itself. Zero at the last
    depth. Logits are of the model's dtype, float32 at least, and pass some texts at a time; sums are float64. A system
    without a head over a vocabulary is refused. ``progress`` is called with the share of the work done.

    >>> lens_divergence(torch.nn.Identity())
    Traceback (most recent call last):
      ...
    helmscope.types.HelmscopeError: system is a Identity, but a lens needs a head: a Recording of a language model
    """
    if not isinstance(system, HasLogits):
        raise HelmscopeError(
            f"system is a {type(system).__name__}, but a lens needs a head: a Recording of a language model"
        )
    path, tell = system.trajectory, check_progress(progress)
    weights = token_weights(path.states[0], None if path.weights is None else path.weights[0]).double().cpu()
    counted, depths, texts = weights > 0, [int(depth) for depth in path.times], len(weights)
    size = max(1, PASSING // system.logits(depth=depths[0], rows=slice(0, 1)).numel())
    found = torch.empty(2, len(depths), texts, dtype=torch.float64, device="cpu")
    for begin in range(0, texts, size):
        rows = slice(begin, begin + size)
        here, m = counted[rows], weights[rows]
        final = system.logits(rows=rows)[here]
        for step, depth in enumerate(depths):
            values = m.new_zeros(2, *m.shape)
            values[:, here] = _per_token(final, system.logits(depth=depth, rows=rows)[here]).cpu()
            found[:, step, rows] = (values * m).sum(-1) / m.sum(-1)
            tell((begin + (step + 1) / len(depths) * len(m)) / texts)
    seen = {"divergence": found[0], "entropy": found[1]}
    return with_bounds(with_replicates(seen, state_axes(path)), dict.fromkeys(seen, AT_LEAST_0))


def _per_token(final: Float[Tensor, "token w"], early: Float[Tensor, "token w"]) -> Float[Tensor, "2 token"]:
    """KL(p | p_t) and the entropy of p_t, some tokens at a time."""
    wide, found = torch.float64 if final.dtype == torch.float64 else torch.float32, []
    size = max(1, WORKED // final.shape[-1])
    for one, other in zip(torch.split(final, size), torch.split(early, size), strict=True):
        log_p, log_t = (torch.log_softmax(part, -1, dtype=wide) for part in (one, other))
        p, t = log_p.exp(), log_t.exp()
        # sum (t - p) is 0 but for rounding, and takes that of the two normalizations away
        parts = (p * (log_p - log_t) + (t - p), -t * log_t)
        found.append(torch.stack([part.sum(-1, dtype=torch.float64) for part in parts]))
    return torch.cat(found, 1)
