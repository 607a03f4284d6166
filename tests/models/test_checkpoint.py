"""Files that are damaged or hostile give our errors and no others; whole folders load."""

from __future__ import annotations

import json
import random
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

from helmscope.models.checkpoint import check_file, check_folder
from helmscope.models.load import load, load_all
from helmscope.models.record import record
from helmscope.types import HelmscopeError, type_with_article
from support.model_families import inputs_of, tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    return tmp_path


def file_with(path, header: bytes, body: bytes = b"", length: int | None = None):
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + body)
    return path


def test_a_valid_file(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    assert set(check_file(tmp_path / "x.safetensors")) == {"a", "b"}


def tensor(**changes):
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": 1}',
        b'{"a": {}, "a": {}}',
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({"a": tensor(dtype="F33")}).encode(),
        json.dumps({"a": tensor(dtype=[1])}).encode(),
        json.dumps({"a": tensor(shape=[-1])}).encode(),
        json.dumps({"a": tensor(shape=[2**62, 2**62])}).encode(),
        json.dumps({"a": tensor(shape=[True])}).encode(),
        json.dumps({"a": tensor(shape="1")}).encode(),
        json.dumps({"a": tensor(data_offsets=[4, 0])}).encode(),
        json.dumps({"a": tensor(data_offsets=[0, 4, 8])}).encode(),
        json.dumps({"a": tensor(data_offsets=[1e400, 4])}).encode(),
        json.dumps({"a": tensor(), "b": tensor()}).encode(),
        json.dumps({"a": tensor(data_offsets=[4, 8])}).encode(),
        json.dumps({"a": tensor() | {"more": 1}}).encode(),
    ],
)
def test_invalid_headers(tmp_path, header):
    with pytest.raises(HelmscopeError, match="file"):
        check_file(file_with(tmp_path / "x.safetensors", header, b"\0" * 4))


@pytest.mark.parametrize("length", [2**63, 2**40, 100, 10**8 + 1])
def test_a_header_longer_than_its_file(tmp_path, length):
    with pytest.raises(HelmscopeError, match="cut short"):
        check_file(file_with(tmp_path / "x.safetensors", b"{}", length=length))


def test_ten_thousand_fuzzed_headers(tmp_path):
    """Bytes changed, removed or repeated: either the file is still valid or ``HelmscopeError`` is raised."""
    whole = {f"t{k}": torch.zeros(3, k + 1) for k in range(4)}
    path = tmp_path / "x.safetensors"
    save_file(whole, path)
    good, draw, refused = path.read_bytes(), random.Random(0), 0
    end = 8 + int.from_bytes(good[:8], "little")
    for _ in range(10_000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(end)
            match draw.randrange(4):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at : at + draw.randint(1, 9)]
                case 2:
                    data[at:at] = bytes(draw.choice(b'{}[]",:0123456789-eE.') for _ in range(draw.randint(1, 9)))
                case _:
                    data[at:at] = data[at : at + draw.randint(1, 30)]
        path.write_bytes(bytes(data))
        try:
            check_file(path)
        except HelmscopeError as error:
            refused += "\n" not in str(error)
    assert refused > 9_000


def test_a_folder_loads_with_its_origin(folder):
    loaded = load(folder)
    assert set(loaded.origin.hashes) == {"model.safetensors"}
    assert (loaded.origin.family, loaded.origin.attention, loaded.tokenizer) == ("gpt2", "sdpa", None)
    assert load(folder, dtype=torch.float64).model.dtype == torch.float64
    recording = record(folder, inputs_of("gpt2"))
    assert recording.certificate.ok
    manifest = recording.manifest()
    assert set(manifest.inputs) == {"model.safetensors", "texts"}
    assert manifest.parameters["attention"] == "sdpa"
    assert type(manifest).from_json(manifest.to_json()) == manifest
    assert [(each.origin.name, each.origin.folder) for each in load_all([folder] * 2)] == [
        (folder.name, str(folder))
    ] * 2


def test_a_model_in_memory():
    model = tiny_model("llama")
    assert load(model).model is model
    with pytest.raises(HelmscopeError, match="model is a Linear, but it must be a transformers PreTrainedModel"):
        load(torch.nn.Linear(1, 1))
    with pytest.raises(HelmscopeError, match="model is an int"):
        load(3)


