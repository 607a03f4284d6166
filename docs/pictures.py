"""The picture of the README: ``python docs/pictures.py`` draws docs/clustering.png."""

from pathlib import Path

import helmscope as hs

# system 8 has two clusters at t = 60, like 14 of the 16 systems
tokens = hs.Uniform(n=32, dim=3).sample(batch=16, seed=0)
sim = hs.integrate(hs.SA(beta=4.0), tokens, times=[0, 2, 4, 6, 10, 60])
sim.plot(system=8).save(Path(__file__).parent / "clustering.png")
