"""Logits of a few chosen tokens, at chosen positions and depths."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.models.certify import bound, relative
from helmscope.models.head import few_logits, has_linear_head
from helmscope.models.probe import vocabulary_size
from helmscope.models.put_state import PutState
from helmscope.models.recording import Recording, check_recording
from helmscope.models.tokenizer import encode
from helmscope.observe.scoring import LOGITS_PER_FORWARD
from helmscope.observe.track import origin_attributes
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_progress,
    check_replicates,
    identity_coordinates,
    pluralized,
    short_repr,
    sub_progress,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.models.runner import Runner
    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption


@shows_progress("logit lens")
def token_logits(
    recording: Recording,
    tokens: Sequence[str | int],
    *,
    position: int | Sequence[int] | None = -1,
    depth: int | Sequence[int] | None = None,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Logits of some vocabulary entries: ``logit`` along (prompt, token).

    ``tokens`` are ids, or strings that the tokenizer encodes as a single token (mind the space before a word); the
    coordinates ``token`` and ``token_id`` hold them as text and as ids. ``position`` counts the visible tokens of each
    text from 0, or from its end if negative; the default is the last one, where the next token is predicted. A list of
    positions adds an axis ``position``, and None takes all positions of the batch, NaN where a text has no token.
    ``depth`` is the depth of the logit lens, by default that of the model's own output; a list adds an axis ``depth``.
    Where the head is linear, the logits of all other entries are never computed. Raises HelmscopeError for a token that
    is not in the vocabulary, a position outside a text, or a model without a head over a vocabulary.

    A logit difference of two tokens is ``measured.logit.sel(token=" she") - measured.logit.sel(token=" he")``.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> measured = token_logits(recording, [3, 5])
    >>> (measured.logit.sel(token="3") - measured.logit.sel(token="5")).dims
    ('prompt',)
    >>> token_logits(recording, [3], depth=range(5), position=[0, -1]).logit.dims
    ('depth', 'prompt', 'position', 'token')
    """
    check_recording(recording)
    recording.certificate.require("lens")
    recording.certificate.require("lens over depth")
    report, positions = check_progress(progress), _Positions.of(recording, position)
    ids, labels = _ids_and_labels(recording, tokens)
    depths = list(depth) if isinstance(depth, Sequence) else [depth]
    if not depths:
        raise HelmscopeError("depth is empty, but it must hold at least one depth")
    logits = []
    for k, one_depth in enumerate(depths):
        share = sub_progress(report, k / len(depths), (k + 1) / len(depths))
        logits.append(_logits_at(_runner_at_depth(recording, one_depth), ids, positions, share))
    values = torch.stack(logits).double().cpu().numpy()
    dims: tuple[str, ...] = ("depth", "prompt", "position", "token")
    coords: dict[str, Any] = {"prompt": np.arange(len(recording.batch)), "token": labels}
    coords["token_id"] = ("token", ids.numpy())
    coords |= identity_coordinates("prompt", recording.batch.identities)
    if isinstance(depth, Sequence):
        coords["depth"] = ("depth", depths, {"units": recording.trajectory.unit})
    coords |= {} if positions.names is None else {"position": positions.names}
    for axis in ("depth", "position"):
        if axis not in coords:
            values, dims = values.squeeze(dims.index(axis)), tuple(dim for dim in dims if dim != axis)
    variables = {"logit": (dims, values, {"long_name": "logit of the token"})}
    return check_replicates(xr.Dataset(variables, coords, origin_attributes(recording)))


def _runner_at_depth(recording: Recording, depth: int | None) -> Runner:
    """A runner whose head reads the state at a depth."""
    if depth is None:
        return recording.runner
    put = PutState(recording.anatomy.depths.last, recording.residual_stream(depth=depth), recording.anatomy)
    return recording.runner.under(put)