def test_the_error_names_a_tensor_with_nan(folder):
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].ln_1.weight[3] = torch.nan
    with pytest.raises(HelmscopeError, match=r"'transformer\.h\.1\.ln_1\.weight'"):
        load(model)
    model.save_pretrained(folder)
    with pytest.raises(HelmscopeError, match=r"'transformer\.h\.1\.ln_1\.weight'"):
        load(folder)


def test_a_model_too_large_for_the_memory_is_refused_before_it_is_read(folder, monkeypatch):
    """The file is sparse; hashing its 4 TB would take hours."""
    size = 4 * 10**12
    header = json.dumps({"a": tensor(shape=[size // 4], data_offsets=[0, size])}).encode()
    file_with(folder / "model.safetensors", header)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(8 + len(header) + size)
    monkeypatch.setattr("helmscope.models.checkpoint.hash_file", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(HelmscopeError, match=r"1,000,000,000,000 weights in float32, but that makes 4e\+03 GB"):
        load(folder)


def test_invalid_folders_raise(folder, tmp_path):
    missing = tmp_path / "missing"
    model = tiny_model("gpt2")
    state = {k: v.clone() for k, v in model.state_dict().items() if "h.2.mlp" not in k and k != "lm_head.weight"}
    model.config.save_pretrained(missing)
    save_file(state, missing / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HelmscopeError, match=r"lack the tensor 'transformer\.h\.2\.mlp"):
        load(missing)
    (missing / "model.safetensors").rename(missing / "pytorch_model.bin")
    with pytest.raises(HelmscopeError, match=r"only pickled weights.*convert them"):
        load(missing)
    (missing / "pytorch_model.bin").unlink()
    with pytest.raises(HelmscopeError, match="no weight files"):
        load(missing)
    cut = folder / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(HelmscopeError, match=r"holds .* bytes of tensors"):
        check_folder(folder)
    with pytest.raises(HelmscopeError, match="could not be loaded from the Hub's local cache: leave out offline"):
        load("no-such-name/anywhere", offline=True)
    for name in ("./nope", "no such name", "a/b/c", "x" * 5000):
        with pytest.raises(HelmscopeError, match=r"no such folder, and it is neither a bundled model \(A, B, tied\)"):
            load(name, offline=True)
    for name, right in (("a", "A"), ("Tied", "tied")):
        with pytest.raises(HelmscopeError, match=f"unknown model '{name}': did you mean '{right}'"):
            load(name)
    with pytest.raises(HelmscopeError, match=r"only a model on the Hub has revisions: pass the folder"):
        load(folder, revision="step1")
    for models, revisions, name in (
        ("a/b", (None,), "models"),
        (folder, (None,), "models"),
        (["a"], "x", "revisions"),
    ):
        with pytest.raises(HelmscopeError, match=f"{name} is .* but it must be a list, even"):
            load_all(models, revisions=revisions)
    with pytest.raises(HelmscopeError, match="unknown option 'foo'"):
        load_all(["a"], foo=1)


def test_an_unreachable_hub_is_named_as_the_reason(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", _no_such_host)
    with pytest.raises(HelmscopeError, match=r"could not be loaded from the Hub \(the Hub cannot be reached\)$"):
        load("C")


def _no_such_host(*_args, **_options):
    raise socket.gaierror(-2, "Name or service not known")


def test_models_are_loaded_from_the_hub_cache(tmp_path, monkeypatch):
    """The layout of the Hub's cache, written by the test: two revisions of one model."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--tiny"
    commits = {"main": "a" * 40, "step100": "b" * 40}
    for seed, (name, commit) in enumerate(commits.items()):
        (home / "refs").mkdir(parents=True, exist_ok=True)
        (home / "refs" / name).write_text(commit)
        tiny_model("gpt2", seed=seed).save_pretrained(home / "snapshots" / commit)
    first, second = load_all(["org/tiny"], revisions=[None, "step100"], offline=True)
    assert (first.origin.revision, second.origin.revision) == ("a" * 40, "b" * 40)
    assert first.origin.hashes != second.origin.hashes
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)
    assert torch.equal(
        load("org/tiny", revision="b" * 40, offline=True).model.lm_head.weight, second.model.lm_head.weight
    )


def test_code_in_a_repository_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('this must never run')")
    with pytest.raises(HelmscopeError, match="could not be loaded"):
        load(folder)


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b'{"weight_map": {"a": "../model.safetensors"}}',
        b'{"weight_map": {"a": "gone.safetensors"}}',
        b'{"weight_map": {"a": "%s"}}' % (b"x" * 5000),  # longer than a file system can take
    ],
)
def test_an_index_that_lists_missing_files_raises(folder, index):
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(HelmscopeError, match=r"weight_map|is not in its folder"):
        load(folder)


def test_the_error_names_a_tensor_of_wrong_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_inner": 40}))
    with pytest.raises(HelmscopeError, match=r"mlp\.c_"):
        load(folder)


def test_the_suggested_conversion_of_pickles_keeps_the_head(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text())
    for named, kind in [
        (["GPT2LMHeadModel"], "GPT2LMHeadModel"),
        (["BertForMaskedLM"], "BertForMaskedLM"),
        (["x; import os"], "AutoModelForCausalLM"),
        (["x'\"$(rm)"], "AutoModelForCausalLM"),
        ([], "AutoModelForCausalLM"),
        (None, "AutoModelForCausalLM"),
        ([3], "AutoModelForCausalLM"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | {"architectures": named}))
        with pytest.raises(HelmscopeError, match=rf"transformers import {kind}; {kind}\.from_pretrained"):
            load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(HelmscopeError, match=r"AutoModelForCausalLM\.from_pretrained"):
        load(folder)


@pytest.mark.parametrize("whole", [True, False])
def test_more_layers_in_the_files_than_in_the_configuration(folder, whole):
    """In the files of a full model and of its trunk; tensors outside the layers are ignored."""
    model = tiny_model("gpt2")
    (model if whole else model.transformer).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2Model"], "n_layer": 2}))
    with pytest.raises(
        HelmscopeError, match=r"hold the tensor '(transformer\.)?h\.2\..*but by config.json 'h' has 2 layers"
    ):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2Model"]}))
    state = {k: v.clone() for k, v in model.transformer.state_dict().items()}
    more = {"foo.9.bar": torch.ones(2), "h.0.attn.extra": torch.ones(2)}
    save_file(state | more, folder / "model.safetensors", metadata={"format": "pt"})
    assert len(load(folder).model.h) == 3


def configured(folder, family, **changes):
    """A model folder with a modified config.json."""
    tiny_model(family).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"n_layer": 10**9}, r"n_layer = 1000000000, but it may be at most 10,000, and the files hold"),
        ("albert", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, but it may be at most"),
        ("albert", {"num_hidden_groups": 10**9}, "num_hidden_groups = 1000000000, but it may be at most"),
        ("gpt2", {"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers = 1000000000, but it may"),
        ("gpt2", {"num_labels": 10**9}, "num_labels = 1000000000, but it may be at most 2,000,000"),
        (
            "gpt2",
            {"n_layer": 9_999},
            r"asks for more than [\d,]+ tensors and modules, but its files hold [\d,]+ numbers",
        ),
        (
            "gpt2",
            {"n_embd": 10**8},
            r"asks for more than [\d,]+ numbers, but its files hold [\d,]+ numbers in 40 tensors",
        ),
        ("gpt2", {"vocab_size": 10**12}, r"asks for more than [\d,]+ numbers"),
        ("gpt2", {"n_positions": 10**8}, r"asks for more than [\d,]+ numbers"),
        ("llama", {"intermediate_size": 10**11}, r"asks for more than [\d,]+ numbers"),
        ("mixtral", {"num_local_experts": 10**9}, r"asks for more than [\d,]+ numbers"),
    ],
)
def test_a_configuration_that_requests_more_than_the_files_hold(tmp_path, family, changes, message):
    """Nothing of that size may be allocated: none of these would fit into memory, or finish."""
    with pytest.raises(HelmscopeError, match=message):
        load(configured(tmp_path, family, **changes))


def test_a_tied_block_may_be_called_more_often_than_the_files_have_layers(tmp_path):
    assert load(configured(tmp_path, "albert", num_hidden_layers=500)).model.config.num_hidden_layers == 500


@pytest.mark.parametrize(
    ("dtype", "shown"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")]
)
@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "unheard-of"}}])
def test_quantized_weights_raise(tmp_path, dtype, shown, config):
    """transformers would use the codes as weights and ignore the scale."""
    folder, name = configured(tmp_path, "llama", **config), "model.layers.0.mlp.up_proj.weight"
    state = load_file(folder / "model.safetensors")
    scale = state[name].abs().max() / 100
    state |= {name: (state[name] / scale).to(dtype), f"{name}_scale": scale[None]}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HelmscopeError, match=rf"the tensor '{name}' as {shown}, but weights must be F64, F32"):
        load(folder)


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "weight.SCB", "scales"])
def test_a_scale_that_is_not_applied_raises(folder, scale):
    state = load_file(folder / "model.safetensors")
    name = f"transformer.h.0.mlp.c_fc.{scale}"
    save_file(state | {name: torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HelmscopeError, match=rf"the scale '{name}', but GPT2LMHeadModel does not apply it"):
        load(folder)


def test_integer_tensors_that_are_not_weights_are_ignored(folder):
    """Masks and positions, which older checkpoints store with their weights."""
    state = load_file(folder / "model.safetensors")
    more = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8), "position_ids": torch.arange(8)}
    save_file(state | more, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder).origin.note is None


def test_quantized_weights_in_memory_raise():
    model = tiny_model("gpt2")
    matrix = model.transformer.h[0].mlp.c_fc
    matrix.weight = torch.nn.Parameter(matrix.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(HelmscopeError, match=r"'transformer\.h\.0\.mlp\.c_fc\.weight' in float8_e4m3fn, but weights"):
        load(model)


@pytest.mark.parametrize("family", ["mpnet", "bert", "gpt_neox"])
def test_a_head_missing_from_the_files(tmp_path, family):
    """As in popular sentence encoders: the files of a trunk, while config.json names the full model."""
    whole = tiny_model(family)
    whole.base_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [type(whole).__name__]}))
    loaded = load(tmp_path)
    assert type(loaded.model) is type(whole.base_model)
    assert loaded.origin.note.startswith(f"config.json names {type_with_article(whole)}, but the files lack its head")
    ids = inputs_of(family)
    recording = record(loaded, ids)
    assert recording.certificate.ok
    assert recording.certificate["files"].ok is None
    assert recording.certificate["files"].statement == loaded.origin.note
    assert recording.certificate["head"].ok is None
    wanted = record(whole, ids)
    assert torch.equal(recording.trajectory.states, wanted.trajectory.states)
    assert all(line.name != "files" for line in wanted.certificate.lines)


def test_the_error_names_a_tensor_missing_from_the_trunk(tmp_path):
    """Even if the head is missing too."""
    trunk = tiny_model("mpnet").base_model
    trunk.config.architectures = ["MPNetForMaskedLM"]
    trunk.config.save_pretrained(tmp_path)
    state = {
        name: value.clone() for name, value in trunk.state_dict().items() if "layer.1.attention.attn.k" not in name
    }
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        HelmscopeError, match=r"lack the tensor 'mpnet\.encoder\.layer\.1\.attention\.attn\.k\.bias' and 1"
    ):
        load(tmp_path)


def test_a_pooler_missing_from_the_files(tmp_path):
    trunk = tiny_model("bert").base_model
    trunk.config.architectures = ["BertModel"]
    trunk.save_pretrained(tmp_path)
    assert trunk.pooler is None
    loaded = load(tmp_path)
    assert loaded.model.pooler is None
    assert "lack its head, 'pooler.dense.bias' and 1 more: it is loaded without" in loaded.origin.note
    assert record(loaded, inputs_of("bert")).certificate.ok


def test_loading_is_silent_and_restores_the_logging_of_transformers(folder, capfd):
    from transformers.utils import logging

    state = {k: v.clone() for k, v in tiny_model("gpt2").state_dict().items() if k != "lm_head.weight"}
    save_file(state | {"foo": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    capfd.readouterr()
    try:
        load(folder)
        assert capfd.readouterr() == ("", "")
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.WARNING, True)
    finally:
        logging.set_verbosity(before[0])
        if not before[1]:
            logging.disable_progress_bar()
