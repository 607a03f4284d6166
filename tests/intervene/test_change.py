"""Edits of a forward pass against the same forward written by hand; afterwards the model is unchanged."""

from __future__ import annotations

import pytest
import torch

from helmscope.intervene.attention import AblateHead, MaskKeys, Perturb, ReplaceKernel
from helmscope.intervene.change import edited, with_parameters
from helmscope.intervene.states import Ablate, Add, Patch, Replace
from helmscope.models.keep import KeptTensors
from helmscope.models.record import record
from helmscope.models.sites import Site
from helmscope.types import HelmscopeError
from support.model_families import CLASSES, inputs_of, tiny_model

FIRST_NOISE = [0.40669912, 1.14922528]  # Philox of NumPy's SeedSequence(4, spawn_key=(1, 0)): layer 1, text 0
TAPPED = [family for family in CLASSES if family != "bloom"]


def outputs(model, family, **options):
    with torch.no_grad():
        return model(input_ids=inputs_of(family), **options)[0]


@pytest.fixture(scope="module", params=CLASSES)
def case(request):
    model = tiny_model(request.param)
    return request.param, model, record(model, inputs_of(request.param), batch_size=2)


def gpt2_by_hand(model, ids, skip):
    """GPT-2 written out, without the half-layers in ``skip``."""
    trunk, heads = model.transformer, 4
    with torch.no_grad():
        x = trunk.wte(ids) + trunk.wpe(torch.arange(ids.shape[1]))
        for number, block in enumerate(trunk.h):
            if (Site.ATTENTION, number) not in skip:
                q, k, v = block.attn.c_attn(block.ln_1(x)).split(32, -1)
                q, k, v = (part.view(*part.shape[:2], heads, 8).transpose(1, 2) for part in (q, k, v))
                logits = q @ k.mT / 8**0.5
                logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
                read = torch.softmax(logits, -1) @ v
                for head in range(heads):
                    if ("head", number, head) in skip:
                        read[:, head] = 0
                x = x + block.attn.c_proj(read.transpose(1, 2).flatten(2))
            if (Site.MLP, number) not in skip:
                x = x + block.mlp(block.ln_2(x))
        return model.lm_head(trunk.ln_f(x))


def test_ablations_by_hand():
    model = tiny_model("gpt2")
    ids = inputs_of("gpt2")
    recording = record(model, ids)
    for site in (Site.ATTENTION, Site.MLP):
        for layer in range(3):
            with edited(recording, Ablate([layer], site=site)):
                found = outputs(model, "gpt2")
            assert (found - gpt2_by_hand(model, ids, {(site, layer)})).abs().max() < 1e-6
    with edited(recording, AblateHead([1], heads=[0, 2])):
        found = outputs(model, "gpt2")
    assert (found - gpt2_by_hand(model, ids, {("head", 1, 0), ("head", 1, 2)})).abs().max() < 1e-6
    assert (found - outputs(model, "gpt2")).abs().max() > 1e-5


def test_edits_that_put_back_the_same_values_change_nothing(case):
    family, _, recording = case
    plain = recording.logits()
    size = plain.abs().max()
    for site in (Site.INPUT, Site.MIDDLE, Site.OUTPUT):
        for layer in range(3):
            again = recording.under(Patch([layer], site=site, source=recording))
            assert (again.logits() - plain).abs().max() <= 2e-6 * size, (site, layer)
    assert torch.equal(recording.under(Add(site=Site.MLP, value=0.0)).logits(), plain) or family == "granite"
    if recording.anatomy.tapped:
        assert (recording.under(ReplaceKernel()).logits() - plain).abs().max() <= 2e-6 * size
        assert torch.equal(recording.under(Perturb(sigma=0.0)).logits(), plain)
        no_keys = torch.zeros(3, 13, dtype=torch.bool)
        assert torch.equal(recording.under(MaskKeys(keys=no_keys)).logits(), plain)


def test_writes_of_another_recording(case):
    family, model, recording = case
    other = record(model, inputs_of(family, seed=9), keep=KeptTensors.WRITES)
    for site in (Site.ATTENTION, Site.MLP):
        value = other.kept[f"{site.value} write"][1]
        wanted = recording.under(Replace([1], site=site, value=value)).logits()
        assert torch.equal(recording.under(Patch([1], site=site, source=other)).logits(), wanted)
        assert (wanted - recording.logits()).abs().max() > 1e-5


