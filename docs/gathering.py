"""Plot how tokens gather in the arms of several models, one panel per subject, as gathering.png in this folder.

helmscope claims test attention-clusters mlp-prevents --model A --model B --model tied --model FOLDER --out RUN
python docs/gathering.py RUN
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import xarray as xr

from helmscope.plots.style import COLORS, new_figure, styled
from helmscope.stats.reduce import band, reduced

LINES = {  # dashed, to be seen over the whole model
    "whole model": "-",
    "attention alone": "-",
    "MLP alone": "--",
    "attention alone, untrained": ":",
    "no mixing (P = I)": "-.",
    "at the whole model's radius": (0, (1, 3)),
}
LABELS = {
    "no mixing (P = I)": "attention alone, P = I",
    "at the whole model's radius": "attention alone, whole model's radius",
}
OUT = Path(__file__).parent / "gathering.png"


def read_shares(run: Path) -> dict[str, xr.Dataset]:
    """The share of inner products above the level by depth and arm, reduced over the prompts, for each subject."""
    shares = {}
    for file in sorted((run / "units").glob("mlp-prevents--*.nc")):
        with xr.open_dataset(file, engine="h5netcdf") as stored:
            data = stored[["share"]].load()
        (verdict,) = json.loads(stored.attrs["verdict"])
        shares[verdict["subject"]] = reduced(data)
    return shares


def rulings(run: Path) -> dict[str, str]:
    """The ruling of attention-clusters on each subject; if a control failed, with its name."""
    found = {}
    for file in sorted((run / "units").glob("attention-clusters--*.nc")):
        with xr.open_dataset(file, engine="h5netcdf") as stored:
            (verdict,) = json.loads(stored.attrs["verdict"])
        failed = [each["name"] for each in verdict["controls"] if each["ruling"] not in each["expected"]]
        why = f"\n(its control {failed[0]} fails)" if failed else ""
        found[verdict["subject"]] = f"{verdict['ruling']}{why}"
    return found


def main() -> None:
    """Plot the subjects of a run folder."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run of helmscope claims test mlp-prevents")
    parser.add_argument("--subjects", nargs="*", help="the subjects to show, in this order [default: all]")
    parser.add_argument("--title", default="Pairs of tokens that gather, in the whole model and in its parts alone")
    options = parser.parse_args()
    shares, ruled = read_shares(options.run), rulings(options.run)
    shares = {subject: shares[subject] for subject in options.subjects or shares}
    with styled():
        figure, panels = new_figure(1, len(shares), width=3.1 * len(shares), height=3.9)
        for panel, (subject, data) in zip(panels, shares.items(), strict=True):
            low, high = band(data, "share")
            for color, (arm, style) in zip((*COLORS, "#6b6b6b"), LINES.items(), strict=False):
                chosen = {"arm": arm}
                if arm not in data.arm.values:
                    continue
                depth = data.depth.values
                panel.plot(
                    depth, data.share.sel(chosen), linestyle=style, color=color, linewidth=2, label=LABELS.get(arm, arm)
                )
                panel.fill_between(depth, low.sel(chosen), high.sel(chosen), color=color, alpha=0.2, linewidth=0)
            title = f"{subject}\nattention-clusters {ruled[subject]}" if subject in ruled else subject
            panel.set(xlabel="depth (half-layers)", ylim=(-0.02, 1.02))
            panel.set_title(title, fontsize=9)
        panels[0].set_ylabel("share of pairs with cosine above 0.9")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(options.title, fontweight="bold")
        figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
