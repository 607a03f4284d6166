"""``helmscope measure``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from helmscope.cli.options import (
    AllowMixed,
    AsJson,
    Device,
    MaxMemory,
    NamedModel,
    OnRay,
    Plot,
    Resume,
    Texts,
    Threads,
    Workers,
)


def measure(
    model: Annotated[str | None, typer.Argument(help="A, B, tied, a folder or a Hub id [default: A].")] = None,
    named: NamedModel = None,
    texts: Texts = None,
    text_count: Annotated[
        int | None, typer.Option(help="Number of texts [default: 64; 32 if quick or of interventions].")
    ] = None,
    text_length: Annotated[
        int | None, typer.Option(help="Tokens of each text, at most [default: 128; 64 if quick or of interventions].")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Fewer and shorter texts, and smaller samples.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Names of measurements, separated by commas; may be repeated [default: all of them]."),
    ] = None,
    interventions: Annotated[
        bool,
        typer.Option("--interventions", help="Measure the model under many edits instead: noise, sinks, ablations."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed of what is sampled.")] = 0,
    device: Device = "cpu",
    threads: Threads = 1,
    workers: Workers = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    plot: Plot = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/measure-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model on texts: attention, MLPs, steps over depth and transport, each written to a netCDF file and,
    as means with intervals, to a CSV file, with one picture of all.
    """
    options = locals()
    from helmscope.cli.options import check_plot, chosen_models, make_engine, make_spec, parse_names
    from helmscope.cli.output import run_and_show
    from helmscope.jobs import MeasurementSpec

    def draw(result: Any) -> Any:
        from helmscope.plots.measurements import measurements_figure

        return measurements_figure(result.measured, title=result.spec.title)

    models = chosen_models([] if model is None else [model], None if named is None else [named])
    spec = make_spec(MeasurementSpec, options | {"only": parse_names(only), "model": models[0] if models else "A"})
    engine = make_engine(workers, max_memory, threads, ray)
    picture: dict[str, Any] = {"plot": check_plot(plot), "draw": draw}
    run_and_show(spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json, **picture)
