"""``helmscope phase``."""

from __future__ import annotations

from typing import Annotated

import typer

from helmscope.cli.options import (
    AllowMixed,
    AsJson,
    Causal,
    Delta,
    Device,
    Field,
    Jobs,
    MaxMemory,
    Nu,
    OnRay,
    Resume,
    Threads,
    Tokens,
    Value,
)


def phase(
    field: Field = "sa",
    value: Value = 1.0,
    causal: Causal = False,
    nu: Nu = 0.0,
    spectrum: Annotated[
        str | None, typer.Option(help="Eigenvalues of a symmetric B, dim of them, such as 1,0.5 [default: B = I].")
    ] = None,
    n: Tokens = 32,
    dims: Annotated[
        str | None, typer.Option("--dims", "--dim", help="Dimensions of the space [default: 8,32].")
    ] = None,
    betas: Annotated[str, typer.Option(help="Inverse temperatures: 1,4,9 or FROM:TO:COUNT.")] = "0.1:9:10",
    times: Annotated[str, typer.Option(help="Times: 0,1,5 or FROM:TO:COUNT.")] = "0:30:61",
    samples: Annotated[int, typer.Option(help="Independent systems behind each probability.")] = 64,
    delta: Delta = 1e-3,
    published: Annotated[
        bool | None,
        typer.Option(
            "--published/--no-published",
            help="Lay what the published scheme gives beside ours [default: for sa without noise].",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the starts and of the noise.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float64 or float32 [default: float64; on a GPU float32 where a kernel serves].")
    ] = None,
    device: Device = "cpu",
    threads: Threads = 1,
    jobs: Jobs = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/phase-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: AsJson = False,
) -> None:
    """Have two tokens met? The probability over beta and time, with standard errors and the curve t*(beta).

    As it stands, a quick picture of two dimensions in about a minute. The whole figure 3 of arXiv:2312.10794:

    helmscope phase --dims 2,8,32,128,512,1024 --betas 0.1:9:90 --times 0:30:200 --samples 1024 --published
    """
    given = locals()
    from helmscope.cli.options import engine_of, numbers_of, spec_of
    from helmscope.cli.output import carry_out
    from helmscope.jobs import Phase

    engine = engine_of(jobs, max_memory, threads, ray)
    lists = {name: numbers_of(given[name]) for name in ("spectrum", "dims", "betas", "times")}
    spec = spec_of(Phase, given | lists)
    carry_out(spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json)
