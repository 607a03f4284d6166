"""Encoder-decoder models: both stacks, and cross-attention as a sub-step of its own, against the model's own forward
pass and hooks written by hand.
"""

from __future__ import annotations

from threading import Thread

import pytest
import torch
import transformers as tf

from helmscope.intervene.attention import AblateHead, Perturb, ReplaceKernel
from helmscope.intervene.change import edited
from helmscope.intervene.edit import Edit
from helmscope.intervene.states import Ablate, Add, Patch
from helmscope.models.hooks import hooked
from helmscope.models.keep import KeptTensors
from helmscope.models.record import record
from helmscope.models.sites import Observer, Site
from helmscope.types import HelmscopeError
from support.model_families import PAIRS, inputs_of, pair_inputs, tiny_model

F64 = torch.float64
T5_LIKE = ("t5-relu", "t5-gated")
TOPOLOGY = {"bart": "post-norm", "marian": "post-norm", "t5gemma": "sequential sandwich"}
TWO = ("t5-relu", "bart")


def batch_rounding(family):
    """How far a text alone may be from the same text in a batch: T5Gemma's norms and softmax are in float32."""
    return 1e-6 if family == "t5gemma" else 1e-12


def parts_of(model):
    return model.get_encoder(), model.get_decoder()


def blocks_of(stack):
    return stack.block if hasattr(stack, "block") else stack.layers


def state_modules(family, block, *, crosses):
    """For each state of a block but the first: a module, and whether the state is what it reads or what it gives."""
    if family in T5_LIKE:
        return [(part, "gives") for part in block.layer]
    if family == "t5gemma":
        between = [(block.pre_cross_attn_layernorm, "reads")] if crosses else []
        return [*between, (block.pre_feedforward_layernorm, "reads"), (block, "gives")]
    if family in ("bart", "marian"):
        names = ["self_attn_layer_norm", *(["encoder_attn_layer_norm"] if crosses else []), "final_layer_norm"]
        return [(getattr(block, name), "gives") for name in names]
    between = [(block.encoder_attn_layer_norm, "reads")] if crosses else []
    return [*between, (block.final_layer_norm, "reads"), (block, "gives")]


def own_states(family, model, inputs):
    """The states of both stacks at every depth, by plain hooks."""
    found, handles = ([], []), []
    for stack, states in zip(parts_of(model), found, strict=True):
        blocks, crosses = blocks_of(stack), stack is parts_of(model)[1]

        def note(value, states=states):
            states.append((value[0] if isinstance(value, tuple) else value).detach().clone())

        handles.append(blocks[0].register_forward_pre_hook(lambda module, args, note=note: note(args[0])))
        for block in blocks:
            for module, how in state_modules(family, block, crosses=crosses):
                if how == "reads":
                    handles.append(module.register_forward_pre_hook(lambda module, args, note=note: note(args[0])))
                else:
                    handles.append(module.register_forward_hook(lambda module, args, out, note=note: note(out)))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture(scope="module", params=sorted(PAIRS))
def recorded(request):
    model = tiny_model(request.param, dtype=F64)
    for part in (model, model.get_encoder(), model.get_decoder()):  # transformers 5.17 does not reach the stacks of T5
        part.set_attn_implementation("eager")
    return request.param, model, record(model, pair_inputs(), batch_size=2)


def test_both_certificates(recorded):
    family, _, recording = recorded
    print(recording.certificate)
    topology = TOPOLOGY.get(family, "sequential pre-norm")
    assert recording.certificate.ok
    assert recording.encoder.certificate.ok
    assert str(recording.anatomy).startswith(f"{topology} with cross-attention; 3 layers")
    assert str(recording.encoder.anatomy).startswith(f"{topology}; 3 layers")
    assert recording.encoder.encoder is None
    for name in ("cross records", "cross rows", "cross mask", "cross heads", "encoder", "causality"):
        assert recording.certificate[name].ok, name
    assert recording.encoder.certificate["causality"].ok is None  # it looks both ways


