"""Which tokens of a prompt a costly quantity is computed at: evenly spaced ones, or drawn ones, and their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.types import ReplayContext


def spaced_tokens(
    weights: Float[Tensor, "rows n"],
    count: int | None,
    *,
    include_first_token: bool = False,
    replicate: str = "prompt",
    start: int = 0,
) -> tuple[Int[Tensor, "rows k"], Bool[Tensor, "rows k"]]:
    """Positions of ``count`` tokens of each row, evenly spaced among those of positive weight without position 0, the
    usual attention sink, unless ``include_first_token``, and which of them count: False where a row has fewer. None
    takes all of them.

    With N candidates the k-th of c is number round(k (N - 1) / (c - 1)), so that the first and the last are taken.
    Raises HelmscopeError for a row without a candidate, which it names as ``replicate`` number ``start`` plus its own.

    >>> spaced_tokens(torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]]), 2)
    (tensor([[1, 3]]), tensor([[True, True]]))
    """
    counted = weights > 0
    counted[:, 0] &= include_first_token
    number = counted.sum(-1)
    if bool((number == 0).any()):
        row = int((number == 0).nonzero()[0])
        raise HelmscopeError(
            f"{replicate} {start + row} has no token that counts{'' if include_first_token else ' besides the first'}, "
            "but sampled tokens need one"
        )
    most = weights.shape[-1] - (not include_first_token)
    wanted = most if count is None else min(count, most)
    taken = number.clamp(max=wanted)
    place = torch.arange(wanted, device=weights.device)
    # where all candidates are taken the step is exactly 1
    step = (number - 1) / (taken - 1).clamp(min=1)
    nth = (place * step.unsqueeze(-1)).round().long().minimum((number - 1).unsqueeze(-1))
    order = counted.to(torch.int8).argsort(dim=-1, descending=True, stable=True)  # candidates first, in order
    counts = place < taken.unsqueeze(-1)
    return torch.where(counts, order.gather(-1, nth), 0), counts


def sample_tokens(
    context: ReplayContext, weights: Float[Tensor, "rows n"], sampled_tokens: int, *, seed: int, first_position: int = 0
) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]:
    """Indices (rows, tokens) of tokens drawn without replacement for each replicate, among those of positive weight
    without the first ``first_position`` of them, and which of the indices count (rows, tokens): False where there are
    fewer.

    >>> from helmscope.types import Half, ReplayContext
    >>> context = ReplayContext(0, Half.ATTENTION, 0.0, slice(0, 1))
    >>> sample_tokens(context, torch.tensor([[1.0, 1.0, 0.0]]), 2, seed=0, first_position=1)
    (tensor([[1, 0]]), tensor([[ True, False]]))
    """
    chosen, counts = [], []
    for row, m in zip(range(context.rows.start, context.rows.stop), weights.cpu(), strict=True):
        candidates = (m > 0).nonzero().flatten().numpy()[first_position:]
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(row,))))
        drawn = np.sort(order.permutation(candidates)[:sampled_tokens])
        missing = sampled_tokens - len(drawn)
        chosen.append(np.concatenate([drawn, np.zeros(missing, dtype=np.int64)]))
        counts.append(np.arange(sampled_tokens) < len(drawn))
    device = weights.device
    return torch.from_numpy(np.stack(chosen)).to(device), torch.from_numpy(np.stack(counts)).to(device)


def taken(values: Float[Tensor, "rows n ..."], chosen: Int[Tensor, "rows k"]) -> Float[Tensor, "rows k ..."]:
    """values[row, chosen[row, k]] for every row.

    >>> taken(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2, 0]]))
    tensor([[3., 1.]])
    """
    rows = torch.arange(len(values), device=values.device).unsqueeze(-1)
    return values[rows, chosen]