def test_a_replaced_state_is_recorded(case):
    _, _, recording = case
    new = torch.randn(3, 13, 32, generator=torch.Generator().manual_seed(3))
    tokens = torch.zeros(3, 13, dtype=torch.bool)
    tokens[:, 4:6] = True
    for site, depth in ((Site.INPUT, 2), (Site.MIDDLE, 3), (Site.OUTPUT, 4)):
        edited = recording.under(Replace([1], site=site, value=new, tokens=tokens))
        state = edited.residual_stream(depth=depth)
        assert (state[tokens] - new[tokens]).abs().max() < 1e-5, site
        assert (state[~tokens] - recording.residual_stream(depth=depth)[~tokens]).abs().max() < 1e-5
        assert (edited.logits() - recording.logits()).abs().max() > 1e-4


def test_frozen_tokens_do_not_change(case):
    _, _, recording = case
    frozen = torch.ones(3, 13, dtype=torch.bool)
    frozen[:, 5] = False
    states = recording.trajectory.states[2].roll(1, 0)
    went = recording.resume(depth=2, states=states, frozen=frozen).trajectory.states
    free = recording.resume(depth=2, states=states).trajectory.states
    old = recording.trajectory.states[2:]
    assert (went[0] - states).abs().max() < 1e-5
    assert (went[1:][:, frozen] - old[1:][:, frozen]).abs().max() < 1e-5
    assert (went[1:][:, ~frozen] - old[1:][:, ~frozen]).abs().max() > 1e-4
    assert (free[1:][:, frozen] - old[1:][:, frozen]).abs().max() > 1e-4


@pytest.mark.parametrize("family", TAPPED)
def test_masked_keys_get_no_weight(family):
    model = tiny_model(family)
    recording = record(model, inputs_of(family))
    keys = torch.zeros(3, 13, dtype=torch.bool)
    keys[:, 3] = True
    kernel = recording.under(MaskKeys([1], keys=keys)).kernel(layer=1)
    rows = [k for k in range(13) if k != 3]
    assert kernel[:, :, rows, 3].abs().max() == 0
    assert (kernel.sum(-1) - recording.kernel(layer=1).sum(-1)).abs().max() < 1e-5
    first = torch.zeros(3, 13, dtype=torch.bool)
    first[:, 0] = True
    kernel = recording.under(MaskKeys(keys=first)).kernel(layer=1)
    assert torch.isfinite(kernel).all()
    if recording.certificate["causality"].ok:
        assert kernel.triu(1).abs().max() == 0  # a masked first token still attends only to itself
        assert (kernel[:, :, 0, 0] == recording.kernel(layer=1)[:, :, 0, 0]).all()


@pytest.mark.parametrize("site", [Site.QUERY, Site.KEY, Site.VALUE, Site.MIDDLE, Site.MLP])
def test_noise_is_repeatable_and_grows_with_its_scale(site):
    model = tiny_model("llama")
    recording = record(model, inputs_of("llama"))
    plain = recording.logits()
    once, twice = (recording.under(Perturb(site=site, relative_sigma=0.1, seed=5)).logits() for _ in range(2))
    other = recording.under(Perturb(site=site, relative_sigma=0.1, seed=6)).logits()
    assert torch.equal(once, twice)
    assert not torch.equal(once, other)
    stronger = recording.under(Perturb(site=site, relative_sigma=1.0, seed=5)).logits()
    assert 0 < (once - plain).norm() < (stronger - plain).norm()


def test_the_model_is_restored_after_an_exception(case):
    family, model, recording = case
    before, own = outputs(model, family), model.config._attn_implementation
    changes = [Ablate(site=Site.MLP)] + ([Perturb(relative_sigma=0.1)] if recording.anatomy.tapped else [])

    def interrupted():
        with edited(recording, *changes):
            outputs(model, family)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        interrupted()
    assert torch.equal(outputs(model, family), before)
    assert model.config._attn_implementation == own
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_parameters_are_restored_exactly():
    model = tiny_model("gpt2")
    name = "transformer.h.1.mlp.c_proj.weight"
    before, value = outputs(model, "gpt2"), dict(model.named_parameters())[name]
    kept = value.detach().clone()

    def interrupted():
        with with_parameters(model, {name: torch.zeros_like(value)}):
            assert not torch.equal(outputs(model, "gpt2"), before)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert torch.equal(value, kept)
    assert torch.equal(outputs(model, "gpt2"), before)


