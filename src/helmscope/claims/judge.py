"""Turns the finding of an experiment into a verdict, by the region of the claim and its controls."""

from __future__ import annotations

from collections.abc import Iterator

from helmscope.claims.entry import Entry, Ground
from helmscope.claims.finding import Assessment, Check, Finding
from helmscope.stats.reduce import reduced
from helmscope.types import Control, HelmscopeError, Region, Ruling, Verdict, interval_text

FEW_REPLICATES = 32  # below this, the verdict warns that its interval assumes normality


def judge(entry: Entry, finding: Finding, *, subject: str = "") -> Verdict:
    """The verdict on a claim: its evidence compared with the region that was fixed before the run.

    If the null or the printed form does not come out as expected, the ruling is inconclusive, since such a trial cannot
    distinguish the claim from its null. A further part of the claim that comes out otherwise rules out support, but a
    refuted claim stays refuted. ``subject`` names what the claim was tried on. Raises HelmscopeError unless ``finding``
    is a Finding whose data can be plotted.

    >>> import xarray as xr
    >>> from helmscope.claims.finding import Count
    >>> from helmscope.claims.reading import entry
    >>> data = xr.Dataset({"share": 1.0, "share_stderr": 0.0}, attrs={"n": 64})
    >>> finding = Finding(evidence=Count(64, 64), null=Check("V = -I", Count(0, 64)), data=data)
    >>> judge(entry("one-cluster"), finding).ruling.value
    'supported'
    """
    if not isinstance(finding, Finding):
        raise HelmscopeError(
            f"experiment of '{entry.id}' returned a {type(finding).__name__}, but it must return a Finding"
        )
    reduced(finding.data)  # raise for data that cannot be plotted here, not in a report after many trials
    assessment = finding.evidence.weigh(entry.region)
    null = _control(finding.null, entry.region)
    printed = None if finding.printed is None else _control(finding.printed, entry.region)
    also = tuple(_control(check, entry.region) for check in finding.also)
    controls = [null] if printed is None else [null, printed]
    failed = [control for control in controls if not control.as_expected]
    if assessment.ruling is not Ruling.REFUTED:
        failed += [part for part in also if not part.as_expected]
    ruling = Ruling.INCONCLUSIVE if failed else assessment.ruling
    return Verdict(
        claim=entry.id,
        ruling=ruling,
        interval=assessment.interval,
        region=entry.region,
        entry_hash=entry.hash,
        sentence=" ".join(_sentences(ruling, assessment, entry, finding, printed, failed)),
        where=finding.where,
        null=null,
        printed=printed,
        also=also,
        exhibits=finding.exhibits,
        subject=subject,
    )


def _control(check: Check, default_region: Region) -> Control:
    region = default_region if check.region is None else check.region
    assessment = check.evidence.weigh(region)
    return Control(check.what, assessment.ruling, check.expected, assessment.interval, region)


def _sentences(
    ruling: Ruling,
    assessment: Assessment,
    entry: Entry,
    finding: Finding,
    printed: Control | None,
    failed: list[Control],
) -> Iterator[str]:
    """Failed controls; the ruling with its interval and basis; the remark; the printed form; what was not tried."""
    if failed:
        failures = [f"{control.what}: {control.ruling.value}, expected {control.expected.value}" for control in failed]
        yield f"A control failed, so there is no ruling: {'; '.join(failures)}."
    interval, basis = assessment.interval, assessment.basis
    if interval is None:
        yield f"{basis[0].upper()}{basis[1:]}."
    else:
        yield f"{ruling.value[0].upper()}{ruling.value[1:]}: {interval_text(interval)}, {basis}."
        if interval.n < FEW_REPLICATES:
            yield f"Fewer than {FEW_REPLICATES} replicates: the interval assumes that they are normally distributed."
    if assessment.ruling is Ruling.INCONCLUSIVE and assessment.replicates_needed is not None:
        yield f"About {assessment.replicates_needed:,} replicates would decide it."
    elif assessment.ruling is Ruling.INCONCLUSIVE and entry.region.bounded:
        yield "No number of replicates is known that would decide it."
    if finding.remark:
        yield finding.remark
    if printed is not None:
        yield f"As printed ({printed.what}): {printed.ruling.value}, {interval_text(printed.interval)}."
    if Ground.MODEL in entry.decided and finding.where.startswith("simulation"):
        yield "Tried in simulation only, not yet on a model."
