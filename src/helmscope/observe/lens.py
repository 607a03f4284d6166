"""The logit lens: predictions from the states at earlier depths, and how far they are from the final prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from helmscope.observe.track import AT_LEAST_0, origin_attributes, token_weights, with_bounds, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, Trajectory, check_progress, type_with_article

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

LABELS = {"kl": "KL divergence of the logit lens", "lens_entropy": "entropy of the logit lens"}
LOGITS_PER_FORWARD = 1 << 22  # logits that the head may return at a time
LOGITS_PER_SUM = 1 << 18  # logits that are summed at a time, which fit in a cache


@runtime_checkable
class HasLogits(Protocol):
    """A system with a head, which maps the state at a depth (by default the last one) to logits."""

    @property
    def trajectory(self) -> Trajectory:
        """The states of the tokens."""

    def logits(self, *, depth: int | None = None, rows: slice = slice(None)) -> Tensor:
        """The head's logits (batch, n, vocabulary) for the texts ``rows``."""


@shows_progress("logit lens")
def logit_lens_kl(system: HasLogits, *, progress: ProgressOption = None) -> xr.Dataset:
    """Divergence of the logit lens at each depth from the model's prediction, and its entropy, for each text in nats:

        ``kl``          KL(p | p_t) = sum_w p(w) log p(w) / p_t(w)      ``lens_entropy``  -sum_w p_t(w) log p_t(w)

    averaged over tokens by their weights, along (depth, prompt). p_t is the softmax of the head applied to the state at
    depth t, p that of the model itself, so the divergence is 0 at the last depth. Logits have the model's dtype, at
    least float32, and are computed for a few texts at a time; sums are float64. Raises HelmscopeError for a system
    without a head over a vocabulary. ``progress`` is called with the share of the work done.

    >>> logit_lens_kl(torch.nn.Identity())
    Traceback (most recent call last):
      ...
    helmscope.types.HelmscopeError: system is an Identity, but a lens needs a head: a Recording of a language model
    """
    if not isinstance(system, HasLogits):
        raise HelmscopeError(
            f"system is {type_with_article(system)}, but a lens needs a head: a Recording of a language model"
        )
    path, report = system.trajectory, check_progress(progress)
    weights = token_weights(path.states[0], None if path.weights is None else path.weights[0]).double().cpu()
    counted, depths, texts = weights > 0, [int(depth) for depth in path.times], len(weights)
    size = max(1, LOGITS_PER_FORWARD // system.logits(depth=depths[0], rows=slice(0, 1)).numel())
    means = torch.empty(2, len(depths), texts, dtype=torch.float64, device="cpu")
    for begin in range(0, texts, size):
        rows = slice(begin, begin + size)
        mask, m = counted[rows], weights[rows]
        final = system.logits(rows=rows)[mask]
        for step, depth in enumerate(depths):
            values = m.new_zeros(2, *m.shape)
            values[:, mask] = _per_token(final, system.logits(depth=depth, rows=rows)[mask]).cpu()
            means[:, step, rows] = (values * m).sum(-1) / m.sum(-1)
            report((begin + (step + 1) / len(depths) * len(m)) / texts)
    quantities = {"kl": means[0], "lens_entropy": means[1]}
    measurement = with_bounds(with_replicates(quantities, path), dict.fromkeys(quantities, AT_LEAST_0))
    for name, label in LABELS.items():
        measurement[name].attrs |= {"long_name": label, "units": "nats"}
    return measurement.assign_attrs(origin_attributes(system))


def _per_token(final: Float[Tensor, "token w"], early: Float[Tensor, "token w"]) -> Float[Tensor, "2 token"]:
    """KL(p | p_t) and the entropy of p_t for each token, computed for a few tokens at a time."""
    dtype, chunks = torch.float64 if final.dtype == torch.float64 else torch.float32, []
    size = max(1, LOGITS_PER_SUM // final.shape[-1])
    for final_chunk, early_chunk in zip(torch.split(final, size), torch.split(early, size), strict=True):
        log_p, log_t = (torch.log_softmax(logits, -1, dtype=dtype) for logits in (final_chunk, early_chunk))
        p, t = log_p.exp(), log_t.exp()
        # sum (t - p) is 0 up to rounding, and cancels the rounding errors of the two normalizations
        terms = (p * (log_p - log_t) + (t - p), -t * log_t)
        chunks.append(torch.stack([term.sum(-1, dtype=torch.float64) for term in terms]))
    return torch.cat(chunks, 1)
