"""The head of a language model, told to give the logits of a few tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from helmscope.models.tap import held

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


def has_linear_head(model: Any) -> bool:
    """Whether the model names a matrix that its logits come from."""
    return isinstance(model.get_output_embeddings(), nn.Linear)


@contextmanager
def few_logits(model: Any, ids: Int[Tensor, " token"]) -> Iterator[None]:
    """Inside, the matrix of the head has the rows ``ids`` alone; what the model does to its logits, such as scaling or
    capping them, it does to those. A model that mixes logits gives something else then: compare one text.
    """
    head = model.get_output_embeddings()
    ids = ids.to(head.weight.device)
    weight, bias = head.weight[ids], None if head.bias is None else head.bias[ids]

    def forward(state: Tensor) -> Tensor:
        return nn.functional.linear(state, weight, bias)

    with held(model):
        own = head.__dict__.get("forward")  # one of the instance's, as tools that move weights about set it
        head.forward = forward
        try:
            yield
        finally:
            del head.forward
            if own is not None:
                head.forward = own
