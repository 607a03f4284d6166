"""Citations in docstrings: every key is listed in docs/references.md, and no source is cited by a bare number."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
REFERENCES = (ROOT / "docs" / "references.md").read_text(encoding="utf8")
KEYS = set(re.findall(r"^\*\*\[(.+?)\]\*\*", REFERENCES, re.M))
NUMBERS = set(re.findall(r"^\| (\d+) \|", REFERENCES, re.M))
# the catalogue of claims has its own numbers of sources, which the references explain
ROOMS_WITH_NUMBERS = {"claims", "report"}


def cited_texts() -> dict[str, str]:
    """The text of every source file and document that cites by key, with line breaks as spaces."""
    sources = [path for path in (ROOT / "src" / "helmscope").rglob("*.py") if not ROOMS_WITH_NUMBERS & set(path.parts)]
    documents = [ROOT / "ARCHITECTURE.md", ROOT / "docs" / "glossary.md", ROOT / "docs" / "tour.md"]
    return {path.name: re.sub(r"\s+", " ", path.read_text(encoding="utf8")) for path in (*sources, *documents)}


def test_every_citation_is_listed() -> None:
    assert len(KEYS) == 4
    count = 0
    for name, text in cited_texts().items():
        for cited in re.findall(rf"\[((?:{'|'.join(KEYS)})[^\]]*)\]", text):
            count += 1
            key, _, place = cited.partition(", ")
            assert set(key.split("; ")) <= KEYS, (name, cited)
            assert set(re.findall(r"\d+", place)) <= NUMBERS or place.startswith("figure"), (name, cited)
    assert count > 50


def test_no_source_is_cited_by_a_bare_number() -> None:
    bare = [name for name, text in cited_texts().items() if re.search(r"\b[Ss]ources? 00\d|\b00\d-\d+\b", text)]
    assert bare == []
