"""Tokenizers that panic, or that would fill the memory: one sentence each. Those in use pass."""

from __future__ import annotations

import base64
import json
import os
import threading

import pytest
import transformers as tf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import helmscope as hs
from helmscope.models.record import record
from helmscope.models.tokenizer import MAX_GROWTH, growth, without_backtraces
from helmscope.types import HelmscopeError
from support.children import run_python
from support.model_families import tiny_model

PLAIN = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
}


def folder_with(folder, **parts):
    """A model folder with a handwritten tokenizer.json."""
    tiny_model("gpt2").save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(PLAIN | parts))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def charsmap(*texts: str) -> dict:
    """A SentencePiece table with an empty index."""
    table = (4).to_bytes(4, "little") + bytes(4) + b"".join(text.encode() + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def times(count: int) -> dict:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * count}


def test_a_plain_tokenizer_is_read(tmp_path):
    assert record(folder_with(tmp_path), ["a b a"]).batch.tokens == (("a", "b", "a"),)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff").decode()}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"], "continuing_subword_prefix": "##"}},
    ],
)
def test_a_panic_while_reading_the_tokenizer(tmp_path, parts, capfd):
    """The model is loaded all the same and can be run on token ids; no backtrace of native code is printed."""
    folder = folder_with(tmp_path, **parts)
    capfd.readouterr()
    loaded = hs.load(folder)
    assert capfd.readouterr().err == ""
    assert loaded.tokenizer is None
    assert loaded.tokenizer_error.startswith("tokenizer.json: ")
    with pytest.raises(HelmscopeError, match=r"its tokenizer could not be read \(tokenizer.json: .*pass tokenizer="):
        record(loaded, ["a b"])


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
)
def test_a_panic_on_the_texts(tmp_path, parts, capfd):
    loaded = hs.load(folder_with(tmp_path, **parts))
    capfd.readouterr()
    with pytest.raises(HelmscopeError, match=r"tokenizer is a .*, but it fails on these texts: "):
        record(loaded, ["a b"])
    assert capfd.readouterr().err == ""


class PanicException(BaseException):  # named as that of native code, by which it is recognized
    pass


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (None, "a warning\n\nthread 'x' panicked\n"),
        (KeyError("x"), "a warning\n\nthread 'x' panicked\n"),
        (PanicException("x"), "a warning\n"),
    ],
)
def test_only_the_report_of_a_panic_is_dropped(capfd, error, shown):
    def report():
        with without_backtraces():
            os.write(2, b"a warning\n\nthread 'x' panicked\n")
            if error is not None:
                raise error

    if error is None:
        report()
    else:
        with pytest.raises(type(error)):
            report()
    os.write(2, b"afterwards")
    assert capfd.readouterr().err == shown + "afterwards"


def test_threads_hold_back_standard_error_one_after_another(capfd):
    def report(name):
        with without_backtraces():
            os.write(2, name)

    threads = [threading.Thread(target=report, args=(b"%d\n" % k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(capfd.readouterr().err.split()) == [str(k) for k in range(8)]


def test_a_process_without_standard_error_tokenizes_too():
    code = """
import os, sys
from helmscope.models.tokenizer import without_backtraces
os.close(2)
with without_backtraces():
    print("done")
"""
    assert run_python(code, check=True).stdout == "done\n"


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": times(10**6)},
        {"normalizer": {"type": "Sequence", "normalizers": [times(100)] * 5}},
        {
            "normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "a" * 100}] * 5}
        },  # as older files say it
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 10**5}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 1000}, times(100)]}},
        {"normalizer": {"type": "Sequence", "normalizers": [charsmap("a" * 300), charsmap("b" * 300)]}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True}] * 40,
            }
        },
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 200,
                "pair": [],
                "special_tokens": {"a": {"id": "a", "ids": [0] * 200, "tokens": ["a"] * 200}},
            }
        },
        # a token that is normalized when it is added would set it off while the file is read
        {
            "normalizer": {"type": "Sequence", "normalizers": [times(100)] * 5},
            "added_tokens": [
                {"id": 3, "content": "aa", "single_word": False, "lstrip": False, "rstrip": False}
                | {"normalized": True, "special": False}
            ],
        },
    ],
)
def test_rules_that_expand_without_bound_raise(tmp_path, parts):
    loaded = hs.load(folder_with(tmp_path, **parts))
    assert "tokens, but at most 2,000 are allowed" in loaded.tokenizer_error
    with pytest.raises(HelmscopeError, match=r"its rules can expand one character into \S+ tokens, but at most 2,000"):
        record(loaded, ["a b"])


def test_rules_of_a_tokenizer_in_memory_are_checked_too():
    made = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 100)] * 5)
    words = tf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    with pytest.raises(HelmscopeError, match=r"fails on these texts: its rules can expand one character into 1e\+10"):
        record(tiny_model("gpt2"), ["a"], tokenizer=words)


def test_a_file_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("helmscope.models.tokenizer.MAX_BYTES", 100)
    assert "bytes, but at most 100 are read" in hs.load(folder_with(tmp_path)).tokenizer_error


def test_the_rules_in_use_are_far_from_the_bound(tmp_path):
    """The rules of ALBERT, T5 and RoBERTa that expand texts."""
    albert = [
        {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
        *({"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")),
        charsmap("صلى الله عليه وسلم", "ﬀ"),  # the longest of Unicode's own
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]
    frame = processors.TemplateProcessing(single="a $A b", special_tokens=[("a", 0), ("b", 1)])
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": albert},
        "pre_tokenizer": json.loads(pre_tokenizers.Metaspace().__getstate__()),
        "post_processor": json.loads(frame.__getstate__()),
    }
    assert (
        growth(parts["normalizer"]) * growth(parts["pre_tokenizer"]) * growth(parts["post_processor"]) == 18 * 3 * 2 * 3
    )
    assert MAX_GROWTH > 5 * 18 * 3 * 2 * 3
    level = json.loads(pre_tokenizers.ByteLevel().__getstate__())
    assert hs.load(folder_with(tmp_path, pre_tokenizer=level)).tokenizer is not None


def test_a_folder_without_a_tokenizer_gets_none(tmp_path):
    """transformers would build one with a few special tokens, to which every text is unknown."""
    tiny_model("albert").save_pretrained(tmp_path)
    loaded = hs.load(tmp_path)
    assert (loaded.tokenizer, loaded.tokenizer_error) == (None, None)


def test_an_interrupt_is_not_swallowed():
    class Stopped:
        pad_token_id = 0

        def __call__(self, text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(tiny_model("gpt2"), ["a"], tokenizer=Stopped())
