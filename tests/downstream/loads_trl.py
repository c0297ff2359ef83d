"""trl: `SFTTrainer(model=PATH)` hands `model_init_kwargs` to transformers."""

from __future__ import annotations

import inspect
import tempfile

import transformers
from datasets import Dataset
from tiny import PARTS, in_nf4, on_all_gpus, tokenizer
from trl import SFTConfig, SFTTrainer

from bnb_dispatch_fix.planning.simulation import simulated_gpus

PACKAGE = "trl"
DTYPE = "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"
SIGNATURE = inspect.signature(SFTTrainer.__init__)


def loads(folder):
    def call(strategy, max_memory):
        asked = {**in_nf4(strategy, max_memory), DTYPE: "float16"}  # newer: else in float32
        config = SFTConfig(
            output_dir=tempfile.gettempdir(),
            model_init_kwargs=asked,
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        with simulated_gpus():
            trainer(folder, config)

    return on_all_gpus(call, PARTS)


def trainer(folder, config):
    texts = Dataset.from_dict({"text": ["a a"] * 4})
    named = "processing_class" if "processing_class" in SIGNATURE.parameters else "tokenizer"
    SFTTrainer(model=folder, args=config, train_dataset=texts, **{named: tokenizer()})
