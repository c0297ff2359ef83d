"""Says which release quantizes the experts of a model, and what the model takes there."""

from __future__ import annotations

import sys
from typing import Any, List, Optional

from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.units import Units
from bnb_dispatch_fix.wording import amount, cell

_FUSED = "one tensor for all of a layer, where only linear layers are quantized"
#: Types of models whose experts are linear layers of their own in transformers 4.57.6, and one
#: tensor per layer in 5.0.0 and newer; read off both releases.
_LINEAR_BEFORE_5 = (
    *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe"),
    *("hunyuan_v1_moe", "jamba", "longcat_flash", "minimax", "mixtral", "olmoe", "phimoe"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next"),
)
#: Of these, the ones whose router is such a layer, too.
_LINEAR_ROUTER = (
    *("flex_olmo", "jamba", "minimax", "mixtral", "olmoe", "phimoe"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next"),
)
#: Experts that take less than this share of the model are not spoken of.
_LARGE = 0.05
#: The release up to which nobody quantizes fused experts with bitsandbytes.
_LOOKED_UP_TO = "5.25"


def lines(request: Request, fine: Units) -> List[str]:
    """What is said of experts that stay unquantized, where these are much of the model."""
    experts = sum(facts.unquantized for name, facts in fine.facts.items() if "expert" in name)
    if experts < _LARGE * fine.total:
        return []
    found = f"{cell(experts)} of it are experts: {_FUSED}"
    if _type(request) not in _LINEAR_BEFORE_5 or not _is_generation_5():
        return [found, f"no release up to {_LOOKED_UP_TO} quantizes them with bitsandbytes"]
    router = [name for name in fine.facts if name.rpartition(".")[2] in ("gate", "router")]
    routers = sum(fine.facts[name].unquantized for name in router)
    linear = experts + (routers if _type(request) in _LINEAR_ROUTER else 0)
    shrunk = fine.total - linear + int(linear * _share(request))
    return [
        found,
        f"transformers 4.57.6 has a linear layer for each expert and quantizes them: there the "
        f"model takes {amount(shrunk)}",
    ]


def _share(request: Request) -> float:
    """What quantizing leaves of 16 bits."""
    config: Optional[Any] = getattr(request.quantizer, "quantization_config", request.quantizer)
    return 0.25 if getattr(config, "load_in_4bit", False) else 0.5


def _type(request: Request) -> str:
    return str(getattr(getattr(request.model, "config", None), "model_type", ""))


def _is_generation_5() -> bool:
    version = str(getattr(sys.modules.get("transformers"), "__version__", ""))
    return not version.startswith("4.")
