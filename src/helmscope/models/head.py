"""Logits of selected tokens only, by restricting the head of a language model to some of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from helmscope.models.tap import locked

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


def has_linear_head(model: Any) -> bool:
    """Whether the model's logits are a linear map of its last states, by ``get_output_embeddings``."""
    return isinstance(model.get_output_embeddings(), nn.Linear)


@contextmanager
def few_logits(model: Any, ids: Int[Tensor, " token"]) -> Iterator[None]:
    """Context manager: within it, the head computes only the logits of the tokens ``ids``. What the model does to each
    logit, such as scaling or capping, still applies. If it mixes logits the results differ: compare one text.
    """
    head = model.get_output_embeddings()
    ids = ids.to(head.weight.device)
    weight, bias = head.weight[ids], None if head.bias is None else head.bias[ids]

    def forward(state: Tensor) -> Tensor:
        return nn.functional.linear(state, weight, bias)

    with locked(model):
        replaced = head.__dict__.get("forward")  # set on the instance by tools that move weights
        head.forward = forward
        try:
            yield
        finally:
            del head.forward
            if replaced is not None:
                head.forward = replaced
