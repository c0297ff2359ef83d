"""sentence-transformers: `model_kwargs` go to transformers' `AutoModel`."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer
from tiny import PARTS, in_nf4, on_all_gpus

from bnb_dispatch_fix.planning.simulation import simulated_gpus

PACKAGE = "sentence_transformers"
#: The model without its head.
BODY = {
    name.replace("model.", "", 1): size for name, size in PARTS.items() if name.startswith("model.")
}


def loads(folder):
    def call(strategy, max_memory):
        asked = in_nf4(strategy, max_memory)
        with simulated_gpus():
            SentenceTransformer(folder, model_kwargs=asked, device="cpu")

    return on_all_gpus(call, BODY)
