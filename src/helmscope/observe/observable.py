"""The decorator of functions of tokens, by which they also take a system or its trajectory, with its weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

import torch

from helmscope.observe.track import trajectory_of
from helmscope.types import HelmscopeError, System, Trajectory, check_progress, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

Params = ParamSpec("Params")
Result = TypeVar("Result")
Cloud: TypeAlias = "Tensor | Trajectory | System"

PARTS = 32  # of a batch, after each of which progress is reported

NOTE = (
    "``x`` may also be a Trajectory or a System: then its states are evaluated with its weights, which are 0 for\n"
    "padding, and the result has the axes (time, batch)."
)


def observable(
    function: Callable[Concatenate[Tensor, Params], Result],
) -> Callable[Concatenate[Cloud, Params], Result]:
    """Decorator for a function of tokens f(x, weights=None, ...): ``x`` may also be a Trajectory or a System, whose
    states are then evaluated with the weights of its tokens; the result has the axes (time, batch).

    Raises HelmscopeError for a system together with ``weights``, and for one with weights, such as a recording with
    padding, if the function has no argument ``weights``, so that padding is never counted by accident.

    >>> import torch
    >>> @observable
    ... def first_coordinate(x, *, weights=None):
    ...     return x[..., 0].mean(-1) if weights is None else (weights * x[..., 0]).sum(-1) / weights.sum(-1)
    >>> half = Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2), weights=torch.tensor([[[1.0, 0.0]]]))
    >>> first_coordinate(torch.eye(2)), first_coordinate(half)
    (tensor(0.5000), tensor([[1.]]))
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(x: Cloud, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        if not (isinstance(x, Trajectory) or hasattr(x, "trajectory")):
            return function(x, *args, **kwargs)
        path, shown = trajectory_of(x), type_with_article(x)
        if path.weights is None:
            return function(path.states, *args, **kwargs)
        if "weights" not in signature.parameters:
            raise HelmscopeError(
                f"x is {shown} whose tokens have weights (padding has weight 0), but {function.__name__} counts all "
                "tokens equally: pass the tokens that count, such as path.states[k, i][path.weights[0, i] > 0]"
            )
        bound = signature.bind(path.states, *args, **kwargs)
        if bound.arguments.get("weights") is not None:
            raise HelmscopeError(f"weights are given, but x is {shown} whose tokens have their own: omit weights")
        bound.arguments["weights"] = path.weights
        return function(*bound.args, **bound.kwargs)

    call.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{NOTE}\n"
    return cast("Callable[Concatenate[Cloud, Params], Result]", call)


def in_parts(
    function: Callable[[Tensor, Tensor], Tensor],
    x: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"],
    progress: ProgressOption,
) -> Float[Tensor, "*batch"]:
    """The values of a function of tokens and weights for the clouds of a batch, a part of the batch at a time, after
    each of which ``progress`` is called with the share of the clouds done. The tokens are checked already.

    >>> import torch
    >>> in_parts(lambda x, m: (m * x[..., 0]).sum(-1), torch.eye(2).expand(2, 2, 2), torch.ones(2), print)
    0.5
    1.0
    tensor([1., 1.])
    """
    clouds, m = x.reshape(-1, *x.shape[-2:]), weights.expand(x.shape[:-1]).reshape(-1, x.shape[-2])
    report, size, values, done = check_progress(progress), max(1, len(clouds) // PARTS), list["Tensor"](), 0
    if not len(clouds):
        return function(clouds, m).reshape(x.shape[:-2])
    for part, part_weights in zip(torch.split(clouds, size), torch.split(m, size), strict=True):
        values.append(function(part, part_weights))
        done += len(part)
        report(done / len(clouds))
    return torch.cat(values).reshape(x.shape[:-2])
