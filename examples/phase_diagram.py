"""When do tokens in high dimension meet? A small phase diagram as a PDF. python phase_diagram.py [FOLDER]"""

import sys
from pathlib import Path

import helmscope as hs

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
diagram = hs.phase_diagram(
    hs.SA,
    betas=[0.5, 1, 2, 3, 4, 5],
    times=[k / 4 for k in range(49)],
    start=hs.Uniform(n=32, dim=128),
    samples=8,
    seed=0,
)
half = hs.observe.half_time(diagram)
for beta in (1, 4):
    theory, measured = float(diagram.hitting_time.sel(beta=beta)), float(half.half_time.sel(beta=beta))
    print(f"beta = {beta}: half of all pairs have met at t = {measured:.2f}, orthonormal tokens at t = {theory:.2f}")

diagram.plot().save(folder / "phase.pdf")
print("saved to", folder / "phase.pdf")
