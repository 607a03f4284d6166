"""Turns the finding of an experiment into a verdict, by the conditions of the claim and its controls."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from helmscope.claims.entry import Condition, ControlCase, Entry, SubjectKind
from helmscope.claims.evidence import Assessment, Evidence, Inconclusive, PremiseImpossible
from helmscope.claims.finding import Finding
from helmscope.stats.reduce import reduced
from helmscope.types import (
    Control,
    HelmscopeError,
    JudgedCondition,
    Judgment,
    PrintedStatement,
    Provenance,
    Region,
    Ruling,
    Verdict,
    interval_text,
    type_with_article,
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
    subject_kind: SubjectKind = SubjectKind.SIMULATION,
    subject: str = "",
    provenance: Provenance | None = None,
    file: str = "",
) -> Verdict:
    """The verdict on a claim for one subject: its evidence compared with the regions that were fixed before the run.

    All conditions must hold: the claim is refuted if one of them is, and supported if all are; if one that is a
    premise fails, the premise is impossible for this subject. If a control does not come out as expected, the ruling is
    inconclusive, since such a trial cannot distinguish the claim from its null, and so it is if replicates are lacking.
    What the source prints is judged separately. Raises HelmscopeError unless ``finding`` is a Finding with the
    conditions and controls of the entry on this ``subject_kind``, whose data can be plotted; the error names ``file``,
    the file of the experiment.

    >>> from helmscope.claims.entry import parse_entry
    >>> from helmscope.claims.evidence import Count
    >>> text = '''statement = "Heads are more frequent than tails."
    ... conditions = [{ name = "share of heads", above = 0.5 }]
    ... '''
    >>> judge(parse_entry(text, "mine.toml"), Finding(evidence=Count(60, 64)))
    <Verdict on mine: supported, 0.938 [0.848, 0.983], n = 64>
    """
    experiment = f"experiment of '{entry.id}'{f' in {file}' if file else ''}"
    if not isinstance(finding, Finding):
        raise HelmscopeError(f"{experiment} returned {type_with_article(finding)}, but it must return a Finding")
    reduced(finding.data)  # raise for data that cannot be plotted here, not in a report after many trials
    provenance = provenance or Provenance(entry=entry.hash, version=entry.version)
    described = tuple(_judged(name, UNJUDGED, given.weigh(UNJUDGED)) for name, given in finding.described.items())
    if isinstance(finding.evidence, PremiseImpossible | Inconclusive):
        reason = finding.evidence.reason
        return Verdict(
            claim=entry.id,
            ruling=finding.evidence.weigh(UNJUDGED).ruling,
            described=described,
            sentence=" ".join(filter(None, (f"{reason[0].upper()}{reason[1:]}.", finding.remark))),
            setting=finding.setting,
            attachments=finding.attachments,
            subject=subject,
            provenance=provenance,
        )
    assessed = _assess_conditions(entry, finding, subject_kind, experiment)
    conditions = tuple(_judged(each.name, each.region, assessment) for each, assessment in assessed)
    controls = _judge_controls(entry, finding, subject_kind, experiment)
    premises = [condition.name for condition in entry.conditions_on(subject_kind) if condition.premise]
    ruling = combine(conditions, controls, premises)
    if finding.undecided_because:
        ruling = Ruling.INCONCLUSIVE
        conditions = tuple(_left_open(condition) for condition in conditions)
    printed = _judge_printed(entry, finding)
    return Verdict(
        claim=entry.id,
        ruling=ruling,
        conditions=conditions,
        controls=controls,
        described=described,
        printed=printed,
        sentence=" ".join(_sentences(ruling, conditions, controls, finding, printed, _few_replicates(assessed))),
        setting=finding.setting,
        attachments=finding.attachments,
        subject=subject,
        provenance=provenance,
    )


def _left_open(condition: JudgedCondition) -> JudgedCondition:
    """A condition that is not decided, since replicates are lacking."""
    if condition.ruling is Ruling.DESCRIBED:
        return condition
    return replace(condition, ruling=Ruling.INCONCLUSIVE, replicates_needed=None)


def combine(
    conditions: Sequence[JudgedCondition], controls: Sequence[Control], premises: Collection[str] = ()
) -> Ruling:
    """The ruling over all conditions: refuted if one is, impossible if the premise of one is, supported if all are;
    inconclusive if a control failed. Conditions named in ``premises`` come first: unless they hold, the others decide
    nothing.

    >>> region = Region(text="above 0", above=0.0)
    >>> slope = JudgedCondition("slope", region, None, Ruling.SUPPORTED)
    >>> combine([slope, JudgedCondition("fit", region, None, Ruling.REFUTED)], []).value
    'refuted'
    """
    if not all(control.as_expected for control in controls):
        return Ruling.INCONCLUSIVE
    presupposed = {condition.ruling for condition in conditions if condition.name in premises}
    for decisive in (Ruling.IMPOSSIBLE, Ruling.INCONCLUSIVE):
        if decisive in presupposed:
            return decisive
    rulings = {condition.ruling for condition in conditions}
    order = (Ruling.REFUTED, Ruling.IMPOSSIBLE, Ruling.INCONCLUSIVE, Ruling.SUPPORTED, Ruling.BY_CONSTRUCTION)
    for decisive in order:
        if decisive in rulings:
            return decisive
    return Ruling.DESCRIBED


def _judged(name: str, region: Region, assessment: Assessment) -> JudgedCondition:
    return JudgedCondition(
        name, region, assessment.interval, assessment.ruling, assessment.basis, assessment.replicates_needed
    )


def _assess_conditions(
    entry: Entry, finding: Finding, subject_kind: SubjectKind, experiment: str
) -> list[tuple[Condition, Assessment]]:
    conditions = entry.conditions_on(subject_kind)
    if not conditions:
        raise HelmscopeError(f"{experiment} ran on a {subject_kind.value}, but {entry.id}.toml has no condition on one")
    evidence = finding.evidence
    if not isinstance(evidence, Mapping):
        evidence = {condition.name: evidence for condition in conditions[:1]}
    _check_names(f"{experiment} returned", "conditions", entry, [each.name for each in conditions], evidence)
    assessed = [(condition, evidence[condition.name].weigh(condition.region)) for condition in conditions]
    return [
        (condition, _as_premise(condition, assessment) if condition.premise else assessment)
        for condition, assessment in assessed
    ]


def _as_premise(condition: Condition, assessment: Assessment) -> Assessment:
    """The assessment of a condition that the claim presupposes: where it is refuted the premise is impossible."""
    if assessment.ruling is not Ruling.REFUTED:
        return assessment
    basis = f"{assessment.basis}; the claim presupposes: {condition.text[:-1]}"
    return replace(assessment, ruling=Ruling.IMPOSSIBLE, basis=basis)


def _few_replicates(assessed: Sequence[tuple[Condition, Assessment]]) -> bool:
    """Whether an interval that assumes normal replicates, unlike that of a count, has fewer than FEW_REPLICATES."""
    return any(
        not assessment.exact and assessment.interval is not None and assessment.interval.n < FEW_REPLICATES
        for _, assessment in assessed
    )


def _judge_controls(entry: Entry, finding: Finding, subject_kind: SubjectKind, experiment: str) -> tuple[Control, ...]:
    cases = entry.controls_on(subject_kind)
    _check_names(f"{experiment} returned", "controls", entry, [case.name for case in cases], finding.controls)
    controls = []
    for case in cases:
        region = control_region(entry, case, subject_kind)
        judged = _judged(case.name, region, finding.controls[case.name].weigh(region))
        expected = tuple(Ruling(ruling) for ruling in case.expected)
        fields = (judged.name, judged.region, judged.interval, judged.ruling, judged.basis, judged.replicates_needed)
        controls.append(Control(*fields, expected=expected))
    return tuple(controls)


def control_region(entry: Entry, case: ControlCase, subject_kind: SubjectKind) -> Region:
    """The region of a control: its own bounds or, if it has none, those of a condition of the claim.

    >>> from helmscope.claims.reading import entry
    >>> rate = entry("rate")
    >>> control_region(rate, ControlCase(name="V = -I", text="must fail"), SubjectKind.SIMULATION).low
    0.999999
    """
    if case.region.bounded:
        return case.region
    conditions = entry.conditions_on(subject_kind)
    condition = conditions[0] if case.of is None else next(each for each in conditions if each.name == case.of)
    return Region(text=case.text or condition.text, **condition.region.bounds)


def _judge_printed(entry: Entry, finding: Finding) -> PrintedStatement | None:
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
    return PrintedStatement(form.text, form.place, Judgment(form.judgment), form.reason, measured, interval, region)


def _check_names(returned: str, kind: str, entry: Entry, wanted: Sequence[str], given: Mapping[str, Evidence]) -> None:
    """Raise HelmscopeError unless the experiment returned exactly the conditions, or controls, of the entry."""
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        names, expected = (", ".join(f"'{name}'" for name in each) for each in (given, wanted))
        found = f"the {kind} {names}" if given else f"no {kind}"
        raise HelmscopeError(f"{returned} {found}, but {entry.id}.toml names {expected or 'none'}")


def _sentences(
    ruling: Ruling,
    conditions: Sequence[JudgedCondition],
    controls: Sequence[Control],
    finding: Finding,
    printed: PrintedStatement | None,
    few_replicates: bool,
) -> Iterator[str]:
    """What is lacking; failed controls; each condition by name, with its interval and basis; the remark; what the
    source prints.
    """
    if finding.undecided_because:
        yield f"Nothing is decided: {finding.undecided_because}."
    failed = [control for control in controls if not control.as_expected]
    if failed:
        failures = [f"{control.name}: {control.ruling.value}, expected {control.expectation}" for control in failed]
        yield f"A control failed, so there is no ruling: {'; '.join(failures)}."
    for condition in conditions:
        shown = ruling if len(conditions) == 1 else condition.ruling
        heading = f"{shown.value[0].upper()}{shown.value[1:]} ({condition.name})"
        measured = "" if condition.interval is None else f"{interval_text(condition.interval)}, "
        yield f"{heading}: {measured}{condition.basis}."
        if condition.ruling is Ruling.INCONCLUSIVE and condition.replicates_needed is not None:
            yield f"About {condition.replicates_needed:,} replicates would decide it."
        elif condition.ruling is Ruling.INCONCLUSIVE and not finding.undecided_because:
            yield "No number of replicates is known that would decide it."
    if few_replicates:
        yield f"Fewer than {FEW_REPLICATES} replicates: the interval assumes that they are normally distributed."
    if finding.remark:
        yield finding.remark
    if printed is not None and printed.measured is not None:
        yield f"As printed ({printed.text}): {printed.judgment.value}, {interval_text(printed.interval)}."
