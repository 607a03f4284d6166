"""``Runner``: a model with its texts and edits, the only place where recordings start a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.hooks import check_edits, current_chunk, hooked
from helmscope.models.probe import base_model_of, run
from helmscope.models.sites import Chunk
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, pluralized

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.sites import AbstractEdit, Observer
    from helmscope.models.texts import Batch
    from helmscope.types.progress import ProgressOption


@dataclass(frozen=True, eq=False, repr=False)
class Runner:
    """Runs a model on a batch under ``edits``, ``batch_size`` texts at a time, and leaves the model unchanged. Raises
    HelmscopeError at once if an edit does not fit the model. The runner of a decoder runs its whole model, with the
    edits of the runner ``encoder`` applied to the encoder.

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
        texts = (
            f"{pluralized(len(self.batch), 'text')}, {self.batch_size} at a time; {pluralized(len(self.edits), 'edit')}"
        )
        return f"<Runner of {type(self.model).__name__}: {texts}>"

    @property
    def model(self) -> Any:
        """The model that is run."""
        return self.anatomy.model

    def under(self, *edits: AbstractEdit) -> Runner:
        """A runner of the same model and texts with further edits."""
        return replace(self, edits=(*self.edits, *edits))

    @shows_progress("running the model")
    def forward(
        self,
        *observers: Observer,
        rows: slice = slice(None),
        gradients: bool = False,
        progress: ProgressOption = None,
    ) -> None:
        """Run the model without its head on the texts ``rows``; the observers receive the values.

        With ``gradients`` those depend differentiably on the parameters and on the tensors that the edits use.
        ``progress`` is called with the share of the texts done.
        """
        for _ in self._chunks(base_model_of(self.model), observers, rows, gradients, progress):
            pass

    @shows_progress("running the model")
    def outputs(
        self,
        *observers: Observer,
        rows: slice = slice(None),
        gradients: bool = False,
        progress: ProgressOption = None,
    ) -> Float[Tensor, "rows n vocabulary"]:
        """The first output of the whole model with its head for the texts ``rows``; ``gradients`` and ``progress``
        as in ``forward``.
        """
        return torch.cat([out[0] for out in self._chunks(self.model, observers, rows, gradients, progress)])

    def _chunks(
        self,
        model: Any,
        observers: tuple[Observer, ...],
        rows: slice,
        gradients: bool,
        progress: ProgressOption,
    ) -> Iterator[Any]:
        """Iterate over the outputs of ``model``, one per chunk of texts."""
        report = check_progress(progress)
        if self.model.training:
            raise HelmscopeError("the model is in training mode, where forward passes are random: call model.eval()")
        device = next(self.model.parameters()).device
        start, stop, _ = rows.indices(len(self.batch))
        with ExitStack() as watched:
            watched.enter_context(hooked(self.anatomy, self.edits, observers, skip=self._skip(observers)))
            if self.encoder is not None:
                edits = self.encoder.edits
                watched.enter_context(hooked(self.encoder.anatomy, edits, skip=self.encoder._skip(())))
            for begin in range(start, stop, self.batch_size):
                part = slice(begin, min(begin + self.batch_size, stop))
                inputs = self.batch.rows(part).to(device)
                with ExitStack() as texts:
                    for runner in (self, self.encoder):
                        if runner is not None:
                            texts.enter_context(current_chunk(runner.model, runner._chunk(part, device)))
                    out = run(model, inputs, gradients=gradients, **self.anatomy.options)
                yield out
                report((part.stop - start) / (stop - start))

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
        """The number of first layers that need not run, because a state is put in after them. All must run for
        observers of attention: in the layer where a middle state is put in, attention reads the output of the earlier
        layers. Edits in skipped layers have no effect after that state.
        """
        all_needed = any(each.sees_attention or each.sees_cross or each.needs_all_layers for each in observers)
        return 0 if all_needed else max((edit.skip for edit in self.edits), default=0)