def test_states_at_every_depth_of_both_stacks(recorded):
    family, model, recording = recorded
    inputs = pair_inputs()
    for each, wanted, steps, mask in zip(
        (recording.encoder, recording),
        own_states(family, model, inputs),
        (2, 3),
        ("attention_mask", "decoder_attention_mask"),
        strict=True,
    ):
        assert len(each.trajectory.times) == len(wanted) == 3 * steps + 1
        assert torch.equal(each.trajectory.weights[0].long(), inputs[mask])
        for depth, state in enumerate(wanted):
            found = each.residual_stream(depth=depth)
            assert (found - state).abs().max() <= 1e-12 * state.abs().max(), depth


def test_kernels_and_logits_are_the_models_own(recorded):
    _, model, recording = recorded
    with torch.no_grad():
        wanted = model(**pair_inputs(), output_attentions=True)
    assert (recording.logits() - wanted.logits).abs().max() <= 1e-12 * wanted.logits.abs().max()
    for layer in range(3):
        cross = recording.cross_kernel(layer=layer)
        assert cross.shape == (3, 4, 7, 11)
        for found, own, each in (
            (cross, wanted.cross_attentions, recording),
            (recording.kernel(layer=layer), wanted.decoder_attentions, recording),
            (recording.encoder.kernel(layer=layer), wanted.encoder_attentions, recording.encoder),
        ):
            queries = each.visible[:, None, :, None]  # rows of padding are 0
            assert (found - own[layer] * queries).abs().max() <= 1e-14


def test_a_text_alone_is_the_text_in_its_batch(recorded):
    """Neither the other texts, nor the padding of encoder or decoder, nor the size of chunks make a difference."""
    family, model, recording = recorded
    inputs, bound = pair_inputs(), batch_rounding(family)
    lengths = {name: int(inputs[name][1].sum()) for name in ("attention_mask", "decoder_attention_mask")}
    alone = record(
        model,
        {
            "input_ids": inputs["input_ids"][1:2, : lengths["attention_mask"]],
            "decoder_input_ids": inputs["decoder_input_ids"][1:2, : lengths["decoder_attention_mask"]],
        },
    )
    for each, other in ((alone, recording), (alone.encoder, recording.encoder)):
        n = each.trajectory.states.shape[2]
        for depth in range(len(each.trajectory.times)):
            wanted = each.residual_stream(depth=depth)
            assert (other.residual_stream(depth=depth)[1:2, :n] - wanted).abs().max() <= bound * wanted.abs().max()
    whole = record(model, inputs)
    assert (whole.logits() - recording.logits()).abs().max() <= bound * recording.logits().abs().max()


