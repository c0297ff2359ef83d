"""trl: `SFTTrainer(model=PATH)` hands `model_init_kwargs` to transformers."""

from __future__ import annotations

import inspect
import tempfile

import transformers
from datasets import Dataset
from tiny import GPUS, PARTS, STRATEGIES, Load, budgets, nf4, rooms, tokenizer
from trl import SFTConfig, SFTTrainer

from bnb_dispatch_fix.planning.simulation import simulated_gpus

PACKAGE = "trl"
DTYPE = "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"
SIGNATURE = inspect.signature(SFTTrainer.__init__)


def loads(folder):
    for strategy in STRATEGIES:
        for count, mib in GPUS:
            max_memory = budgets(count, mib)

            def call(strategy=strategy, max_memory=max_memory):
                asked = {
                    "device_map": strategy,
                    "max_memory": dict(max_memory),
                    "quantization_config": nf4(),
                    DTYPE: "float16",  # newer releases would load in float32
                }
                config = SFTConfig(
                    output_dir=tempfile.gettempdir(),
                    model_init_kwargs=asked,
                    report_to=[],
                    use_cpu=True,
                    bf16=False,
                )
                with simulated_gpus():
                    trainer(folder, config)

            yield Load(f"{strategy} {count}x{mib}", call, PARTS, rooms(max_memory))


def trainer(folder, config):
    texts = Dataset.from_dict({"text": ["a a"] * 4})
    named = "processing_class" if "processing_class" in SIGNATURE.parameters else "tokenizer"
    SFTTrainer(model=folder, args=config, train_dataset=texts, **{named: tokenizer()})
