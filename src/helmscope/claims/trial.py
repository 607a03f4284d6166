"""Trials: run the experiment of one claim on one subject and judge its finding."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.claims.imported_code import imported_hash
from helmscope.claims.judge import judge
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import Experiment, TrialCase, code_file, experiments, registered
from helmscope.claims.untrained import untrained_notice
from helmscope.models.subject import Subject
from helmscope.runs.attempt import described
from helmscope.runs.bar import progress_reporting
from helmscope.stats.summary import summary
from helmscope.store.manifest import hash_bytes, hash_file
from helmscope.types import (
    HelmscopeError,
    Plottable,
    Provenance,
    Verdict,
    check_name,
    check_progress,
    html_stack,
    one_line_repr,
    pluralized,
)
from helmscope.types.measurement import COMPANIONS

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.plots.figure import Figure
    from helmscope.types.progress import ProgressOption


@dataclass(frozen=True, eq=False, repr=False)
class Trial(Plottable):
    """The verdict on a claim, with the Measurement of its experiment and all replicates.

    ``plot()`` shows both; the values that it plots are ``hs.reduce_replicates(trial.data)``.

    >>> import xarray as xr
    >>> from helmscope.types import Ruling
    >>> data = xr.Dataset({"slope": 1.0, "slope_stderr": 0.1}, attrs={"n": 20})
    >>> Trial(Verdict(claim="rate", ruling=Ruling.IMPOSSIBLE), data)
    <Trial of rate: premise impossible here; 1 variable measured>
    """

    verdict: Verdict
    data: xr.Dataset

    @property
    def _variables(self) -> list[str]:
        return [str(name) for name in self.data.data_vars if not str(name).endswith(COMPANIONS)]

    def __repr__(self) -> str:
        measured = f"; {pluralized(len(self._variables), 'variable')} measured" if self._variables else ""
        return one_line_repr(f"Trial of {self.verdict.claim}: {self.verdict.summary}{measured}")

    def _repr_html_(self) -> str:
        parts = [self.verdict._repr_html_()]
        parts += [summary(self.data)._repr_html_()] if self._variables else []
        return html_stack(*parts)

    def plot(self, *names: str, **options: Any) -> Figure:
        """Plot the statistic with its region, and below it the measured variables: the first five, or those with the
        given names (also as the option ``variables`` of ``hs.plot``); ``width`` is in inches.

        Raises HelmscopeError for a variable or an option that does not exist.
        """
        from helmscope.plots.trial import trial_figure  # deferred, since listing claims needs no plotting

        for option in options:
            check_name("option of plot", option, ["variables", "width"])
        if names:
            options["variables"] = names
        return trial_figure(self.verdict, self.data, **options)


def run_trial(
    claim: str,
    *,
    seed: int = 0,
    quick: bool = False,
    claims_folder: str | Path | None = None,
    subject: Subject | None = None,
    other: Subject | None = None,
    progress: ProgressOption = None,
) -> Trial:
    """Run the experiment of one claim on one subject and judge its finding by the regions fixed in the catalogue.

    ``subject`` is the simulation or the model to try it on, by default the first one that the experiment names;
    ``other`` is a second model, for claims that compare two. ``quick`` uses fewer replicates. With ``claims_folder``
    the claim is one of a user's catalogue, and the Python files there are run. Equal seeds give equal verdicts.
    ``progress`` is called with 1 at the end. Raises HelmscopeError for an unknown claim, for one without an experiment,
    for a subject that it cannot be tried on, and if the experiment fails.

    >>> run_trial("kuramoto", quick=True).verdict.ruling.value
    'true by construction'
    """
    TrialCase(seed, quick)
    check_progress(progress)
    chosen = registered(claim, claims_folder)
    entry = read_catalogue(claims_folder)[claim]  # read before the experiment, which cannot change what it is judged by
    case = chosen.case(seed, quick=quick, subject=subject, other=other, entry=entry)
    provenance = Provenance(
        entry=entry.hash,
        version=entry.version,
        code=code_hash(claim, claims_folder),
        weights=" ".join(each.weights for each in case.subjects if not each.is_simulation),
        texts=" ".join(each.text_hash for each in case.subjects if not each.is_simulation),
    )
    try:
        with progress_reporting(progress, f"trying '{claim}'") as report:
            finding = chosen.function(case)
    except Exception as error:
        reason = str(error) if isinstance(error, HelmscopeError) else described(error)
        line = _failing_line(error, chosen.function)
        raise HelmscopeError(f"experiment of '{claim}' failed{line}: {reason}") from error
    check_progress(report)(1.0)
    label = " and ".join(case.names)
    file = code_file(chosen.function).name
    verdict = judge(entry, finding, subject_kind=case.subject_kind, subject=label, provenance=provenance, file=file)
    notices = [notice for each in case.subjects if (notice := untrained_notice(each))]
    return Trial(replace(verdict, sentence=" ".join([verdict.sentence, *notices])), finding.data)


def sources(claim: str, claims_folder: str | Path | None) -> dict[str, str]:
    """The hashes of a claim's entry and code: the file of its experiment, or all Python files of a user's folder, and
    one hash for all modules of this package that they import, directly or through others.

    A run can only be resumed with the same hashes.

    >>> list(sources("rate", None))
    ['rate.toml', 'rate.py', 'imported by rate']
    """
    entry = read_catalogue(claims_folder)[claim]
    code = (
        [code_file(experiments()[claim].function)]
        if claims_folder is None
        else sorted(Path(claims_folder).glob("*.py"))
    )
    files = {path.name: hash_file(path) for path in code}
    return {f"{claim}.toml": entry.hash, **files, f"imported by {claim}": imported_hash(code)}


def code_hash(claim: str, claims_folder: str | Path | None) -> str:
    """SHA-256 of the hashes of a claim's code: all of ``sources`` but the entry.

    >>> len(code_hash("rate", None))
    64
    """
    hashes = [digest for name, digest in sources(claim, claims_folder).items() if name != f"{claim}.toml"]
    return hash_bytes(" ".join(hashes).encode())


def _failing_line(error: Exception, function: Experiment) -> str:
    """The line of the experiment's own file at which an error was raised, as text."""
    file = code_file(function)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return f" in {file.name}, line {lines[-1]}" if lines else ""
