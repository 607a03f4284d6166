"""A Subject: identified by weights and texts, recorded once, split into halves that never share a prompt."""

from __future__ import annotations

import shutil
from importlib import import_module

import pytest
import torch
import transformers as tf

import helmscope as hs
from helmscope.models import subject as home
from helmscope.models.cache import RecordingCache
from helmscope.models.subject import Subject
from helmscope.runs.unit import Unit
from helmscope.types import HelmscopeError
from support.model_families import tiny_model

recording_module = import_module("helmscope.models.record")  # the package has the function by this name

ROWS = [[k % 90 + 3, (7 * k) % 90 + 3, 5, k % 11 + 3, 9, 11] for k in range(12)]


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    """An empty cache for each test."""
    empty = RecordingCache()
    monkeypatch.setattr(home, "_CACHE", empty)
    return empty


@pytest.fixture
def recorded(monkeypatch):
    """The number of texts in every recording that is made."""
    made, record = [], recording_module.record

    def counting(loaded, texts, **options):
        made.append(len(texts))
        return record(loaded, texts, **options)

    monkeypatch.setattr(recording_module, "record", counting)
    return made


@pytest.fixture
def folder(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_identity_is_of_weights_and_texts_and_of_nothing_else(folder, tmp_path):
    same = Subject(folder, ROWS)
    identity = same.identity
    assert len(identity) == 64
    shutil.copytree(folder, tmp_path / "elsewhere")
    for again in (
        Subject(str(folder), torch.tensor(ROWS)),
        Subject(tmp_path / "elsewhere", ROWS),
        Subject(folder, ROWS, device="cpu", truncate=True),
    ):
        assert again.identity == identity
    same.recording  # noqa: B018  # what was measured does not matter either
    assert Subject(folder, ROWS).identity == identity
    assert Subject(folder, ROWS[:-1]).identity != identity
    assert Subject(folder, ROWS[::-1]).identity != identity
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] += 1e-6
    model.save_pretrained(tmp_path / "other")
    assert Subject(tmp_path / "other", ROWS).identity != identity


def test_the_identity_of_a_model_in_memory_follows_its_tensors_and_its_configuration():
    model = tiny_model("gpt2")
    first = Subject(model, ROWS).identity
    assert Subject(tiny_model("gpt2"), ROWS).identity == first
    assert Subject(hs.load(model), ROWS).identity == first
    with torch.no_grad():
        model.transformer.h[1].ln_1.bias[3] += 1e-6
    changed = Subject(model, ROWS).identity
    assert changed != first
    model.config.layer_norm_epsilon = 1e-3  # the same weights, used otherwise
    assert Subject(model, ROWS).identity not in (first, changed)


def test_the_tokenizer_matters_by_the_ids_it_gives():
    texts = ["One day a cat sat.", "Tom had a dog."]
    subject = Subject("A", texts)
    ids = subject.tokenizer(texts)["input_ids"]
    assert subject.token_ids == tuple(map(tuple, ids))
    assert subject.identity != Subject("A", ["One day a cat sat.", "Tom had a cat."]).identity
    assert Subject("tied").looped(3).identity != Subject("tied", loops=2).identity


def test_the_default_is_model_a_on_the_texts_in_the_box():
    assert hs.Subject() == Subject("A") != Subject("B")
    assert Subject().texts == tuple(hs.models.story_texts())
    assert repr(Subject()) == "<Subject A: 128 texts>"
    assert Subject().label == f"A (sha256 {Subject().identity})"


def test_halves_are_disjoint_and_stable_and_the_same_for_every_model():
    twice = [*ROWS, *ROWS[:5]]
    subject = Subject(tiny_model("gpt2"), twice)
    selection, test = subject.selection, subject.test
    assert len(selection) == len(test) == 6
    assert sorted(selection + test) == sorted(map(tuple, ROWS))
    assert (Subject(tiny_model("llama"), twice).selection, Subject(tiny_model("gpt2"), twice).test) == (selection, test)
    assert Subject(tiny_model("gpt2"), twice[::-1]).selection != selection
    with pytest.raises(HelmscopeError, match="texts holds 3 different prompts, but two halves need at least 4"):
        Subject(tiny_model("gpt2"), [*ROWS[:3], ROWS[0]]).test  # noqa: B018


