"""Edits by plain functions against hand-written PyTorch hooks, their context, and gradients through them."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.intervene.edit import Edit
from helmscope.models.record import record
from helmscope.models.sites import OF_CROSS, EditContext, Site
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

# the modules of layer 1: block, the one that outputs the attention write, the MLP write, the values
MODULES = {
    "gpt2": ("transformer.h.1", "attn", "mlp", None),
    "llama": ("model.layers.1", "self_attn", "mlp", "self_attn.v_proj"),
    "gpt_neox": ("gpt_neox.layers.1", "attention", "mlp", None),
    "gemma2": ("model.layers.1", "post_attention_layernorm", "post_feedforward_layernorm", "self_attn.v_proj"),
    "bert": ("bert.encoder.layer.1", "attention.output.dense", "output.dense", "attention.self.value"),
    "mixtral": ("model.layers.1", "self_attn", "mlp", "self_attn.v_proj"),
}


def mixed(value):
    """A nonlinear function that no edit could reproduce by accident."""
    return 0.5 * value + 0.25 * value.roll(1, 1).tanh()


def by_hooks(model, family, site):
    """The logits when a hook on the module itself applies ``mixed``."""
    path, attention, mlp, values = MODULES[family]
    block = model.get_submodule(path)

    def write(module, args, output):
        return (mixed(output[0]), *output[1:]) if isinstance(output, tuple) else mixed(output)

    def read(module, args, kwargs):
        return (mixed(args[0]), *args[1:]), kwargs

    if site is Site.INPUT:
        handle = block.register_forward_pre_hook(read, with_kwargs=True)
    else:
        names = {Site.ATTENTION: attention, Site.MLP: mlp, Site.OUTPUT: "", Site.VALUE: values}
        handle = block.get_submodule(names[site]).register_forward_hook(write)
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(input_ids=inputs_of(family))[0]
    finally:
        handle.remove()
        model.set_attn_implementation(own)


@pytest.mark.parametrize("family", sorted(MODULES))
def test_a_function_does_what_a_hand_written_hook_does(family):
    model = tiny_model(family)
    recording = record(model, inputs_of(family))
    plain = recording.logits()
    for site in (Site.INPUT, Site.ATTENTION, Site.MLP, Site.OUTPUT):
        found = recording.under(Edit(site, [1], mixed)).logits()
        assert torch.equal(found, by_hooks(model, family, site)), site
        assert (found - plain).abs().max() > 1e-4
    if MODULES[family][3] is not None:  # the values are (rows, kv_heads, n, r) here, (rows, n, kv_heads r) there

        def each_head(value):
            return mixed(value.transpose(1, 2)).transpose(1, 2)

        assert torch.equal(
            recording.under(Edit(Site.VALUE, [1], each_head)).logits(), by_hooks(model, family, Site.VALUE)
        )


def test_weights_mask_and_heads_by_hand():
    model = tiny_model("gpt2")
    recording = record(model, inputs_of("gpt2"), keep=hs.models.KeptTensors.VALUES)
    even = torch.ones(13, 13).tril() / torch.arange(1, 14).unsqueeze(-1)
    changed = recording.under(Edit(Site.KERNEL, [0], lambda weights: even.expand_as(weights)))
    assert torch.equal(changed.kernel(layer=0), even.expand(3, 4, 13, 13))
    read = (even @ recording.kept["value"][0]).transpose(1, 2)
    same = recording.under(Edit(Site.HEADS, [0], lambda heads: read))
    assert (same.logits() - changed.logits()).abs().max() < 1e-6

    def nearest(mask):
        return mask.masked_fill(torch.ones(13, 13, dtype=torch.bool).tril(-3), torch.finfo(mask.dtype).min)

    kernel = recording.under(Edit(Site.MASK, [2], nearest)).kernel(layer=2)
    assert kernel.tril(-3).abs().max() == 0
    assert (kernel.sum(-1) - 1).abs().max() < 1e-6


def test_a_function_that_returns_none_changes_nothing():
    recording = record(tiny_model("llama"), inputs_of("llama"))
    for site in Site:
        if site not in (Site.READ, Site.BEFORE_OUTPUT_NORM) and site not in OF_CROSS:
            assert torch.equal(recording.under(Edit(site, None, lambda value: None)).logits(), recording.logits())


def test_the_context_says_where_an_edit_is_applied():
    ids = inputs_of("gpt2")
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    recording = record(tiny_model("gpt2"), {"input_ids": ids, "attention_mask": mask}, batch_size=2)
    contexts = []

    def note(value, context):
        contexts.append((context.site, context.layer, context.rows, context.texts))
        assert context.visible.tolist() == mask[context.rows].bool().tolist()
        assert context.weights.tolist() == mask[context.rows].float().tolist()
        with pytest.raises(dataclasses.FrozenInstanceError):
            context.layer = 0

    edits = [Edit(Site.MLP, [0, 2], note), Edit(Site.KEY, [1], note)]
    recording.runner.under(*edits).forward()
    expected = [(Site.MLP, 0), (Site.KEY, 1), (Site.MLP, 2)]
    assert contexts == [(*where, rows, 3) for rows in (slice(0, 2), slice(2, 3)) for where in expected]
    assert all(vars(edit).keys() == {"site", "layers", "function", "takes_context"} for edit in edits)
    with pytest.raises(dataclasses.FrozenInstanceError):
        edits[0].rows = slice(0, 1)


def test_edits_under_changed_know_the_texts_too():
    """Noise under ``changed`` depends on the index of the text in the batch, not on the size of the chunks."""
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"), batch_size=2)
    noise = hs.intervene.Perturb(relative_sigma=0.5, seed=2)
    with hs.intervene.edited(recording, noise):
        inside = recording.logits()
    assert (inside - recording.under(noise).logits()).abs().max() < 1e-6


def test_random_numbers_depend_on_seed_layer_and_text():
    context = EditContext(site=Site.MLP, layer=2, rows=slice(3, 5), texts=8)
    drawn = context.normal(torch.zeros(2, 3, 4, dtype=torch.float64), seed=7)
    for k, text in enumerate((3, 4)):
        source = np.random.Generator(np.random.Philox(np.random.SeedSequence(7, spawn_key=(2, text))))
        assert np.array_equal(drawn[k].numpy(), source.standard_normal((3, 4)))


class Doubled:
    def __call__(self, value, context):
        assert isinstance(context, EditContext)
        return 2 * value


def default_context(value, context=None):
    assert context is not None
    return 2 * value


@pytest.mark.parametrize(
    "function",
    [
        lambda write: 2 * write,
        lambda write, times=2: times * write,
        lambda write, context: 2 * write,
        lambda *values: 2 * values[0],
        partial(lambda times, write: times * write, 2),
        partial(torch.mul, torch.tensor(2.0)),
        Doubled(),
        default_context,
    ],
)
def test_functions_of_a_value_or_of_a_value_and_a_context(function):
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    wanted = recording.under(Edit(Site.MLP, [1], lambda write: 2 * write)).logits()
    assert torch.equal(recording.under(Edit(Site.MLP, [1], function)).logits(), wanted)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Edit(Site.READ, None, mixed), "site is <Site.READ: 'read'>, but Edit must be at one of Site.INPUT"),
        (
            lambda: Edit("mlp", None, mixed),
            r"site is 'mlp', but it must be a member of hs.Site such as hs.Site.MLP, one of Site.INP",
        ),
        (lambda: Edit("cross head", None, mixed), "hs.Site such as hs.Site.CROSS_HEADS"),
        (lambda: hs.intervene.Perturb(site=3, sigma=1.0), "site is 3, but it must be a member of hs.Site such as"),
        (lambda: Edit(Site.MLP, [7], mixed), "layers holds 7, but the model has layers 0 to 2"),
        (
            lambda: Edit(Site.MLP, "h.1", mixed),
            r"layers is 'h.1', .* or a list of layers: the number of a block is",
        ),
        (lambda: Edit(Site.MLP, True, mixed), "layers is True, but it must be a layer such as 3"),
        (lambda: Edit(Site.MLP, None, 3), "function is 3, but it must be a function of a value"),
        (lambda: Edit(Site.MLP, None, lambda: 3), r"function is .*lambda.* with the arguments \(\), but"),
        (lambda: Edit(Site.MLP, None, lambda a, b, c: a), r"with the arguments \(a, b, c\), but it must take a value"),
        (
            lambda: Edit(Site.MLP, None, lambda a, *, b: a),
            r"with the arguments \(a, b\), but it must take",
        ),
        (lambda: Edit(Site.MLP, None, lambda a: 3), "returns int at Site.MLP, but it must return a tensor of shape"),
        (
            lambda: Edit(Site.MLP, None, lambda a: a[:, :2]),
            r"returns \(3, 2, 32\) at Site.MLP, but it must return a tensor",
        ),
        (lambda: Edit(Site.KERNEL, None, lambda a: a[0]), r"returns \(4, 13, 13\) at Site.KERNEL"),
        (lambda: Edit(Site.MASK, None, lambda a: a[0]), r"returns \(1, 13, 13\) at Site.MASK"),
        (
            lambda: hs.intervene.Perturb(site=Site.KERNEL, sigma=1.0),
            "site is <Site.KERNEL.*, but Perturb must be at one of",
        ),
        (lambda: hs.intervene.Replace(site=Site.KEY), "site is <Site.KEY.*, but Replace must be at one of Site.INPUT"),
    ],
)
def test_bad_edits(make, words):
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    with pytest.raises(HelmscopeError, match=words):
        recording.under(make())


def divides_by_zero(value):
    return value / (1 // 0)


def reads_no_key(value):
    return {}["missing"]


@pytest.mark.parametrize(
    ("edit", "words", "cause"),
    [
        (Edit(Site.MLP, [1], divides_by_zero), "MLP in layer 1: ZeroDivisionError: .*division", ZeroDivisionError),
        (Edit(Site.MLP, [2], reads_no_key), "MLP in layer 2: KeyError: 'missing'", KeyError),
        (hs.intervene.ReplaceKernel([0], function=divides_by_zero), "KERNEL in layer 0: ZeroDiv", ZeroDivisionError),
    ],
)
def test_an_error_in_the_function_of_an_edit_is_reported_as_one(edit, words, cause):
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    with pytest.raises(
        HelmscopeError, match=rf"^the function of {type(edit).__name__}\(.* fails at Site\.{words}"
    ) as found:
        recording.under(edit)
    assert isinstance(found.value.__cause__, cause)


def test_a_single_layer_and_a_single_head_need_no_list():
    assert repr(Edit(Site.MLP, 1, mixed)) == repr(Edit(Site.MLP, [1], mixed))
    assert repr(hs.intervene.AblateHead(2, heads=0)) == "AblateHead(layers=[2], heads=[0])"
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    assert torch.equal(
        recording.under(hs.intervene.AblateHead(2, heads=0)).logits(),
        recording.under(hs.intervene.AblateHead([2], heads=[0])).logits(),
    )


def test_heads_are_checked_before_the_forward_starts():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    begun = []
    handle = recording.anatomy.model.register_forward_pre_hook(lambda *_: begun.append(1))
    with pytest.raises(HelmscopeError, match="heads holds 4, but layer 2 has heads 0 to 3"):
        recording.under(hs.intervene.AblateHead([2], heads=[0, 4]))
    handle.remove()
    assert not begun


def test_attention_outside_the_registry_cannot_be_edited():
    recording = record(tiny_model("bloom"), inputs_of("bloom"))
    for site in (Site.QUERY, Site.KEY, Site.VALUE, Site.MASK, Site.KERNEL, Site.HEADS):
        with pytest.raises(HelmscopeError, match=f"site of Edit is {site}, but the family of Bloom"):
            recording.under(Edit(site, None, torch.clone))


def scalar(logits):
    """A scalar that depends on all logits."""
    return (logits.softmax(-1) * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).sum()


def finite_difference(function, x, direction, step=1e-3):
    """Fourth-order central difference, so that the step can be large enough for small derivatives."""
    with torch.no_grad():
        near, far = (function(x + h * direction) - function(x - h * direction) for h in (step, 2 * step))
        return (8 * near - far) / (12 * step)


@pytest.mark.parametrize(
    "site", [Site.INPUT, Site.ATTENTION, Site.MIDDLE, Site.MLP, Site.OUTPUT, Site.QUERY, Site.VALUE, Site.KERNEL]
)
def test_gradients_with_respect_to_what_an_edit_adds(site):
    recording = record(tiny_model("gpt2", dtype=torch.float64), inputs_of("gpt2"), batch_size=2)
    generator = torch.Generator().manual_seed(0)
    size = {Site.QUERY: 8, Site.VALUE: 8, Site.KERNEL: 13}.get(site, 32)
    at, direction = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    at = (0.1 * at).requires_grad_()
    direction = 30 * direction if site is Site.QUERY else direction  # the logits of a tiny model hardly depend on it

    def number(vector, **options):
        runner = recording.runner.under(Edit(site, [1], lambda value: value + vector))
        return scalar(runner.outputs(**options))

    (gradient,) = torch.autograd.grad(number(at, gradients=True), at)
    wanted = finite_difference(number, at.detach(), direction)
    assert float(gradient @ direction) == pytest.approx(float(wanted), rel=1e-6)
    assert abs(float(wanted)) > 5e-5
    assert not number(at).requires_grad


def test_gradients_of_logits_states_and_lens():
    recording = record(tiny_model("gpt2", dtype=torch.float64), inputs_of("gpt2"), batch_size=2)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(32, generator=generator, dtype=torch.float64)
    functions = [
        lambda edited, **options: scalar(edited.logits(**options)),
        lambda edited, **options: scalar(edited.logits(rows=slice(1, 3), **options)),
        lambda edited, **options: scalar(edited.logits(depth=5, **options)),
        lambda edited, **options: edited.residual_stream(depth=6, **options).sin().sum(),
        lambda edited, **options: edited.residual_stream(depth=3, **options).sin().sum(),
    ]
    for function in functions:
        vector = torch.zeros(32, dtype=torch.float64, requires_grad=True)
        changed = recording.under(hs.intervene.Add([0], site=Site.MIDDLE, value=vector))
        (gradient,) = torch.autograd.grad(function(changed, gradients=True), vector)
        wanted = finite_difference(
            lambda v, function=function: function(recording.under(hs.intervene.Add([0], site=Site.MIDDLE, value=v))),
            vector.detach(),
            direction,
        )
        assert float(gradient @ direction) == pytest.approx(float(wanted), rel=1e-6)
        assert not changed.logits().requires_grad
        assert not changed.trajectory.states.requires_grad


def test_gradients_with_respect_to_the_states_to_resume_from():
    recording = record(tiny_model("gpt2", dtype=torch.float64), inputs_of("gpt2"), batch_size=2)
    states = recording.trajectory.states[3].clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    direction = 0.1 * torch.randn(states.shape, generator=generator, dtype=torch.float64)
    resumed = recording.resume(depth=3, states=states)
    assert not resumed.trajectory.states.requires_grad
    (gradient,) = torch.autograd.grad(scalar(resumed.logits(gradients=True)), states)
    wanted = finite_difference(
        lambda x: scalar(recording.resume(depth=3, states=x).logits()), states.detach(), direction
    )
    assert float((gradient * direction).sum()) == pytest.approx(float(wanted), rel=1e-6)
    (last,) = torch.autograd.grad(resumed.residual_stream(depth=6, gradients=True).sin().sum(), states)
    wanted = finite_difference(
        lambda x: recording.resume(depth=3, states=x).residual_stream(depth=6).sin().sum(), states.detach(), direction
    )
    assert float((last * direction).sum()) == pytest.approx(float(wanted), rel=1e-6)


def test_states_with_gradients_equal_the_recorded_ones():
    for family in ("gpt2", "gpt_neox", "bert"):
        recording = record(tiny_model(family), inputs_of(family), batch_size=2)
        for depth in range(7):
            state = recording.residual_stream(depth=depth)
            found = recording.residual_stream(depth=depth, gradients=True)
            assert found.requires_grad
            assert (found - state).abs().max() <= 2e-6 * state.abs().max()
