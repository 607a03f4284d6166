"""The prompts of a trial: different texts, different first tokens, and what too few of them leave open."""

from __future__ import annotations

import pytest

from helmscope.claims.entry import parse_entry
from helmscope.claims.evidence import Inconclusive, PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.judge import combine, judge
from helmscope.claims.prompts import ChosenPrompts, choose_prompts, prompts_or_finding
from helmscope.claims.registry import registered_case
from helmscope.claims.trial import run_trial
from helmscope.models.bundled_models import held_out_texts, story_texts
from helmscope.models.subject import Subject
from helmscope.types import HelmscopeError, JudgedCondition, Region, Ruling


class Rows:
    """A subject of token ids alone."""

    name = "rows"

    def __init__(self, rows: list[tuple[int, ...]]) -> None:
        self.token_ids = self.texts = tuple(rows)


def chosen_by_hand(rows: list[tuple[int, ...]], count: int, start: int) -> list[tuple[int, ...]]:
    """One row for each first token, then a second one for each, and so on; copies left out; in their order."""
    left: list[tuple[int, ...]] = []
    for row in rows:
        if row not in left:
            left.append(row)
    taken: list[tuple[int, ...]] = []
    while left and len(taken) < count:
        seen = []
        for row in list(left):
            if row[start] not in seen and len(taken) < count:
                seen.append(row[start])
                taken.append(row)
                left.remove(row)
    return [row for row in dict.fromkeys(rows) if row in taken]


@pytest.mark.parametrize("count", [1, 3, 5, 8, 20])
@pytest.mark.parametrize("mark", [(), (7,)])
def test_prompts_against_a_choice_by_hand(count: int, mark: tuple[int, ...]) -> None:
    firsts = (1, 1, 2, 1, 2, 3, 1, 2, 4)
    rows = [(*mark, first, 10 + k % 7, 5) for k, first in enumerate(firsts)] * 2
    texts, first_tokens = choose_prompts(count, Rows(rows))  # type: ignore[arg-type]
    wanted = chosen_by_hand(rows, count, len(mark))
    assert list(texts) == wanted
    assert first_tokens == len({row[len(mark)] for row in wanted})


def test_rows_are_cut_and_their_copies_left_out() -> None:
    rows = [(1, 2, 3, 4), (1, 2, 3, 9), (2, 2, 3), (3, 1), (4, 4, 4)]
    texts, first_tokens = choose_prompts(9, Rows(rows), length=3)  # type: ignore[arg-type]
    assert texts == ((1, 2, 3), (2, 2, 3), (4, 4, 4))
    assert first_tokens == 3


