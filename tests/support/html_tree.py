"""Parses HTML into a tree of elements, and fails where it is not well formed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "input", "br", "link", "source"}


@dataclass
class Element:
    tag: str
    attrs: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        """All descendants with this tag, in document order."""
        below = [child for child in self.children if isinstance(child, Element)]
        return [hit for child in below for hit in ([child] if child.tag == tag else []) + child.all(tag)]

    @property
    def text(self) -> str:
        parts = [child if isinstance(child, str) else child.text for child in self.children]
        return re.sub(r"\s+", " ", " ".join(parts)).strip()


class Tree(HTMLParser):
    """Parse the page into elements; fails on an unmatched closing tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open = [Element("", {})]
        self.feed(text)
        self.close()
        assert len(self.open) == 1, [element.tag for element in self.open]

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)


def tree(text: str) -> Element:
    """The root of a document."""
    return Tree(text).open[0]
