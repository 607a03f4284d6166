"""Scoring of next tokens: which tokens of a recording are predicted, with which weights, and what the model's
predictions of them are, unmodified and under edits. ``loss`` and ``damage`` reduce them to Measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.models.premise import Premise
from helmscope.models.probe import vocabulary_size
from helmscope.models.put_state import PutInput
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import AbstractEdit, Observer, Site
from helmscope.observe.track import warn_of_short_texts
from helmscope.types import HelmscopeError, identity_coordinates

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.models.runner import Runner
    from helmscope.models.texts import Batch
    from helmscope.types import Progress

    Values = Callable[..., Tensor]  # of logits, targets and logits without edits, (tokens, ...), to (*kinds, tokens)

LOGITS_PER_FORWARD = 1 << 24  # logits that one forward pass of the model may return
LOGITS_PER_SUM = 1 << 16  # logits that are summed at a time in float64, which fit in a cache


class Scoring:
    """Computes the losses of the ``tokens`` of a recording; ``weights`` (batch, n) holds the weight of each scored
    token, which is predicted by the logits ``shift`` positions before it.
    """

    def __init__(self, recording: Recording) -> None:
        check_recording(recording)
        self.runner, batch = recording.runner, recording.batch
        self.tokens, self.shift = _scored(recording)
        self.weights = _weights(recording, self.tokens, self.shift)
        warn_of_short_texts("losses", (self.weights.sum(-1) == 0).tolist())
        self.ids = self.tokens.inputs[self.tokens.ids_name].cpu()
        self.coords: dict[str, Any] = {"prompt": np.arange(len(batch))}
        self.coords["predicted"] = ("prompt", self.weights.sum(-1).numpy())
        self.coords |= identity_coordinates("prompt", batch.identities)
        self.attributes = {"model": recording.origin.title}
        self._vocabulary = vocabulary_size(self.runner.model)

    @property
    def null(self) -> float:
        """The loss of a uniform guess."""
        return math.log(self._vocabulary)

    def chunks(self) -> Iterator[slice]:
        """Chunks of texts: as many as the runner allows, and fewer where their logits would take too much memory."""
        texts, n = self.weights.shape
        size = max(1, min(self.runner.batch_size, LOGITS_PER_FORWARD // (n * self._vocabulary)))
        for begin in range(0, texts, size):
            yield slice(begin, min(begin + size, texts))

    def losses(self, progress: Progress) -> Float[Tensor, "batch n"]:
        """The loss of every token, NaN where it is not scored."""
        chunks = []
        for rows in self.chunks():
            chunks.append(self.of_tokens(token_losses, rows, self.logits(self.runner, rows)))
            progress(rows.stop / len(self.weights))
        return torch.cat(chunks)

    def means(self, values: Float[Tensor, "*kinds rows n"], rows: slice = slice(None)) -> np.ndarray:
        """The mean of each text by the weights of its tokens, NaN where no token is scored."""
        weights = self.weights[rows]
        total = torch.where(weights > 0, weights * values, 0.0).sum(-1)
        return np.asarray((total / weights.sum(-1)).numpy())

    def means_under(
        self, edit_lists: Sequence[tuple[AbstractEdit, ...]], progress: Progress, function: Values | None = None
    ) -> np.ndarray:
        """Means (1 + edit lists, *kinds, batch) of ``function`` of the edited logits, the target and the logits without
        edits, at every scored token: without edits, then under each list of edits. By default they are losses. Layers
        before the first one that is edited are not run again.
        """
        layers, function = len(self.runner.anatomy.layers), function or token_losses
        for edits in edit_lists:
            self.runner.under(*edits)  # raises for edits that do not fit the model, before anything is run
        begins = [next((k for k in range(layers) if _acts(edits, k)), layers - 1) for edits in edit_lists]
        chunks = []
        for rows in self.chunks():
            inputs = LayerInputs(begins)
            plain = self.logits(self.runner, rows, inputs)
            means = [self.means(self.of_tokens(function, rows, plain, plain), rows)]
            for k, (layer, edits) in enumerate(zip(begins, edit_lists, strict=True), start=2):
                put = PutInput(layer, inputs.states[layer], rows)
                edited = self.logits(self.runner.under(put, *edits), rows)
                means.append(self.means(self.of_tokens(function, rows, edited, plain), rows))
                share = k / (1 + len(edit_lists))
                progress((rows.start + share * (rows.stop - rows.start)) / len(self.weights))
            chunks.append(np.stack(means))
        return np.concatenate(chunks, -1)

    def logits(self, runner: Runner, rows: slice, *observers: Observer) -> Float[Tensor, "rows n vocabulary"]:
        """The logits of some texts; raises HelmscopeError where the model cannot predict one of their tokens."""
        logits, largest = runner.outputs(*observers, rows=rows), int(self.ids[rows].max())
        self._vocabulary = logits.shape[-1]
        if largest >= self._vocabulary:
            raise HelmscopeError(
                f"texts contain the token id {largest}, but the model predicts only tokens 0 to {self._vocabulary - 1}"
            )
        return logits

    def of_tokens(self, function: Values, rows: slice, *logits: Tensor) -> Float[Tensor, "*kinds rows n"]:
        """``function`` of the logits at the scored tokens, a few tokens at a time in float64; NaN elsewhere."""
        ids, found = self.ids[rows], []
        scored = (self.weights[rows] > 0).nonzero()
        for chunk in torch.split(scored, max(1, LOGITS_PER_SUM // self._vocabulary)):
            text, token = chunk.to(logits[0].device).unbind(-1)
            edited, *others = (each[text, token - self.shift].double() for each in logits)
            found.append(function(edited, ids[chunk[:, 0], chunk[:, 1]].to(edited.device), *others).cpu())
        if not found:  # no token of these texts is scored
            edited, *others = (each[:1, 0].double() for each in logits)
            found = [function(edited, ids[:1, 0].to(edited.device), *others).cpu()[..., :0]]
        joined = torch.cat(found, -1)
        values = torch.full((*joined.shape[:-1], *ids.shape), torch.nan, dtype=torch.float64, device="cpu")
        values[..., scored[:, 0], scored[:, 1]] = joined
        return values


def token_losses(
    logits: Float[Tensor, "tokens vocabulary"], targets: Int[Tensor, " tokens"], *plain: Tensor
) -> Float[Tensor, " tokens"]:
    """-log p of the targets under the softmax of the logits."""
    return torch.logsumexp(logits, -1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def scoring_unsupported(recording: object) -> str | None:
    """One sentence that says why the next tokens of a system have no loss; None if they have one.

    >>> scoring_unsupported("A")
    "recording is a str, but it must be a Recording: record a model first, hs.record('A')"
    """
    try:
        found = check_recording(recording)
        _weights(found, *_scored(found))
    except HelmscopeError as error:
        return str(error)
    return None


def _scored(recording: Recording) -> tuple[Batch, int]:
    """The tokens that are predicted, and how many positions before each the logits are that predict it."""
    batch = recording.batch
    return (batch, 1) if batch.targets is None else (batch.targets, 0)


def _weights(recording: Recording, tokens: Batch, shift: int) -> Float[Tensor, "batch n"]:
    """The weight of each token as a prediction from ``shift`` positions before it; raises HelmscopeError for a model
    that does not predict next tokens.
    """
    asker, model = "the loss of the next token", recording.origin.name
    if tokens.ids_name not in tokens.inputs:
        raise HelmscopeError(f"{asker} needs a language model, but {model} reads no token ids")
    counted, visible = tokens.counted, tokens.visible
    weights = torch.ones(tokens.inputs[tokens.ids_name].shape, dtype=torch.float64, device="cpu")
    weights = weights if counted is None else counted.cpu().double()
    weights = weights * (torch.arange(weights.shape[1], device="cpu") >= shift)
    if visible is not None and shift:
        weights[:, shift:] *= visible[:, :-shift].cpu()
    if not bool(weights.any()):
        raise HelmscopeError(f"{asker} needs a text with two or more tokens that count, but texts contains none")
    recording.certificate.require("lens")
    why = Premise(causal=True, head=True).unmet(recording.certificate, model, asker)
    if why is not None:
        raise HelmscopeError(why)
    return weights


def _acts(edits: Sequence[AbstractEdit], layer: int) -> bool:
    return any(edit.acts(layer) for edit in edits)


class LayerInputs(Observer):
    """Stores the inputs of some layers, by default of all."""

    sites = frozenset({Site.INPUT})

    def __init__(self, layers: Sequence[int] | None = None) -> None:
        self.layers = None if layers is None else frozenset(layers)
        self.states: dict[int, Tensor] = {}

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Stores a copy, since some model families add to a state in place later."""
        if self.layers is None or layer in self.layers:
            self.states[layer] = value.clone()