def _logits_at(
    runner: Runner, ids: Int[Tensor, " token"], positions: _Positions, progress: Progress
) -> Float[Tensor, "batch position token"]:
    """The logits of some tokens at some positions, from their rows of the head alone where this reproduces the model's
    logits for the first text.
    """
    first, texts, model = slice(0, 1), len(runner.batch), runner.model
    whole = runner.outputs(rows=first)
    if int(ids.max()) >= whole.shape[-1]:
        raise HelmscopeError(
            f"tokens holds the id {int(ids.max())}, but the model predicts tokens 0 to {whole.shape[-1] - 1}"
        )
    wanted = whole[..., ids.to(whole.device)]
    few = texts > 1 and has_linear_head(model) and _few_suffice(runner, ids, wanted)
    chunks = [positions.select(wanted, first)]
    size = max(1, min(runner.batch_size, LOGITS_PER_FORWARD // (wanted if few else whole).numel()))
    for begin in range(1, texts, size):
        rows = slice(begin, min(begin + size, texts))
        with few_logits(model, ids) if few else nullcontext():
            out = runner.outputs(rows=rows)
        chunks.append(positions.select(out if few else out[..., ids.to(out.device)], rows))
        progress(begin / texts)
    progress(1.0)
    return torch.cat(chunks)


def _few_suffice(runner: Runner, ids: Int[Tensor, " token"], wanted: Float[Tensor, "1 n token"]) -> bool:
    """Whether the rows of the head for ``ids`` alone reproduce the logits ``wanted`` of the first text."""
    try:
        with few_logits(runner.model, ids):
            short = runner.outputs(rows=slice(0, 1))
    except HelmscopeError:  # the model needs all logits, such as BART, which adds a bias to each of them
        return False
    return short.shape == wanted.shape and relative(short, wanted) <= bound(short.dtype)


@dataclass(frozen=True, eq=False)
class _Positions:
    """Positions in each text: their columns in the batch, whether a token is present there, and the coordinates of the
    axis ``position``, None where the result has no such axis.
    """

    columns: Int[Tensor, "batch position"]
    present: Bool[Tensor, "batch position"]
    names: list[int] | None

    @classmethod
    def of(cls, recording: Recording, position: int | Sequence[int] | None) -> _Positions:
        """Positions among the visible tokens of each text."""
        texts, n = len(recording.batch), recording.residual.radius.shape[-1]
        visible = torch.ones(texts, n, dtype=torch.bool, device="cpu")
        visible = visible if recording.visible is None else recording.visible.cpu()
        if position is None:
            return cls(torch.arange(n, device="cpu").expand(texts, n), visible, list(range(n)))
        several: Sequence[Any] = position if isinstance(position, Sequence) else [position]
        try:
            indices = [operator.index(index) for index in several]
        except TypeError:
            indices = []
        if not indices:
            raise HelmscopeError(
                f"position is {short_repr(position)}, but it must be a whole number such as -1, a list of them, or None"
            )
        columns = torch.empty(texts, len(indices), dtype=torch.int64, device="cpu")
        for k, row in enumerate(visible):
            visible_columns = row.nonzero().squeeze(-1)
            for index in indices:
                if not -len(visible_columns) <= index < len(visible_columns):
                    tokens = pluralized(len(visible_columns), "token")
                    raise HelmscopeError(f"position is {index}, but texts[{k}] has {tokens}")
            columns[k] = visible_columns[indices]
        return cls(columns, torch.ones_like(columns).bool(), indices if several is position else None)

    def select(self, logits: Float[Tensor, "rows n token"], rows: slice) -> Float[Tensor, "rows position token"]:
        """The logits of some texts at these positions, NaN where no token is present."""
        columns = self.columns[rows].to(logits.device).unsqueeze(-1)
        selected = logits.gather(1, columns.expand(-1, -1, logits.shape[-1]))
        return torch.where(self.present[rows].unsqueeze(-1), selected.double().cpu(), torch.nan)


def _ids_and_labels(recording: Recording, tokens: Sequence[str | int]) -> tuple[Int[Tensor, " token"], list[str]]:
    """Ids and labels of vocabulary entries given as text or as ids."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not tokens:
        raise HelmscopeError(
            f"tokens is {short_repr(tokens)}, but it must be a list of at least one, such as [' she', 42]"
        )
    tokenizer, size = recording.tokenizer, vocabulary_size(recording.anatomy.model)
    ids = [_token_id(token, tokenizer, size) for token in tokens]
    for k, token_id in enumerate(ids):
        if token_id in ids[:k]:
            raise HelmscopeError(f"tokens holds the id {token_id} twice, but all tokens must be different")
    labels = [token if isinstance(token, str) else _label(token, tokenizer) for token in tokens]
    return torch.tensor(ids, device="cpu"), labels


def _token_id(token: object, tokenizer: Any, size: int) -> int:
    if not isinstance(token, str):
        number = check_integer("id in tokens", token, at_least=0)
        if number >= size:
            raise HelmscopeError(f"id in tokens is {number}, but the model has the tokens 0 to {size - 1}")
        return number
    if tokenizer is None:
        raise HelmscopeError(f"tokens holds {short_repr(token)}, but the recording has no tokenizer: pass token ids")
    ids = encode([token], tokenizer, add_special_tokens=False)[0]
    pieces = tokenizer.convert_ids_to_tokens(ids)
    if len(ids) != 1:
        raise HelmscopeError(
            f"tokens holds {short_repr(token)}, which the tokenizer splits into {short_repr(pieces)}, but it must "
            "be one token"
        )
    if ids[0] == tokenizer.unk_token_id and token != tokenizer.unk_token:
        raise HelmscopeError(f"tokens holds {short_repr(token)}, but it must be in the tokenizer's vocabulary")
    return ids[0]


def _label(token: int, tokenizer: Any) -> str:
    return str(token) if tokenizer is None else str(tokenizer.decode([token]))
