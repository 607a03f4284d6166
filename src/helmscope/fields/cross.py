"""Cross-attention: attention to a second cloud, as the tokens of a decoder attend to those of an encoder.

x_i' = P_{x_i} sum_j p_ij V y_j,     p_ij = m_j e^{beta x_i^T B y_j} / sum_k m_k e^{beta x_i^T B y_k}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from helmscope.fields.attention import check_matrix, softmax_kernel
from helmscope.fields.field import Field
from helmscope.fields.lowrank import LowRank, as_dense, query_and_key
from helmscope.fields.parameters import number_or_tensor, over_tokens, shape_or_type
from helmscope.fields.weights import check_weights
from helmscope.geometry.sphere import project
from helmscope.kernels.choose import token_sum
from helmscope.kernels.dense import matrix_product, transformed_logits
from helmscope.kernels.request import Request
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time


@dataclass(frozen=True, eq=False)
class CrossAttention(Field):
    """Attention to a second cloud: x_i' = P_{x_i} sum_j p_ij V y_j, with the tokens y_j of ``memory`` (*batch, m, d)
    held fixed and weighted by ``memory_weights`` (*batch, m).

    The tokens x do not attend to each other. ``beta``, ``query_key`` and ``value`` as in ``SA``. Sums over the memory
    are computed by ``kernels/``: if either cloud has more than 2,048 tokens, no n x m matrix is stored. Raises
    ``HelmscopeError`` for a memory without a token of positive weight, and when called for tokens of another
    dimension.

    >>> north = torch.tensor([[0.0, 1.0]])
    >>> CrossAttention(beta=1.0, memory=north)(torch.tensor([[1.0, 0.0]]))
    tensor([[0., 1.]])
    """

    parameters: ClassVar[Mapping[str, int]] = {
        "beta": 0,
        "memory": 2,
        "query_key": 2,
        "value": 2,
        "memory_weights": 1,
    }

    beta: float | Float[Tensor, "*batch"]
    memory: Float[Tensor, "*batch m d"]
    query_key: Float[Tensor, "*batch d d"] | LowRank | None = field(default=None, kw_only=True)
    value: Float[Tensor, "*batch d d"] | LowRank | None = field(default=None, kw_only=True)
    memory_weights: Float[Tensor, "*batch m"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", number_or_tensor("beta", self.beta, at_least=0))
        y = self.memory
        if not isinstance(y, torch.Tensor) or y.ndim < 2 or 0 in y.shape or not y.is_floating_point():
            raise HelmscopeError(f"memory is {shape_or_type(y)}, but it must be a float tensor of tokens (..., m, d)")
        for name in ("query_key", "value"):
            if not isinstance(getattr(self, name), LowRank):  # which checks its factors itself
                check_matrix(name, getattr(self, name), floor=False)
        check_weights(y, self.memory_weights)
        _ = self.batch  # raises if batch axes do not broadcast

    @property
    def exchangeable(self) -> bool:
        """True: tokens do not interact."""
        return True

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the tokens have the dimension of the memory and the matrices."""
        d = x.shape[-1]
        for name in ("memory", "query_key", "value"):
            parameter = getattr(self, name)
            if parameter is not None and parameter.shape[-1] != d:
                raise HelmscopeError(f"{name} has shape {tuple(parameter.shape)}, but tokens have dimension {d}")
        super().check_size(x)

    def request(self, x: Float[Tensor, "*batch n d"]) -> Request:
        """The request for the attention sum over the memory.

        >>> CrossAttention(beta=1.0, memory=torch.eye(3)).request(torch.eye(3)[:1]).key.shape
        torch.Size([3, 3])
        """
        y = self.memory.to(x).expand(*x.shape[:-2], *self.memory.shape[-2:])
        query, key = query_and_key(x, self.query_key)[0], query_and_key(y, self.query_key)[1]
        weights = None if self.memory_weights is None else self.memory_weights.to(x)
        return Request(over_tokens(self.beta, x) * query, key, y, weights=weights)

    def cross_kernel(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
        """The attention weights p_ij of memory token j for token i, (*batch, n, m); rows sum to 1.

        >>> CrossAttention(beta=0.0, memory=torch.eye(3)).cross_kernel(torch.eye(3)[:1])
        tensor([[0.3333, 0.3333, 0.3333]])
        """
        request = self.request(x)
        return softmax_kernel(transformed_logits(request), request.weights)

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """sum_j p_ij V y_j, before projection; ``weights`` of the tokens x are ignored."""
        mean = token_sum(self.request(x)).mean
        return mean if self.value is None else matrix_product(mean, as_dense(self.value, x).mT)

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangential part of the sum, unchecked."""
        return project(x, self.ambient(x))
