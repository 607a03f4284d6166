"""Try all packaged claims quickly with several seeds and compare the rulings with those of trials.md; writes seeds.json
and seeds.md to this folder.

    python docs/seeds.py --seeds 10
    python docs/seeds.py mlp-prevents residual-flow --subjects A B
    python docs/seeds.py --workers 16

A ruling that seeds.json already has is not made again as long as the entry of its claim and the code of its experiment
have the same hashes, so that a long run can be continued; ``--afresh`` makes all of them. Rows that were not made again
since something changed are marked as stale.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from joblib import Parallel, delayed

from helmscope.claims.reading import entry
from helmscope.claims.registry import experiments
from helmscope.claims.run_trials import PlannedTrial, plan_trials
from helmscope.claims.trial import code_hash, run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling

HERE = Path(__file__).parent

HEADER = """# The trials with other seeds

Quick runs with the seeds 0 to {last}, beside the ruling of the full run in `trials.md`. *Agree* is the number of seeds
with that ruling; the others are listed. The seed decides the random starts and inputs of a simulation, and, for a
model, its untrained twins and its prompts: the development texts are shuffled with the seed, and the trial takes the
first 32 of them with different first tokens. Rows marked *stale* were made with an earlier version of the entry or of
the code, those of models with the same prompts at every seed, and were not made again. Written by
`python docs/seeds.py --seeds {seeds}`.

| claim | subject | full run | agree | other rulings |
|---|---|---|---|---|
"""


class Row(TypedDict):
    """The rulings of one claim and subject, one per seed, with the hashes of the entry and the code that made them."""

    entry: str
    code: str
    rulings: list[str]


Rows = dict[str, Row]  # by "claim | subject"


def published_rulings() -> dict[str, str]:
    """The rulings of trials.md, by claim and subject."""
    lines = (HERE / "trials.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {f"{row[0]} | {row[1]}": row[3] for row in rows[1:]}


def contradictory(rulings: list[str]) -> bool:
    """Whether some seeds support what others refute."""
    return {Ruling.SUPPORTED.value, Ruling.REFUTED.value} <= set(rulings)


def stored_rows() -> Rows:
    """The rows of seeds.json."""
    path = HERE / "seeds.json"
    rows: Rows = json.loads(path.read_text()) if path.exists() else {}
    return rows


def is_stale(name: str, row: Row) -> bool:
    """Whether the entry or the code has changed since a row was made."""
    claim = name.partition(" | ")[0]
    return (row["entry"], row["code"]) != (entry(claim).hash, code_hash(claim, None))


def write(rows: Rows, seeds: int) -> None:
    """Write seeds.json, and seeds.md with the rows that have all seeds."""
    (HERE / "seeds.json").write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    text = HEADER.format(seeds=seeds, last=seeds - 1)
    for name, published in published_rulings().items():
        found = rows[name]["rulings"][:seeds] if name in rows else []
        if len(found) == seeds:
            others = [f"{ruling} at seed {seed}" for seed, ruling in enumerate(found) if ruling != published]
            others += ["**contradictory**"] if contradictory(found) else []
            others += ["*stale*"] if is_stale(name, rows[name]) else []
            text += f"| {name} | {published} | {found.count(published)} of {seeds} | {', '.join(others)} |\n"
    (HERE / "seeds.md").write_text(text)


def redrawn(subject: Subject, seed: int) -> Subject:
    """A model with its texts in an order that the seed decides, so that a trial takes other prompts."""
    if subject.is_simulation:
        return subject
    order = np.random.default_rng(seed).permutation(len(subject.texts))
    return Subject(subject.model, [subject.texts[k] for k in order], loops=subject.loops)


def ruling(planned: PlannedTrial, subject: Subject, seed: int) -> str:
    """The ruling of a quick trial."""
    other = None if planned.other is None else redrawn(planned.other, seed)
    trial = run_trial(planned.claim, seed=seed, quick=True, subject=subject, other=other)
    return trial.verdict.ruling.value


def missing_rulings(planned: list[PlannedTrial], made: list[int], seed: int) -> dict[str, str]:
    """The rulings of those claims on one subject that have none with this seed yet, which share what is recorded."""
    torch.set_num_threads(1)
    due = [each for each, count in zip(planned, made, strict=True) if count <= seed]
    if not due:
        return {}
    with redrawn(planned[0].subject, seed) as subject:
        return {row_name(each): ruling(each, subject, seed) for each in due}


def task_of(planned: PlannedTrial) -> str:
    """What is computed in one process: one simulated claim, or all claims on a model."""
    return planned.claim if planned.subject.is_simulation else planned.subject.name


def make_missing(planned: list[PlannedTrial], rows: Rows, seeds: int, workers: int) -> None:
    """Make the missing rulings and write them in the order of the seeds. A task is one seed of a simulated claim, or of
    all claims on one model, which share what is recorded and take longest: they come first."""
    groups = [list(group) for _, group in groupby(planned, key=task_of)]
    groups.sort(key=lambda group: group[0].subject.is_simulation)
    made = [[len(rows[row_name(each)]["rulings"]) for each in group] for group in groups]
    tasks = [(k, seed) for seed in range(seeds) for k in range(len(groups))]
    found = Parallel(n_jobs=workers, return_as="generator")(
        delayed(missing_rulings)(groups[k], made[k], seed) for k, seed in tasks
    )
    for rulings in found:
        for name, each in rulings.items():
            rows[name]["rulings"].append(each)
        write(rows, seeds)


def row_name(planned: PlannedTrial) -> str:
    """The name of the row of a claim and subject."""
    return f"{planned.claim} | {planned.label}"


def main() -> None:
    """Make the rulings that are missing or stale, subject by subject, and write and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("claims", nargs="*", help="claims to try [default: all]")
    parser.add_argument("--subjects", nargs="*", help="subjects to try them on [default: all]")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 0")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--afresh", action="store_true", help="make all rulings again")
    options = parser.parse_args()
    rows = stored_rows()
    planned = [
        each
        for each in plan_trials(options.claims or list(experiments()))
        if not options.subjects or each.label in options.subjects
    ]
    planned.sort(key=task_of)
    for each in planned:
        name = row_name(each)
        if name not in rows or options.afresh or is_stale(name, rows[name]):
            rows[name] = {"entry": entry(each.claim).hash, "code": code_hash(each.claim, None), "rulings": []}
    make_missing(planned, rows, options.seeds, options.workers)
    write(rows, options.seeds)
    print((HERE / "seeds.md").read_text())


if __name__ == "__main__":
    main()
