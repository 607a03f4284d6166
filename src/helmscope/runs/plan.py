"""units.json: the units of a run and the conditions under which it was started, so that it can be resumed."""

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
from helmscope.types import HelmscopeError, check_integer, type_with_article

RESULTS = "units"
MISSING = object()


@dataclass(frozen=True)
class RunPlan:
    """The units of a run by name, each with its key; the identity of the manifest that the run was started with; and
    what else affects the last bits of a result: the CPU and the threads per unit. ``mixed`` lists the conditions that
    changed between calls, if that was allowed.

    >>> RunPlan(units={"mean": "ab" * 32}, manifest={"seed": 0}, cpu="x86_64", threads=1).stamp("mean")[:8]
    'a4f13c8d'
    """

    units: Mapping[str, str]
    manifest: Mapping[str, Any]
    cpu: str
    threads: int
    mixed: Sequence[str] = ()

    def stamp(self, name: str) -> str:
        """SHA-256 of a unit and its run, stored with the result so that no other result is mistaken for it. It is the
        same for runs on equal machines whose manifests differ only in time and command line.
        """
        return hash_bytes(encode([self._run_hash, name, self.units[name]], "the stamp"))

    @cached_property
    def _run_hash(self) -> str:
        return hash_bytes(encode([self.manifest, self.cpu, self.threads], "the run"))


def begin(
    folder: RunFolder, manifest: Manifest, plan: RunPlan, *, allow_mixed: bool = False, any_manifest: bool = False
) -> RunPlan:
    """Start or resume a run: write ``manifest`` and ``plan`` to a new ``folder``, or check them against those that it
    was started with. Returns the plan that is in effect.

    Raises ``HelmscopeError`` unless the folder was started with the same units and, unless ``any_manifest``, the same
    seed, dtype, device, inputs and parameters; and, unless ``allow_mixed``, with the same versions, CPU and threads,
    which results that are equal to the last bit need. If those changed, computed inputs may change in their last bits
    too.

    >>> import tempfile
    >>> details = dict(seed=0, dtype="float64", device="cpu", threads=1, command=[], inputs={}, parameters={})
    >>> manifest = Manifest.collect(**details)
    >>> plan = RunPlan({"a": "ab" * 32}, manifest.identity, cpu(), threads=1)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     begin(RunFolder(path), manifest, plan) == read_plan(RunFolder(path))
    True
    """
    stored_manifest, stored_plan = read_parts(folder)
    if stored_manifest is None:
        folder.write_manifest(manifest)
    first = manifest if stored_manifest is None else stored_manifest
    earlier = replace(plan, manifest=first.identity) if stored_plan is None else stored_plan
    _check_units(plan.units, earlier.units, folder.path / UNITS)
    changed = [*_version_changes(first, manifest), *_machine_changes(earlier, plan)]
    if not any_manifest:
        settings, inputs = _manifest_changes(earlier.manifest, manifest.identity)
        if settings or (inputs and not changed):
            raise HelmscopeError(
                f"{folder.path} was started with {' and '.join(settings + inputs)}: use the original values or "
                "choose a new folder"
            )
        changed += inputs
    if changed and not allow_mixed:
        raise HelmscopeError(
            f"{folder.path} was started with {' and '.join(changed)}, so that results may differ in their last bits: "
            "go back to the original, choose a new folder, or set allow_mixed (--allow-mixed)"
        )
    current = replace(earlier, mixed=sorted({*earlier.mixed, *changed}))
    if current != stored_plan:
        write_bytes(folder.path / UNITS, encode(asdict(current), UNITS))
    return current


def read_parts(folder: RunFolder) -> tuple[Manifest | None, RunPlan | None]:
    """The manifest and the plan of a folder, each None if missing; raises ``HelmscopeError`` if they are inconsistent.

    The manifest is written first, then the plan, then the results: a killed run may lack later parts, but never an
    earlier one. Parameters may be added to the manifest later, such as the kernel that was used.

    >>> read_parts(RunFolder("no-such-folder"))
    (None, None)
    """
    has_manifest, has_plan = ((folder.path / name).is_file() for name in (MANIFEST, UNITS))
    if has_plan and not has_manifest:
        raise _disagreement(folder, f"{UNITS} is there, but {MANIFEST} is missing")
    if not has_plan:
        for name in _result_names(folder.path / RESULTS):
            raise _disagreement(folder, f"{RESULTS} holds the result {name!r}, but {UNITS} is missing")
    manifest = folder.read_manifest() if has_manifest else None
    plan = read_plan(folder) if has_plan else None
    if manifest is not None and plan is not None:
        for (field, key), planned, written in _differences(plan.manifest, manifest.identity):
            if field == "parameters" and planned is MISSING:
                continue
            what = _label(field, key)
            raise _disagreement(
                folder, f"{what} is {_short_repr(written)} in {MANIFEST}, but {_short_repr(planned)} in {UNITS}"
            )
    return manifest, plan