def test_resume_from_every_depth_reproduces_the_rest(recorded):
    family, _, recording = recorded
    bound = 1e-7 if family == "t5gemma" else 1e-10  # which computes its norms and softmax in float32
    for each in (recording, recording.encoder):
        path, outputs = each.trajectory, each.logits()
        for depth in range(len(path.times)):
            again = each.resume(depth=depth, states=path.states[depth])
            assert (again.logits() - outputs).abs().max() <= bound * outputs.abs().max(), depth
            assert (again.trajectory.states - path.states[depth:]).abs().max() <= 10 * bound
            assert again.layers == range(min(depth // each.anatomy.depths.steps, 2), 3)
    lens = recording.logits(depth=recording.anatomy.depths.last)
    assert (lens - recording.logits()).abs().max() <= bound * lens.abs().max()


def test_forces_of_both_stacks_give_what_the_mlps_write(recorded):
    _, model, _ = recorded
    recording = record(model, pair_inputs(), keep=KeptTensors.WRITES)
    for each in (recording, recording.encoder):
        for layer, own in enumerate(each.anatomy.layers):
            written = each.force(layer=layer).ambient(each.force_points(layer=layer))
            if own.wiring.sandwich:
                written = own.part(own.wiring.mlp)(written.detach()).detach()
            wanted = each.kept["mlp write"][layer]
            assert (written - wanted).norm() <= 1e-6 * wanted.norm()
        if each.anatomy.post_norm:  # directions before gain and bias are those that the force is evaluated at
            depth = each.anatomy.depths.at(1, Site.CROSS_MIDDLE if each is recording else Site.MIDDLE)
            towards = torch.nn.functional.normalize(each.force_points(layer=1), dim=-1)
            shown = each.on_sphere.states[depth]
            assert (shown - towards * each.visible.unsqueeze(-1)).abs().max() <= 1e-12  # zero vectors at padding


class Everything(Observer):
    sites = frozenset(Site)
    sees_attention = sees_cross = True


def test_logits_are_bit_equal_with_and_without(recorded):
    _, model, recording = recorded
    inputs = pair_inputs() | recording.anatomy.options  # with a cache the last bits are others
    with torch.no_grad():
        before = model(**inputs)[0]
        with hooked(recording.anatomy, observers=[Everything()]):
            inside = model(**inputs)[0]
        assert torch.equal(before, model(**inputs)[0])
    assert torch.equal(before, inside)


def cross_module(family, block):
    return block.layer[1].EncDecAttention if family in T5_LIKE else block.encoder_attn


def first_mlp_matrix(family, block):
    if family in T5_LIKE:
        return block.layer[-1].DenseReluDense.wo
    return block.fc2


@pytest.mark.parametrize("family", TWO)
def test_an_edit_of_the_cross_write_equals_a_hook_by_hand(family):
    model, inputs = tiny_model(family, dtype=F64), pair_inputs()
    recording = record(model, inputs, batch_size=2, keep=KeptTensors.KERNELS)
    halved = recording.under(Edit(Site.CROSS, [1], lambda write: 0.5 * write))
    module = cross_module(family, blocks_of(model.get_decoder())[1])
    handle = module.register_forward_hook(lambda module, args, out: (0.5 * out[0], *out[1:]))
    wanted, logits = own_states(family, model, inputs)[1], model(**inputs)[0].detach()
    handle.remove()
    assert (halved.logits() - logits).abs().max() <= 1e-12 * logits.abs().max()
    assert (logits - recording.logits()).abs().max() > 1e-4 * logits.abs().max()
    for depth, state in enumerate(wanted):
        assert (halved.residual_stream(depth=depth) - state).abs().max() <= 1e-12 * state.abs().max()
    assert halved.certificate.ok
    assert (
        recording.under(Ablate([1], site=Site.CROSS)).residual_stream(depth=5) - halved.residual_stream(depth=5)
    ).abs().max() > 1e-3
    # what a state becomes is what is put there, and a patch of the unchanged state undoes the edit
    undone = halved.under(Patch([1], site=Site.CROSS_MIDDLE, source=recording))
    assert (undone.logits() - recording.logits()).abs().max() <= 1e-10 * logits.abs().max()


@pytest.mark.parametrize("family", TWO)
def test_edits_inside_cross_attention(family):
    model, inputs = tiny_model(family, dtype=F64), pair_inputs()
    recording = record(model, inputs, keep=KeptTensors.KERNELS | KeptTensors.VALUES)
    queries = recording.visible[:, None, :, None]  # rows of padding are 0
    assert torch.equal(recording.cross_kernel(layer=1), recording.kept["cross kernel"][1] * queries)

    def first_alone(mask):
        hidden = torch.ones(7, 11, dtype=torch.bool)
        hidden[:, 0] = False
        return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)

    alone = recording.under(Edit(Site.CROSS_MASK, [2], first_alone))
    assert (alone.cross_kernel(layer=2)[..., 0] - queries[..., 0].double()).abs().max() <= 1e-14
    assert torch.equal(alone.kernel(layer=2), recording.kernel(layer=2))  # attention itself reads what it read
    # the same by hand: every token reads the value of the first one
    value = recording.kept["cross value"][2][:, :, :1].expand(-1, -1, 7, -1)
    same = recording.under(Edit(Site.CROSS_HEADS, [2], lambda heads: value.transpose(1, 2)))
    assert (same.logits() - alone.logits()).abs().max() <= 1e-12 * alone.logits().abs().max()
    assert torch.equal(recording.under(Edit(Site.CROSS_KEY, None, lambda key: None)).logits(), recording.logits())
    # heads and weights by the edits that have names
    keep = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=F64)[:, None]
    ablated = recording.under(AblateHead([1], heads=[1], site=Site.CROSS_HEADS))
    by_hand = recording.under(Edit(Site.CROSS_HEADS, [1], lambda heads: keep * heads))
    assert torch.equal(ablated.logits(), by_hand.logits())
    even = recording.under(
        ReplaceKernel([0], function=lambda rows: rows.new_full(rows.shape, 1 / 11), site=Site.CROSS_KERNEL)
    )
    assert (even.cross_kernel(layer=0) - queries.double() / 11).abs().max() <= 1e-15
    noisy = recording.under(Perturb([0], site=Site.CROSS_QUERY, sigma=1.0))
    assert (noisy.cross_kernel(layer=0) - recording.cross_kernel(layer=0)).abs().max() > 1e-3
    with pytest.raises(HelmscopeError, match="heads holds 4, but layer 0 has heads 0 to 3"):
        recording.under(AblateHead([0], heads=[4], site=Site.CROSS_HEADS))


