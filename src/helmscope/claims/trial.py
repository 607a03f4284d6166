"""A trial: one claim, its experiment and a seed give a verdict and the numbers to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helmscope.claims.judge import judge
from helmscope.claims.reading import read_catalogue
from helmscope.claims.registry import Case, experiments
from helmscope.runs.run import run
from helmscope.runs.unit import Unit
from helmscope.store.manifest import hash_file
from helmscope.store.verdicts import decode_verdicts, encode_verdicts
from helmscope.types import HelmscopeError, Verdict, known_name

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.runs.attempt import Engine
    from helmscope.store.manifest import Manifest
    from helmscope.store.run_folder import RunFolder


@dataclass(frozen=True, eq=False)
class Trial:
    """A verdict, and the Measurement of its experiment.

    >>> from helmscope.types import Ruling
    >>> Trial(Verdict("rate", Ruling.SUPPORTED, 1, 1, 1, 20, "", "", ""), data=None).verdict.claim
    'rate'
    """

    verdict: Verdict
    data: xr.Dataset


def try_claim(claim: str, *, seed: int = 0, quick: bool = False, folder: str | Path | None = None) -> Trial:
    """Runs the experiment of one claim and judges what it found, by the entry's frozen region.

    ``quick`` takes the fewest replicates that the rules allow. With ``folder`` the claim is one of a user's catalogue,
    and the Python files there are run. Equal seeds give equal verdicts. An unknown claim is refused with the nearest
    one, and so is one without an experiment.

    >>> try_claim("kuramoto", quick=True).verdict.ruling.value
    'true by construction'
    """
    entry = read_catalogue(folder)[_tried(claim, folder)]
    finding = experiments(folder)[claim].function(Case(seed, quick))
    verdict = judge(entry, finding)
    return Trial(verdict, finding.data)


def run_trials(
    claims: Sequence[str],
    to: RunFolder,
    *,
    seed: int = 0,
    quick: bool = False,
    folder: str | Path | None = None,
    manifest: Manifest | None = None,
    engine: Engine | None = None,
    progress: str | None = None,
    allow_mixed: bool = False,
) -> list[Trial]:
    """``try_claim`` for several claims, as units of work in a run folder, which also gets verdicts.json; resumed,
    interrupted and spread over processes as ``runs.run`` says.

    >>> import tempfile
    >>> from helmscope.store.run_folder import RunFolder
    >>> with tempfile.TemporaryDirectory() as root:
    ...     run_trials(["kuramoto"], RunFolder.new(root, "claims"), quick=True)[0].verdict.claim
    'kuramoto'
    """
    place = None if folder is None else str(Path(folder).resolve())
    asked = {"seed": Case(seed, quick).seed, "quick": quick, "folder": place}
    units = [
        Unit(_tried(claim, place), trial_unit, {"claim": claim, "sources": sources(claim, place), **asked})
        for claim in claims
    ]
    result = run(units, to, manifest=manifest, engine=engine, progress=progress, allow_mixed=allow_mixed)
    trials = [_read(result[unit.name]) for unit in units]
    to.write_verdicts([trial.verdict for trial in trials])
    return trials


def sources(claim: str, folder: str | None) -> dict[str, str]:
    """The hash of an entry and, of a user's folder, of the Python files beside it: a run goes on only with the same.

    >>> list(sources("rate", None))
    ['rate.toml']
    """
    code = [] if folder is None else sorted(Path(folder).glob("*.py"))
    entry = read_catalogue(folder)[claim]
    return {f"{claim}.toml": entry.hash, **{path.name: hash_file(path) for path in code}}


def trial_unit(claim: str, sources: dict[str, str], seed: int, quick: bool, folder: str | None) -> xr.Dataset:
    """One unit of work: the Measurement of a trial, with the verdict as JSON among its attributes. ``sources`` makes
    the unit another one where an entry or its code has changed."""
    trial = try_claim(claim, seed=seed, quick=quick, folder=folder)
    return trial.data.assign_attrs(verdict=encode_verdicts([trial.verdict]).decode())


def _read(dataset: xr.Dataset) -> Trial:
    (verdict,) = decode_verdicts(str(dataset.attrs["verdict"]).encode(), "verdict of a trial")
    return Trial(verdict, dataset.drop_attrs(deep=False).assign_attrs(n=dataset.attrs["n"]))


def _tried(claim: str, folder: str | Path | None) -> str:
    """``claim``, if it is in the catalogue and has an experiment."""
    known_name("claim", claim, read_catalogue(folder))
    if claim not in experiments(folder):
        raise HelmscopeError(f"claim '{claim}' is not yet tried: it has no experiment")
    return claim
