"""The logits of a few chosen tokens, at chosen places and depths."""

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
from helmscope.models.place import PutState
from helmscope.models.probe import vocabulary_size
from helmscope.models.recording import Recording
from helmscope.models.tokenizer import encode
from helmscope.observe.loss import PASSING
from helmscope.types import HelmscopeError, check_progress, check_replicates, counted, part_of, shown, whole_number

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.models.runner import Runner
    from helmscope.types import Progress


def token_logits(
    recording: Recording,
    tokens: Sequence[str | int],
    *,
    position: int | Sequence[int] | None = -1,
    depth: int | Sequence[int] | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """The logits of some vocabulary entries, ``logit`` along (prompt, token); the coordinate ``token`` holds them as
    text, ``token_id`` as ids.

    ``tokens`` are ids, or strings that the tokenizer makes one token of (mind the space before a word). ``position``
    counts the visible tokens of each text from 0, or from its end by negative numbers: the last one by default, where
    the next token is predicted; a list of them gives an axis ``position``, and None all places of the batch, NaN where
    a text has no token. ``depth`` is that of the lens, and a list of depths gives an axis ``depth``; None is the model
    itself. Where the head is linear, the logits of all other entries are never computed.

    A difference of logits is that of two tokens:
    ``seen.logit.sel(token=" she") - seen.logit.sel(token=" he")``.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> seen = token_logits(recording, [3, 5])
    >>> (seen.logit.sel(token="3") - seen.logit.sel(token="5")).dims
    ('prompt',)
    >>> token_logits(recording, [3], depth=range(5), position=[0, -1]).logit.dims
    ('depth', 'prompt', 'position', 'token')
    """
    if not isinstance(recording, Recording):
        raise HelmscopeError(f"recording is a {type(recording).__name__}, but logits are those of a Recording")
    recording.certificate.require("lens")
    recording.certificate.require("lens over depth")
    tell, places = check_progress(progress), _Places.of(recording, position)
    ids, labels = _chosen(recording, tokens)
    depths = list(depth) if isinstance(depth, Sequence) else [depth]
    if not depths:
        raise HelmscopeError("depth is empty, but it must hold at least one depth")
    found = []
    for k, each in enumerate(depths):
        part = part_of(tell, k / len(depths), (k + 1) / len(depths))
        found.append(_picked(_at_depth(recording, each), ids, places, part))
    values = torch.stack(found).double().cpu().numpy()
    dims: tuple[str, ...] = ("depth", "prompt", "position", "token")
    coords: dict[str, Any] = {"prompt": np.arange(len(recording.batch)), "token": labels}
    coords["token_id"] = ("token", ids.numpy())
    coords |= {"depth": depths} if isinstance(depth, Sequence) else {}
    coords |= {} if places.names is None else {"position": places.names}
    for axis in ("depth", "position"):
        if axis not in coords:
            values, dims = values.squeeze(dims.index(axis)), tuple(dim for dim in dims if dim != axis)
    return check_replicates(xr.Dataset({"logit": (dims, values)}, coords))


def _at_depth(recording: Recording, depth: int | None) -> Runner:
    """What runs the head on the state at a depth."""
    if depth is None:
        return recording.runner
    put = PutState(2 * len(recording.anatomy.layers), recording.stream(depth=depth), recording.anatomy)
    return recording.runner.under(put)


def _picked(
    runner: Runner, ids: Int[Tensor, " token"], places: _Places, tell: Progress
) -> Float[Tensor, "batch position token"]:
    """The logits of some tokens at some places: by their rows of the head alone where one text shows that this gives
    what the model gives.
    """
    first, texts, model = slice(0, 1), len(runner.batch), runner.model
    whole = runner.outputs(rows=first)
    if int(ids.max()) >= whole.shape[-1]:
        raise HelmscopeError(
            f"tokens holds the id {int(ids.max())}, but the model predicts tokens 0 to {whole.shape[-1] - 1}"
        )
    wanted, few = whole[..., ids.to(whole.device)], False
    if texts > 1 and has_linear_head(model):
        with few_logits(model, ids):
            short = runner.outputs(rows=first)
        few = short.shape == wanted.shape and relative(short, wanted) <= bound(short.dtype)
    found = [places.picked(wanted, first)]
    size = max(1, min(runner.batch_size, PASSING // (wanted if few else whole).numel()))
    for begin in range(1, texts, size):
        rows = slice(begin, min(begin + size, texts))
        with few_logits(model, ids) if few else nullcontext():
            out = runner.outputs(rows=rows)
        found.append(places.picked(out if few else out[..., ids.to(out.device)], rows))
        tell(begin / texts)
    tell(1.0)
    return torch.cat(found)


@dataclass(frozen=True, eq=False)
class _Places:
    """Where logits are looked at: the columns (batch, position) of the batch, whether there is a token, and the names
    of the positions along their axis, None where there is none.
    """

    columns: Int[Tensor, "batch position"]
    there: Bool[Tensor, "batch position"]
    names: list[int] | None

    @classmethod
    def of(cls, recording: Recording, position: int | Sequence[int] | None) -> _Places:
        """Positions count the visible tokens of each text."""
        texts, n = len(recording.batch), recording.residual.radius.shape[-1]
        visible = torch.ones(texts, n, dtype=torch.bool, device="cpu")
        visible = visible if recording.visible is None else recording.visible.cpu()
        if position is None:
            return cls(torch.arange(n, device="cpu").expand(texts, n), visible, list(range(n)))
        listed: Sequence[Any] = position if isinstance(position, Sequence) else [position]
        try:
            asked = [operator.index(each) for each in listed]
        except TypeError:
            asked = []
        if not asked:
            raise HelmscopeError(
                f"position is {shown(position)}, but it must be a whole number such as -1, a list of them, or None"
            )
        columns = torch.empty(texts, len(asked), dtype=torch.int64, device="cpu")
        for k, row in enumerate(visible):
            seen = row.nonzero().squeeze(-1)
            for each in asked:
                if not -len(seen) <= each < len(seen):
                    raise HelmscopeError(f"position is {each}, but texts[{k}] has {counted(len(seen), 'token')}")
            columns[k] = seen[asked]
        return cls(columns, torch.ones_like(columns).bool(), asked if listed is position else None)

    def picked(self, logits: Float[Tensor, "rows n token"], rows: slice) -> Float[Tensor, "rows position token"]:
        """The logits of some texts at these places."""
        columns = self.columns[rows].to(logits.device).unsqueeze(-1)
        found = logits.gather(1, columns.expand(-1, -1, logits.shape[-1]))
        return torch.where(self.there[rows].unsqueeze(-1), found.double().cpu(), torch.nan)


def _chosen(recording: Recording, tokens: Sequence[str | int]) -> tuple[Int[Tensor, " token"], list[str]]:
    """Ids and labels of vocabulary entries given as text or as ids."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not tokens:
        raise HelmscopeError(f"tokens is {shown(tokens)}, but it must be a list of at least one, such as [' she', 42]")
    words, most = recording.tokenizer, vocabulary_size(recording.anatomy.model)
    ids = [_id_of(token, words, most) for token in tokens]
    for k, each in enumerate(ids):
        if each in ids[:k]:
            raise HelmscopeError(f"tokens holds the id {each} twice, but each must be another one")
    labels = [token if isinstance(token, str) else _label(token, words) for token in tokens]
    return torch.tensor(ids, device="cpu"), labels


def _id_of(token: object, words: Any, most: int) -> int:
    if not isinstance(token, str):
        number = whole_number("id in tokens", token, at_least=0)
        if number >= most:
            raise HelmscopeError(f"id in tokens is {number}, but the model has the tokens 0 to {most - 1}")
        return number
    if words is None:
        raise HelmscopeError(f"tokens holds {shown(token)}, but the recording has no tokenizer: give token ids")
    found = encode([token], words, add_special_tokens=False)[0]
    pieces = words.convert_ids_to_tokens(found)
    if len(found) != 1:
        raise HelmscopeError(
            f"tokens holds {shown(token)}, which the tokenizer cuts into {shown(pieces)}, but it must be one token"
        )
    if found[0] == words.unk_token_id and token != words.unk_token:
        raise HelmscopeError(f"tokens holds {shown(token)}, but the tokenizer does not know it")
    return found[0]


def _label(token: int, words: Any) -> str:
    return str(token) if words is None else str(words.decode([token]))
