"""Asks the installed release what a context takes: a forward pass with its cache, without memory.

Where the release cannot do that on the meta device, the configuration is asked instead
(config_law.py), and the reason is told.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from bnb_dispatch_fix.planning.config_law import Unknown, Widths, law_of
from bnb_dispatch_fix.planning.room import KV_DTYPES, Event, Pass
from bnb_dispatch_fix.wording import one_line

#: Longer reasons are cut.
_LONGEST = 160
#: What a model's output has its cache under.
_CACHES = ("past_key_values", "cache_params", "state", "mems")
#: Arguments that keep the logits of a context's last token only, as `generate` has it.
_ONE_LOGIT = ("logits_to_keep", "num_logits_to_keep")
#: A part of a cache whose name says one of these holds what a recurrent layer computes with; it
#: is no key and no value, and has the dtype that the layer needs.
_STATES = ("conv", "ssm", "recurrent", "state", "length")


class Law(NamedTuple):
    """What a model takes for a number of tokens, and where that is known from."""

    of: Callable[[int], Pass]
    source: str


def law(model: Any, units: Sequence[str], tokens: int, batch: int, kv_dtype: Optional[str]) -> Law:
    """How a model on the meta device computes with its cache; asked for `tokens` at once.

    The model is changed: its tensors are moved to the meta device, and it is set to evaluate.
    Raises `config_law.Unknown` where neither the release nor the configuration can say.
    """
    import transformers  # found, not required

    release = f"transformers {transformers.__version__}"
    try:
        asked = _asked(model, batch, kv_dtype)
        asked(tokens)
    except Exception as error:  # noqa: BLE001  # whatever a model cannot do on the meta device
        reason = f"{release} cannot be asked: {one_line(error, _LONGEST)}"
        worked_out = from_configuration(model, units, batch, kv_dtype)
        return Law(worked_out, f"worked out from the configuration because {reason}")
    return Law(asked, f"measured on {release}'s own forward pass")


def from_configuration(
    model: Any, units: Sequence[str], batch: int, kv_dtype: Optional[str]
) -> Callable[[int], Pass]:
    """The law that the configuration alone gives; raises `config_law.Unknown`."""
    import torch  # found, not required

    computed = torch.empty((), dtype=model.dtype).element_size()
    width = computed if kv_dtype is None else KV_DTYPES[kv_dtype]
    taken = inspect.signature(model.forward).parameters
    all_logits = not any(name in taken for name in _ONE_LOGIT)
    return law_of(model.config, units, batch, Widths(width, computed), all_logits=all_logits)


def _asked(model: Any, batch: int, kv_dtype: Optional[str]) -> Callable[[int], Pass]:
    """A law that runs the model's forward pass, once for each number of tokens."""
    import torch  # found, not required

    if not hasattr(torch, "UntypedStorage") or not hasattr(torch.device, "__enter__"):
        raise RuntimeError(f"torch {torch.__version__} does not tell when memory is freed")
    from bnb_dispatch_fix.planning import forward  # imports what old releases of torch lack

    forward.moved_to_meta(model)
    model.eval()
    width = None if kv_dtype is None else KV_DTYPES[kv_dtype]

    @functools.lru_cache(maxsize=None)
    def passed(tokens: int) -> Pass:
        with forward.watched(model, tokens * batch) as watch:
            kept = _kept(model, tokens, batch)
        return _described(watch, forward.cached_tensors(kept), width)

    return passed


def _kept(model: Any, tokens: int, batch: int) -> Any:
    """Run the model over a context of its own kind; its cache, None where it keeps none."""
    inputs = _inputs(model, tokens, batch)
    found = _cache_of(model(**inputs))
    if found is not None or not _generates(model) or _reads_at_once(model):
        return found
    prepared = _prepared(model, inputs)
    found = _cache_of(model(**prepared)) or _cache_of(prepared)
    if found is None:
        raise RuntimeError("its forward pass gives no cache back")
    return found


def _reads_at_once(model: Any) -> bool:
    """An encoder, also under a head for language models (BERT's): it reads its input at once."""
    import transformers  # found, not required

    encoders = transformers.MODEL_FOR_MASKED_LM_MAPPING
    decodes = getattr(model.config, "is_decoder", False) or model.config.is_encoder_decoder
    return type(model.config) in encoders and not decodes


