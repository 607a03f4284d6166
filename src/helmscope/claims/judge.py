"""From a finding to a verdict: the region decides, the controls may forbid it, a sentence says so."""

from __future__ import annotations

from collections.abc import Iterator

from helmscope.claims.entry import Entry, Ground
from helmscope.claims.finding import Check, Finding, Weighed
from helmscope.stats.reduce import reduced
from helmscope.types import Control, HelmscopeError, Region, Ruling, Verdict, interval_text

LEAST_REPLICATES = 32


def judge(entry: Entry, finding: Finding, *, subject: str = "") -> Verdict:
    """The verdict on an entry, by its own frozen region.

    A null or a printed form that does not come out as it must makes any ruling inconclusive: a trial that cannot tell
    the null from the claim says nothing. Another part of the claim that comes out otherwise forbids support, but does
    not save a claim whose statistic is refuted. ``subject`` says what was put on trial.

    >>> import xarray as xr
    >>> from helmscope.claims.finding import Count
    >>> from helmscope.claims.reading import entry
    >>> data = xr.Dataset({"share": 1.0, "share_stderr": 0.0}, attrs={"n": 64})
    >>> finding = Finding(evidence=Count(64, 64), null=Check("V = -I", Count(0, 64)), data=data)
    >>> judge(entry("one-cluster"), finding).ruling.value
    'supported'
    """
    if not isinstance(finding, Finding):
        raise HelmscopeError(f"experiment of '{entry.id}' gave a {type(finding).__name__}, but it must give a Finding")
    reduced(finding.data)  # a picture that cannot be drawn is refused here, not in a report after many trials
    weighed = finding.evidence.weigh(entry.region)
    null = _control(finding.null, entry.region)
    printed = None if finding.printed is None else _control(finding.printed, entry.region)
    also = tuple(_control(check, entry.region) for check in finding.also)
    controls = [null] if printed is None else [null, printed]
    failed = [control for control in controls if not control.as_expected]
    if weighed.ruling is not Ruling.REFUTED:
        failed += [part for part in also if not part.as_expected]
    ruling = Ruling.INCONCLUSIVE if failed else weighed.ruling
    return Verdict(
        claim=entry.id,
        ruling=ruling,
        interval=weighed.interval,
        region=entry.region,
        entry_hash=entry.hash,
        sentence=" ".join(_sentences(ruling, weighed, entry, finding, printed, failed)),
        where=finding.where,
        null=null,
        printed=printed,
        also=also,
        exhibits=finding.exhibits,
        subject=subject,
    )


def _control(check: Check, of_entry: Region) -> Control:
    region = of_entry if check.region is None else check.region
    weighed = check.evidence.weigh(region)
    return Control(check.what, weighed.ruling, check.expected, weighed.interval, region)


def _sentences(
    ruling: Ruling, weighed: Weighed, entry: Entry, finding: Finding, printed: Control | None, failed: list[Control]
) -> Iterator[str]:
    """What failed; ruling, number and how it came about; the remark; the printed form; what was not tried."""
    if failed:
        told = [f"{control.what}: {control.ruling.value} where {control.expected.value} was due" for control in failed]
        yield f"A control failed, so nothing is ruled: {'; '.join(told)}."
    seen = weighed.interval
    if seen is None:
        yield f"{weighed.how[0].upper()}{weighed.how[1:]}."
    else:
        yield f"{ruling.value[0].upper()}{ruling.value[1:]}: {interval_text(seen)}, {weighed.how}."
        if seen.n < LEAST_REPLICATES:
            yield f"Fewer than {LEAST_REPLICATES} replicates: the interval rests on their law being normal."
    if weighed.ruling is Ruling.INCONCLUSIVE and weighed.enough is not None:
        yield f"About {weighed.enough:,} replicates would decide it."
    elif weighed.ruling is Ruling.INCONCLUSIVE and entry.region.bounded:
        yield "No number of replicates is known to decide it."
    if finding.remark:
        yield finding.remark
    if printed is not None:
        yield f"As printed ({printed.what}): {printed.ruling.value}, {interval_text(printed.interval)}."
    if Ground.MODEL in entry.decided and finding.where.startswith("simulation"):
        yield "This is the simulation; on a model the claim is not yet tried."
