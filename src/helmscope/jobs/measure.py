"""All measurements of a model on some texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from helmscope.jobs import checks
from helmscope.jobs.checks import Check, boolean, integer, list_of, optional
from helmscope.jobs.job import Job, PictureWriter, Result, Work
from helmscope.jobs.names import INTERVENTIONS, MEASUREMENTS
from helmscope.jobs.spec import Spec
from helmscope.runs.unit import Unit
from helmscope.types import HelmscopeError, check_name, check_seed, pluralized

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.jobs.cost import Estimate
    from helmscope.models.subject import Subject

TEXTS, TOKENS = (64, 32), (128, 64)  # of a full and of a quick run
REPLAY, JOINT = (
    "replay",
    "__",
)  # the unit of all streaming instruments, and what joins their names to those of variables
PICTURE, LEFT_OUT = "measurements.png", "left_out"


class MeasurementSpec(Spec, frozen=True, kw_only=True, tag="measure"):
    """Spec for all measurements of ``model``, "A", "B", "tied", a folder or a Hub id, as ``hs.measure`` takes them.

    ``texts`` is a file with one text per line or a JSON list; by default those that come with the package. The first
    ``text_count`` of them are used, each cut to its first ``text_length`` tokens: 64 texts of 128 tokens, with
    ``quick`` 32 of 64, where those that sample also take smaller samples. ``interventions`` takes the measurements that
    run the model under many edits instead (``hs.observe.intervention_names()``), by default on 32 texts of 64 tokens.
    ``only`` selects measurements by name; by default all that the model supports. ``seed`` draws the samples.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(MeasurementSpec(text_count=2, text_length=8, only=["depth_steps"]), folder=f"{root}/run")
    >>> result.measured["depth_steps"].angle.dims
    ('depth', 'prompt')
    """

    model: str = "A"
    texts: str | None = None
    text_count: int | None = None
    text_length: int | None = None
    only: tuple[str, ...] = ()
    interventions: bool = False
    quick: bool = False
    seed: int = 0
    device: str = "cpu"

    main_fields: ClassVar[tuple[str, ...]] = ("model", "text_count", "text_length")
    verb: ClassVar[tuple[str, ...]] = ("measure",)
    checks: ClassVar[Mapping[str, Check]] = {
        "model": checks.path,
        "texts": optional(checks.path),
        "text_count": optional(integer(1)),
        "text_length": optional(integer(2)),
        "only": lambda name, value: tuple(dict.fromkeys(list_of(checks.text)(name, value))),
        "interventions": boolean,
        "quick": boolean,
        "seed": lambda _, value: check_seed(value),
        "device": checks.text,
    }

    def _complete(self) -> None:
        if self.interventions and self.only:
            raise HelmscopeError("interventions is true and only is given, but only one of them can choose: omit one")
        for name, (full, quick) in (("text_count", TEXTS), ("text_length", TOKENS)):
            if getattr(self, name) is None:
                self._set(name, quick if self.quick or self.interventions else full)

    @property
    def possible(self) -> tuple[str, ...]:
        """The names of the measurements that are taken of a model that supports all.

        >>> MeasurementSpec(only=["depth_steps"]).possible
        ('depth_steps',)
        """
        return self.only or (INTERVENTIONS if self.interventions else MEASUREMENTS)

    def subject(self) -> Subject:
        """The model with its texts, cut to their first tokens.

        >>> MeasurementSpec(text_count=3).subject()
        <Subject A: 3 texts>
        """
        from helmscope.jobs.names import usable_device
        from helmscope.jobs.texts import MIN_TOKENS, read_texts
        from helmscope.models.subject import Subject

        device = None if self.device == "cpu" else usable_device(self.device)
        prompts = None if self.texts is None else read_texts(self.texts)
        whole = Subject(self.model, prompts, device=device, truncate=True)
        rows = [list(row[: self.text_length]) for row in whole.token_ids[: self.text_count]]
        short = next((i for i, row in enumerate(rows) if len(row) < MIN_TOKENS), None)
        if short is not None:
            raise HelmscopeError(
                f"texts[{short}] has {pluralized(len(rows[short]), 'token')} for model {whole.name}, but a measurement "
                f"needs at least {MIN_TOKENS} in each"
            )
        if len({len(row) for row in rows}) == 1:
            return Subject(self.model, rows, device=device)
        # token ids have no padding, so that texts of different lengths stay texts
        tokenizer = whole.loaded.tokenizer
        assert tokenizer is not None
        cut = [
            text if len(ids) <= len(row) else tokenizer.decode(row, skip_special_tokens=True)
            for text, ids, row in zip(whole.texts, whole.token_ids, rows, strict=False)
        ]
        return Subject(self.model, cut, device=device, truncate=True)

    @property
    def title(self) -> str:
        """The model and the size of its texts, as text.

        >>> MeasurementSpec(quick=True).title
        'A: 32 texts of up to 64 tokens'
        """
        name = Path(self.model).name if Path(self.model).is_dir() else self.model
        return f"{name}: {pluralized(self.text_count or 0, 'text')} of up to {self.text_length} tokens"

    def prepare(self) -> MeasurementJob:
        """Return the job, with one unit for all streaming instruments and one for each standalone measurement."""
        from helmscope.jobs.cost import subject_size
        from helmscope.observe.measure import streaming_instruments, unsupported_measurements
        from helmscope.types import check_memory

        for name in self.only:
            check_name("measurement", name, (*MEASUREMENTS, *INTERVENTIONS))
        subject = self.subject()
        size = subject_size(subject)
        amounts = f"{size.parameters:,} parameters on {size.tokens:,} tokens"
        check_memory(f"model is '{self.model}' with {amounts}", size.bytes // 8)
        reasons = unsupported_measurements(subject.recording, only=self.possible)
        for name in self.only:
            reason = reasons[name]
            if reason is not None:
                raise HelmscopeError(reason)
        names = [name for name in reasons if reasons[name] is None]
        streamed = [each.name for each in streaming_instruments() if each.name in names]
        groups = ({REPLAY: streamed} if streamed else {}) | {name: [name] for name in names if name not in streamed}
        shared = {"subject": subject.as_data(), "identity": subject.identity, "quick": self.quick, "seed": self.seed}
        shared["asked"] = bool(self.only)
        canonical = {
            "model": str(subject.as_data()["model"]),
            "texts": self.texts and str(Path(self.texts).resolve()),
            "only": tuple(sorted(self.only)),
        }
        return MeasurementJob(
            spec=msgspec.structs.replace(self, **canonical),
            units=[Unit(name, measurement_unit, {"names": group, **shared}) for name, group in groups.items()],
            dtype=str(subject.loaded.model.dtype).removeprefix("torch."),
            device=self.device,
            inputs={subject.name: subject.identity},
            parameters={name: value for name, value in self.fields.items() if name not in ("seed", "device")},
            skipped={name: reason for name, reason in reasons.items() if reason is not None},
        )

    def estimate(self) -> Estimate:
        """Estimate the time on one core, in forward passes of the model that each measurement takes, and the memory."""
        from helmscope.jobs.cost import measurement_cost

        return measurement_cost(self)


def measurement_unit(
    names: list[str], subject: dict[str, Any], identity: str, quick: bool, seed: int, asked: bool
) -> xr.Dataset:
    """Unit of work: the measurements of these names, joined in one Dataset; ``identity`` is that of the subject. One
    that fails and was not ``asked`` for by name gives an empty Dataset with the reason.
    """
    import xarray as xr

    from helmscope.models.subject import Subject
    from helmscope.observe.measure import measure

    chosen = Subject.from_data(subject)
    if chosen.identity != identity:
        raise HelmscopeError(f"model or texts of {chosen.name} have changed since the run was planned: start a new one")
    try:
        return join_measurements(measure(chosen.recording, only=names, quick=quick, seed=seed))
    except HelmscopeError as error:
        if asked:
            raise
        return xr.Dataset(attrs={LEFT_OUT: str(error)})


def join_measurements(measured: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Several Measurements in one Dataset, with the name of each before those of its variables and axes.

    >>> import xarray as xr
    >>> list(join_measurements({"a": xr.Dataset({"x": ("prompt", [1.0])})}).variables)
    ['a__x']
    """
    import xarray as xr

    joined = xr.Dataset()
    for name, each in measured.items():
        renamed = each.rename({key: f"{name}{JOINT}{key}" for key in (*each.variables, *each.dims)})
        joined = joined.merge(renamed, compat="override", join="outer")
        joined.attrs |= {f"{name}{JOINT}{key}": value for key, value in each.attrs.items()}
    return joined