@pytest.mark.parametrize("family", TWO)
def test_an_edit_of_the_encoder_changes_the_decoder_as_a_hook_by_hand(family):
    model, inputs, seen = tiny_model(family, dtype=F64), pair_inputs(), []
    recording = record(model, inputs, batch_size=2)

    def doubled(write, context):
        seen.append((context.rows, context.texts, context.visible.shape))
        return 2 * write

    edited = recording.under(Ablate([2], site=Site.CROSS), encoder=[Edit(Site.MLP, [1], doubled)])
    assert (slice(2, 3), 3, torch.Size([1, 11])) in seen  # the context is of the encoder's tokens
    encoder, decoder = parts_of(model)
    handles = [
        first_mlp_matrix(family, blocks_of(encoder)[1]).register_forward_hook(lambda module, args, out: 2 * out),
        cross_module(family, blocks_of(decoder)[2]).register_forward_hook(
            lambda module, args, out: (0 * out[0], *out[1:])
        ),
    ]
    wanted, logits = own_states(family, model, inputs), model(**inputs)[0].detach()
    for handle in handles:
        handle.remove()
    for each, states in zip((edited.encoder, edited), wanted, strict=True):
        for depth, state in enumerate(states):
            assert (each.residual_stream(depth=depth) - state).abs().max() <= 1e-12 * state.abs().max()
    assert (edited.logits() - logits).abs().max() <= 1e-12 * logits.abs().max()
    assert ", under Ablate(layers=[2], site=Site.CROSS), with its encoder under Edit(site=" in repr(edited)
    assert "edit of the encoder" in edited._repr_html_()
    assert len(edited.manifest().parameters["encoder edits"]) == 1
    assert edited.certificate["edits"].statement.startswith("2 applied")
    assert torch.equal(record(model, inputs, batch_size=2).logits(), recording.logits())  # the model is as it was


@pytest.mark.parametrize("family", TWO)
def test_the_decoder_reads_a_resumed_encoder(family):
    model, inputs = tiny_model(family, dtype=F64), pair_inputs()
    recording = record(model, inputs)
    states = directions_of(recording.encoder, 3).roll(1, 0)
    resumed = recording.encoder.resume(depth=3, states=states)
    edited = recording.under(encoder=resumed)
    assert edited.encoder is resumed
    radius = recording.encoder.trajectory.radius[3].unsqueeze(-1)
    mean = recording.encoder.residual.mean
    put = radius * states + (0 if mean is None else mean[3].unsqueeze(-1))
    same = recording.under(encoder=[Edit(Site.MIDDLE, [1], lambda state: put)])
    assert (edited.logits() - same.logits()).abs().max() <= 1e-12 * same.logits().abs().max()
    assert (edited.logits() - recording.logits()).abs().max() > 1e-4 * same.logits().abs().max()
    moved = states.clone().requires_grad_()
    steered = recording.under(encoder=recording.encoder.resume(depth=3, states=moved)).logits(gradients=True)
    assert torch.autograd.grad(steered.logsumexp(-1).sum(), moved)[0].abs().max() > 0
    again = edited.resume(depth=4, states=edited.trajectory.states[4])  # the decoder's resume keeps the encoder
    assert (again.logits() - edited.logits()).abs().max() <= 1e-10 * same.logits().abs().max()