def _generates(model: Any) -> bool:
    ask = getattr(type(model), "can_generate", None)
    try:
        return bool(ask is not None and model.can_generate())
    except Exception:  # noqa: BLE001  # a model of its own kind
        return False


def _prepared(model: Any, inputs: Mapping[str, Any]) -> Dict[str, Any]:
    """The inputs as `generate` hands them on, where it makes a cache that the model does not."""
    import torch  # found, not required

    ids = inputs["input_ids"]
    given = {
        "past_key_values": None,
        "attention_mask": None,
        "inputs_embeds": None,
        "cache_position": torch.arange(ids.shape[1]),
        "use_cache": True,
        "is_first_iteration": True,
    }
    taken = inspect.signature(model.prepare_inputs_for_generation).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        given = {name: value for name, value in given.items() if name in taken}
    prepared = dict(model.prepare_inputs_for_generation(ids, **given))
    prepared["return_dict"] = True
    return prepared


def _cache_of(output: Any) -> Any:
    for name in _CACHES:
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if found is not None:
            return found
    return None


def _inputs(model: Any, tokens: int, batch: int) -> Dict[str, Any]:
    """A context of so many tokens, as `generate` would start with it."""
    import torch  # found, not required

    taken = inspect.signature(model.forward).parameters
    name = getattr(model, "main_input_name", "input_ids")
    ids = torch.zeros((batch, tokens), dtype=torch.long)
    inputs: Dict[str, Any] = {
        name: ids if name == "input_ids" else _heard_or_seen(model, name, batch)
    }
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    wanted = {"use_cache": True, "return_dict": True, **dict.fromkeys(_ONE_LOGIT, 1)}
    inputs.update((name, value) for name, value in wanted.items() if name in taken)
    return inputs


def _heard_or_seen(model: Any, name: str, batch: int) -> Any:
    """Sound or a picture, as large as the model takes."""
    import torch  # found, not required

    config = model.config
    if name == "input_features":
        shape: Tuple[int, ...] = (batch, config.num_mel_bins, 2 * config.max_source_positions)
    elif name == "pixel_values":
        vision = getattr(config, "vision_config", None) or getattr(config, "encoder", config)
        side = vision.image_size
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        shape = (batch, getattr(vision, "num_channels", 3), height, width)
    else:
        raise TypeError(f"what a model takes as {name} is not known here")
    return torch.zeros(shape, dtype=model.dtype)


def _described(watch: Any, tensors: List[Tuple[str, Any]], width: Optional[float]) -> Pass:
    """What was seen, as plain data; keys and values `width` bytes wide where that is given."""
    owners = _owners(watch, tensors)
    cache: List[Tuple[str, int]] = []
    kept: Dict[int, float] = {}  # storage → how much of its size is left in the cache's dtype
    for path, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if width is not None and tensor.is_floating_point() and not _is_state(path):
            factor = kept[watch.number_of(tensor)] = width / tensor.element_size()
            size = math.ceil(size * factor)
        cache.append((owners[path], size))
    events = tuple(_resized(event, kept) for event in watch.events)
    return Pass(events, tuple(cache))


def _owners(watch: Any, tensors: Sequence[Tuple[str, Any]]) -> Dict[str, str]:
    """The module that keeps each tensor: the last that touched it; "" where none did.

    What no module touched, a counter, is kept beside what has the longest path in common.
    """
    found = {path: watch.touched_last(tensor) for path, tensor in tensors}
    beside = {path.rpartition(".")[0]: owner for path, owner in found.items() if owner}
    return {path: owner or beside.get(path.rpartition(".")[0], "") for path, owner in found.items()}


def _resized(event: Event, kept: Mapping[int, float]) -> Event:
    factor = kept.get(event.storage, 1) if event.kind == "take" else 1
    return event if factor == 1 else event._replace(size=math.ceil(event.size * factor))


def _is_state(path: str) -> bool:
    return any(word in path for word in _STATES)


__all__ = ["Law", "Unknown", "law"]