def test_noise_is_absolute_or_relative_and_depends_on_its_seed_only():
    """As [Additive transport] prints it, sigma is the standard deviation of the noise, whatever the size of the
    keys."""
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"), keep=KeptTensors.KEYS)
    keys = recording.kept["key"]
    for change, size in (
        (Perturb([1], site=Site.KEY, sigma=0.3, seed=4), torch.tensor(0.3)),
        (Perturb([1], site=Site.KEY, relative_sigma=0.3, seed=4), 0.3 * keys[1].square().mean((1, 2, 3), True).sqrt()),
    ):
        noise = (recording.under(change, keep=KeptTensors.KEYS).kept["key"][1] - keys[1]) / size
        assert abs(float(noise.std()) - 1) < 0.05
        assert noise[0, 0, 0, :2].tolist() == pytest.approx(FIRST_NOISE, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda r: Ablate([3]), "layers holds 3, but the model has layers 0 to 2"),
        (lambda r: Ablate(site=Site.READ), "Ablate must be at one of Site.INPUT, Site.ATTENTION"),
        (lambda r: AblateHead([0]), r"heads is \(\), but it must be a whole number"),
        (lambda r: AblateHead([0], heads=7), "heads holds 7, but layer 0 has heads 0 to 3"),
        (lambda r: AblateHead([0], heads=[1.0]), r"heads\[0\] is 1.0, but heads must be numbers"),
        (lambda r: AblateHead(heads=["2H0"]), r"heads\[0\] is '2H0', but .* or names such as \['L2H0', 'L4H3'\]"),
        (lambda r: AblateHead(heads=["L2H0", "x"]), r"heads\[1\] is 'x', but .* or names such as \['L2H0',"),
        (lambda r: AblateHead(heads=["L2H0", 3]), r"heads\[1\] is 3, but .* or names such as \['L2H0',"),
        (lambda r: AblateHead(heads="2H0"), "heads is '2H0', but .* or names such as"),
        (lambda r: AblateHead([0], heads=-1), "heads is -1, but heads must be numbers >= 0"),
        (lambda r: ReplaceKernel(function=3), "function is 3, but it must be a function"),
        (lambda r: Perturb(seed="a"), "seed is 'a'"),
        (lambda r: Perturb(seed=1.5), "seed is 1.5"),
        (lambda r: Perturb([1.0]), r"layers is \[1.0\], but it must be a layer such as 3 or 'L3', or a list of layers"),
        (lambda r: Ablate([]), r"layers is \[\], but it must be a layer such as 3"),
        (lambda r: Ablate([-1]), r"layers is \[-1\]"),
        (lambda r: Ablate([True]), r"layers is \[True\]"),
        (lambda r: Ablate(3), "layers holds 3, but the model has layers 0 to 2"),
        (lambda r: Ablate("01"), "layers is '01'"),
        (lambda r: "x", "an edit is a str"),
        (lambda r: AblateHead([0], heads=[9]), "heads holds 9, but layer 0 has heads 0 to 3"),
        (lambda r: MaskKeys(keys=torch.zeros(3, 13)), "must be a tensor of bool"),
        (lambda r: Patch([0], site=Site.MLP, source=r), "source kept no writes"),
        (lambda r: Patch([0], site=Site.INPUT), "source is a NoneType"),
        (lambda r: Perturb(sigma=-1.0), "sigma is -1.0"),
        (lambda r: Perturb(relative_sigma=-1.0), "relative_sigma is -1.0"),
        (lambda r: Perturb(), "exactly one of them"),
        (lambda r: Perturb(sigma=0.1, relative_sigma=0.1), "sigma is 0.1 and relative_sigma is 0.1, but exactly one"),
        (lambda r: Ablate(tokens=torch.ones(4, 13, dtype=torch.bool)), "tokens is of torch.bool"),
        (lambda r: Ablate(tokens=torch.ones(3, 13)), "must be a tensor of bool"),
        (lambda r: MaskKeys(keys=torch.ones(5, 13, dtype=torch.bool)), "keys is of torch.bool"),
        (lambda r: Add(value=torch.ones(4, 13, 32)), "value is"),
        (lambda r: Add(value=None), "value is None"),
    ],
)
def test_bad_changes(make, words):
    model = tiny_model("gpt2")
    recording = record(model, inputs_of("gpt2"))
    with pytest.raises(HelmscopeError, match=words), edited(recording, make(recording)):
        outputs(model, "gpt2")


