"""``helmscope doctor``."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    model: Annotated[str, typer.Argument(help="Folder with safetensors files, or the id of a model on the Hub.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    text_count: Annotated[int, typer.Option(help="Number of texts of the measurement whose cost is estimated.")] = 128,
    text_length: Annotated[int, typer.Option(help="Tokens per text, at most the model's context.")] = 128,
    dtype: Annotated[
        str | None, typer.Option(help="float64, float32, bfloat16 or float16 [default: float32 on a CPU].")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    offline: Annotated[bool, typer.Option("--offline", help="Use local files only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check whether recordings of a model can be trusted: print its certificate and the cost of a measurement."""
    from dataclasses import asdict

    from helmscope.runs.progress import import_announced

    import_announced("torch")
    from helmscope.jobs.names import MODEL_DTYPES, usable_device
    from helmscope.models.doctor import diagnose
    from helmscope.store.printable import printable

    diagnosis = diagnose(
        model,
        text_count=text_count,
        text_length=text_length,
        revision=revision,
        dtype=None if dtype is None else MODEL_DTYPES.load(dtype),
        device=usable_device(device),
        offline=offline,
    )
    ok = diagnosis.ok
    if as_json:
        print(json.dumps({"ok": ok} | asdict(diagnosis), indent=2))
    else:  # names and tokens from the model's files may contain control characters
        print(*map(printable, str(diagnosis).split("\n")), sep="\n")
    if not ok:
        raise typer.Exit(1)