def split_measurements(joined: xr.Dataset) -> dict[str, xr.Dataset]:
    """The Measurements that ``join_measurements`` joined.

    >>> import xarray as xr
    >>> measured = {"a": xr.Dataset({"x": ("prompt", [1.0])}, attrs={"n": 1})}
    >>> split_measurements(join_measurements(measured))["a"].identical(measured["a"])
    True
    """
    measured = {}
    for name in dict.fromkeys(str(key).partition(JOINT)[0] for key in joined.data_vars):
        begin = f"{name}{JOINT}"
        # a Dataset of some variables keeps all coordinates of their axes
        part = joined[[key for key in joined.data_vars if str(key).startswith(begin)]]
        part = part.drop_vars([key for key in part.coords if not str(key).startswith(begin)])
        names = (*part.variables, *part.dims)
        part = part.rename({key: str(key).removeprefix(begin) for key in names})
        part.attrs = {str(k).removeprefix(begin): v for k, v in joined.attrs.items() if str(k).startswith(begin)}
        measured[name] = part
    return measured


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MeasurementResult(Result):
    """The result of ``MeasurementSpec``: the Measurements by name, with replicates, the reasons why others were
    ``skipped``, the paths of their ``tables``, CSV files of means with intervals, and the path of the ``picture``, None
    if it could not be drawn.

    >>> import tempfile
    >>> from helmscope.jobs import run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(MeasurementSpec(text_count=2, text_length=8, only=["arc_length"]), folder=f"{root}/run")
    >>> result.ok, list(result.measured)
    (True, ['arc_length'])
    """

    measured: Mapping[str, xr.Dataset]
    skipped: Mapping[str, str]
    tables: Mapping[str, Path] = field(default_factory=dict)
    picture: Path | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class MeasurementJob(Job):
    """Prepared measurements."""

    spec: MeasurementSpec
    skipped: Mapping[str, str]

    prints_cost: ClassVar[bool] = True
    weights_units: ClassVar[bool] = True

    @property
    def notices(self) -> tuple[str, ...]:
        """What the model does not support."""
        return tuple(f"no {name}: {reason}" for name, reason in self.skipped.items())

    def execute(self, work: Work) -> MeasurementResult:
        """Run the units, and write one netCDF file and one table for each measurement, and a picture of all."""
        from helmscope.jobs.measured_table import csv_table
        from helmscope.plots.measurements import measurements_figure
        from helmscope.plots.style import png

        results = self.run_units(work, "measuring")
        found = {name: each for unit in self.units for name, each in split_measurements(results[unit.name]).items()}
        failed = {
            unit.name: each.attrs[LEFT_OUT] for unit in self.units if LEFT_OUT in (each := results[unit.name]).attrs
        }
        measured = {name: found[name] for name in (*MEASUREMENTS, *INTERVENTIONS) if name in found}
        for name, each in measured.items():
            work.folder.write_results(name, each)
            work.folder.write_bytes(f"{name}.csv", csv_table(each))
        pictures = PictureWriter(work.folder, work.show_progress)
        picture = pictures.write("picture", PICTURE, lambda: png(measurements_figure(measured, title=self.spec.title)))
        return MeasurementResult(
            spec=self.spec,
            folder=work.folder,
            measured=measured,
            skipped={**self.skipped, **failed},
            tables={name: work.folder.path / f"{name}.csv" for name in measured},
            picture=picture,
            notes=(*(f"no {name}: {reason}" for name, reason in failed.items()), *pictures.notes),
        )
