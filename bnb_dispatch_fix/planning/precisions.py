"""The precisions that `plan` knows: by the value of --bits, from the largest down."""

from __future__ import annotations

from typing import Any, Mapping, Optional

_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
#: How `from_pretrained` is told.
QUANTIZATION: Mapping[str, Optional[Mapping[str, Any]]] = {
    "16": None,
    "8": {"load_in_8bit": True},
    "4": _NF4,
    "4dq": {**_NF4, "bnb_4bit_use_double_quant": True},
}

#: What each is called; 16 bits by their dtype.
TITLES = {"8": "8-bit", "4": "4-bit nf4", "4dq": "4-bit nf4, double quantization"}