def test_nested_edits_all_apply(case):
    family, _, recording = case
    tapped = recording.anatomy.tapped
    head = AblateHead([0], heads=[0, 1]) if tapped else Ablate([0], site=Site.ATTENTION)
    push = Add([2], site=Site.MLP, value=torch.linspace(-1, 1, 32))  # a constant would be lost in a LayerNorm
    both, alone = recording.under(head, push).logits(), recording.under(head).logits()
    with edited(recording, head), edited(recording, push) as model:
        found = outputs(model, family)
    assert (found - both).abs().max() < 1e-5 * both.abs().max()
    with edited(recording, head):
        inside = recording.logits()
    assert (inside - alone).abs().max() < 1e-5 * both.abs().max()
    assert (both - alone).abs().max() > 1e-4 * both.abs().max()


def test_an_edit_does_not_depend_on_the_chunks_of_texts():
    model = tiny_model("gpt2")
    recording = record(model, inputs_of("gpt2"), batch_size=2)
    tokens = torch.zeros(3, 13, dtype=torch.bool)
    tokens[0] = True
    change = Replace([0], site=Site.MLP, tokens=tokens, value=torch.ones(32))
    wanted = recording.under(change).logits()
    with edited(recording, change):
        assert (outputs(model, "gpt2") - wanted).abs().max() < 1e-5
    whole = record(model, inputs_of("gpt2"), batch_size=3)
    noise = Perturb(relative_sigma=0.5, seed=2)
    assert (recording.under(noise).logits() - whole.under(noise).logits()).abs().max() < 1e-5


def test_a_patch_from_a_resumed_recording_knows_its_depth():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    later = recording.resume(depth=3, states=recording.trajectory.states[3])
    with pytest.raises(HelmscopeError, match="source begins at depth 3, but layer 1 needs 2"):
        recording.under(Patch([1], site=Site.INPUT, source=later))
    again = recording.under(Patch([2], site=Site.INPUT, source=later)).logits()
    assert (again - recording.logits()).abs().max() < 1e-5
    with pytest.raises(HelmscopeError, match="layers holds 99"):
        recording.under(Ablate([99]))


def test_a_forward_of_the_instance_is_kept():
    model = tiny_model("llama")
    recording = record(model, inputs_of("llama"))
    block = model.model.layers[0]
    mine = block.forward
    block.forward = mine
    recording.resume(depth=4, states=recording.trajectory.states[4])
    assert block.__dict__["forward"] == mine


def test_threads_wait_for_each_other():
    from concurrent.futures import ThreadPoolExecutor

    model = tiny_model("gpt2")
    own, wanted = model.config._attn_implementation, record(model, inputs_of("gpt2")).trajectory.states
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: record(model, inputs_of("gpt2")).trajectory.states, range(8)))
    assert all(torch.equal(states, wanted) for states in found)
    assert model.config._attn_implementation == own


def test_editing_attention_outside_the_registry_is_an_error():
    model = tiny_model("bloom")
    recording = record(model, inputs_of("bloom"))
    with (
        pytest.raises(HelmscopeError, match="does not look up its attention function in the registry"),
        edited(recording, Perturb(relative_sigma=0.1)),
    ):
        pass


def test_nothing_can_be_recorded_within_changed():
    from helmscope.models.doctor import diagnose

    model, ids = tiny_model("gpt2"), inputs_of("gpt2")
    recording = record(model, ids)
    with edited(recording, Ablate([2])):
        for make in (
            lambda: record(model, ids),
            lambda: record(model.transformer, ids),
            lambda: diagnose(model),
            lambda: recording.under(Ablate([1])),
            lambda: recording.resume(depth=2, states=recording.trajectory.states[2]),
        ):
            with pytest.raises(HelmscopeError, match=r"under an edit, but.*leave `edited` first"):
                make()
    name = "transformer.h.2.mlp.c_proj.weight"
    with with_parameters(model, {name: torch.zeros_like(dict(model.named_parameters())[name])}):
        other = record(model, ids)
        assert other.certificate.ok
        assert other.certificate["mlp"].ok
    assert not torch.equal(other.trajectory.states[-1], recording.trajectory.states[-1])
    assert torch.equal(record(model, ids).trajectory.states, recording.trajectory.states)


