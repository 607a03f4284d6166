"""Turns the finding of an experiment into a verdict, by the conditions of the claim and its controls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from helmscope.claims.entry import ControlCase, Entry, Ground
from helmscope.claims.evidence import Evidence, Impossible
from helmscope.claims.finding import Finding
from helmscope.stats.reduce import reduced
from helmscope.types import (
    Control,
    HelmscopeError,
    Judged,
    Judgment,
    Printed,
    Provenance,
    Region,
    Ruling,
    Verdict,
    interval_text,
)

FEW_REPLICATES = 32  # below this, the verdict warns that its interval assumes normality
UNJUDGED = Region(text="Described only.")
MEASURED = {
    Ruling.SUPPORTED: Judgment.TRUE,
    Ruling.BY_CONSTRUCTION: Judgment.TRUE,
    Ruling.REFUTED: Judgment.FALSE,
    Ruling.INCONCLUSIVE: Judgment.UNDECIDED,
}


def judge(
    entry: Entry,
    finding: Finding,
    *,
    ground: Ground = Ground.SIMULATION,
    subject: str = "",
    provenance: Provenance | None = None,
) -> Verdict:
    """The verdict on a claim for one subject: its evidence compared with the regions that were fixed before the run.

    All conditions must hold: the claim is refuted if one of them is, and supported if all are. If a control does not
    come out as expected, the ruling is inconclusive, since such a trial cannot distinguish the claim from its null.
    What the source prints is judged apart. Raises HelmscopeError unless ``finding`` is a Finding with the conditions
    and controls of the entry on this ``ground``, whose data can be plotted.

    >>> import xarray as xr
    >>> from helmscope.claims.entry import parse_entry
    >>> from helmscope.claims.evidence import Count
    >>> text = '''id = "mine"
    ... version = 1
    ... statement = "Heads are more frequent than tails."
    ... source = "my notes"
    ... decided = ["simulation"]
    ... experiment = "Toss a coin."
    ... null = "A fair coin."
    ... [[conditions]]
    ... name = "share of heads"
    ... statistic = "Share of heads."
    ... text = "More than half."
    ... above = 0.5
    ... '''
    >>> judge(parse_entry(text, "mine.toml"), Finding(evidence=Count(60, 64), data=xr.Dataset(attrs={"n": 64})))
    <Verdict on mine: supported, 0.938 [0.848, 0.983], n = 64>
    """
    if not isinstance(finding, Finding):
        raise HelmscopeError(
            f"experiment of '{entry.id}' returned a {type(finding).__name__}, but it must return a Finding"
        )
    reduced(finding.data)  # raise for data that cannot be plotted here, not in a report after many trials
    provenance = provenance or Provenance(entry=entry.hash, version=entry.version)
    if isinstance(finding.evidence, Impossible):
        reason = finding.evidence.reason
        return Verdict(
            claim=entry.id,
            ruling=Ruling.IMPOSSIBLE,
            sentence=f"{reason[0].upper()}{reason[1:]}.",
            where=finding.where,
            subject=subject,
            provenance=provenance,
        )
    conditions = _judge_conditions(entry, finding, ground)
    controls = _judge_controls(entry, finding, ground)
    ruling = combine(conditions, controls)
    printed = _judge_printed(entry, finding)
    return Verdict(
        claim=entry.id,
        ruling=ruling,
        conditions=conditions,
        controls=controls,
        described=tuple(_judged(name, evidence, UNJUDGED) for name, evidence in finding.described.items()),
        printed=printed,
        sentence=" ".join(_sentences(ruling, conditions, controls, finding, printed)),
        where=finding.where,
        exhibits=finding.exhibits,
        subject=subject,
        provenance=provenance,
    )


def combine(conditions: Sequence[Judged], controls: Sequence[Control]) -> Ruling:
    """The ruling over all conditions: refuted if one is, supported if all are; inconclusive if a control failed.

    >>> region = Region(text="above 0", above=0.0)
    >>> slope = Judged("slope", region, None, Ruling.SUPPORTED)
    >>> combine([slope, Judged("fit", region, None, Ruling.REFUTED)], []).value
    'refuted'
    """
    if not all(control.as_expected for control in controls):
        return Ruling.INCONCLUSIVE
    rulings = {condition.ruling for condition in conditions}
    for decisive in (Ruling.REFUTED, Ruling.INCONCLUSIVE, Ruling.SUPPORTED, Ruling.BY_CONSTRUCTION):
        if decisive in rulings:
            return decisive
    return Ruling.DESCRIBED


def _judged(name: str, evidence: Evidence, region: Region) -> Judged:
    assessment = evidence.weigh(region)
    return Judged(name, region, assessment.interval, assessment.ruling, assessment.basis, assessment.replicates_needed)


def _judge_conditions(entry: Entry, finding: Finding, ground: Ground) -> tuple[Judged, ...]:
    conditions = entry.conditions_on(ground)
    evidence = finding.evidence
    if not isinstance(evidence, Mapping):
        evidence = {condition.name: evidence for condition in conditions[:1]}
    _check_names("condition", entry, [condition.name for condition in conditions], evidence)
    return tuple(_judged(condition.name, evidence[condition.name], condition.region) for condition in conditions)


def _judge_controls(entry: Entry, finding: Finding, ground: Ground) -> tuple[Control, ...]:
    cases = entry.controls_on(ground)
    _check_names("control", entry, [case.name for case in cases], finding.controls)
    controls = []
    for case in cases:
        judged = _judged(case.name, finding.controls[case.name], control_region(entry, case, ground))
        expected = tuple(Ruling(ruling) for ruling in case.expected)
        fields = (judged.name, judged.region, judged.interval, judged.ruling, judged.basis, judged.replicates_needed)
        controls.append(Control(*fields, expected=expected))
    return tuple(controls)


def control_region(entry: Entry, case: ControlCase, ground: Ground) -> Region:
    """The region of a control: its own bounds or, if it has none, those of a condition of the claim.

    >>> from helmscope.claims.reading import entry
    >>> rate = entry("rate")
    >>> control_region(rate, ControlCase(name="V = -I", text="must fail"), Ground.SIMULATION).low
    0.999999
    """
    if case.region.bounded:
        return case.region
    conditions = entry.conditions_on(ground)
    condition = conditions[0] if case.of is None else next(each for each in conditions if each.name == case.of)
    return Region(text=case.text, **condition.region.bounds)


def _judge_printed(entry: Entry, finding: Finding) -> Printed | None:
    """The judgment on what the source prints: on paper, and measured where the experiment has evidence."""
    form = entry.printed
    if form is None or (finding.printed is not None and not form.region.bounded):
        if finding.printed is None:
            return None
        raise HelmscopeError(f"experiment of '{entry.id}' tests what is printed, but the entry gives it no region")
    interval = measured = None
    if finding.printed is not None:
        assessment = finding.printed.weigh(form.region)
        interval, measured = assessment.interval, MEASURED[assessment.ruling]
    region = form.region if form.region.bounded else None
    return Printed(form.text, form.place, Judgment(form.judgment), form.reason, measured, interval, region)


def _check_names(what: str, entry: Entry, wanted: Sequence[str], given: Mapping[str, Evidence]) -> None:
    """Raise HelmscopeError unless the experiment returned exactly the conditions, or controls, of the entry."""
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        returned = ", ".join(f"'{name}'" for name in given) or "none"
        expected = ", ".join(f"'{name}'" for name in wanted) or "none"
        raise HelmscopeError(
            f"experiment of '{entry.id}' returned the {what}s {returned}, but the entry has {expected}"
        )


def _sentences(
    ruling: Ruling,
    conditions: Sequence[Judged],
    controls: Sequence[Control],
    finding: Finding,
    printed: Printed | None,
) -> Iterator[str]:
    """Failed controls; each condition with its interval and basis; the remark; what the source prints."""
    failed = [control for control in controls if not control.as_expected]
    if failed:
        failures = [f"{control.name}: {control.ruling.value}, expected {control.expectation}" for control in failed]
        yield f"A control failed, so there is no ruling: {'; '.join(failures)}."
    for condition in conditions:
        shown = ruling if len(conditions) == 1 else condition.ruling
        name = "" if len(conditions) == 1 else f" ({condition.name})"
        heading = f"{shown.value[0].upper()}{shown.value[1:]}{name}"
        yield f"{heading}: {interval_text(condition.interval)}, {condition.basis}."
        if condition.ruling is Ruling.INCONCLUSIVE and condition.replicates_needed is not None:
            yield f"About {condition.replicates_needed:,} replicates would decide it."
        elif condition.ruling is Ruling.INCONCLUSIVE:
            yield "No number of replicates is known that would decide it."
    smallest = min((condition.interval.n for condition in conditions if condition.interval is not None), default=0)
    if 0 < smallest < FEW_REPLICATES:
        yield f"Fewer than {FEW_REPLICATES} replicates: the interval assumes that they are normally distributed."
    if finding.remark:
        yield finding.remark
    if printed is not None and printed.measured is not None:
        yield f"As printed ({printed.text}): {printed.judgment.value}, {interval_text(printed.interval)}."
