"""Summaries of a recording: its one-line repr, its notebook table, and its manifest."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from helmscope.models.sites import bytes_of
from helmscope.store.manifest import Manifest, hash_bytes
from helmscope.types import html_stack, html_table, one_line_repr, pluralized, shortened

if TYPE_CHECKING:
    from helmscope.models.recording import Recording
    from helmscope.models.texts import Batch

LONGEST_TEXT = 160  # characters of the first text
LONGEST_EDITS = 48  # characters of all edits in a repr
SPACE_MARKS = "\u0120\u2581"  # how byte-level BPE and SentencePiece mark a space before a token


def recording_repr(recording: Recording) -> str:
    """The repr of a recording: model, where they apply the first depth and the edits, then certificate, texts and
    architecture. What distinguishes recordings of one model is first, because a long line is cut at its end.
    """
    what = [f"Recording of {recording.origin.title}"]
    if recording.first:
        what.append(f"from depth {recording.first}")
    if edits := _edit_reprs(recording):
        what.append(f"under {shortened(', '.join(edits), LONGEST_EDITS)}")
    if encoder_edits := _edit_reprs(recording.encoder):
        what.append(f"with its encoder under {shortened(', '.join(encoder_edits), LONGEST_EDITS)}")
    facts = [f"certificate {recording.certificate.summary}", _texts_summary(recording), str(recording.anatomy)]
    return one_line_repr(f"{', '.join(what)}: {'; '.join(facts)}")


def recording_html(recording: Recording) -> str:
    """The notebook table of a recording, followed by that of its certificate."""
    origin, first, depths = recording.origin, recording.first, len(recording.residual.radius)
    tokens = recording.batch.tokens
    rows = [
        ("model", f"{origin.folder or origin.name}, {origin.dtype} on {origin.device}"),
        ("architecture", str(recording.anatomy)),
        ("texts", _texts_summary(recording)),
        ("depths", f"{pluralized(depths, 'depth')}, {first} to {first + depths - 1}, in half-layers"),
        *(("edit", edit) for edit in _edit_reprs(recording)),
        *(("edit of the encoder", edit) for edit in _edit_reprs(recording.encoder)),
        *([] if tokens is None else [("first text", _first_text(recording, tokens[0]))]),
    ]
    return html_stack(html_table(f"Recording of {origin.title}", rows), recording.certificate._repr_html_())


def recording_manifest(recording: Recording, *, seed: int) -> Manifest:
    """The manifest of a recording; see ``Recording.manifest``."""
    origin = recording.origin
    parameters = {
        "model": origin.folder or origin.name,
        "family": origin.family,
        "revision": origin.revision,
        "attention": origin.attention,
        "topology": str(recording.anatomy),
        "edits": _edit_reprs(recording),
        **({} if recording.encoder is None else {"encoder edits": _edit_reprs(recording.encoder)}),
        "first": recording.first,
        "certificate": {line.name: line.ok for line in recording.certificate.lines},
    }
    return Manifest.collect(
        seed=seed,
        dtype=origin.dtype,
        device=origin.device,
        threads=torch.get_num_threads(),
        command=sys.argv,
        inputs={**origin.hashes, "texts": _texts_hash(recording.batch)},
        parameters=parameters,
    )


def _edit_reprs(recording: Recording | None) -> list[str]:
    return [] if recording is None else [repr(edit) for edit in recording.edits]


def _texts_summary(recording: Recording) -> str:
    batch, tokens = recording.batch, recording.residual.radius.shape[-1]
    return f"{pluralized(len(batch), 'text')} x {pluralized(tokens, 'token')} ({_texts_hash(batch)[:12]})"


def _texts_hash(batch: Batch) -> str:
    return hash_bytes(b"".join(map(bytes_of, batch.inputs.values())))


def _first_text(recording: Recording, tokens: tuple[str, ...]) -> str:
    """The visible part of the first text, decoded, or if that is impossible its tokens with spaces for the tokenizer's
    marks.
    """
    batch = recording.batch
    with suppress(Exception):  # there may be no tokenizer, and one can raise anything
        return shortened(str(recording.tokenizer.decode(list(batch.visible_ids[0]))), LONGEST_TEXT)
    visible = [token for k, token in enumerate(tokens) if batch.visible is None or bool(batch.visible[0, k])]
    marked = any(token[:1] in SPACE_MARKS for token in visible if token)
    text = ("" if marked else " ").join(visible)
    return shortened("".join(" " if letter in SPACE_MARKS else letter for letter in text), LONGEST_TEXT)