def test_a_model_is_recorded_once_for_all_subjects(folder, recorded, cache):
    first = Subject(folder, ROWS).recording
    assert Subject(str(folder), ROWS).recording is first
    assert Subject(folder, ROWS).record(ROWS) is first
    assert recorded == [12]
    assert Subject(folder, ROWS).record(ROWS[:4]).batch.inputs["input_ids"].shape == (4, 6)
    twins = list(Subject(folder, ROWS).twin_recordings(2, seed=3))
    assert [*Subject(folder, ROWS).twin_recordings(2, seed=3)] == twins
    assert recorded == [12, 4, 12, 12]
    with Subject(folder, ROWS) as subject:
        assert subject.recording is first
    assert len(cache._values) == 0
    assert Subject(folder, ROWS).recording is not first


def test_what_is_recorded_once_is_what_record_gives():
    model = tiny_model("gpt2")
    wanted = hs.record(model, torch.tensor(ROWS)).trajectory.states
    assert torch.equal(Subject(model, ROWS).recording.trajectory.states, wanted)


def test_the_cache_is_bounded(folder, recorded, cache):
    cache.most = 1
    for _ in range(2):
        Subject(folder, ROWS).recording  # noqa: B018
        Subject(folder, ROWS).record(ROWS[:4])
    assert recorded == [12, 4, 12, 4]
    assert len(cache._values) == 1


def test_two_models_in_memory_are_not_taken_for_each_other(recorded):
    model, other = tiny_model("gpt2"), tiny_model("gpt2")
    assert Subject(model, ROWS).recording.anatomy.model is model
    assert Subject(other, ROWS).recording.anatomy.model is other
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.zero_()
    Subject(model, ROWS).recording  # noqa: B018
    assert recorded == [12, 12, 12]


def test_files_that_change_under_a_subject_are_refused(folder):
    subject = Subject(folder, ROWS)
    before = subject.identity
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight.mul_(2)
    model.save_pretrained(folder)
    with pytest.raises(HelmscopeError, match="its files have changed since this subject was first used"):
        subject.recording  # noqa: B018
    assert Subject(folder, ROWS).identity != before
    subject.close()


def test_twins_are_those_of_the_series_and_have_no_training():
    subject = Subject(tiny_model("gpt2"), ROWS)
    twins = list(subject.twins(2, seed=1))
    assert list(subject.twins(1, seed=1)) == twins[:1]
    wanted = hs.models.untrained_twin(subject.loaded, seed=hs.claims.TrialCase(seed=1).seed_for(1))
    for name, value in twins[1].model.state_dict().items():
        assert torch.equal(value, wanted.model.state_dict()[name])
    (recorded,) = subject.twin_recordings(1, seed=1, texts=ROWS[:3])
    assert recorded.anatomy.model is twins[0].model
    with pytest.raises(HelmscopeError, match="count is 0"):
        next(subject.twins(0))


def test_a_premise_that_cannot_hold_is_one_sentence():
    causal, full = Subject(tiny_model("gpt2"), ROWS), Subject(tiny_model("bert"), ROWS)
    bare = Subject(tiny_model("gpt2").transformer, ROWS)
    everything = {"mlp": True, "head": True}
    assert causal.unmet_premise("kernel", "on_sphere", causal=True, **everything) is None
    assert full.unmet_premise("replay", full=True, **everything) is None
    both = "the claim needs attention that is causal, but that of BertForMaskedLM is bidirectional"
    assert full.unmet_premise(causal=True) == both
    assert "that is bidirectional, but that of GPT2LMHeadModel is causal" in causal.unmet_premise(full=True)
    assert bare.unmet_premise(causal=True, mlp=True) is None
    sentence = bare.unmet_premise(head=True)
    assert sentence.startswith("the claim needs a head over a vocabulary, but GPT2Model does not have it: ")
    assert "causal" in Subject(tiny_model("gpt2"), [[5], [6]]).unmet_premise(causal=True)
    assert "needs a model" in Subject.simulation().unmet_premise()
    finding = hs.claims.Finding.impossible(sentence)
    assert finding.evidence.reason == sentence
    with pytest.raises(HelmscopeError, match="unknown part of a recording 'heads'"):
        causal.unmet_premise("heads")
    with pytest.raises(HelmscopeError, match="causal and full are both True"):
        causal.unmet_premise(causal=True, full=True)


