"""A model on some texts under some edits, ready to be run: the one place where recordings start a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.hooks import check_edits, running, watching
from helmscope.models.probe import run, trunk_of
from helmscope.models.watch import Chunk
from helmscope.types import HelmscopeError, Progress, check_progress, counted

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.texts import Batch
    from helmscope.models.watch import AbstractEdit, Observer


@dataclass(frozen=True, eq=False, repr=False)
class Runner:
    """Runs a model on a batch, ``batch_size`` texts at a time, under ``edits``, and leaves the model as it was. Edits
    that do not fit the model are refused at once. The runner of a decoder runs its whole model, and the encoder in it
    under the edits of the runner ``encoder``.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> from helmscope.models.record import record
    >>> runner = record(model, torch.tensor([[1, 2, 3, 4]])).runner
    >>> runner
    <Runner of GPT2LMHeadModel: 1 text, 16 at a time; 0 edits>
    >>> runner.outputs().shape
    torch.Size([1, 4, 9])
    """

    anatomy: Anatomy
    batch: Batch
    batch_size: int
    edits: tuple[AbstractEdit, ...] = ()
    encoder: Runner | None = None

    def __post_init__(self) -> None:
        check_edits(self.anatomy, self.edits)

    def __repr__(self) -> str:
        texts = f"{counted(len(self.batch), 'text')}, {self.batch_size} at a time; {counted(len(self.edits), 'edit')}"
        return f"<Runner of {type(self.model).__name__}: {texts}>"

    @property
    def model(self) -> Any:
        """The model itself."""
        return self.anatomy.model

    def under(self, *edits: AbstractEdit) -> Runner:
        """The same with further edits."""
        return replace(self, edits=(*self.edits, *edits))

    def forward(
        self,
        *observers: Observer,
        rows: slice = slice(None),
        gradients: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Run the model without its head on the texts ``rows``, for the observers to see what passes.

        With ``gradients`` what they see depends differentiably on the tensors that the edits use. ``progress`` is
        called with the share of the texts done.
        """
        for _ in self._chunks(trunk_of(self.model), observers, rows, gradients, progress):
            pass

    def outputs(
        self, *observers: Observer, rows: slice = slice(None), gradients: bool = False
    ) -> Float[Tensor, "rows n vocabulary"]:
        """What the whole model, its head included, returns first for the texts ``rows``; ``gradients`` as above."""
        return torch.cat([out[0] for out in self._chunks(self.model, observers, rows, gradients, None)])

    def _chunks(
        self,
        model: Any,
        observers: tuple[Observer, ...],
        rows: slice,
        gradients: bool,
        progress: Progress | None,
    ) -> Iterator[Any]:
        """What ``model`` returns, chunk of texts by chunk of texts."""
        tell = check_progress(progress)
        if self.model.training:
            raise HelmscopeError("the model is in training mode, where every forward is another: call model.eval()")
        device = next(self.model.parameters()).device
        start, stop, _ = rows.indices(len(self.batch))
        with ExitStack() as watched:
            watched.enter_context(watching(self.anatomy, self.edits, observers, skip=self._skip(observers)))
            if self.encoder is not None:
                edits = self.encoder.edits
                watched.enter_context(watching(self.encoder.anatomy, edits, skip=self.encoder._skip(())))
            for begin in range(start, stop, self.batch_size):
                part = slice(begin, min(begin + self.batch_size, stop))
                inputs = self.batch.rows(part).to(device)
                with ExitStack() as texts:
                    for runner in (self, self.encoder):
                        if runner is not None:
                            texts.enter_context(running(runner.model, runner._chunk(part, device)))
                    out = run(model, inputs, gradients=gradients, **self.anatomy.options)
                yield out
                tell((part.stop - start) / (stop - start))

    def _chunk(self, rows: slice, device: torch.device) -> Chunk:
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        counted, visible = self.batch.counted, self.batch.visible
        return Chunk(
            rows=rows,
            texts=len(self.batch),
            weights=None if counted is None else counted[rows].to(device, dtype),
            visible=None if visible is None else visible[rows].to(device),
        )

    def _skip(self, observers: tuple[Observer, ...]) -> int:
        """How many layers need not run: those before a state that is put in. Whoever sees attention does so in the
        layer in which a mid state is put too, which reads the layers before. An edit in a layer that does not run would
        have changed nothing behind that state.
        """
        needed = any(each.sees_attention or each.sees_cross or each.needs_all_layers for each in observers)
        return 0 if needed else max((edit.skip for edit in self.edits), default=0)