@pytest.mark.parametrize("family", TWO)
def test_gradients_flow_through_both_stacks(family):
    model, inputs = tiny_model(family, dtype=F64), pair_inputs()
    recording = record(model, inputs, batch_size=2)
    steer, push = (torch.zeros(32, dtype=F64, requires_grad=True) for _ in range(2))
    under = recording.under(Add([1], site=Site.CROSS, value=push), encoder=[Add([0], site=Site.MLP, value=steer)])
    direction = torch.randn(3, 7, 96, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad((under.logits(gradients=True) * direction).sum(), (steer, push))
    encoder, decoder = parts_of(model)
    handles = [
        first_mlp_matrix(family, blocks_of(encoder)[0]).register_forward_hook(lambda module, args, out: out + steer),
        cross_module(family, blocks_of(decoder)[1]).register_forward_hook(
            lambda module, args, out: (out[0] + push, *out[1:])
        ),
    ]
    wanted = torch.autograd.grad((model(**inputs)[0] * direction).sum(), (steer, push))
    for handle in handles:
        handle.remove()
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-8 * other.abs().max()
    state = under.residual_stream(depth=5, gradients=True)
    assert torch.autograd.grad(state.sum(), push)[0].abs().max() > 0
    assert not recording.logits().requires_grad


def directions_of(recording, depth):
    """The directions of all tokens, padding included."""
    return recording.residual.with_hidden(depth, recording.trajectory.states[depth])


def test_frozen_tokens_stay_through_cross_attention():
    recording = record(tiny_model("bart", dtype=F64), pair_inputs())
    frozen = torch.zeros(3, 7, dtype=torch.bool)
    frozen[:, 0] = True
    again = recording.resume(depth=2, states=directions_of(recording, 2).roll(1, 1), frozen=frozen)
    assert (again.trajectory.states[1:, :, 0] - recording.trajectory.states[3:, :, 0]).abs().max() <= 1e-12
    assert (again.trajectory.states[1:, :, 1] - recording.trajectory.states[3:, :, 1]).abs().max() > 1e-3


def test_what_is_not_there_is_refused():
    plain = record(tiny_model("gpt2"), inputs_of("gpt2"))
    assert plain.encoder is None
    with pytest.raises(HelmscopeError, match="cross_kernel needs an encoder-decoder model, but GPT2LMHead"):
        plain.cross_kernel(layer=0)
    with pytest.raises(HelmscopeError, match=r"at Site\.CROSS, but GPT2LMHeadModel has no cross-attention"):
        plain.under(Edit(Site.CROSS, None, torch.clone))
    with pytest.raises(HelmscopeError, match="encoder holds 1 edit, but GPT2LMHeadModel has no separate encoder"):
        plain.under(encoder=[Ablate()])
    with pytest.raises(HelmscopeError, match="encoder holds 1 edit, but GPT2LMHeadModel has no separate encoder"):
        plain.under(encoder=Ablate())
    with pytest.raises(HelmscopeError, match="encoder is an int, but it must be an edit, a list of edits or a Rec"):
        plain.under(encoder=3)
    recording = record(tiny_model("bart"), pair_inputs())
    with pytest.raises(HelmscopeError, match="encoder is a Recording of another model or of other texts"):
        recording.under(encoder=record(tiny_model("bart"), pair_inputs()).encoder)
    with pytest.raises(HelmscopeError, match=r"source has 3 layers of 2 sub-steps of .* the model has 3 of 3"):
        recording.under(Patch([1], site=Site.INPUT, source=recording.encoder))
    with pytest.raises(HelmscopeError, match="depth is 10, but this recording has depths 0 to 9"):
        recording.residual_stream(depth=10)


def test_heads_of_other_kinds():
    """What such a model returns first is no state of its decoder."""
    sizes = {"vocab_size": 96, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 1}
    ids = inputs_of("gpt2", n=6)
    model = tf.T5ForQuestionAnswering(tf.T5Config(**sizes, num_heads=4, decoder_start_token_id=0)).eval()
    recording = record(model, ids)
    assert recording.certificate.ok
    assert recording.certificate["causality"].ok
    assert recording.certificate["head"].ok is None
    assert recording.trajectory.states.shape == (4, 3, 6, 32)
    assert recording.encoder.trajectory.states.shape == (5, 3, 6, 32)


def test_threads_that_want_encoder_and_decoder_do_not_wait_for_each_other():
    model = tiny_model("bart")
    recording = record(model, pair_inputs())
    wanted, found = recording.logits(), []

    def nested():
        with edited(recording.encoder, Edit(Site.MLP, [0], lambda write: None)):
            found.append(recording.logits())

    threads = [Thread(target=target, daemon=True) for target in (nested, lambda: found.append(recording.logits())) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 8
    assert all(torch.equal(each, wanted) for each in found)
