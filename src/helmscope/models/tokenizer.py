"""The tokenizer stored with a model, with checks of its rules before it runs.

Tokenizers run as native code on rules from a file. An invalid rule makes that code panic, which is not an ``Exception``
in Python and prints a backtrace; ``without_backtraces`` drops it. A short chain of rules can expand one character into
a billion and exhaust the memory of the process, so the rules are checked first. Not detected: a regular expression
whose matching does not terminate in reasonable time.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import os
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.models.library import quiet, transformers_library
from helmscope.store.atomic import one_line
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.*", "*.model", "tokenizer_config.json")
MAX_BYTES = 200_000_000  # in a tokenizer.json; large vocabularies take 40 million
MAX_GROWTH = 2_000  # tokens per character; tokenizers in use stay below 400
RULES = ("normalizer", "pre_tokenizer", "post_processor")
STANDARD_ERROR = 2  # the file descriptor, to which native code writes directly
PANIC = b"\nthread '"  # how the report of a panic begins
_redirecting = threading.Lock()  # the descriptor belongs to the whole process


def read_tokenizer(folder: Path) -> tuple[Any | None, str | None]:
    """The tokenizer in a model's folder and None, or None and the reason why it could not be read.

    Both are None if the folder has no tokenizer: the model can still be run on token ids.
    """
    loader = transformers_library().AutoTokenizer
    present = [path.name for pattern in FILES for path in sorted(folder.glob(pattern))]
    if not present:  # transformers would build an empty tokenizer
        return None, None
    try:
        check_file(folder / "tokenizer.json")
        with quiet(), without_backtraces():
            tokenizer = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return (tokenizer, None) if tokenizer.vocab_size else (None, None)
    except BaseException as error:  # a damaged file can raise anything; it is reported once a text is tokenized
        if not is_failure(error):
            raise
        return None, f"{present[0]}: {one_line(error)}"


def encode(texts: Sequence[str], tokenizer: Any, *, as_targets: bool = False, **options: Any) -> list[list[int]]:
    """The token ids of every text; raises ``HelmscopeError`` if the tokenizer fails or its rules could expand too much.

    ``as_targets``: the texts are those of a decoder, for which a tokenizer may have other rules, such as another
    language.
    """
    try:
        check_rules(_rules_of(tokenizer))
        has_targets = as_targets and "text_target" in inspect.signature(tokenizer.__call__).parameters
        # it would warn of texts longer than the context, which are refused or truncated afterwards
        with quiet(), without_backtraces():
            encodings = [
                tokenizer(text_target=text, **options) if has_targets else tokenizer(text, **options) for text in texts
            ]
        return [list(encoding["input_ids"]) for encoding in encodings]
    except BaseException as error:  # a tokenizer can raise anything
        if not is_failure(error):
            raise
        kind = type_with_article(tokenizer)
        raise HelmscopeError(f"tokenizer is {kind}, but it fails on these texts: {one_line(error)}") from error


def is_failure(error: BaseException) -> bool:
    """Whether an error is a failure, in Python or in Rust, and not an interrupt."""
    return isinstance(error, Exception) or _is_panic(error)


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


@contextmanager
def without_backtraces() -> Iterator[None]:
    """Context manager: within it, standard error is held out. It is printed at the end, without the report of a panic
    that ends the block; the exception has its message.
    """
    with _redirecting:
        try:
            original = os.dup(STANDARD_ERROR)
        except OSError:  # the process has no standard error
            yield
            return
        panicked = False
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), STANDARD_ERROR)
            try:
                yield
            except BaseException as error:
                panicked = _is_panic(error)
                raise
            finally:
                os.dup2(original, STANDARD_ERROR)
                os.close(original)
                held.seek(0)
                text = held.read()
                os.write(STANDARD_ERROR, text.partition(PANIC)[0] if panicked else text)


def check_file(path: Path) -> None:
    """Raise ``HelmscopeError`` if a tokenizer.json is too long or its rules expand by more than ``MAX_GROWTH``."""
    if not path.is_file():
        return
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise HelmscopeError(f"it has {size:,} bytes, but at most {MAX_BYTES:,} are read")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return  # the tokenizer itself reports it in more detail
    if isinstance(content, dict):
        check_rules([content.get(name) for name in RULES])


def check_rules(rules: Sequence[Any]) -> None:
    """Raise ``HelmscopeError`` if rules could expand one character into more than ``MAX_GROWTH`` tokens."""
    most = math.prod(map(growth, rules))
    if most > MAX_GROWTH:
        raise HelmscopeError(
            f"its rules can expand one character into {most:.3g} tokens, but at most {MAX_GROWTH:,} are allowed"
        )


def growth(rule: Any) -> float:
    """An upper bound of the number of characters or tokens that a rule makes of one character.

    For a sequence of rules it is the product. A rule is recognized by its fields, since older files have no type.
    Unicode transformations (lower case, NFKD) expand by a bounded factor, whatever the file, and are not counted.

    >>> double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    >>> growth({"type": "Sequence", "normalizers": [double] * 10})
    1024.0
    """
    if not isinstance(rule, dict):
        return 1.0
    inner = [step for part in ("normalizers", "pretokenizers", "processors") for step in _as_list(rule.get(part))]
    factor = 1.0
    if isinstance(rule.get("content"), str):
        factor = _replacement_growth(rule.get("pattern"), len(rule["content"]))
    elif isinstance(rule.get("prepend"), str):
        factor = 1.0 + len(rule["prepend"])
    elif isinstance(rule.get("precompiled_charsmap"), str):
        factor = _longest_replacement(rule["precompiled_charsmap"])
    elif isinstance(rule.get("special_tokens"), dict):
        factor = _template_growth(_as_list(rule.get("single")), rule["special_tokens"])
    elif rule.get("type") == "ByteLevel" or "add_prefix_space" in rule:
        factor = 4.0  # a character has up to four bytes, each of which becomes a character
    elif isinstance(rule.get("replacement"), str):  # replaces spaces, and may put one in front of the text
        factor = 2.0
    return factor * math.prod(map(growth, inner))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _replacement_growth(pattern: Any, length: int) -> float:
    """The growth by a replacement of ``length`` characters, for a fixed text or a regular expression; the latter may
    match before and after every character.
    """
    fixed = _field(pattern, "String")
    return max(1.0, length / len(fixed)) if isinstance(fixed, str) and fixed else 1.0 + 2 * length


def _longest_replacement(charsmap: str) -> float:
    """The length of the longest replacement in a SentencePiece table.

    Its format is the length of the index (4 bytes), the index, then texts that end in a zero byte.
    """
    try:
        table = base64.b64decode(charsmap)
    except ValueError:
        return 1.0
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return float(max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))))


def _template_growth(pieces: list[Any], special: Mapping[str, Any]) -> float:
    """The growth by a template: its number of copies of the text plus its special tokens."""
    total = 0
    for piece in pieces:
        token = special.get(str(_field(_field(piece, "SpecialToken"), "id")))
        total += len(_as_list(_field(token, "ids"))) or 1
    return float(max(1, total))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _rules_of(tokenizer: Any) -> list[Any]:
    """The rules of a tokenizer in memory, without those that its user wrote in Python."""
    backend, rules = getattr(tokenizer, "backend_tokenizer", None), []
    for name in RULES:
        part = getattr(backend, name, None)
        try:
            rules.append(None if part is None else json.loads(part.__getstate__()))
        except Exception:  # a rule written in Python cannot be serialized
            continue
    return rules
