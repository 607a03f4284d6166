"""Test your own claim, whose entry and experiment are in the folder claim/. python own_claim.py"""

from pathlib import Path

import helmscope as hs

folder = Path(__file__).parent / "claim"
entry = hs.claims.read_catalogue(folder)["tokens-gather"]
print(entry.statement)
print(f"region: {entry.conditions[0].text}")

trial = hs.run_trial("tokens-gather", claims_folder=folder, quick=True)  # runs the Python files in that folder
print(trial.verdict.sentence)
for control in trial.verdict.controls:
    print(f"control, {control.name}: {control.summary}")
