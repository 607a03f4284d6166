"""``BatchedEdits``: several lists of edits in one forward pass, each on a copy of its own of the texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.models.sites import AbstractEdit, Chunk
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.runner import Runner
    from helmscope.models.sites import EditContext, Site


@dataclass(frozen=True, eq=False, repr=False)
class BatchedEdits(AbstractEdit):
    """Apply each of several lists of edits to one of as many equal parts of the batch.

    The edits are told that their part is the chunk of texts ``of``, so that noise and whatever else depends on the
    index of a text is that of a forward pass under this list alone. ``BatchedEdits.runner`` makes the copies of the
    texts.

    >>> from helmscope import record
    >>> from helmscope.intervene.attention import Perturb
    >>> recording = record("A", ["Once upon a time", "The cat sat on"])
    >>> noise = [[Perturb(sigma=0.5, seed=seed)] for seed in range(3)]
    >>> together = BatchedEdits.runner(recording.runner, slice(0, 2), noise).outputs()
    >>> alone = recording.runner.under(*noise[2]).outputs()
    >>> together.shape, torch.allclose(together[4:], alone, atol=1e-4)
    (torch.Size([6, 4, 4096]), True)
    """

    lists: Sequence[Sequence[AbstractEdit]]
    of: Chunk

    @classmethod
    def runner(cls, runner: Runner, rows: slice, lists: Sequence[Sequence[AbstractEdit]]) -> Runner:
        """A runner of the texts ``rows`` of ``runner``, repeated for each list of edits, in a single forward pass.
        Raises HelmscopeError for no list, and for several lists on a decoder that reads an encoder.

        >>> from helmscope import record
        >>> BatchedEdits.runner(record("A", ["Once upon a time"]).runner, slice(0, 1), [[], []])
        <Runner of GPT2LMHeadModel: 2 texts, 2 at a time; 1 edit>
        """
        if not lists:
            raise HelmscopeError("lists is empty, but it must hold at least one list of edits")
        if runner.encoder is not None and len(lists) > 1:
            raise HelmscopeError(f"lists holds {len(lists)} lists, but a decoder that reads an encoder runs only one")
        batch, counted, visible = runner.batch.rows(rows), runner.batch.counted, runner.batch.visible
        of = Chunk(
            rows=slice(rows.start, rows.start + len(batch)),
            texts=len(runner.batch),
            weights=None if counted is None else counted[rows],
            visible=None if visible is None else visible[rows],
        )
        edit = cls([(*runner.edits, *edits) for edits in lists], of)
        copies = len(batch) * len(lists)
        return replace(runner, batch=batch.repeated(len(lists)), batch_size=copies, edits=(edit,))

    @property
    def sites(self) -> frozenset[Site]:
        """The sites of all edits."""
        return frozenset().union(*(edit.sites for edits in self.lists for edit in edits))

    def acts(self, layer: int) -> bool:
        """Whether any edit applies to a layer."""
        return any(edit.acts(layer) for edits in self.lists for edit in edits)

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` if an edit does not fit the model."""
        for edits in self.lists:
            for edit in edits:
                edit.check(anatomy)

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The parts of the value, each after its own edits."""
        if len(value) == 1:  # a mask that all texts share
            value = value.expand(context.rows.stop - context.rows.start, *value.shape[1:])
        here = replace(self.of, weights=_on(self.of.weights, value), visible=_on(self.of.visible, value))
        parts = []
        for part, edits in zip(value.chunk(len(self.lists)), self.lists, strict=True):
            for edit in edits:
                if context.site in edit.sites and edit.acts(context.layer):
                    new = edit.new(part, here.at(context.site, context.layer))
                    part = part if new is None else new.to(part)
            parts.append(part)
        return torch.cat(parts)


def _on(mask: Tensor | None, value: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(value.device)
