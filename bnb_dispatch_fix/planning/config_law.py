"""What a context takes by a model's configuration alone: heads, layers and windows as it says.

For releases that cannot be asked (see cache.py), and where nobody asked for a context and a number
at once is enough.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from bnb_dispatch_fix.planning.room import Event, Pass

#: Bytes of an element in float32: of norms and of logits.
_FULL = 4
#: Kinds of layers that keep keys and values; those of the second kind only of a window's tokens.
_ATTENTION, _WINDOWED = ("full_attention", "attention"), ("sliding_attention", "chunked_attention")
#: What configurations call the same number; decoders' own first.
_NAMES = {
    "layers": ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "n_layers",
               "num_layers"),
    "heads": ("decoder_attention_heads", "num_attention_heads", "n_head", "n_heads", "num_heads"),
    "groups": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "head": ("head_dim", "d_kv"),
    "inner": ("intermediate_size", "decoder_ffn_dim", "d_ff", "ffn_dim", "n_inner"),
    "window": ("sliding_window", "attention_chunk_size"),
}  # fmt: skip
#: Names of fields that say that layers keep a state of their own.
_STATE = re.compile(r"(^|_)(ssm|mamba|lru|linear_conv|rwkv|conv_L|conv_kernel|state_size)(_|$)")
_NUMBERED = re.compile(r"(.*\.)?(\d+)(\.|$)")
#: Parts of a model that compute no token of the answer.
_ASIDE = re.compile(r"(^|[._])(encoder|vision|visual|audio|expert)")


class Unknown(ValueError):
    """The configuration does not say what a context takes; one line that says why."""


class Shape(NamedTuple):
    """A model's numbers that count here, in elements; `windows` is a number of tokens, or None."""

    windows: Tuple[Optional[int], ...]
    kept: int
    hidden: int
    inner: int
    vocabulary: int
    encoded: Optional[int]


def shape_of(config: Any) -> Shape:
    """Read a configuration; that of the text where a model takes other things, too.

    Raises:
        Unknown: a number is missing, or layers keep something else than keys and values.
    """
    text = getattr(config, "text_config", None) or config
    hidden, heads = _number(text, "hidden"), _number(text, "heads")
    return Shape(
        windows=_windows(text, _number(text, "layers")),
        kept=_kept(text, hidden, heads),
        hidden=hidden,
        inner=_inner(text, hidden),
        vocabulary=getattr(text, "vocab_size", 0) or 0,
        encoded=_encoded(text),
    )


def _number(config: Any, what: str, otherwise: Optional[int] = None) -> int:
    for name in _NAMES[what]:
        found = getattr(config, name, None)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    if otherwise is None:
        raise Unknown(f"the configuration has no {_NAMES[what][-1]} or the like")
    return otherwise