def test_it_travels_as_plain_data(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    here = Subject("tiny", ROWS, truncate=True)
    data = here.as_data()
    assert data["model"] == str(folder)
    Unit("subject", dict, data)  # plain enough for a unit of work
    assert Subject.from_data(data).identity == here.identity
    assert Subject.from_data(Subject.simulation().as_data()).is_simulation
    assert Subject.from_data(Subject("A").as_data()) == Subject("A")
    for subject, what in (
        (Subject(tiny_model("gpt2"), ROWS), "model"),
        (Subject("A", tokenizer=object()), "tokenizer"),
    ):
        assert not subject.picklable
        with pytest.raises(HelmscopeError, match=f"{what} of subject '.*' is in memory, where no other process"):
            subject.as_data()


def test_a_simulation_has_no_model():
    nothing = Subject.simulation()
    assert (nothing.identity, nothing.label, repr(nothing)) == ("simulation", "simulation", "<Subject simulation>")
    nothing.close()
    for name in ("texts", "loaded", "recording", "test", "tokenizer"):
        with pytest.raises(HelmscopeError, match="needs a model, but the subject is a simulation"):
            getattr(nothing, name)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((" ",), {}, "model is '', but it must be a name"),
        ((3,), {}, "model is an int, but it must be a name, a folder"),
        ((None,), {}, "model is a NoneType, but it must be"),
        ((torch.nn.Linear(2, 2),), {}, "model is a Linear, but it must be"),
        (("A", "One text"), {}, "texts is a str, but it must be a list of strings"),
        (("A", []), {}, "texts is empty"),
        (("A", ["One", " "]), {}, r"texts\[1\] is ' ', but a text must not be blank"),
        (("A", ["One", 3]), {}, r"texts\[0\] is 'One', but texts must be all strings, or all rows"),
        (("A", [[1, 2], [3]]), {}, r"texts\[1\] has 1 id, but texts\[0\] has 2"),
        (("A", [[1, -2]]), {}, r"texts\[0\] is \[1, -2\]"),
        (("A",), {"loops": 0}, "loops is 0, but it must be a whole number >= 1"),
        (("A",), {"device": 3}, "device is 3, but it must be a str or None"),
        (("A",), {"truncate": "yes"}, "truncate is 'yes', but it must be True or False"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, options, sentence):
    with pytest.raises(HelmscopeError, match=sentence):
        Subject(*arguments, **options)


def test_a_model_in_memory_is_not_changed():
    with pytest.raises(HelmscopeError, match="loops is 3, but the model is in memory already"):
        Subject(tiny_model("albert"), ROWS, loops=3)
    assert Subject(tiny_model("albert"), ROWS).tied_loops is None


def test_texts_that_the_model_cannot_read_are_refused_when_needed(folder):
    with pytest.raises(HelmscopeError, match="texts are strings, but the model came without a tokenizer"):
        Subject(folder, ["One day"]).identity  # noqa: B018
    with pytest.raises(HelmscopeError, match="texts contain the token id 96"):
        Subject(folder, [[96]]).recording  # noqa: B018
    with pytest.raises(HelmscopeError, match=r"texts\[0\] has 70 tokens, but the model's context is 64"):
        Subject(folder, [[5] * 70]).recording  # noqa: B018
    assert len(Subject(folder, [[5] * 70], truncate=True).token_ids[0]) == 64
    assert isinstance(Subject(folder, ROWS).loaded.model, tf.GPT2LMHeadModel)