def read_plan(folder: RunFolder) -> RunPlan:
    """Read units.json; raises ``HelmscopeError`` if it is missing or invalid.

    >>> read_plan(RunFolder("no-such-folder"))
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: cannot read no-such-folder/units.json: No such file or directory
    """
    path = folder.path / UNITS
    with explained(f"read {path}"):
        data = path.read_bytes()
    return RunPlan(**record(decode(data, str(path)), _READERS, str(path)))


def cpu() -> str:
    """Model and instruction sets of the CPU, by which libraries choose their code and thus the last bits of results.

    >>> cpu() == cpu() != ""
    True
    """
    lines: dict[str, str] = {}
    with explained("read /proc/cpuinfo"), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    features = lines.get("flags") or lines.get("Features") or ""
    return f"{lines.get('model name') or platform.machine()} ({hash_bytes(features.encode())[:8]})"


def _result_names(folder: Path) -> list[str]:
    with explained(f"read {folder}"):
        return sorted(name for name in os.listdir(folder) if not is_temporary(name)) if folder.is_dir() else []


def _disagreement(folder: RunFolder, reason: str) -> HelmscopeError:
    return HelmscopeError(
        f"the parts of {folder.path} disagree: {reason}: put back what was there, or take a new folder"
    )


def _check_units(requested: Mapping[str, str], planned: Mapping[str, str], path: Path) -> None:
    for name in sorted({*requested, *planned}):
        if name not in planned:
            reason = "is not in"
        elif name not in requested:
            reason = "is missing, but it is in"
        elif requested[name] != planned[name]:
            reason = "has another function or other parameters than in"
        else:
            continue
        raise HelmscopeError(f"unit {name!r} {reason} {path}: repeat the same units, or take a new folder")


def _version_changes(first: Manifest, current: Manifest) -> list[str]:
    """A package that only one of the two lists is skipped, because it cannot have been used by both."""
    pairs = {name: (getattr(first, name), getattr(current, name)) for name in ("helmscope", "python", "platform")}
    pairs |= {name: (version, current.packages.get(name, version)) for name, version in first.packages.items()}
    return [f"{name} {old} (now {new})" for name, (old, new) in pairs.items() if old != new]


def _machine_changes(first: RunPlan, current: RunPlan) -> list[str]:
    pairs = {"CPU": (first.cpu, current.cpu), "threads": (first.threads, current.threads)}
    return [f"{name} {old} (now {new})" for name, (old, new) in pairs.items() if old != new]


def _manifest_changes(first: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The changes of settings (seed, dtype, device, parameters), and those of inputs; versions are ignored."""
    changes: dict[str, list[str]] = {field: [] for field in ("seed", "dtype", "device", "parameters", "inputs")}
    for (field, key), old, new in _differences(first, current):
        if field in changes:
            changes[field].append(f"{_label(field, key)} {_short_repr(old)} (now {_short_repr(new)})")
    inputs = changes.pop("inputs")
    return [change for of_field in changes.values() for change in of_field], inputs


def _differences(
    one: Mapping[str, Any], two: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, str | None], object, object]]:
    """Field, key and both values wherever the identities of two manifests differ."""
    first, second = _flatten(one), _flatten(two)
    for place in {**first, **second}:
        pair = first.get(place, MISSING), second.get(place, MISSING)
        if pair[0] != pair[1]:
            yield place, *pair


def _flatten(identity: Mapping[str, Any]) -> dict[tuple[str, str | None], object]:
    """Values by field of the manifest and, if the field is a mapping, by key; otherwise the key is None."""
    flat: dict[tuple[str, str | None], object] = {}
    for field, value in identity.items():
        if isinstance(value, Mapping):
            flat |= {(field, key): item for key, item in value.items()}
        else:
            flat[field, None] = value
    return flat


def _label(field: str, key: str | None) -> str:
    return field if key is None else f"{field.removesuffix('s')} {key!r}"


def _short_repr(value: object) -> str:
    if value is MISSING:
        return "missing"
    full = repr(value)
    return full if len(full) <= 60 else f"{full[:57]}..."


def _read_strings(name: str, value: object) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be an object with named values")
    return {key: text(f"{printable(key)} of {name}", item) for key, item in value.items()}


def _read_string_list(name: str, value: object) -> list[str]:
    if not isinstance(value, list):
        raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a list")
    return [text(f"item {i} of {name}", item) for i, item in enumerate(value)]


def _read_identity(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be an object with named values")
    identity: dict[str, Any] = plain(name, value)
    return identity


_READERS: dict[str, Reader] = {
    "units": _read_strings,
    "manifest": _read_identity,
    "cpu": text,
    "threads": partial(check_integer, at_least=1),
    "mixed": _read_string_list,
}
