"""Try claims on planted models, whose tokens gather or scatter by construction; writes planted.json and planted.md to
this folder.

    python docs/planted.py --seeds 100

Every model is small, and its effect is about twice the smallest one that decides. A seed that planted.json already has
is not tried again, so that a long run can be continued; ``--afresh`` tries all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch

from helmscope.claims.reading import entry
from helmscope.claims.trial import try_claim
from helmscope.models.subject import Subject
from helmscope.types import Ruling

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.planted_models import CLAIMS, RULINGS, planted_model, planted_rows  # noqa: E402

Table = dict[str, dict[str, list[str]]]  # kind of model -> claim -> one ruling per seed

HEADER = """# Planted models against claims

Small models whose tokens never move, gather, scatter, or gather by attention only, by construction and by about twice
the effect that decides (0.1, where 0.05 decides), tried with {seeds} seeds each, 32 prompts per trial. The seed decides
the embeddings and the prompts. *Right* is the number of seeds with the expected ruling, *undecided* those ruled
inconclusive, and *opposite* those ruled supported instead of refuted or the other way round. Written by
`python docs/planted.py --seeds {seeds}`.

| tokens | claim | expected | right | undecided | opposite |
|---|---|---|---|---|---|
"""


def rulings(kind: str, seed: int) -> list[str]:
    """The rulings of all claims on one planted model."""
    with Subject(planted_model(kind, seed), planted_rows(seed)) as subject:
        trials = [try_claim(claim, seed=seed, quick=True, subject=subject) for claim in CLAIMS]
    return [trial.verdict.ruling.value for trial in trials]


def row(kind: str, claim: str, expected: Ruling, found: list[str]) -> str:
    """One row of the table."""
    count = Counter(found)
    (opposite,) = {Ruling.SUPPORTED, Ruling.REFUTED} - {expected}
    counts = (count[expected.value], count[Ruling.INCONCLUSIVE.value], count[opposite.value])
    return f"| {kind} | {claim} | {expected.value} | {' | '.join(map(str, counts))} |\n"


def write(table: Table) -> None:
    """Write planted.json and planted.md; every kind has the same number of seeds in the latter."""
    versions = {claim: entry(claim).version for claim in CLAIMS}
    (HERE / "planted.json").write_text(json.dumps({"versions": versions, "rulings": table}, indent=1) + "\n")
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
    parser.add_argument("--afresh", action="store_true", help="try all seeds again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: Table = {kind: {claim: [] for claim in CLAIMS} for kind in RULINGS}
    if (HERE / "planted.json").exists() and not options.afresh:
        table = json.loads((HERE / "planted.json").read_text())["rulings"]
    for seed in range(options.seeds):
        for kind, claims in table.items():
            if seed < len(claims[CLAIMS[0]]):
                continue
            for claim, ruling in zip(CLAIMS, rulings(kind, seed), strict=True):
                claims[claim].append(ruling)
        write(table)
    print((HERE / "planted.md").read_text())


if __name__ == "__main__":
    main()
