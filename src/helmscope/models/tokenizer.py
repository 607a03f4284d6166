"""The tokenizer beside a model, before anybody trusts it.

Tokenizers run as native code on rules that the file brings along. A broken rule makes that code panic, which is not an
``Exception`` in Python. A short chain of rules can make a billion characters of one, and take the whole process down
before anything can stop it, so the rules are read first. What is not seen here: a regular expression that never ends.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.models.library import quiet, transformers_library
from helmscope.store.atomic import one_line
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.*", "*.model", "tokenizer_config.json")
MOST_BYTES = 200_000_000  # of a tokenizer.json; large vocabularies take 40 million
MOST_GROWTH = 2_000  # tokens from one character; the tokenizers in use stay below 400
RULES = ("normalizer", "pre_tokenizer", "post_processor")


def read_tokenizer(folder: Path) -> tuple[Any | None, str | None]:
    """The tokenizer beside a model, or why it could not be read; neither where there is none: the model still takes
    token ids.
    """
    loader = transformers_library().AutoTokenizer
    there = [path.name for pattern in FILES for path in sorted(folder.glob(pattern))]
    if not there:  # or transformers makes an empty one
        return None, None
    try:
        check_file(folder / "tokenizer.json")
        with quiet():
            found = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return (found, None) if found.vocab_size else (None, None)
    except BaseException as error:  # whatever a damaged file makes transformers stumble over; texts will say it
        if not is_failure(error):
            raise
        return None, f"{there[0]}: {one_line(error)}"


def encode(texts: Sequence[str], tokenizer: Any, *, as_targets: bool = False, **options: Any) -> list[list[int]]:
    """The token ids of every text; a tokenizer that fails, or could grow beyond all bounds, is one sentence. What a
    decoder is to write may have rules of its own (``as_targets``), such as those of another language.
    """
    try:
        check_rules(_rules_of(tokenizer))
        apart = as_targets and "text_target" in inspect.signature(tokenizer.__call__).parameters
        given = [tokenizer(text_target=text, **options) if apart else tokenizer(text, **options) for text in texts]
        return [list(each["input_ids"]) for each in given]
    except BaseException as error:  # whatever a tokenizer stumbles over
        if not is_failure(error):
            raise
        kind = type(tokenizer).__name__
        raise HelmscopeError(f"tokenizer is a {kind}, but it fails on these texts: {one_line(error)}") from error


def is_failure(error: BaseException) -> bool:
    """Whether code has failed, in Python or in Rust, and was not told to stop."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def check_file(path: Path) -> None:
    """Refuse a tokenizer.json that is too long, or whose rules grow beyond ``MOST_GROWTH``."""
    if not path.is_file():
        return
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise HelmscopeError(f"it has {size:,} bytes, but at most {MOST_BYTES:,} are read")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return  # which the tokenizer itself says better
    if isinstance(content, dict):
        check_rules([content.get(name) for name in RULES])


def check_rules(rules: Sequence[Any]) -> None:
    """Refuse rules that could make more than ``MOST_GROWTH`` tokens of one character."""
    most = math.prod(map(growth, rules))
    if most > MOST_GROWTH:
        raise HelmscopeError(
            f"its rules can make {most:.3g} tokens of one character, but at most {MOST_GROWTH:,} are allowed"
        )


def growth(rule: Any) -> float:
    """At most how many characters, or tokens, a rule makes of one: the product over a sequence of rules.

    A rule is known by its fields, since older files name no type. What Unicode itself does (lower case, NFKD) is
    bounded, whatever the file says, and left out.

    >>> double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    >>> growth({"type": "Sequence", "normalizers": [double] * 10})
    1024.0
    """
    if not isinstance(rule, dict):
        return 1.0
    inner = [each for part in ("normalizers", "pretokenizers", "processors") for each in _list(rule.get(part))]
    own = 1.0
    if isinstance(rule.get("content"), str):
        own = _replaced(rule.get("pattern"), len(rule["content"]))
    elif isinstance(rule.get("prepend"), str):
        own = 1.0 + len(rule["prepend"])
    elif isinstance(rule.get("precompiled_charsmap"), str):
        own = _longest_in(rule["precompiled_charsmap"])
    elif isinstance(rule.get("special_tokens"), dict):
        own = _framed(_list(rule.get("single")), rule["special_tokens"])
    elif rule.get("type") == "ByteLevel" or "add_prefix_space" in rule:
        own = 4.0  # a character has up to four bytes, each of which becomes one
    elif isinstance(rule.get("replacement"), str):  # of spaces, with one more in front of the text
        own = 2.0
    return own * math.prod(map(growth, inner))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _replaced(pattern: Any, length: int) -> float:
    """The growth by a replacement of that length: of a fixed text, or of a regular expression, which may match before
    and behind every character.
    """
    fixed = _field(pattern, "String")
    return max(1.0, length / len(fixed)) if isinstance(fixed, str) and fixed else 1.0 + 2 * length


def _longest_in(charsmap: str) -> float:
    """The longest replacement in a table of SentencePiece: the length of its index (4 bytes), the index, texts that end
    in a zero byte.
    """
    try:
        table = base64.b64decode(charsmap)
    except ValueError:
        return 1.0
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return float(max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))))


def _framed(pieces: list[Any], special: Mapping[str, Any]) -> float:
    """The growth by a template: the text as often as it stands there, and the special tokens around it."""
    total = 0
    for piece in pieces:
        told = special.get(str(_field(_field(piece, "SpecialToken"), "id")))
        total += len(_list(_field(told, "ids"))) or 1
    return float(max(1, total))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _rules_of(tokenizer: Any) -> list[Any]:
    """The rules of a tokenizer in memory, as far as they are those of the tokenizers library and not its user's."""
    inner, found = getattr(tokenizer, "backend_tokenizer", None), []
    for name in RULES:
        part = getattr(inner, name, None)
        try:
            found.append(None if part is None else json.loads(part.__getstate__()))
        except Exception:  # a rule that is written in Python has no such form
            continue
    return found
