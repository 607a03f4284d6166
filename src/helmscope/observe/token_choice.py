"""Which tokens of a prompt a costly quantity is computed at: evenly spaced ones, without the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


def spaced_tokens(
    weights: Float[Tensor, "rows n"],
    count: int | None,
    *,
    first_token: bool = False,
    replicate: str = "prompt",
    start: int = 0,
) -> tuple[Int[Tensor, "rows k"], Bool[Tensor, "rows k"]]:
    """Positions of ``count`` tokens of each row, evenly spaced among those of positive weight without position 0, the
    usual attention sink, unless ``first_token``, and which of them count: False where a row has fewer. None takes all
    of them.

    With N candidates the k-th of c is number round(k (N - 1) / (c - 1)), so that the first and the last are taken.
    Raises HelmscopeError for a row without a candidate, which it names as ``replicate`` number ``start`` plus its own.

    >>> spaced_tokens(torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]]), 2)
    (tensor([[1, 3]]), tensor([[True, True]]))
    """
    counted = weights > 0
    counted[:, 0] &= first_token
    number = counted.sum(-1)
    if bool((number == 0).any()):
        row = int((number == 0).nonzero()[0])
        raise HelmscopeError(
            f"{replicate} {start + row} has no token that counts{'' if first_token else ' besides the first'}, but "
            "sampled tokens need one"
        )
    most = weights.shape[-1] - (not first_token)
    wanted = most if count is None else min(count, most)
    taken = number.clamp(max=wanted)
    place = torch.arange(wanted, device=weights.device)
    # where all candidates are taken the step is exactly 1
    step = (number - 1) / (taken - 1).clamp(min=1)
    nth = (place * step.unsqueeze(-1)).round().long().minimum((number - 1).unsqueeze(-1))
    order = counted.to(torch.int8).argsort(dim=-1, descending=True, stable=True)  # candidates first, in order
    counts = place < taken.unsqueeze(-1)
    return torch.where(counts, order.gather(-1, nth), 0), counts


def taken(values: Float[Tensor, "rows n ..."], chosen: Int[Tensor, "rows k"]) -> Float[Tensor, "rows k ..."]:
    """values[row, chosen[row, k]] for every row.

    >>> taken(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2, 0]]))
    tensor([[3., 1.]])
    """
    rows = torch.arange(len(values), device=values.device).unsqueeze(-1)
    return values[rows, chosen]
