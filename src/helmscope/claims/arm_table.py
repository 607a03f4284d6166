"""The table of the arms of a model: the gathering of its tokens in the whole model, by attention and by MLPs alone."""

from __future__ import annotations

from collections.abc import Iterable

from helmscope.claims.arm_statistics import ATTENTION, MLP, SAME_PROMPTS, UNTRAINED, WHOLE, share_at_end
from helmscope.types import Interval, Verdict

ARMS = (*(arm.label for arm in (WHOLE, ATTENTION, MLP)), SAME_PROMPTS, UNTRAINED)
CLAIM = "mlp-prevents"


def arm_table(verdicts: Iterable[Verdict]) -> str:
    """A table with one row for each subject on which mlp-prevents was tried: the share of inner products above 0.9 at
    the last depth in the whole model, with attention alone and with MLPs alone; and with attention alone in untrained
    twins beside that of the model on the same prompts; "" if it was tried on none.

    >>> arm_table([])
    ''
    """
    rows = []
    for verdict in verdicts:
        shares = {quantity.name: quantity.interval for quantity in verdict.described}
        if verdict.claim == CLAIM and share_at_end(ARMS[0]) in shares:
            rows.append([verdict.subject, *(_cell(shares.get(share_at_end(arm))) for arm in ARMS)])
    if not rows:
        return ""
    lines = [["subject", *ARMS], *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(ARMS) + 1)]
    aligned = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(line.rstrip() for line in aligned)


def _cell(interval: Interval | None) -> str:
    """A share with its interval, which is cut off where no share can be."""
    if interval is None:
        return "not tried"
    low, high = max(0.0, interval.low), min(1.0, interval.high)
    return f"{interval.estimate:.3f} [{low:.3f}, {high:.3f}]"