def test_texts_shorter_than_what_all_begin_with() -> None:
    """The shared beginning ends before the end of the shortest text."""
    texts, first_tokens = choose_prompts(9, Rows([(7, 7), (7, 7, 1), (7, 7, 2)]))  # type: ignore[arg-type]
    assert (len(texts), first_tokens) == (3, 1)
    assert choose_prompts(9, Rows([]), gap=1) == ((), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("texts", [story_texts(), held_out_texts()])
@pytest.mark.parametrize("quick", [True, False])
def test_bundled_texts_suffice(texts: list[str], quick: bool) -> None:
    case = registered_case("residual-flow", quick=quick, subject=Subject("A", texts))
    chosen = ChosenPrompts.of(case, length=32)
    assert (len(chosen), chosen.too_few, chosen.alike) == (32 if quick else 64, "", "")
    assert chosen.first_tokens >= 32
    firsts = {row[0] for row in chosen.texts}
    assert len(firsts) == chosen.first_tokens
    assert chosen.setting == f"{len(chosen)} prompts with {len(firsts)} distinct first tokens"


@pytest.mark.parametrize(("claim", "model"), [("residual-flow", "A"), ("settles", "tied"), ("tokens-cluster", "A")])
def test_texts_of_a_few_words_decide_nothing_and_are_no_error(claim: str, model: str) -> None:
    with Subject(model, [" ".join(text.split()[:9]) for text in story_texts()]) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert verdict.sentence.startswith("The claim needs 32 different texts")
    assert verdict.sentence.count(".") == 1


@pytest.mark.parametrize(("claim", "model"), [("residual-flow", "A"), ("settles", "tied")])
def test_prompts_of_all_trials_have_distinct_first_tokens(
    claim: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[tuple[int, ...], ...]] = []

    def stop(self: Subject, texts: tuple[tuple[int, ...], ...]) -> None:
        recorded.append(texts)
        raise HelmscopeError("far enough")

    monkeypatch.setattr(Subject, "record", stop)
    monkeypatch.setattr(Subject, "unmet_premise", lambda self, *parts, **needs: None)  # which records a few texts
    with pytest.raises(HelmscopeError, match="far enough"):
        run_trial(claim, quick=True, subject=Subject(model))
    (rows,) = recorded
    start = next(k for k in range(32) if len({row[k] for row in rows}) > 1)
    assert len(rows) == len({row[start] for row in rows}) == 32


def test_the_opening_of_a_trial_on_a_model() -> None:
    """A missing part comes before too few texts, and prompts are those of ``ChosenPrompts``."""
    few, encoder = Subject("A", story_texts()[:3]), Subject("tied", story_texts()[:3])
    found = {
        "encoder": prompts_or_finding(registered_case("small-steps", subject=encoder), causal=True, gap=1),
        "few": prompts_or_finding(registered_case("small-steps", subject=few), "trajectory", gap=1),
    }
    assert all(isinstance(each, Finding) for each in found.values())
    assert isinstance(found["encoder"].evidence, PremiseImpossible)  # type: ignore[union-attr]
    assert isinstance(found["few"].evidence, Inconclusive)  # type: ignore[union-attr]
    with pytest.raises(HelmscopeError, match="trajectori"):
        prompts_or_finding(registered_case("small-steps", subject=few), "trajectori", gap=1)
    case = registered_case("residual-flow", quick=True, subject=Subject("A"))
    chosen = prompts_or_finding(case, "trajectory", "force", mlp=True, head=True, causal=True, length=32)
    assert chosen == ChosenPrompts.of(case, length=32)


ENTRY = """
statement = "Tokens meet where they attend."
[[conditions]]
name = "meet"
low = 0.5
[[conditions]]
name = "attend"
text = "They attend by 0.1 or more."
low = 0.1
premise = true
"""


@pytest.mark.parametrize(
    ("meet", "attend", "ruling"),
    [
        (0.9, 0.9, Ruling.SUPPORTED),
        (0.1, 0.9, Ruling.REFUTED),
        (0.9, 0.0, Ruling.IMPOSSIBLE),
        (0.1, 0.0, Ruling.IMPOSSIBLE),  # not refuted: nothing attends
        (0.1, 0.1, Ruling.INCONCLUSIVE),  # nor where it is open whether anything does
        (0.9, 0.1, Ruling.INCONCLUSIVE),
    ],
)
def test_a_premise_comes_first(meet: float, attend: float, ruling: Ruling) -> None:
    noise = [0.01, -0.01] * 16
    evidence = {name: Replicates([at + e for e in noise]) for name, at in (("meet", meet), ("attend", attend))}
    verdict = judge(parse_entry(ENTRY, "mine.toml"), Finding(evidence=evidence))
    assert verdict.ruling is ruling
    presupposes = "the claim presupposes: They attend by 0.1 or more." in verdict.sentence
    assert presupposes == (ruling is Ruling.IMPOSSIBLE)


def test_without_premises_one_refuted_condition_refutes() -> None:
    region = Region(text="above 0", above=0.0)
    refuted, impossible = (JudgedCondition(r.value, region, None, r) for r in (Ruling.REFUTED, Ruling.IMPOSSIBLE))
    assert combine([refuted, impossible], []) is Ruling.REFUTED
    assert combine([refuted, impossible], [], [impossible.name]) is Ruling.IMPOSSIBLE


def test_a_shortage_leaves_open_what_was_measured() -> None:
    entry = parse_entry('statement = "Tokens meet."\nconditions = [{ low = 0.5 }]', "mine.toml")
    verdict = judge(entry, Finding(evidence=Replicates([0.9, 0.91, 0.92]), undecided_because="the prompts begin alike"))
    assert (verdict.ruling, verdict.conditions[0].ruling) == (Ruling.INCONCLUSIVE, Ruling.INCONCLUSIVE)
    assert verdict.interval is not None
    assert verdict.sentence.startswith("Nothing is decided: the prompts begin alike. Inconclusive (mine): 0.91 [")
    nothing = judge(entry, Finding.inconclusive("there are too few texts"))
    assert (nothing.ruling, nothing.interval) == (Ruling.INCONCLUSIVE, None)
    assert nothing.sentence == "There are too few texts."
    with pytest.raises(HelmscopeError, match="reason is '', but it must be a text"):
        Inconclusive("")
