"""One word at one position over contexts, and the covariances of what attention adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(eq=False)
class ContextGroup(ConciseRepr):
    """What layer 0 does to one word at one position over contexts, divided by the length of the state.

    ``outputs`` (contexts, heads, s) are the outputs of the heads, and ``writes`` (heads, d, s) the tangential parts of
    their output matrices; ``covariances`` (2, heads, s, s) are the means of Cov_P over even and odd contexts;
    ``key_traces`` is the sum over keys of the trace of the covariance of what each key contributes, ``random_trace``
    the mean trace of Sigma_B; ``first`` holds the weights (heads, n) and values (heads, n, s) of the first context.

    >>> from helmscope import record
    >>> from helmscope.models.bundled_models import validation_contexts
    >>> from helmscope.observe.context_noise import context_groups
    >>> recording, contexts = record("A", ["Once upon a time"]), validation_contexts()[:64]
    >>> (group,) = context_groups(recording, contexts, groups=1, min_contexts=4)
    >>> group.sigma_of(group.outputs).shape
    torch.Size([192, 192])
    """

    token: int
    position: int
    dim: int
    outputs: Float[Tensor, "contexts heads s"]
    writes: Float[Tensor, "heads d s"]
    covariances: Float[Tensor, "halves heads s s"]
    key_traces: float
    random_trace: float
    effective_keys: float
    first: tuple[Tensor, Tensor] | None = None

    @full_precision
    def increments(self, outputs: Float[Tensor, "contexts heads s"]) -> Float[Tensor, "contexts d"]:
        """The tangential increments for outputs of the heads.

        >>> group = ContextGroup(5, 9, 1, torch.ones(1, 1, 2), torch.eye(2)[None], None, 0.0, 0.0, 1.0)
        >>> group.increments(group.outputs)
        tensor([[1., 1.]])
        """
        return torch.einsum("chs,hds->cd", outputs, self.writes)

    @full_precision
    def sigma_of(self, outputs: Float[Tensor, "contexts heads s"]) -> Float[Tensor, "d d"]:
        """Half of the unbiased covariance of the increments over contexts.

        >>> outputs = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]])
        >>> ContextGroup(5, 9, 1, outputs, torch.eye(2)[None], None, 0.0, 0.0, 1.0).sigma_of(outputs)
        tensor([[1., 0.],
                [0., 0.]])
        """
        moved = self.increments(outputs)
        moved = moved - moved.mean(0)
        return moved.mT @ moved / (2 * (len(moved) - 1))

    @full_precision
    def sigma_sampling(self, covariances: Float[Tensor, "heads s s"]) -> Float[Tensor, "d d"]:
        """Sigma_A summed over heads for covariances of the values.

        >>> group = ContextGroup(5, 9, 1, None, torch.eye(2)[None], None, 0.0, 0.0, 1.0)
        >>> group.sigma_sampling(torch.eye(2)[None])
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
        """
        return (self.writes @ covariances @ self.writes.mT).sum(0) / 2
