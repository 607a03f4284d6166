"""``default_texts``: plain English paragraphs, made by rule, for models that are not in the box.

The texts in the box are simple stories, on which the models in the box were trained. Other models are tried on these
paragraphs unless texts are passed: expository prose on sixteen topics, whose sentences and words are in
paragraphs.toml. Which of them a paragraph consists of follows from its number, without random numbers, so that the
texts are the same everywhere.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources

import msgspec

NUMBERS = (
    *("six", "eleven", "fourteen", "nine", "twenty", "seventeen", "thirty", "eight", "twelve", "forty", "fifteen"),
    *("thirteen", "sixty", "eighteen", "ten", "fifty", "seven", "sixteen", "twenty-five"),
)
LENGTH = 7  # sentences after the opening


class Topic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sentences with slots, such as {dish}, {dish+1} for the next word of the list, or {n+2} for a number.

    >>> Topic(openings=("Soup is hot.",), sentences=(), words={}).openings
    ('Soup is hot.',)
    """

    openings: tuple[str, ...]
    sentences: tuple[str, ...]
    words: dict[str, tuple[str, ...]]


@cache
def default_texts() -> tuple[str, ...]:
    """64 plain English paragraphs of 100 to 140 words, always the same, each with a different first word.

    >>> texts = default_texts()
    >>> len(texts), texts[0].split()[0]
    (64, 'Rain')
    """
    source = resources.files("helmscope.models") / "paragraphs.toml"
    topics = msgspec.convert(tomllib.loads(source.read_text(encoding="utf-8")), dict[str, Topic]).values()
    openings = [(topic, opening) for topic in topics for opening in topic.openings]
    return tuple(_paragraph(topic, opening, index) for index, (topic, opening) in enumerate(openings))


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
