"""Try claims on planted models, of which they are true or false by construction; writes planted.json and planted.md to
this folder.

    python docs/planted.py --seeds 100 --workers 2

A seed that planted.json already has is not tried again as long as the entry of its claim, the code of its experiment
and the planted models have the same hashes, so that a long run can be continued; ``--afresh`` tries all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TypedDict

import torch
from joblib import Parallel, delayed

from helmscope.claims.reading import entry
from helmscope.claims.trial import code_hash, run_trial
from helmscope.models.subject import Subject
from helmscope.store.manifest import hash_file
from helmscope.types import Ruling

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.planted_cases import CASES as TRANSPORT_CASES  # noqa: E402
from support.planted_cases import PlantedCase  # noqa: E402
from support.planted_layer_cases import LAYER_CASES  # noqa: E402
from support.planted_models import CLAIMS, RULINGS, planted_model, planted_rows  # noqa: E402

CASES = (*TRANSPORT_CASES, *LAYER_CASES)
MODULES = ("planted_attention", "planted_heads", "planted_updates", "planted_cases")  # of the cases of either kind
LAYER_MODULES = ("planted_attention", "planted_entropy", "planted_layers", "planted_layer_cases")


class Row(TypedDict):
    """The rulings of one case, one per seed, with the hash of what they depend on."""

    hash: str
    rulings: list[str]


Rows = dict[str, Row]  # of the cases, by name
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
CASES_HEADER = """
## Claims on additive transport

Models of one to eight small layers in which the claim is true, or its opposite, by construction, with large effects:
what is shown is that the trial finds what is there, with all controls, whatever the seed. A control that compares two
random draws fails by chance in 2.5 % of trials, which are then undecided. Where nothing is planted (*independent* keys,
writes that are *the same everywhere*) a ruling of *inconclusive* is right, too. What is planted is described in
`tests/support/planted_attention.py`, `planted_heads.py` and `planted_updates.py`.

| claim | planted | expected | right | undecided | wrong |
|---|---|---|---|---|---|
"""

LAYERS_HEADER = """
## Claims on layers as steps of a flow

Models of two to four layers that are what a claim says, or its opposite, by construction: small and large updates,
small and large gradient steps, tokens that climb a potential or are moved against it, clouds that spread and gather in
either order, drifts with the mobility of attention's noise or without it, and, for jko-step, a layer that spreads its
tokens as diffusion does before one that is an exact step, one that gathers them against its noise, and one that turns
them. What is planted is described in `tests/support/planted_entropy.py` and `planted_layers.py`.

| claim | planted | expected | right | undecided | wrong |
|---|---|---|---|---|---|
"""


def rulings(kind: str, seed: int) -> list[str]:
    """The rulings of all claims on one planted model."""
    torch.set_num_threads(1)
    with Subject(planted_model(kind, seed), planted_rows(seed)) as subject:
        trials = [run_trial(claim, seed=seed, quick=True, subject=subject) for claim in CLAIMS]
    return [trial.verdict.ruling.value for trial in trials]


def case_ruling(case: PlantedCase, seed: int) -> str:
    """The ruling of one case."""
    torch.set_num_threads(1)
    return case.verdict(seed).ruling.value


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


def case_hash(case: PlantedCase) -> str:
    """What the rulings of a case depend on."""
    modules = LAYER_MODULES if case in LAYER_CASES else MODULES
    models = (hash_file(HERE.parent / "tests" / "support" / f"{name}.py") for name in modules)
    return " ".join([entry(case.claim).hash, code_hash(case.claim, None), *models])


def stored_cases() -> Rows:
    """The rulings of the cases in planted.json; none where something that they depend on has changed since."""
    path = HERE / "planted.json"
    old: Rows = json.loads(path.read_text()).get("cases", {}) if path.exists() else {}
    hashes = {case.name: case_hash(case) for case in CASES}
    kept = {name: row for name, row in old.items() if row["hash"] == hashes.get(name)}
    return {name: kept.get(name, Row(hash=each, rulings=[])) for name, each in hashes.items()}


def write(table: Table, rows_of_cases: Rows) -> None:
    """Write planted.json and planted.md; every kind has the same number of seeds in the latter."""
    content = {"hashes": hashes(), "rulings": table, "cases": rows_of_cases}
    (HERE / "planted.json").write_text(json.dumps(content, indent=1) + "\n")
    seeds = min(len(found) for claims in table.values() for found in claims.values())
    rows = [
        row(kind, claim, expected, table[kind][claim][:seeds])
        for kind, claims in RULINGS.items()
        for claim, expected in zip(CLAIMS, claims, strict=True)
    ]
    text = HEADER.format(seeds=seeds) + "".join(rows)
    for header, cases in ((CASES_HEADER, TRANSPORT_CASES), (LAYERS_HEADER, LAYER_CASES)):
        found = (row(case.claim, case.kind, case.right, rows_of_cases[case.name]["rulings"]) for case in cases)
        text += header + "".join(found)
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
    table, cases = stored(), stored_cases()
    due = [(kind, seed) for seed in range(options.seeds) for kind in table if seed >= len(table[kind][CLAIMS[0]])]
    found = Parallel(n_jobs=options.workers, return_as="generator")(delayed(rulings)(*each) for each in due)
    for (kind, _), made in zip(due, found, strict=True):
        for claim, ruling in zip(CLAIMS, made, strict=True):
            table[kind][claim].append(ruling)
        write(table, cases)
    tried = [
        (case, seed) for seed in range(options.seeds) for case in CASES if seed >= len(cases[case.name]["rulings"])
    ]
    made_of = Parallel(n_jobs=options.workers, return_as="generator")(delayed(case_ruling)(*each) for each in tried)
    for (case, _), ruling in zip(tried, made_of, strict=True):
        cases[case.name]["rulings"].append(ruling)
        if case is CASES[-1]:
            write(table, cases)
    write(table, cases)
    print((HERE / "planted.md").read_text())


if __name__ == "__main__":
    main()
