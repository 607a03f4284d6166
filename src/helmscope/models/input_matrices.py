"""The matrices by which the heads of attention read queries, keys and values from the normalized state.

    q_i = s W_Q y_i + b_Q,    k_j = s W_K y_j + b_K,    v_j = s W_V y_j + b_V        before any rotary phases

y is the input of the linear modules inside attention, for a pre-norm block the output of its norm. Which coordinate of
which linear module becomes which coordinate of a query is found by labels: the outputs of all linear modules inside
attention are replaced by numbers, digit by digit, and the labels are read off the queries, keys and values of the first
token, whose rotary phase is 1. So fused projections are found in any order of their parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.mlp_reading import affine_of, matrix_of
from helmscope.models.sites import Observer, Site
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor, nn

    from helmscope.models.recording import Recording
    from helmscope.models.tap import Call

PROJECTED = {Site.QUERY: "query", Site.KEY: "key", Site.VALUE: "value"}
BASE, DIGITS = 16, 6  # labels in base 16 are exact in half precision; 16^6 coordinates of linear modules per layer
AGREES = {torch.float64: 1e-10, torch.float32: 1e-4}  # largest relative error of a projection; others 3e-2


@dataclass(frozen=True, eq=False)
class InputMatrix:
    """W_Q, W_K or W_V of one layer: ``weight`` (heads, r, d), ``bias`` (heads, r) or None, both with the factor s by
    which the family scales the projection. ``rows`` (heads, r) are the rows of the linear ``module`` of that matrix.
    """

    weight: Float[Tensor, "heads r d"]
    bias: Float[Tensor, "heads r"] | None
    module: nn.Module
    rows: Int[Tensor, "heads r"]


def input_matrices(recording: Recording) -> tuple[dict[Site, InputMatrix], ...]:
    """W_Q, W_K and W_V of every layer, by the sites Site.QUERY, KEY and VALUE; keys and values have a matrix per key
    head. Runs a few short forward passes of one text. Raises HelmscopeError for a family outside the attention
    registry, and where queries, keys or values are not outputs of one linear module, as with a norm of queries and
    keys.

    >>> from helmscope import record
    >>> matrices = input_matrices(record("A", ["Once upon a time"]))
    >>> len(matrices), matrices[0][Site.KEY].weight.shape
    (12, torch.Size([6, 32, 192]))
    """
    anatomy = recording.anatomy
    if not anatomy.tapped:
        raise HelmscopeError(
            f"recording is of {type(anatomy.model).__name__}, whose family does not look up its attention function in "
            "the registry: its query and key matrices cannot be read"
        )
    runner = replace(recording.runner, batch=recording.batch.rows(slice(0, 1)), edits=())
    plain = _Projections()
    runner.forward(plain)
    linear = {
        module: None for call in plain.modules.values() for module in call.modules() if matrix_of(module) is not None
    }
    with _captured(linear) as (inputs, outputs):
        runner.forward(plain)
    offsets, count = {}, 0
    for module in linear:
        offsets[module], count = count, count + outputs[module].shape[-1]
    labels = torch.arange(count, device="cpu")
    ones = _labeled(runner, {module: torch.ones(outputs[module].shape[-1]) for module in linear})
    found: dict[tuple[int, Site], Tensor] = {}
    for digit in range(DIGITS):
        digits = labels // BASE**digit % BASE
        values = {m: digits[offsets[m] : offsets[m] + outputs[m].shape[-1]].float() for m in linear}
        read = _labeled(runner, values)
        for place, scale in ones.items():
            step = torch.where(scale != 0, read[place] / scale, 0.0).round().long().clamp(0, BASE - 1)
            found[place] = found.get(place, torch.zeros_like(step)) + step * BASE**digit
    layers = range(len(anatomy.layers))
    return tuple(
        {
            site: _matrix(layer, site, found[layer, site], ones[layer, site], plain, offsets, inputs, outputs)
            for site in PROJECTED
        }
        for layer in layers
    )


def _matrix(
    layer: int,
    site: Site,
    labels: Int[Tensor, "heads r"],
    scales: Float[Tensor, "heads r"],
    plain: _Projections,
    offsets: dict[nn.Module, int],
    inputs: dict[nn.Module, list[Tensor]],
    outputs: dict[nn.Module, Tensor],
) -> InputMatrix:
    """The matrix that the labels name, if it gives the projection of the first token in a forward pass without
    labels.
    """
    refused = HelmscopeError(
        f"layer {layer} has a {site.value} that is not the output of one linear module inside attention, so that its "
        "matrix cannot be read"
    )
    sizes = {module: outputs[module].shape[-1] for module in offsets}
    holds = (m for m, first in offsets.items() if bool(((labels >= first) & (labels < first + sizes[m])).all()))
    module = next(holds, None)
    scale = scales.flatten()[0]
    if module is None or not bool((scales == scale).all()) or not bool(scale != 0):
        raise refused
    rows = labels - offsets[module]
    weight, bias = affine_of(module)
    weight = scale.to(weight) * weight[rows.to(weight.device)]
    bias = None if bias is None else scale.to(weight) * bias.to(weight)[rows.to(weight.device)]
    expected = plain.values[layer, site].to(weight)
    tol = AGREES.get(plain.dtype, 3e-2) * expected.abs().max()
    # a tied block is called in several layers: one of its inputs is that of this layer
    projected = (weight @ x.to(weight) + (0.0 if bias is None else bias) for x in inputs[module])
    if not any(bool((each - expected).abs().max() <= tol) for each in projected):
        raise refused
    return InputMatrix(weight, bias, module, rows)


class _Projections(Observer):
    """Keeps the attention module of every layer, and the query, key and value of the first token."""

    sees_attention = True
    needs_all_layers = True

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.values: dict[tuple[int, Site], Tensor] = {}
        self.dtype = torch.float32

    def before(self, layer: int, call: Call) -> None:
        """Keep those of a layer."""
        self.modules[layer], self.dtype = call.module, call.query.dtype
        for site, name in PROJECTED.items():
            self.values[layer, site] = getattr(call, name)[0, :, 0].detach().double().cpu()


def _labeled(runner: Any, values: dict[nn.Module, Tensor]) -> dict[tuple[int, Site], Tensor]:
    """Queries, keys and values of the first token where linear modules return ``values``."""
    observer = _Projections()
    with ExitStack() as hooks:
        for module, value in values.items():
            hook = module.register_forward_hook(lambda m, args, out, value=value: value.to(out).expand_as(out))
            hooks.callback(hook.remove)
        runner.forward(observer)
    return observer.values


@contextmanager
def _captured(
    modules: dict[nn.Module, None],
) -> Iterator[tuple[dict[nn.Module, list[Tensor]], dict[nn.Module, Tensor]]]:
    """Within it, the first token's inputs (of every call) and outputs (of the last one) of modules are kept."""
    inputs: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        inputs[module].append(args[0].detach().reshape(-1, args[0].shape[-1])[0])
        outputs[module] = out.detach()

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(keep).remove)
        yield inputs, outputs
