"""The table of families in the docs, from recordings of tiny models; ``python tests/support/model_coverage.py`` writes
it, with tests/ on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

from helmscope.models.certificate import Certificate
from helmscope.models.record import record
from helmscope.models.recording import Recording
from support.model_families import FAMILIES, PAIRS, inputs_of, pair_inputs, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
HEAD = """# Families of models, and what can be measured on them

Written by `tests/support/model_coverage.py` from tiny random models of transformers; a test fails if it is out of date.
All lines of their certificates hold in float32 and float64. A family that is not listed may well work: the topology is
identified by algebra, not by name, and `helmscope doctor` reports what holds.

- **sphere**: LayerNorm removes the token mean, so that directions are on S^(d-2); with RMSNorm they are on S^(d-1).
- **q, k, v**: "yes" if the family looks up its attention function in the registry, so that they can be edited; "seen"
  if they are found among its matrix products, and checked; otherwise only the attention weights are known.
- **MLP**: the field that equals the module, with its norm folded in.

An encoder-decoder model is recorded as two stacks, which have a line each.

| family | topology | sphere | attention | q, k, v | sink | MLP | middle state |
|---|---|---|---|---|---|---|---|
"""


def coverage_row(family: str, recording: Recording) -> str:
    """The row of one family."""
    certificate: Certificate = recording.certificate
    anatomy = recording.anatomy
    force = recording.force(layer=0)
    activation = getattr(force if hasattr(force, "activation") else force.experts[0], "activation", None)
    cells = (
        family,
        "; ".join(dict.fromkeys(str(layer.wiring) for layer in anatomy.layers))
        + ("" if len(anatomy.blocks) == len(anatomy.layers) else ", tied"),
        "S^(d-2)" if anatomy.centered else "S^(d-1)",
        "causal" if certificate["causality"].ok else "both ways",
        "weights only" if not certificate["heads"].ok else "yes" if anatomy.tapped else "seen",
        "yes" if "sink" in certificate["rows"].statement else "",
        f"{type(force).__name__}, {type(activation).__name__}",
        "virtual" if any(line.name == "middle state" for line in certificate.lines) else "real",
    )
    return f"| {' | '.join(cells)} |\n"


def coverage_page() -> str:
    """The whole page; a family whose certificate fails is an error."""
    recordings = {family: record(tiny_model(family), inputs_of(family)) for family in sorted(FAMILIES)}
    for family in sorted(PAIRS):
        decoder = record(tiny_model(family), pair_inputs())
        recordings |= {f"{family}, encoder": decoder.encoder, f"{family}, decoder": decoder}
    for family, recording in recordings.items():
        if not recording.certificate.ok:
            raise AssertionError(f"{family}:\n{recording.certificate}")
    return HEAD + "".join(coverage_row(family, recording) for family, recording in recordings.items())


if __name__ == "__main__":
    PAGE.write_text(coverage_page())
