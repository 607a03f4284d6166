"""Every object has a one-line repr, and in a notebook an escaped HTML table."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from html.parser import HTMLParser

import pytest
import torch
import xarray as xr
from transformers import GPT2Config, GPT2LMHeadModel

import helmscope as hs
from helmscope.types import html_table, pluralized, short_description, shortened

EVIL = "<script>alert(1)</script>"
SEEN, REGION = hs.Interval(1.0, 0.99, 1.01, n=20), hs.types.Region(text="1 within .1", low=0.9, high=1.1)
NULL = hs.types.Control(f"V = -I {EVIL}", REGION, SEEN, hs.types.Ruling.REFUTED, f"from {EVIL}")
RATE = hs.types.JudgedCondition(f"rate {EVIL}", REGION, SEEN, hs.types.Ruling.SUPPORTED, f"from {EVIL}")
PRINTED = hs.types.PrintedStatement(f"e^-beta {EVIL}", f"slide {EVIL}", hs.types.Judgment.FALSE, f"since {EVIL}")
VERDICT = hs.Verdict(
    claim="rate",
    ruling=hs.types.Ruling.SUPPORTED,
    conditions=(RATE,),
    sentence=f"The rate is 1. {EVIL}",
    setting=f"here {EVIL}",
    controls=(NULL, replace(NULL, ruling=hs.types.Ruling.SUPPORTED)),
    described=(RATE,),
    printed=PRINTED,
    attachments=(hs.types.Attachment(f"title {EVIL}", f"text {EVIL}"),),
    subject=f"model {EVIL}",
)
DATA = xr.Dataset(
    {"slope": ("kind", [1.0, 2.0]), "slope_stderr": ("kind", [0.1, 0.1]), "slope_null": ("kind", [0.0, 0.0])},
    {"kind": [EVIL, "plain"]},
    {"n": 20},
)


@cache
def simulation(systems: int = 16, tokens: int = 32, dim: int = 3, times: tuple[float, ...] = (0.0, 1.0, 10.0)):
    start = hs.Uniform(tokens, dim).sample(systems, seed=0)
    return hs.integrate(hs.SA(beta=4.0), start, list(times))


@cache
def recording(texts: int = 2):
    sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    return hs.record(model, torch.arange(8).reshape(2, 4)[:texts])


OBJECTS = {
    "simulation": simulation,
    "block": lambda: hs.integrate(
        hs.Block(hs.SA(1.0), hs.MLP(w_in=torch.ones(9, 3), w_out=torch.ones(3, 9)), placement=hs.fields.PreNorm()),
        torch.eye(3),
        [0.0, 0.1],
    ),
    "trajectory": lambda: simulation().trajectory,
    "problem": lambda: simulation().problem,
    "outcome": lambda: simulation().outcome,
    "recording": recording,
    "edited": lambda: recording().under(*[hs.intervene.Ablate([1]), hs.intervene.Add(value=torch.ones(8))] * 5),
    "certificate": lambda: recording().certificate,
    "verdict": lambda: VERDICT,
    "trial": lambda: hs.claims.Trial(VERDICT, DATA),
    "subject": lambda: hs.Subject("A", ["one text"]),
    "interval": lambda: SEEN,
    "summary": lambda: hs.summary(DATA),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_repr_is_one_line_without_tensors(name):
    text = repr(OBJECTS[name]())
    assert "\n" not in text
    assert len(text) <= 200
    assert "tensor(" not in text
    assert not re.search(r"0x[0-9a-f]{6,}", text)


def test_the_words_of_a_repr():
    assert repr(simulation()) == (
        "<Simulation of SA(beta=4): 16 systems x 32 tokens on S^2; 3 times, 0 to 10; finished>"
    )
    alone = hs.integrate(hs.SA(beta=1.0, value=-torch.eye(3)), torch.eye(3)[:1], [2.5])
    assert repr(alone) == (
        "<Simulation of SA(beta=1, value=<3 x 3>): 1 system x 1 token on S^2; 1 time, 2.5; finished>"
    )
    assert repr(simulation().trajectory) == "<Trajectory: 16 systems x 32 tokens, dimension 3; 3 times, 0 to 10>"
    assert repr(VERDICT).startswith("<Verdict on rate: supported, 1 [0.99, 1.01], n = 20; model ")
    assert repr(hs.claims.Trial(VERDICT, DATA)) == (
        "<Trial of rate: supported, 1 [0.99, 1.01], n = 20; 1 variable measured>"
    )
    assert repr(hs.Subject("A", ["one"])) == "<Subject A: 1 text>"
    assert repr(hs.Subject("A", ["one", "two"])) == "<Subject A: 2 texts>"
    assert "; 2 texts x 4 tokens (" in repr(recording())
    assert "; 1 text x 4 tokens (" in repr(recording(1))
    assert repr(recording().certificate) == f"<Certificate: {len(recording().certificate.lines)} checks, ok>"
    ends = (hs.types.Status.FINISHED, hs.types.Status.AT_REST, hs.types.Status.STEP_LIMIT, hs.types.Status.STEP_LIMIT)
    assert repr(hs.types.Outcome(ends, (1.0,) * 4)) == "<Outcome of 4 systems: 1 finished, 1 at rest, 2 step limit>"
    assert repr(hs.types.Outcome((), ())) == "<Outcome of 0 systems: no systems>"
    assert repr(hs.types.Outcome((hs.types.Status.AT_REST,), (1.0,))) == "<Outcome of 1 system: at rest>"


def test_where_the_tokens_of_a_simulation_live():
    tokens = torch.eye(3, dtype=torch.float64)
    mlp = hs.MLP(w_in=torch.eye(3), w_out=torch.eye(3))
    for placement, where in (
        (hs.fields.PreNorm(), "in a residual stream in R^3"),
        (hs.fields.NoNorm(), "in R^3"),
        (hs.fields.PostNorm(), "on S^2"),
    ):
        run = hs.integrate(hs.Block(hs.SA(1.0), mlp, placement=placement), tokens, [0.0, 0.1])
        assert f"tokens {where}; " in repr(run)


class _Tags(HTMLParser):
    """The tags of a text, each closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.style = ""

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag != "br":  # which has no end
            self.open.append(tag)
        assert {name for name, _ in attrs} <= {"style"}
        self.style += "".join(value for _, value in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


HTML = {name: OBJECTS[name] for name in ("simulation", "recording", "certificate", "verdict", "trial", "summary")}


@pytest.mark.parametrize("name", HTML)
def test_html_is_a_plain_table_for_dark_and_light_notebooks(name):
    text = HTML[name]()._repr_html_()
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert {"div", "table", "tr", "td"} <= tags.seen
    assert tags.seen <= {"div", "table", "tr", "td", "th", "details", "summary", "pre", "br"}
    assert "background" not in tags.style
    assert not re.search(r"(?<!-)color *:", tags.style)
    assert len(text) < 20_000


def test_html_escapes_what_others_wrote():
    for shown in (VERDICT, hs.claims.Trial(VERDICT, DATA), hs.summary(DATA)):
        text = shown._repr_html_()
        assert "<script" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    seen = recording()
    labels = tuple((EVIL,) * 4 for _ in range(2))
    planted = replace(
        seen,
        origin=replace(seen.origin, name=EVIL, family=f"gpt2 {EVIL}"),
        runner=replace(seen.runner, batch=replace(seen.batch, tokens=labels)),
        certificate=seen.certificate.with_line(replace(seen.certificate.lines[0], statement=EVIL)),
    )
    text = planted._repr_html_()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 3 + 1 + 4  # name and family twice; a line of the certificate; four labels


def test_html_says_what_matters():
    text = simulation()._repr_html_()
    for words in ("Simulation of SA(beta=4)", "16 systems x 32 tokens on S^2", "3 times, 0 to 10", "finished at t=10"):
        assert words in text
    noisy = hs.integrate(
        hs.SA(1.0),
        torch.eye(3),
        [0.0, 0.1],
        noise=hs.noise.IsotropicNoise(nu=0.1),
        seed=7,
    )
    assert repr(noisy).startswith("<Simulation of SA(beta=1) with IsotropicNoise(nu=0.1): 1 system x 3 tokens on S^2; ")
    assert "Simulation of SA(beta=1) with IsotropicNoise(nu=0.1)" in noisy._repr_html_()
    title = noisy.plot().subfigs[0].subfigs[0].get_suptitle()
    assert title.startswith("SA(beta=1) with IsotropicNoise(nu=0.1)\n")
    assert "IsotropicNoise(nu=0.1), seed 7" in noisy._repr_html_()
    met = hs.integrate(hs.USA(4.0), torch.eye(2).repeat(3, 1, 1), [2.0], events=[hs.solve.HittingTime(1e-3)])
    assert "happened to 3 of 3" in met._repr_html_()
    text = VERDICT._repr_html_()
    for words in ("rate: supported", "1 [0.99, 1.01], n = 20", "region: 0.9 to 1.1. 1 within .1", "expected: refuted"):
        assert words in text
    text = recording()._repr_html_()
    for words in ("5 depths, 0 to 4, in half-layers", "Certificate: ok", "pre-norm; 2 layers, width 8"):
        assert words in text
    failed = hs.models.Certificate((replace(recording().certificate.lines[0], ok=False),))
    assert repr(failed).startswith("<Certificate: 1 check, fails: ")
    assert "FAIL" in failed._repr_html_()


def test_an_attachment_of_a_verdict_keeps_its_columns_and_is_closed_at_first():
    table = "ok   logits   1e-07\nFAIL heads    1e-02"
    text = replace(VERDICT, attachments=(hs.types.Attachment("Certificate of A", table),))._repr_html_()
    assert f'<details><summary>Certificate of A</summary><pre style="overflow-x: auto">{table}</pre></details>' in text


def test_a_trial_without_variables_still_shows_its_verdict():
    bare = hs.claims.Trial(VERDICT, xr.Dataset(attrs={"n": 1}))
    assert repr(bare) == "<Trial of rate: supported, 1 [0.99, 1.01], n = 20>"
    assert bare._repr_html_().count("<table") == 1


@dataclass
class Odd:
    values: tuple[float, ...]
    word: str = "plain"
    other: object = None


def test_a_value_in_a_few_words():
    assert short_description(hs.SA(beta=torch.tensor(4.0))) == "SA(beta=4)"
    assert short_description(hs.SA(beta=torch.ones(16, 1, 1))) == "SA(beta=<16 x 1 x 1>)"
    assert short_description(Odd((1.0, 2.0, 3.0, 4.0))) == "Odd(values=[1, 2, 3, ... 4 in all])"
    assert short_description(Odd((), "other", len)) == "Odd(values=[], word='other', other=len)"
    assert short_description(hs.fields.FunctionField(lambda x: x)) == "FunctionField(function=<lambda>)"
    assert short_description(Odd((), other=object())) == "Odd(values=[], other=object)"
    assert short_description(Odd((), other=hs.types.Ruling.REFUTED)) == "Odd(values=[], other=REFUTED)"
    assert len(short_description(Odd((), "x" * 500))) == 72
    assert shortened("a\n b", 10) == "a b"


def test_reprs_show_what_differs_from_the_defaults():
    assert repr(hs.SA(beta=4.0)) == "SA(beta=4.0)"
    assert repr(hs.USA(1 / 3, causal=True)) == "USA(beta=0.3333333333333333, causal=True)"
    assert repr(hs.noise.IsotropicNoise(nu=0.05)) == "IsotropicNoise(nu=0.05)"
    assert repr(hs.noise.IsotropicNoise(0.05, process=hs.noise.Ito())) == "IsotropicNoise(nu=0.05, process=Ito())"
    mlp = hs.MLP(w_in=torch.ones(9, 3), w_out=torch.ones(3, 9))
    assert repr(mlp) == "MLP(w_in=<9 x 3>, w_out=<3 x 9>, activation=GELU())"  # not the default of a GatedMLP
    gated = hs.GatedMLP(w_gate=torch.ones(9, 3), w_up=torch.ones(9, 3), w_out=torch.ones(3, 9))
    assert repr(gated) == "GatedMLP(w_gate=<9 x 3>, w_up=<9 x 3>, w_out=<3 x 9>, activation=SiLU())"
    assert repr(replace(gated, activation=hs.activations.ReLU())).endswith(", activation=ReLU())")
    block = hs.Block(hs.SA(1.0), mlp, placement=hs.fields.PreNorm())
    assert repr(block) == f"Block(attention=SA(beta=1.0), mlp={mlp}, placement=PreNorm())"
    assert repr(hs.fields.LayerNorm(gain=torch.ones(3))) == "LayerNorm(gain=<3>)"
    assert repr(hs.Uniform(n=32, dim=3)) == "Uniform(n=32, dim=3)"
    assert repr(hs.jobs.SimulationSpec()) == "SimulationSpec()"
    assert repr(hs.jobs.PhaseSpec(dims=[8], nu=0.1)) == "PhaseSpec(nu=0.1, dims=(8,), published=False)"


def test_the_repr_of_a_user_s_field_is_concise_too():
    @dataclass(frozen=True, eq=False)
    class Turn(hs.Field):
        rate: torch.Tensor
        name_of_axis: str = "z"

        def velocity(self, x, weights=None, *, t=0.0):
            return self.rate * x

    class Plain(hs.Field):
        def velocity(self, x, weights=None, *, t=0.0):
            return x

    assert repr(Turn(torch.ones(2, 2))) == "Turn(rate=<2 x 2>)"
    assert "Plain object" in repr(Plain())
    torch.vmap(lambda beta: repr(hs.SA(beta=beta)) and beta)(torch.ones(2))


def test_the_sentences_below_a_summary_have_lines_of_their_own():
    many = xr.Dataset({"order": ("time", [1.0] * 99), "order_stderr": ("time", [0.1] * 99)}, attrs={"n": 4})
    text = hs.summary(many)._repr_html_()
    assert "<div>in brackets: two standard errors<br>97 entries are not shown: summary(measurement, rows=None)" in text
    assert "&lt;br" in html_table("", [], note="<br>")


def test_the_first_text_of_a_recording_reads_as_it_was_written():
    written = "Once upon a time, there was a lady. She was wearing luggage."
    text = hs.record("A", [written, "There was a cat."])._repr_html_()
    assert f">{written}<" in text
    unequal = hs.record("A", ["There was a cat.", written])._repr_html_()  # padding is not shown
    assert ">There was a cat.<" in unequal


def test_a_first_text_that_the_tokenizer_cannot_decode_is_shown_by_its_tokens():
    class Broken:
        def decode(self, ids, **options):
            raise RuntimeError("no")

    seen = recording()
    for tokens, shown in (
        (("Once", "\u0120upon", ",", "\u0120l"), ">Once upon, l<"),
        (("\u2581Once", "\u2581up", "on", "."), ">Once upon.<"),
        (("once", "up", "##on", "."), ">once up ##on .<"),
    ):
        planted = replace(seen, runner=replace(seen.runner, batch=replace(seen.batch, tokens=(tokens,) * 2)))
        assert shown in planted._repr_html_()
        assert shown in replace(planted, tokenizer=Broken())._repr_html_()


def test_counting_words():
    assert [pluralized(n, "token") for n in (0, 1, 2, 10**6)] == ["0 tokens", "1 token", "2 tokens", "1,000,000 tokens"]


def test_a_table_holds_its_rows():
    text = html_table("head", [("a", 1), ("b", 2)], header=("name", "number"), note="below")
    assert [text.count(f"<{tag}") for tag in ("table", "tr", "td", "th")] == [1, 3, 4, 2]
    assert re.sub(r"<[^>]*>", " ", text).split() == ["head", "name", "number", "a", "1", "b", "2", "below"]
    assert "<table" not in html_table("alone", [])
