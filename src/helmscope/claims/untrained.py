"""Whether a subject looks untrained, so that its verdicts say nothing about trained models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.models.subject import Subject

SHARE_OF_UNIFORM_LOSS = 0.98


def untrained_notice(subject: Subject) -> str:
    """One sentence if the next-token loss of a model on its first texts is not below that of a uniform guess over its
    vocabulary, as for random weights or texts of another vocabulary; otherwise an empty string, also for models without
    such a loss and for simulations.

    >>> from helmscope.models.subject import Subject
    >>> untrained_notice(Subject("A", ["Once upon a time there was a cat."]))
    ''
    """
    if subject.is_simulation:
        return ""
    return subject.cached("untrained notice", lambda: _notice(subject), len)


def _notice(subject: Subject) -> str:
    from helmscope.models.subject import PROBED  # deferred, since listing claims needs no models
    from helmscope.observe.loss import next_token_loss

    try:
        measured = next_token_loss(subject.record(subject.texts[:PROBED]))
    except HelmscopeError:  # an encoder, a model without a head: such a model has no next-token loss
        return ""
    loss, uniform = float(measured.loss.mean()), float(measured.loss_null)
    if not loss >= SHARE_OF_UNIFORM_LOSS * uniform:
        return ""
    return (
        f"{subject.name} looks untrained: its next-token loss of {loss:.3g} nats is not below that of a uniform guess, "
        f"{uniform:.3g}."
    )
