"""peft: an adapter on a 4-bit base that is loaded for real, on the CPU as a whole."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="loads a model: needs torch")
peft = pytest.importorskip("peft", reason="the cells of peft have it")
bitsandbytes = pytest.importorskip("bitsandbytes", reason="the base is quantized with it")

from packaging.version import Version
from tiny import nf4, write_checkpoint
from transformers import AutoModelForCausalLM

import bnb_dispatch_fix

if Version(bitsandbytes.__version__) < Version("0.49"):
    pytest.skip("bitsandbytes before 0.49 quantizes on GPUs only", allow_module_level=True)


def test_it_computes_the_same_with_the_shim(tmp_path):
    bnb_dispatch_fix.deactivate()
    base, adapter = write_checkpoint(tmp_path / "base"), tmp_path / "adapter"
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)

    def logits(*adapters):
        model = AutoModelForCausalLM.from_pretrained(
            base, device_map={"": "cpu"}, quantization_config=nf4()
        )
        model.hf_device_map = {"": "cpu"}  # or peft plans nothing
        for each in adapters:
            model = peft.PeftModel.from_pretrained(
                model, each, device_map="auto", max_memory={"cpu": "1GiB"}
            )
        with torch.no_grad():
            return model(torch.arange(8)[None]).logits

    without = logits(adapter)
    bnb_dispatch_fix.activate()
    try:
        assert torch.equal(logits(adapter), without)
        assert not torch.equal(logits(), without)  # the adapter is there
    finally:
        bnb_dispatch_fix.deactivate()
