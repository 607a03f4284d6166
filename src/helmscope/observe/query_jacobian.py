"""Derivatives D_y q of the queries of chosen tokens by the states of these tokens, by automatic differentiation.

One vector-Jacobian product for each coordinate of the queries has the derivatives of all tokens of a forward pass at
once, through the norm and whatever a family does to its queries, at the cost of a backward pass through all of them.
But a query depends only on the state of its own token and on its position. So the chosen tokens of all prompts are
packed into the few rows of a second forward pass, every token at its own position, with their states put in before each
layer: 128 tokens of 64 prompts take about five rows. Where the queries of that pass are not those of the first one
(edits that differ from row to row, positions that depend on padding), all prompts are differentiated instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.sites import AbstractEdit, EditContext, Observer, Site

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.models.recording import Recording
    from helmscope.models.tap import Attended, Call

AGREEMENT = 1e-4  # of packed queries with those of the model, relative to the largest


def query_jacobians(
    recording: Recording, rows: slice, chosen: Int[Tensor, "rows tokens"], counts: Bool[Tensor, "rows tokens"]
) -> dict[int, Float[Tensor, "rows heads tokens r d"]]:
    """D_y q of every layer for the ``chosen`` tokens of the prompts ``rows``; 0 for those that do not count.

    >>> from helmscope import record
    >>> recording = record("A", ["Once upon a time there was a cat", "The dog ran home to eat"])
    >>> chosen, counts = torch.tensor([[2], [3]]), torch.ones(2, 1, dtype=torch.bool)
    >>> query_jacobians(recording, slice(0, 2), chosen, counts)[0].shape
    torch.Size([2, 6, 1, 32, 192])
    """
    values = _Chosen(recording, rows.start, chosen)
    recording.runner.forward(values, rows=rows, progress=False)
    packed = packed_rows(chosen, counts)
    length = int(packed.amax()) + 1
    if bool(counts.any()) and length < len(chosen):
        states = {layer: _put(state, packed, chosen, counts, length) for layer, state in values.states.items()}
        found = _Jacobians(recording, packed, chosen, counts)
        found.run(slice(0, length), states)
        if all(_agree(found.queries[layer], query, counts) for layer, query in values.queries.items()):
            return found.jacobians
    places = torch.arange(rows.start, rows.stop, device=chosen.device).unsqueeze(-1).expand_as(chosen)
    found = _Jacobians(recording, places, chosen, counts)
    found.run(rows, None)
    return found.jacobians


def packed_rows(chosen: Int[Tensor, "rows tokens"], counts: Bool[Tensor, "rows tokens"]) -> Int[Tensor, "rows tokens"]:
    """The row of each token when tokens of different prompts share rows, no two of them with the same position in one
    row; 0 for those that do not count.

    >>> packed_rows(torch.tensor([[1, 2], [2, 3], [2, 5]]), torch.ones(3, 2, dtype=torch.bool))
    tensor([[0, 0],
            [1, 0],
            [2, 0]])
    """
    taken: dict[int, int] = {}
    found = torch.zeros_like(chosen)
    for row, token in counts.nonzero().tolist():
        position = int(chosen[row, token])
        found[row, token] = taken.get(position, 0)
        taken[position] = int(found[row, token]) + 1
    return found


def _put(state: _State, rows: Tensor, chosen: Tensor, counts: Tensor, length: int) -> Tensor:
    """The states of chosen tokens at their packed places; elsewhere that of the first of them, which is finite."""
    values = state.values[counts]
    found = values[0].expand(length, state.positions, -1).clone()
    found[rows[counts], chosen[counts]] = values
    return found


def _agree(found: Tensor, expected: Tensor, counts: Tensor) -> bool:
    there = counts[:, None, :, None].expand_as(expected)
    far = (found - expected).abs()[there]
    return bool((far <= AGREEMENT * expected.abs()[there].amax()).all())


@dataclass(frozen=True, eq=False)
class _State:
    """The states (rows, tokens, d) of chosen tokens, and how many positions a row has."""

    values: Tensor
    positions: int


class _Chosen(Observer):
    """Observer: states and queries of chosen tokens (rows, tokens) in every layer; row 0 is the prompt ``first``."""

    needs_all_layers = True
    sees_attention = True
    sites = frozenset({Site.INPUT})

    def __init__(self, recording: Recording, first: int, chosen: Tensor) -> None:
        self.layers, self.first, self.chosen = recording.layers, first, chosen
        self.states: dict[int, _State] = {}
        self.queries: dict[int, Tensor] = {}

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Keep the states of a layer."""
        if layer not in self.layers:
            return
        if layer not in self.states:
            empty = torch.zeros(*self.chosen.shape, value.shape[-1], dtype=value.dtype, device=value.device)
            self.states[layer] = _State(empty, value.shape[1])
        own = self._own
        rows = torch.arange(len(value), device=value.device).unsqueeze(-1)
        self.states[layer].values[own] = value.detach()[rows, self.chosen[own]]

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Keep the queries of a layer."""
        if layer not in self.layers:
            return
        assert call is not None
        query = call.query.detach()
        if layer not in self.queries:
            shape = (len(self.chosen), query.shape[1], self.chosen.shape[1], query.shape[-1])
            self.queries[layer] = torch.zeros(shape, dtype=query.dtype, device=query.device)
        own = self._own
        index = self.chosen[own][:, None, :, None].expand(-1, query.shape[1], -1, query.shape[-1])
        self.queries[layer][own] = query.gather(2, index)

    @property
    def _own(self) -> slice:
        return slice(self.rows.start - self.first, self.rows.stop - self.first)


class _Jacobians(Observer):
    """Observer: the queries, and their derivatives by the input of the layer, at the places (row, position) of tokens
    (prompts, tokens), each in the row of a forward pass that ``places`` says and at the position that ``chosen`` says.
    """

    needs_all_layers = True
    sees_attention = True

    def __init__(self, recording: Recording, places: Tensor, chosen: Tensor, counts: Tensor) -> None:
        self.recording, self.places, self.chosen, self.counts = recording, places, chosen, counts
        self.leaves: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        self.jacobians: dict[int, Tensor] = {}

    def run(self, rows: slice, states: Mapping[int, Tensor] | None) -> None:
        """Differentiate a forward pass of the texts ``rows``, with ``states`` in place of its own, if there are any."""
        runner = self.recording.runner.under(_Leaves(self.leaves, states))
        runner.forward(self, rows=rows, gradients=True, progress=False)
        self.leaves.clear()

    @full_precision
    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Differentiate the queries of a layer."""
        if layer not in self.recording.layers:
            return
        assert call is not None
        query, y = call.query, self.leaves[layer]
        heads, r = query.shape[1], query.shape[-1]
        prompts, tokens = self.chosen.shape
        if layer not in self.jacobians:
            shape = (prompts, heads, tokens, r)
            self.queries[layer] = torch.zeros(shape, dtype=query.dtype, device=query.device)
            self.jacobians[layer] = torch.zeros(*shape, y.shape[-1], dtype=y.dtype, device=y.device)
        here = self.counts & (self.places >= self.rows.start) & (self.places < self.rows.stop)
        prompt, token = here.nonzero(as_tuple=True)
        row, position = self.places[here] - self.rows.start, self.chosen[here]
        self.queries[layer][prompt, :, token] = query.detach()[row, :, position]
        if not query.requires_grad:
            return
        for head in range(heads):
            for c in range(r):
                z = torch.zeros_like(query)
                z[:, head, :, c] = 1.0
                (gradient,) = torch.autograd.grad(query, y, z, retain_graph=True, allow_unused=True)
                if gradient is not None:
                    self.jacobians[layer][prompt, head, token, c] = gradient[row, position]


@dataclass(frozen=True, eq=False)
class _Leaves(AbstractEdit):
    """Makes the input of a layer, or ``states`` in its place, a leaf of the graph, and keys and values constants."""

    leaves: dict[int, Tensor] = field(repr=False)
    states: Mapping[int, Tensor] | None = field(repr=False, default=None)

    @property
    def sites(self) -> frozenset[Site]:
        """The input of a layer, its keys and its values."""
        return frozenset({Site.INPUT, Site.KEY, Site.VALUE})

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """A constant, or a copy of the new leaf, since some families add to a state in place."""
        if context.site is not Site.INPUT:
            return value.detach()
        if self.states is not None and context.layer in self.states:
            value = self.states[context.layer][context.rows].to(value)
        self.leaves.clear()
        self.leaves[context.layer] = value.detach().requires_grad_(True)
        return self.leaves[context.layer].clone()
