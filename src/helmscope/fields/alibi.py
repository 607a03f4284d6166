"""ALiBi: a bias of the logits that decreases linearly with the distance of positions (Press, Smith & Lewis 2022,
arXiv:2108.12409).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.types import check_integer, check_memory, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def alibi_bias(n: int, slope: float) -> Float[Tensor, "n n"]:
    """The bias -slope |i - j| for n tokens, (n, n), slope >= 0: nearby tokens get more weight.

    With ``causal=True`` it is ALiBi as published, without a mask its symmetric form. Raises ``HelmscopeError`` for
    n < 1 and for a slope that is negative or not finite.

    >>> alibi_bias(3, 0.5)[2]
    tensor([-1.0000, -0.5000, -0.0000], dtype=torch.float64)
    """
    n = check_integer("n", n, at_least=1)
    check_memory(f"n is {n}", n * n)
    positions = torch.arange(n, dtype=torch.float64, device="cpu")
    return -check_real("slope", slope, at_least=0) * (positions[:, None] - positions).abs()


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One slope per head: 2^(-8 k / heads), k = 1 to heads, the geometric sequence that ends at 1/256.

    The formula is the same if the number of heads is not a power of two. (Published code interleaves two sequences
    then; pass other slopes to ``alibi_bias`` to reproduce it.) Raises ``HelmscopeError`` for heads < 1.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    count = check_integer("heads", heads, at_least=1)
    check_memory(f"heads is {count}", count)
    return tuple(2.0 ** (-8 * k / count) for k in range(1, count + 1))
