"""units.json: what a run is made of and under which circumstances it was begun, so that it can go on later."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from helmscope.store.atomic import explained, is_temporary, write_bytes
from helmscope.store.manifest import Manifest, hash_bytes
from helmscope.store.printable import printable
from helmscope.store.run_folder import MANIFEST, UNITS, RunFolder
from helmscope.store.strict_json import Reader, decode, encode, plain, record, text
from helmscope.types import HelmscopeError, whole_number

RESULTS = "units"
MISSING = object()


@dataclass(frozen=True)
class Plan:
    """The key of every unit by its name, the identity of the manifest that the run was begun with, and what that does
    not say of the machine: CPU and threads of a unit. ``mixed`` names the circumstances that changed on the way, where
    that was allowed.

    >>> Plan(units={"mean": "ab" * 32}, manifest={"seed": 0}, cpu="x86_64", threads=1).stamp("mean")[:8]
    'a4f13c8d'
    """

    units: Mapping[str, str]
    manifest: Mapping[str, Any]
    cpu: str
    threads: int
    mixed: Sequence[str] = ()

    def stamp(self, name: str) -> str:
        """SHA-256 of a unit and its run: what a result carries, so that no other is taken for it. Runs begun with
        equal manifests, but for time and command line, on equal machines have it in common.
        """
        return hash_bytes(encode([self._run, name, self.units[name]], "the stamp"))

    @cached_property
    def _run(self) -> str:
        return hash_bytes(encode([self.manifest, self.cpu, self.threads], "the run"))


def begin(
    folder: RunFolder, manifest: Manifest, plan: Plan, *, allow_mixed: bool = False, any_manifest: bool = False
) -> Plan:
    """The plan that holds for ``folder``: in a folder without one, ``plan``, which is written with the manifest.

    A folder that has them must have been begun with the same units and, unless ``any_manifest``, the same seed, dtype,
    device, inputs and parameters; and unless ``allow_mixed`` under the same versions, CPU and threads, for results
    equal to the last bit. Where these have changed, inputs that were computed may differ in their last bits too.

    >>> import tempfile
    >>> details = dict(seed=0, dtype="float64", device="cpu", threads=1, command=[], inputs={}, parameters={})
    >>> manifest = Manifest.collect(**details)
    >>> plan = Plan({"a": "ab" * 32}, manifest.identity, cpu(), threads=1)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     begin(RunFolder(path), manifest, plan) == read_plan(RunFolder(path))
    True
    """
    found, planned = read_parts(folder)
    if found is None:
        folder.write_manifest(manifest)
    begun = manifest if found is None else found
    earlier = replace(plan, manifest=begun.identity) if planned is None else planned
    _check_units(plan.units, earlier.units, folder.path / UNITS)
    changed = [*_changes(begun, manifest), *_changes_of_machine(earlier, plan)]
    if not any_manifest:
        asked, inputs = _changes_of_manifest(earlier.manifest, manifest.identity)
        if asked or (inputs and not changed):
            raise HelmscopeError(
                f"{folder.path} was begun with {' and '.join(asked + inputs)}: repeat what it was begun with, or take "
                "a new folder"
            )
        changed += inputs
    if changed and not allow_mixed:
        raise HelmscopeError(
            f"{folder.path} was begun with {' and '.join(changed)}, so that results may differ in their last bits: go "
            "back to what it was, take a new folder, or set allow_mixed (--allow-mixed)"
        )
    now = replace(earlier, mixed=sorted({*earlier.mixed, *changed}))
    if now != planned:
        write_bytes(folder.path / UNITS, encode(asdict(now), UNITS))
    return now


def read_parts(folder: RunFolder) -> tuple[Manifest | None, Plan | None]:
    """Manifest and plan of a folder, as far as it has them; a folder whose parts disagree is refused.

    The manifest is written first, then the plan, then results: a run that was killed may lack the later ones, never an
    earlier one. The manifest may have gained parameters since, such as the kernel that was used.

    >>> read_parts(RunFolder("no-such-folder"))
    (None, None)
    """
    has_manifest, has_plan = ((folder.path / name).is_file() for name in (MANIFEST, UNITS))
    if has_plan and not has_manifest:
        raise _disagreement(folder, f"{UNITS} is there, but {MANIFEST} is missing")
    if not has_plan:
        for name in _results(folder.path / RESULTS):
            raise _disagreement(folder, f"{RESULTS} holds the result {name!r}, but {UNITS} is missing")
    manifest = folder.read_manifest() if has_manifest else None
    plan = read_plan(folder) if has_plan else None
    if manifest is not None and plan is not None:
        for (field, inner), recorded, stands in _differences(plan.manifest, manifest.identity):
            if field == "parameters" and recorded is MISSING:
                continue
            what = _label(field, inner)
            raise _disagreement(folder, f"{what} is {_shown(stands)} in {MANIFEST}, but {_shown(recorded)} in {UNITS}")
    return manifest, plan


def read_plan(folder: RunFolder) -> Plan:
    """The plan of a folder, decoded strictly.

    >>> read_plan(RunFolder("no-such-folder"))
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: cannot read no-such-folder/units.json: No such file or directory
    """
    path = folder.path / UNITS
    with explained(f"read {path}"):
        data = path.read_bytes()
    return Plan(**record(decode(data, str(path)), _READERS, str(path)))


def cpu() -> str:
    """Model and abilities of the CPU, by which libraries choose their code, and so the last bits.

    >>> cpu() == cpu() != ""
    True
    """
    lines: dict[str, str] = {}
    with explained("read /proc/cpuinfo"), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    abilities = lines.get("flags") or lines.get("Features") or ""
    return f"{lines.get('model name') or platform.machine()} ({hash_bytes(abilities.encode())[:8]})"


def _results(folder: Path) -> list[str]:
    with explained(f"read {folder}"):
        return sorted(name for name in os.listdir(folder) if not is_temporary(name)) if folder.is_dir() else []


def _disagreement(folder: RunFolder, how: str) -> HelmscopeError:
    return HelmscopeError(f"the parts of {folder.path} disagree: {how}: put back what was there, or take a new folder")


def _check_units(asked: Mapping[str, str], planned: Mapping[str, str], path: Path) -> None:
    for name in sorted({*asked, *planned}):
        if name not in planned:
            reason = "is not in"
        elif name not in asked:
            reason = "is not asked for, but stands in"
        elif asked[name] != planned[name]:
            reason = "has another function or other parameters than in"
        else:
            continue
        raise HelmscopeError(f"unit {name!r} {reason} {path}: repeat the same units, or take a new folder")


def _changes(begun: Manifest, now: Manifest) -> list[str]:
    """A package that only one of the two has cannot have been used by both."""
    pairs = {name: (getattr(begun, name), getattr(now, name)) for name in ("helmscope", "python", "platform")}
    pairs |= {name: (version, now.packages.get(name, version)) for name, version in begun.packages.items()}
    return [f"{name} {old} (now {new})" for name, (old, new) in pairs.items() if old != new]


def _changes_of_machine(begun: Plan, now: Plan) -> list[str]:
    pairs = {"CPU": (begun.cpu, now.cpu), "threads": (begun.threads, now.threads)}
    return [f"{name} {old} (now {new})" for name, (old, new) in pairs.items() if old != new]


def _changes_of_manifest(begun: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What else is asked for than at the beginning, and which inputs are others; versions are not looked at."""
    changes: dict[str, list[str]] = {field: [] for field in ("seed", "dtype", "device", "parameters", "inputs")}
    for (field, inner), old, new in _differences(begun, now):
        if field in changes:
            changes[field].append(f"{_label(field, inner)} {_shown(old)} (now {_shown(new)})")
    inputs = changes.pop("inputs")
    return [change for some in changes.values() for change in some], inputs


