"""Try all packaged claims quickly with several seeds and compare the rulings with those of trials.md; writes seeds.json
and seeds.md to this folder.

    python docs/seeds.py --seeds 10

A ruling that seeds.json already has is not made again as long as the entry of its claim has the same version, so that a
long run can be continued; ``--afresh`` makes all of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from helmscope.claims.reading import entry
from helmscope.claims.registry import experiments
from helmscope.claims.run_trials import PlannedTrial, plan_trials
from helmscope.claims.trial import try_claim
from helmscope.types import Ruling

HERE = Path(__file__).parent
Rulings = dict[str, list[str]]  # "claim | subject" -> one ruling per seed

HEADER = """# The trials with other seeds

Quick runs with the seeds 0 to {last}, beside the ruling of the full run in `trials.md`. *Agree* is the number of seeds
with that ruling; the others are listed. The seed decides the random starts and inputs of a simulation and the untrained
twins of a model; the texts of a model stay the same. Written by `python docs/seeds.py --seeds {seeds}`.

| claim | subject | full run | agree | other rulings |
|---|---|---|---|---|
"""


def published_rulings() -> dict[str, str]:
    """The rulings of trials.md, by claim and subject."""
    lines = (HERE / "trials.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {f"{row[0]} | {row[1]}": row[3] for row in rows[1:]}


def contradictory(rulings: list[str]) -> bool:
    """Whether some seeds support what others refute."""
    return {Ruling.SUPPORTED.value, Ruling.REFUTED.value} <= set(rulings)


def stored_rulings() -> Rulings:
    """The rulings in seeds.json of claims whose entries have not changed since."""
    path = HERE / "seeds.json"
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    return {
        name: found
        for name, found in stored["rulings"].items()
        if stored["versions"][claim := name.partition(" | ")[0]] == entry(claim).version
    }


def write(rulings: Rulings, seeds: int) -> None:
    """Write seeds.json, and seeds.md with those trials that have all seeds."""
    versions = {name.partition(" | ")[0]: entry(name.partition(" | ")[0]).version for name in sorted(rulings)}
    stored = {"versions": versions, "rulings": dict(sorted(rulings.items()))}
    (HERE / "seeds.json").write_text(json.dumps(stored, indent=1) + "\n")
    text = HEADER.format(seeds=seeds, last=seeds - 1)
    for name, published in published_rulings().items():
        found = rulings.get(name, [])[:seeds]
        if len(found) == seeds:
            others = [f"{ruling} at seed {seed}" for seed, ruling in enumerate(found) if ruling != published]
            others += ["**contradictory**"] if contradictory(found) else []
            text += f"| {name} | {published} | {found.count(published)} of {seeds} | {', '.join(others)} |\n"
    (HERE / "seeds.md").write_text(text)


def ruling(planned: PlannedTrial, seed: int) -> str:
    """The ruling of a quick trial."""
    trial = try_claim(planned.claim, seed=seed, quick=True, subject=planned.subject, other=planned.other)
    return trial.verdict.ruling.value


def main() -> None:
    """Make the rulings that are missing, subject by subject, and write and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 0")
    parser.add_argument("--afresh", action="store_true", help="make all rulings again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rulings = {} if options.afresh else stored_rulings()
    for planned in plan_trials(list(experiments())):
        found = rulings.setdefault(f"{planned.claim} | {planned.label}", [])
        found += [ruling(planned, seed) for seed in range(len(found), options.seeds)]
        write(rulings, options.seeds)
    print((HERE / "seeds.md").read_text())


if __name__ == "__main__":
    main()
