"""Write a look at the held-out texts into the histories of the entries: one line per claim that was tried on models.

    python docs/log_looks.py runs/report-...

Every run of `helmscope report`, or of `helmscope claims test --held-out`, is such a look. Rulings and intervals come
from the verdicts of the run; a line that an entry already has is not written again.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

from helmscope.claims.reading import entry
from helmscope.types import Interval, interval_text

CATALOGUE = Path(__file__).parents[1] / "src/helmscope/claims/catalogue"
BOX = ("A", "B", "tied")  # models with held-out texts


def statistics(verdict: dict[str, Any]) -> str:
    """The intervals of the judged conditions of a verdict."""
    judged = [each for each in verdict["conditions"] if each["ruling"] != "described" and each["interval"] is not None]
    return ", ".join(f"{each['name']} {interval_text(Interval(**each['interval']))}" for each in judged)


def look_text(verdicts: list[dict[str, Any]], *, quick: bool, seed: int) -> str:
    """The rulings of one claim on all models, each with its statistics."""
    parts = [
        f"{each['ruling']} on {each['subject']}" + (f" ({statistics(each)})" if statistics(each) else "")
        for each in verdicts
    ]
    return f"Held-out texts, {'quick' if quick else 'full'}, seed {seed}: {'; '.join(parts)}."


def main() -> None:
    """Append the lines."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run on held-out texts")
    run = parser.parse_args().run
    spec = tomllib.loads((run / "spec.toml").read_text())
    if not spec.get("held_out"):
        raise SystemExit(f"{run} did not use held-out texts")
    verdicts = [each for each in json.loads((run / "verdicts.json").read_text()) if each["subject"] in BOX]
    for claim, tried in groupby(sorted(verdicts, key=lambda each: each["claim"]), key=lambda each: each["claim"]):
        text = look_text(list(tried), quick=spec["quick"], seed=spec["seed"])
        path = CATALOGUE / f"{claim}.toml"
        line = f"\n[[history]]\nversion = {entry(claim).version}\nlook = {json.dumps(text)}\n"
        if line not in path.read_text():
            path.write_text(path.read_text() + line)


if __name__ == "__main__":
    main()
