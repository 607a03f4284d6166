"""Recordings where the model lies: a GPU gives the states that the CPU gives."""

import pytest
import torch

import helmscope as hs
from support.model_families import CLASSES, inputs_of, tiny_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CLASSES)
def test_a_recording(family, device):
    wanted = hs.record(tiny_model(family), inputs_of(family))
    found = hs.record(tiny_model(family).to(device), inputs_of(family), batch_size=2)
    assert found.certificate.ok
    assert found.trajectory.states.device.type == device
    assert (found.trajectory.states.cpu() - wanted.trajectory.states).abs().max() < 1e-4
    again = found.resume(depth=3, states=found.trajectory.states[3])
    assert (again.logits() - found.logits()).abs().max() < 1e-5 * found.logits().abs().max()
    if found.anatomy.tapped:
        off = found.under(hs.intervene.AblateHead([1], heads=[0])).logits()
        assert (off.cpu() - wanted.under(hs.intervene.AblateHead([1], heads=[0])).logits()).abs().max() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_losses_and_chosen_logits(device):
    ids = inputs_of("gpt2")
    wanted, found = (hs.record(tiny_model("gpt2").to(place), ids, batch_size=2) for place in ("cpu", device))
    for measured in (hs.next_token_loss, hs.observe.head_ablation_loss):
        assert float(abs(measured(found).loss - measured(wanted).loss).max()) < 1e-5
    chosen = [hs.token_logits(each, [3, 7], depth=[2, 6]).logit for each in (found, wanted)]
    assert float(abs(chosen[0] - chosen[1]).max()) < 1e-4


if torch.cuda.is_available():

    @pytest.mark.parametrize("family", CLASSES)
    def test_bfloat16_on_a_gpu(family):
        recording = hs.record(tiny_model(family, dtype=torch.bfloat16).cuda(), inputs_of(family))
        assert recording.certificate.ok
