"""What the trial of generator on a model reports: the shares of the change of probes that every block explains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates, ReplicatesInEveryCase
from helmscope.observe.probe_curves import along_axes
from helmscope.stats.scales import PLAIN, RemainderScale, Scale

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.observe.probes import ProbeBank

ANGLES, SHOWN = 41, 4  # points along the half circle of a probe, and probes of each kind in a picture
MIN_REST = 1e-15  # rounding of a share of 1
NOTHING_MOVES = "no token moves, and without a change of probes there is no share to explain"
UNSPLIT = "there is no splitting defect, since the halves of a block do not add to the state that attention reads"
DESCRIBED = {
    "explained_share": "share of the drift",
    "explained_share_second_moment": "share of drift and second moment",
    "explained_share_of_mean": "share of the drift in the change of the mean over tokens",
    "explained_share_first_state": "share of the drifts of both halves at the first state",
    "explained_share_second_moment_and_sigma": "share of drift, second moment and Sigma_A",
    "sigma_term_ratio": "mean square of Sigma_A:Hess phi over that of the change",
    "order": "order without the second moment",
    "order_sigma": "order with Sigma_A in place of the second moment",
}


@dataclass(frozen=True, eq=False)
class BlockShares:
    """The generator test of a recording, over (block, prompt).

    >>> nothing = xr.Dataset({"explained_share": (("layer", "prompt"), [[np.nan, np.nan]])}, {"layer": [0]})
    >>> BlockShares(nothing).every_block("explained_share").reason
    'no token moves, and without a change of probes there is no share to explain'
    """

    measured: xr.Dataset

    def blocks(self, name: str) -> dict[str, np.ndarray]:
        """The values of a quantity over prompts by block, those that are defined; blocks with fewer than two are left
        out.

        >>> values = [[0.5, 0.7], [np.nan, 1.0]]
        >>> shares = xr.Dataset({"explained_share": (("layer", "prompt"), values)}, {"layer": [0, 1]})
        >>> list(BlockShares(shares).blocks("explained_share"))
        ['block 0']
        """
        rows = self.measured[name].values
        kept = {f"block {layer}": row[np.isfinite(row)] for layer, row in zip(self.layers, rows, strict=True)}
        return {block: row for block, row in kept.items() if len(row) > 1}

    @property
    def layers(self) -> list[int]:
        """The numbers of the blocks."""
        return [int(layer) for layer in self.measured.layer.values]

    def every_block(self, name: str, scale: Scale = PLAIN) -> Evidence:
        """The values in all blocks, averaged on a scale, or that there are none.

        >>> shares = xr.Dataset({"explained_share": (("layer", "prompt"), [[0.5, 0.7, 0.6]])}, {"layer": [0]})
        >>> BlockShares(shares).every_block("explained_share").names
        ['block 0']
        """
        blocks = self.blocks(name)
        if not blocks:
            return PremiseImpossible(NOTHING_MOVES)
        return ReplicatesInEveryCase(list(blocks.values()), "prompts", list(blocks), scale)

    def shares(self, name: str) -> Evidence:
        """The shares in all blocks: what they lack to 1 is positive and skewed, and averaged as a logarithm.

        >>> shares = xr.Dataset({"explained_share": (("layer", "prompt"), [[0.9, 0.99, 0.999]])}, {"layer": [0]})
        >>> from helmscope.types import Region
        >>> evidence = BlockShares(shares).shares("explained_share")
        >>> round(evidence.weigh(Region(text="at least 0.9", low=0.9)).interval.estimate, 6)
        0.99
        """
        return BlockShares(self.measured.clip(max=1 - MIN_REST)).every_block(name, RemainderScale())

    def median(self, name: str) -> np.ndarray | None:
        """The median over blocks of a quantity, one value per prompt; None if it was left out or is not defined.

        >>> shares = xr.Dataset({"explained_share": (("layer", "prompt"), [[0.5, 0.7], [0.9, 0.1]])}, {"layer": [0, 1]})
        >>> BlockShares(shares).median("explained_share").round(3).tolist()
        [0.7, 0.4]
        """
        if name not in self.measured or not self.blocks(name):
            return None
        values = self.measured[name].values
        values = values[:, np.isfinite(values).any(0)]
        return np.asarray(np.nanmedian(values, 0)) if values.shape[1] > 1 else None

    def span(self, name: str) -> str:
        """The range of the means over prompts, with the blocks of its ends.

        >>> shares = xr.Dataset({"explained_share": (("layer", "prompt"), [[0.5, 0.7], [0.9, 0.1]])}, {"layer": [0, 1]})
        >>> BlockShares(shares).span("explained_share")
        '0.5 (block 1) to 0.6 (block 0)'
        """
        means = {block: float(row.mean()) for block, row in self.blocks(name).items()}
        least, most = min(means, key=lambda block: means[block]), max(means, key=lambda block: means[block])
        return f"{means[least]:.3g} ({least}) to {means[most]:.3g} ({most})"

    def splitting(self) -> Evidence:
        """The splitting defect, the median over blocks, or that there is none.

        >>> BlockShares(xr.Dataset()).splitting().reason[:28]
        'there is no splitting defect'
        """
        values = self.median("splitting_defect")
        return PremiseImpossible(UNSPLIT) if values is None else Replicates(values, "prompts")

    def described(self) -> dict[str, Evidence]:
        """What is reported and not judged.

        >>> shares = xr.Dataset({"explained_share": (("layer", "prompt"), [[0.5, 0.7]])}, {"layer": [0]})
        >>> list(BlockShares(shares).described())
        ['share of the drift, median over blocks']
        """
        medians = {label: self.median(name) for name, label in DESCRIBED.items()}
        return {
            f"{label}, median over blocks": Replicates(values, "prompts")
            for label, values in medians.items()
            if values is not None
        }

    def bank(self, bank: ProbeBank) -> xr.Dataset:
        """Some probes of each kind of a bank over the angle from their axes, the same for every prompt: one panel each.

        >>> import helmscope as hs
        >>> recording = hs.record("A", ["Once upon a time there was a cat.", "The dog ran home to eat."])
        >>> bank = hs.observe.ProbeBank.of(recording, per_kind=3)
        >>> BlockShares(hs.observe.generator_test(recording, bank=bank)).bank(bank).probe_value.dims
        ('prompt', 'angle', 'probe', 'kind')
        """
        angles = torch.linspace(0, math.pi, ANGLES, dtype=torch.float64, device="cpu")
        most = max(kind.count for kind in bank.kinds)
        chosen = np.unique(np.linspace(0, most - 1, min(SHOWN, most)).round().astype(int))
        shown = np.full((ANGLES, len(chosen), len(bank.kinds)), np.nan)
        for k, kind in enumerate(bank.kinds):
            there = chosen < kind.count
            shown[:, there, k] = along_axes(kind, angles).cpu().numpy()[chosen[there]].T
        return curve(
            "probe_value",
            np.broadcast_to(shown, (self.measured.sizes["prompt"], *shown.shape)),
            {"angle": angles.tolist(), "probe": (chosen + 1).tolist(), "kind": bank.names},
            label="the probes, from least to largest value over the angle from their axes",
            over="prompt",
        )

    def curves(self) -> xr.Dataset:
        """The remainders over s, medians over blocks, and what the drift misses by block, with one line per kind.

        >>> import helmscope as hs
        >>> recording = hs.record("A", ["Once upon a time there was a cat.", "The dog ran home to eat."])
        >>> BlockShares(hs.observe.generator_test(recording)).curves().missed.dims
        ('prompt', 'block', 'kind')
        """
        measured, kinds = self.measured, [str(kind) for kind in self.measured.kind.values]
        labels = {"remainder": "after the drift", "remainder_second_moment": "after drift and second moment"}
        curves = [
            curve(
                name,
                measured[name].median("layer").transpose("prompt", "scale", "kind").values,
                {"halvings of s": range(measured.sizes["scale"]), "kind": kinds},
                label=f"remainder {label}, over the change",
                log=True,
                over="prompt",
            )
            for name, label in labels.items()
        ]
        missed = curve(
            "missed",
            1 - measured.explained_share_by_kind.transpose("prompt", "layer", "kind").values,
            {"block": self.layers, "kind": kinds},
            label="share of the change that the drift misses",
            log=True,
            over="prompt",
        )
        return xr.merge([*curves, missed], join="outer")

    def remark(self, silent: BlockShares) -> str:
        """The measured values in sentences; ``silent`` has blocks that write nothing.

        >>> names = ("explained_share", "explained_share_second_moment", "explained_share_null")
        >>> shares = xr.Dataset({name: (("layer", "prompt"), [[0.5, 0.7]]) for name in names}, {"layer": [0]})
        >>> BlockShares(shares).remark(BlockShares(shares * np.nan))
        'The share of the drift runs from 0.6 (block 0) to 0.6 (block 0), with the second moment from ...'
        """
        sentences = [
            f"The share of the drift runs from {self.span('explained_share')}, with the second moment from "
            f"{self.span('explained_share_second_moment')}; permuted updates have {self.span('explained_share_null')}."
        ]
        if self.median("splitting_defect") is not None:
            sentences.append(
                f"The drifts of both halves at the first state explain {self.span('explained_share_first_state')}, and "
                f"the splitting defect is {self.span('splitting_defect')} of the change."
            )
        if self.median("sigma_term_ratio") is not None:
            sentences.append(
                f"Sigma_A:Hess phi, which deterministic attention lacks, would add {self.span('sigma_term_ratio')} of "
                "the mean squared change."
            )
        if silent.blocks("explained_share"):
            sentences.append(
                "Where blocks write nothing, norms alone move tokens, and the drift explains "
                f"{silent.span('explained_share')}."
            )
        return " ".join(sentences)