def _differences(
    one: Mapping[str, Any], two: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, str | None], object, object]]:
    """Place and both values of what the identities of two manifests do not have in common."""
    first, second = _flat(one), _flat(two)
    for place in {**first, **second}:
        pair = first.get(place, MISSING), second.get(place, MISSING)
        if pair[0] != pair[1]:
            yield place, *pair


def _flat(identity: Mapping[str, Any]) -> dict[tuple[str, str | None], object]:
    """By field of the manifest, and name within it where the field is a mapping."""
    flat: dict[tuple[str, str | None], object] = {}
    for field, value in identity.items():
        if isinstance(value, Mapping):
            flat |= {(field, inner): item for inner, item in value.items()}
        else:
            flat[field, None] = value
    return flat


def _label(field: str, inner: str | None) -> str:
    return field if inner is None else f"{field.removesuffix('s')} {inner!r}"


def _shown(value: object) -> str:
    if value is MISSING:
        return "missing"
    written = repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _strings(name: str, value: object) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be an object with named values")
    return {key: text(f"{printable(key)} of {name}", item) for key, item in value.items()}


def _sentences(name: str, value: object) -> list[str]:
    if not isinstance(value, list):
        raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be a list")
    return [text(f"item {i} of {name}", item) for i, item in enumerate(value)]


def _identity(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be an object with named values")
    known: dict[str, Any] = plain(name, value)
    return known


_READERS: dict[str, Reader] = {
    "units": _strings,
    "manifest": _identity,
    "cpu": text,
    "threads": partial(whole_number, at_least=1),
    "mixed": _sentences,
}
