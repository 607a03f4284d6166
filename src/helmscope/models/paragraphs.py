"""``paragraph_texts``: plain English paragraphs, made by rule, for models other than the bundled ones.

The bundled texts are simple stories, on which the bundled models were trained. Other models are tried on these
paragraphs unless texts are passed: expository prose on sixteen topics, whose sentences and words are in
paragraphs.toml. Which of them a paragraph consists of follows from its number, without random numbers, so that the
texts are the same everywhere.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import NamedTuple

from helmscope.models.bundled_models import is_bundled, story_texts

NUMBERS = (
    *("six", "eleven", "fourteen", "nine", "twenty", "seventeen", "thirty", "eight", "twelve", "forty", "fifteen"),
    *("thirteen", "sixty", "eighteen", "ten", "fifty", "seven", "sixteen", "twenty-five"),
)
LENGTH = 7  # sentences after the opening


class Topic(NamedTuple):
    """Sentences with slots, such as {dish}, {dish+1} for the next word of the list, or {n+2} for a number.

    >>> Topic(openings=["Soup is hot."], sentences=[], words={}).openings
    ['Soup is hot.']
    """

    openings: list[str]
    sentences: list[str]
    words: dict[str, list[str]]


@cache
def paragraph_texts() -> tuple[str, ...]:
    """64 plain English paragraphs of 100 to 140 words, always the same, each with a different first word.

    >>> texts = paragraph_texts()
    >>> len(texts), texts[0].split()[0]
    (64, 'Rain')
    """
    source = resources.files("helmscope.models") / "paragraphs.toml"
    topics = [Topic(**topic) for topic in tomllib.loads(source.read_text(encoding="utf-8")).values()]
    openings = [(topic, opening) for topic in topics for opening in topic.openings]
    return tuple(_paragraph(topic, opening, index) for index, (topic, opening) in enumerate(openings))


def texts_for(model: object) -> tuple[str, ...]:
    """The texts for a model to which none are passed: ``story_texts()`` for a bundled model, by name or
    ``LoadedModel``, on whose kind of story it was trained, and ``paragraph_texts()`` for any other.

    >>> texts_for("A")[0] == story_texts()[0], texts_for("my/model") == paragraph_texts()
    (True, True)
    """
    origin = getattr(model, "origin", None)
    comes_with_package = is_bundled(model) if origin is None else origin.folder is None and is_bundled(origin.name)
    return tuple(story_texts()) if comes_with_package else paragraph_texts()


def _paragraph(topic: Topic, opening: str, index: int) -> str:
    """The opening and seven of the sentences, in their order, with the words of this paragraph.

    Paragraphs 0 to 3 of a topic take every second sentence, the others, every second pair, and the other pairs, so that
    no two of them have more than four sentences in common.
    """
    number = index % len(topic.openings)
    taken = [sentence for k, sentence in enumerate(topic.sentences) if (k // (1 + number // 2) + number) % 2 == 0]
    sentences = taken[:LENGTH]
    words = {"n": NUMBERS, **topic.words}

    def fill(slot: re.Match[str]) -> str:
        choices = words[slot[1]]
        return choices[(index + int(slot[2] or 0)) % len(choices)]

    filled = [re.sub(r"\{(\w+)\+?(\d*)\}", fill, sentence) for sentence in (opening, *sentences)]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in filled)