def test_the_recording_of_an_edited_run_names_its_edits(case):
    _, _, recording = case
    states, new = recording.trajectory.states, torch.randn(32, generator=torch.Generator().manual_seed(3))
    tokens = torch.zeros(3, 13, dtype=torch.bool)
    tokens[:, 3] = True
    for site in (Site.INPUT, Site.ATTENTION, Site.MIDDLE, Site.MLP, Site.OUTPUT):
        for change in (Ablate([1], site=site), Add(site=site, value=new), Replace([2], site=site, value=new)):
            edited = recording.under(change)
            assert edited.certificate["edits"].ok is None
            assert "only finite and residual are checked again" in edited.certificate["edits"].statement
            assert edited.certificate["residual"].ok is (None if site is Site.OUTPUT else True), (change, site)
            checked = {line.name for line in edited.certificate.lines if line.ok is not None}
            assert checked == {"finite"} | ({"residual"} if site is not Site.OUTPUT else set())
    lines = str(edited.certificate).splitlines()
    assert any(line.startswith("-     rows") and "not checked under edits; ok without them (" in line for line in lines)
    assert edited.manifest().parameters["certificate"]["rows"] is None
    assert edited.under(Ablate([0])).certificate["rows"] == edited.certificate["rows"]
    assert edited.kernel(layer=0).shape == (3, 4, 13, 13)  # blocked only if the unedited model fails the check
    for step in range(7):
        for frozen in (None, tokens):
            assert recording.resume(depth=step, states=states[step].roll(1, 1), frozen=frozen).certificate.ok
    manifest = (
        recording.under(Replace([1], value=new, tokens=tokens))
        .resume(depth=2, states=states[2], frozen=tokens)
        .manifest()
    )
    assert manifest.parameters["first"] == 2
    first, second = manifest.parameters["edits"]
    assert first.startswith("Replace(layers=[1], tokens=<bool (3, 13) sha256 ")
    assert "value=<float32 (32,) sha256 " in first
    assert second.startswith("PutState(depth=2, states=<float32 (3, 13, 32) sha256 ")
    assert "frozen=<3 tokens of <bool (3, 13) sha256 " in second
    assert recording.manifest().parameters["edits"] == []
    assert "edits" not in {line.name for line in recording.certificate.lines}


def test_the_certificate_reports_a_wrong_residual_sum_under_an_edit(monkeypatch):
    from helmscope.models.recorder import Recorder

    recording, honest = record(tiny_model("gpt2"), inputs_of("gpt2")), Recorder.state
    monkeypatch.setattr(
        Recorder, "state", lambda self, site, layer, v: honest(self, site, layer, 1.01 * v if site is Site.MLP else v)
    )
    assert recording.under(Ablate([0])).certificate["residual"].ok is False


def test_the_repr_of_an_edit_is_one_line():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    many = torch.ones(3, 13, dtype=torch.bool)
    for change, shown in [
        (Ablate(), "Ablate()"),
        (Ablate([3], site=Site.INPUT), "Ablate(layers=[3], site=Site.INPUT)"),
        (ReplaceKernel([0], function=outputs), "ReplaceKernel(layers=[0], function=outputs)"),
        (Perturb(site=Site.KEY, sigma=0.5, seed=7), "Perturb(site=Site.KEY, sigma=0.5, seed=7)"),
        (AblateHead([2], heads=[0, 5]), "AblateHead(layers=[2], heads=[0, 5])"),
    ]:
        assert repr(change) == shown
    for change in (MaskKeys(keys=many), Patch(source=recording, tokens=many), Add(value=torch.randn(3, 13, 32))):
        assert "\n" not in repr(change)
        assert len(repr(change)) < 400
    assert repr(Add(value=torch.ones(2))) != repr(Add(value=torch.zeros(2)))


def test_writes_of_an_edited_run_are_kept(case):
    _, _, recording = case
    off = recording.under(Ablate([0], site=Site.ATTENTION), keep=KeptTensors.WRITES | KeptTensors.KERNELS)
    assert torch.equal(off.kept["kernel"][1], recording.under(Ablate([0], site=Site.ATTENTION)).kernel(layer=1))
    assert off.kept["attention write"][0].abs().max() == 0
    wanted = recording.under(Replace([2], site=Site.MLP, value=off.kept["mlp write"][2])).logits()
    assert torch.equal(recording.under(Patch([2], site=Site.MLP, source=off)).logits(), wanted)
    later = recording.resume(depth=4, states=recording.trajectory.states[4]).under(Ablate([2]), keep=KeptTensors.WRITES)
    assert later.kept["mlp write"].shape == (3, 3, 13, 32)


def test_values_that_are_not_edits_or_models_are_refused():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    with pytest.raises(HelmscopeError, match="an edit is a str"):
        recording.under("x")
    with (
        pytest.raises(HelmscopeError, match="model is a Recording, but it must"),
        with_parameters(recording, {}),
    ):
        pass
    name = "transformer.h.1.mlp.c_proj.weight"
    with (
        pytest.raises(HelmscopeError, match=r"^values\['transformer.*'\] is an int"),
        with_parameters(recording.anatomy.model, {name: 3}),
    ):
        pass
