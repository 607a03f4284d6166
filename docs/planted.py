"""Try claims on planted models, whose tokens gather or scatter by construction; writes planted.json and planted.md to
this folder.

    python docs/planted.py --seeds 100

Every model is small, and its effect is about twice the smallest one that decides. A seed that planted.json already has
is not tried again as long as the entry of its claim, the code of its experiment and the planted models have the same
hashes, so that a long run can be continued; ``--afresh`` tries all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch
from joblib import Parallel, delayed

from helmscope.claims.reading import entry
from helmscope.claims.trial import code_hash, run_trial
from helmscope.models.subject import Subject
from helmscope.store.manifest import hash_file
from helmscope.types import Ruling

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.planted_models import CLAIMS, RULINGS, planted_model, planted_rows  # noqa: E402

Table = dict[str, dict[str, list[str]]]  # kind of model -> claim -> one ruling per seed

HEADER = """# Planted models against claims

Small models whose tokens never move, gather, scatter, or gather by attention only, by construction and by about twice
the effect that decides (0.1, where 0.05 decides), tried with {seeds} seeds each, 32 prompts per trial. The seed decides
the embeddings and the prompts. *Right* is the number of seeds with the expected ruling, *undecided* those ruled
inconclusive, and *wrong* those with another ruling, such as supported instead of refuted. Where attention alone
gathers nothing, mlp-prevents has no premise, also if MLPs scatter tokens that begin close together. Written by
`python docs/planted.py --seeds {seeds}`.

| tokens | claim | expected | right | undecided | wrong |
|---|---|---|---|---|---|
"""


def rulings(kind: str, seed: int) -> list[str]:
    """The rulings of all claims on one planted model."""
    torch.set_num_threads(1)
    with Subject(planted_model(kind, seed), planted_rows(seed)) as subject:
        trials = [run_trial(claim, seed=seed, quick=True, subject=subject) for claim in CLAIMS]
    return [trial.verdict.ruling.value for trial in trials]


def row(kind: str, claim: str, expected: Ruling, found: list[str]) -> str:
    """One row of the table."""
    count = Counter(found)
    right, undecided = count[expected.value], count[Ruling.INCONCLUSIVE.value]
    counts = (right, undecided, len(found) - right - undecided)
    return f"| {kind} | {claim} | {expected.value} | {' | '.join(map(str, counts))} |\n"


def hashes() -> dict[str, str]:
    """What the rulings depend on: the hashes of each entry and of its code, and that of the planted models."""
    found = {"planted models": hash_file(HERE.parent / "tests" / "support" / "planted_models.py")}
    for claim in CLAIMS:
        found |= {f"{claim}, entry": entry(claim).hash, f"{claim}, code": code_hash(claim, None)}
    return found


def stored() -> Table:
    """The rulings in planted.json, or none if something that they depend on has changed since."""
    path = HERE / "planted.json"
    if path.exists() and (content := json.loads(path.read_text())).get("hashes") == hashes():
        table: Table = content["rulings"]
        return table
    return {kind: {claim: [] for claim in CLAIMS} for kind in RULINGS}


def write(table: Table) -> None:
    """Write planted.json and planted.md; every kind has the same number of seeds in the latter."""
    (HERE / "planted.json").write_text(json.dumps({"hashes": hashes(), "rulings": table}, indent=1) + "\n")
    seeds = min(len(found) for claims in table.values() for found in claims.values())
    rows = [
        row(kind, claim, expected, table[kind][claim][:seeds])
        for kind, claims in RULINGS.items()
        for claim, expected in zip(CLAIMS, claims, strict=True)
    ]
    text = HEADER.format(seeds=seeds) + "".join(rows)
    (HERE / "planted.md").write_text(text)


def main() -> None:
    """Try the seeds that are missing, and write and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds, from 0")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--afresh", action="store_true", help="try all seeds again")
    options = parser.parse_args()
    if options.afresh:
        (HERE / "planted.json").unlink(missing_ok=True)
    table = stored()
    due = [(kind, seed) for seed in range(options.seeds) for kind in table if seed >= len(table[kind][CLAIMS[0]])]
    found = Parallel(n_jobs=options.workers, return_as="generator")(delayed(rulings)(*each) for each in due)
    for (kind, _), made in zip(due, found, strict=True):
        for claim, ruling in zip(CLAIMS, made, strict=True):
            table[kind][claim].append(ruling)
        write(table)
    print((HERE / "planted.md").read_text())


if __name__ == "__main__":
    main()
