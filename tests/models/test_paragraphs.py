"""The default texts: 64 plain English paragraphs that differ from their first word on, the same in every process."""

from __future__ import annotations

import itertools
import re
import shutil
import tomllib
from importlib import resources

import pytest
import transformers as tf

import helmscope as hs
from helmscope.models.paragraphs import texts_for
from helmscope.models.subject import Subject
from support.children import run_python

TEXTS = hs.models.paragraph_texts()
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.]) ", text)


def test_there_are_64_paragraphs_of_about_120_words():
    lengths = [len(text.split()) for text in TEXTS]
    assert len(TEXTS) == len(set(TEXTS)) == 64
    assert min(lengths) >= 100
    assert max(lengths) <= 140
    assert 115 <= sum(lengths) / len(lengths) <= 130


def test_every_first_word_differs_in_its_first_three_letters():
    """First tokens differ, then, even where a tokenizer cuts words into pieces of three letters."""
    first_words = [text.split()[0] for text in TEXTS]
    assert len({word[:3] for word in first_words}) == 64


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.split()[0])
def test_a_paragraph_is_plain_prose(text):
    assert re.fullmatch(r"[A-Za-z,.' -]+", text)  # every slot is filled, and there are no line breaks
    assert "  " not in text
    assert text == text.strip()
    parts = sentences(text)
    assert len(parts) == len(set(parts)) == 8
    for sentence in parts:
        assert re.fullmatch(r"[A-Z][^.]+[^ ,.][.]", sentence), sentence
        assert 9 <= len(sentence.split()) <= 22
        # articles agree with the next word, and no word is repeated
        assert not re.search(r"\b[Aa] [aeio]|\b[Aa]n [^aeiouh]", sentence), sentence
        assert not re.search(r"\b(\w+) \1\b", sentence.lower()), sentence


def test_paragraphs_have_at_most_a_few_sentences_in_common():
    pairs = itertools.combinations([set(sentences(text)) for text in TEXTS], 2)
    assert max(len(one & other) for one, other in pairs) <= 4


def test_every_list_of_words_is_used_and_varies_within_a_topic():
    source = resources.files("helmscope.models") / "paragraphs.toml"
    for name, topic in tomllib.loads(source.read_text(encoding="utf-8")).items():
        slots = set(re.findall(r"\{(\w+)", " ".join([*topic["openings"], *topic["sentences"]])))
        assert slots - {"n"} == set(topic["words"]), name
        for words in topic["words"].values():
            assert len(set(words)) == len(words) >= len(topic["openings"]) == 4, name


def test_another_process_makes_the_same_texts():
    done = run_python("import helmscope as hs; print('\\n'.join(hs.models.paragraph_texts()))", check=True)
    assert tuple(done.stdout.splitlines()) == TEXTS


def test_a_model_that_is_not_in_the_box_is_tried_on_them(tmp_path):
    folder = tmp_path / "tiny"
    sizes = {"vocab_size": 4096, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
    tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(hs.models.bundled_folder("A") / name, folder / name)
    subject = Subject(folder)
    assert subject.texts == TEXTS
    assert subject.held_out().texts == TEXTS
    assert len({ids[0] for ids in subject.token_ids}) >= 32
    assert subject.record(subject.texts[:2]).certificate.ok
    assert Subject(folder, ["One text."]).texts == ("One text.",)
    assert hs.record(folder).batch.visible_ids == subject.token_ids  # a recording without texts too


@pytest.mark.parametrize("name", ["A", "B", "tied"])
def test_a_model_in_the_box_keeps_its_own_texts(name):
    stories = tuple(hs.models.story_texts())
    assert Subject(name).texts == texts_for(name) == texts_for(hs.load(name)) == stories
    assert (
        texts_for(hs.load(hs.models.bundled_folder(name))) == TEXTS
    )  # named by its folder, it is not known to be a bundled model
