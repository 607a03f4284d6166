"""units.json: what a run is made of and under which circumstances it was begun, so that it can go on later."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from helmscope.store.atomic import explained, write_bytes
from helmscope.store.manifest import Manifest, hash_bytes
from helmscope.store.run_folder import MANIFEST, UNITS, RunFolder
from helmscope.store.strict_json import Reader, decode, encode, record, text
from helmscope.types import HelmscopeError, whole_number


@dataclass(frozen=True)
class Plan:
    """The key of every unit by its name, and what the manifest does not say of the machine: CPU and threads of a unit.
    ``mixed`` names the circumstances that changed on the way, where that was allowed.

    >>> Plan(units={"mean": "ab" * 32}, cpu="x86_64", threads=1).threads
    1
    """

    units: Mapping[str, str]
    cpu: str
    threads: int
    mixed: Sequence[str] = ()


def settle(folder: RunFolder, manifest: Manifest, plan: Plan, *, allow_mixed: bool) -> None:
    """Writes the manifest and the plan into a folder without; one that has them must have been begun with the same
    units, and unless ``allow_mixed`` under the same versions, CPU and threads, for results equal to the last bit.

    >>> import tempfile
    >>> details = dict(seed=0, dtype="float64", device="cpu", threads=1, command=[], inputs={}, parameters={})
    >>> manifest = Manifest.collect(**details)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     folder, plan = RunFolder(Path(path)), Plan({"a": "ab" * 32}, cpu(), threads=1)
    ...     settle(folder, manifest, plan, allow_mixed=False)
    ...     read_plan(folder).units == plan.units
    True
    """
    if (folder.path / MANIFEST).is_file():
        begun = folder.read_manifest()
    else:
        folder.write_manifest(manifest)
        begun = manifest
    path = folder.path / UNITS
    earlier = read_plan(folder) if path.is_file() else plan
    _check_units(plan.units, earlier.units, path)
    changed = _changes(begun, manifest) + _changes_of_machine(earlier, plan)
    if changed and not allow_mixed:
        raise HelmscopeError(
            f"{folder.path} was begun with {' and '.join(changed)}, so that results may differ in their last bits: go "
            "back to what it was, take a new folder, or set allow_mixed (--allow-mixed)"
        )
    now = replace(earlier, mixed=sorted({*earlier.mixed, *changed}))
    if now != earlier or not path.is_file():
        write_bytes(path, encode(asdict(now), UNITS))


def read_plan(folder: RunFolder) -> Plan:
    """The plan of a folder, decoded strictly.

    >>> read_plan(RunFolder(Path("no-such-folder")))
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
        raise HelmscopeError(f"unit '{name}' {reason} {path}: repeat the same units, or take a new folder")


def _changes(begun: Manifest, now: Manifest) -> list[str]:
    """A package that only one of the two has cannot have been used by both."""
    pairs = {name: (getattr(begun, name), getattr(now, name)) for name in ("helmscope", "python", "platform")}
    pairs |= {name: (version, now.packages.get(name, version)) for name, version in begun.packages.items()}
    return [f"{name} {old} (now {new})" for name, (old, new) in pairs.items() if old != new]


def _changes_of_machine(begun: Plan, now: Plan) -> list[str]:
    pairs = {"CPU": (begun.cpu, now.cpu), "threads": (begun.threads, now.threads)}
    return [f"{name} {old} (now {new})" for name, (old, new) in pairs.items() if old != new]


def _strings(name: str, value: object) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be an object with named values")
    return {key: text(f"{key} of {name}", item) for key, item in value.items()}


def _sentences(name: str, value: object) -> list[str]:
    if not isinstance(value, list):
        raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be a list")
    return [text(f"item {i} of {name}", item) for i, item in enumerate(value)]


_READERS: dict[str, Reader] = {
    "units": _strings,
    "cpu": text,
    "threads": partial(whole_number, at_least=1),
    "mixed": _sentences,
}