def _windows(config: Any, layers: int) -> Tuple[Optional[int], ...]:
    """Each layer's window; releases that do not name kinds of layers keep all tokens."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        names = [name for name in vars(config) if _STATE.search(name)]
        if names:
            raise Unknown(f"layers keep a state of their own ({names[0]})")
        return (None,) * layers
    strange = [kind for kind in kinds if kind not in _ATTENTION + _WINDOWED]
    if strange:
        raise Unknown(f"layers keep a state of their own ({strange[0]})")
    window = _number(config, "window", 0) or None
    return tuple(window if kind in _WINDOWED else None for kind in kinds)


def _kept(config: Any, hidden: int, heads: int) -> int:
    """Elements of one token's key and value in one layer."""
    if getattr(config, "qk_rope_head_dim", None) and getattr(config, "v_head_dim", None):
        widths = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        return heads * int(sum(widths))
    head = _number(config, "head", hidden // heads)
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 2 * head
    knows_groups = any(name in _defaults(config) for name in _NAMES["groups"])
    return 2 * head * (_number(config, "groups", heads) if knows_groups else heads)


def _defaults(config: Any) -> Dict[str, Any]:
    """What the release's own configuration has; it computes with nothing else (Llama in 4.30)."""
    try:
        return dict(vars(type(config)()))
    except Exception:  # noqa: BLE001  # it cannot be made without arguments
        return dict(vars(config))


def _inner(config: Any, hidden: int) -> int:
    """The widest row of a block: of its MLP, or of all experts that a token goes to."""
    inner = _number(config, "inner", 4 * hidden)
    experts = getattr(config, "num_experts_per_tok", None) or 0
    routed = experts * ((getattr(config, "moe_intermediate_size", None) or inner) + hidden)
    return max(inner, routed)


def _encoded(config: Any) -> Optional[int]:
    """Tokens that an encoder makes; 0 where as many as there are, None where there is none."""
    if not getattr(config, "is_encoder_decoder", False):
        return None
    return getattr(config, "max_source_positions", None) or 0


def layer_names(units: Sequence[str], layers: int) -> List[str]:
    """Names of a model's layers, out of those of its units, or of what these are in."""
    stems: Dict[str, Dict[int, None]] = defaultdict(dict)
    for name in units:
        found = _NUMBERED.match(name)
        if found and not _ASIDE.search(found.group(1) or ""):
            stems[found.group(1) or ""][int(found.group(2))] = None
    fitting = [stem for stem, numbers in stems.items() if len(numbers) == layers]
    if not fitting:
        raise Unknown(f"no {layers} layers are seen in the model")
    return [f"{fitting[0]}{number}" for number in sorted(stems[fitting[0]])]


class Widths(NamedTuple):
    """Bytes of an element: of the cache, and of what is computed."""

    cache: float
    computed: int


def law_of(
    config: Any, units: Sequence[str], batch: int, widths: Widths, *, all_logits: bool
) -> Callable[[int], Pass]:
    """What a forward pass takes at most, by the configuration; docs/plan.md has the formula.

    `all_logits` says that the release computes them for every token of the context.

    Raises:
        Unknown: see `shape_of`; or the layers cannot be found among the names of the units.
    """
    shape = shape_of(config)
    names = layer_names(units, len(shape.windows))

    def passed(tokens: int) -> Pass:
        rows = batch * tokens
        cache = [
            (name, math.ceil(batch * _tokens(shape, window, tokens) * shape.kept * widths.cache))
            for name, window in zip(names, shape.windows)
        ]
        block = block_bound(shape, rows, widths.computed)
        logits = (rows if all_logits else batch) * shape.vocabulary * (widths.computed + _FULL)
        return Pass(tuple(_events(cache, block, units[-1], logits)), tuple(cache))

    return passed


def _tokens(shape: Shape, window: Optional[int], tokens: int) -> int:
    """How many tokens' keys and values a layer keeps, those of the encoder with them."""
    own = tokens if window is None else min(tokens, window)
    return own if shape.encoded is None else own + (shape.encoded or tokens)


def block_bound(shape: Shape, rows: int, width: int) -> int:
    """The most that one block takes at once for so many rows, in bytes; an upper bound.

    Four rows of the hidden size and three of the widest inside it, one in float32 for a norm, and
    one weight that is unpacked.
    """
    row = width * (4 * shape.hidden + shape.kept + 3 * shape.inner) + _FULL * shape.hidden
    return rows * row + width * shape.hidden * shape.inner


def _events(cache: Sequence[Tuple[str, int]], block: int, last: str, logits: int) -> List[Event]:
    """A pass as a forward pass would be seen: each layer keeps something and computes."""
    events = []
    for number, (name, size) in enumerate(cache):
        events += [
            Event("enter", name),
            Event("take", name, 2 * number, size),
            Event("take", name, 2 * number + 1, block),
            Event("free", "", 2 * number + 1),
            Event("leave", name),
        ]
    return [*events, Event("enter", last), Event("take", last, -1, logits), Event("leave", last)]
