"""sentence-transformers: `model_kwargs` go to transformers' `AutoModel`."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer
from tiny import GPUS, PARTS, STRATEGIES, Load, budgets, nf4, rooms

from bnb_dispatch_fix.planning.simulation import simulated_gpus

PACKAGE = "sentence_transformers"
#: The model without its head.
BODY = {
    name.replace("model.", "", 1): size for name, size in PARTS.items() if name.startswith("model.")
}


def loads(folder):
    for strategy in STRATEGIES:
        for count, mib in GPUS:
            max_memory = budgets(count, mib)

            def call(strategy=strategy, max_memory=max_memory):
                asked = {
                    "device_map": strategy,
                    "max_memory": dict(max_memory),
                    "quantization_config": nf4(),
                }
                with simulated_gpus():
                    SentenceTransformer(folder, model_kwargs=asked, device="cpu")

            yield Load(f"{strategy} {count}x{mib}", call, BODY, rooms(max_memory))
