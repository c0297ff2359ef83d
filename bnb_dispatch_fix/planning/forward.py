"""Runs a model on the meta device and notes what every operation would take, and how long.

Nothing is computed: on the meta device tensors have a shape and no memory. What an operation
answers that depends on numbers is answered here (see `_answered`).
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import torch  # found, not required: whoever imports this module is ready for its absence
from torch.utils._python_dispatch import TorchDispatchMode

from bnb_dispatch_fix.planning.room import Event
from bnb_dispatch_fix.planning.simulation import replaced

#: Operations of one forward pass, at most: a model that loops over its tokens has more.
MOST_OPERATIONS = 400_000

_ATEN = torch.ops.aten
#: The product of many experts' weights, which the meta device knows for bfloat16 only.
_GROUPED = getattr(_ATEN, "_grouped_mm", None)


class TooManyOperations(RuntimeError):
    """A forward pass takes more operations than anybody would wait for."""


class Watch(TorchDispatchMode):  # type: ignore[misc]  # torch's types are not looked at
    """While it is on, operations on meta tensors are noted in `events`."""

    def __init__(self, model: Any, tokens: int) -> None:
        super().__init__()
        self.events: List[Event] = []
        self._touched: Dict[int, str] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: List[str] = [""]
        self._numbers: Dict[int, int] = {}  # address of a storage → its number
        self._alive: List[Any] = []
        self._weights = {address(tensor) for tensor in tensors_of(model)}
        self._tokens = tokens
        self._routed: Set[str] = set()
        self._operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        self._operations += 1
        if self._operations > MOST_OPERATIONS:
            raise TooManyOperations(f"more than {MOST_OPERATIONS} operations")
        answer = self._answered(func, args)
        out = func(*args, **(kwargs or {})) if answer is None else answer[0]
        if isinstance(out, torch.Tensor):
            self._note(out)
        elif isinstance(out, (tuple, list)):
            for each in out:
                if isinstance(each, torch.Tensor):
                    self._note(each)
        return out

    def number_of(self, tensor: Any) -> int:
        """The number of the storage that a tensor lies in; -1 where it is not known."""
        number: int = self._numbers.get(address(tensor), -1)
        return number

    def touched_last(self, tensor: Any) -> str:
        """The module that last computed with a tensor's storage; "" where none is known."""
        owner: str = self._touched.get(self.number_of(tensor), "")
        return owner

    def call(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module, so that what happens meanwhile is noted as its own."""
        name = self._names.get(id(module), self._stack[-1])
        given = (*args, *kwargs.values())
        inputs = {self.number_of(each) for each in given if isinstance(each, torch.Tensor)} - {-1}
        self.events.append(Event("enter", name, storages=tuple(inputs)))
        self._stack.append(name)
        try:
            return forward(*args, **kwargs)
        finally:
            self._stack.pop()
            self.events.append(Event("leave", name))

    def _note(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            if key in self._weights:
                return
            number = self._numbers[key] = len(self._alive)
            self._alive.append(weakref.ref(storage, self._freer(key, number)))
            size = storage.nbytes()
            self.events.append(Event("take", self._stack[-1], number, size))
        if self._stack[-1] or number not in self._touched:
            self._touched[number] = self._stack[-1]

    def _freer(self, key: int, number: int) -> Callable[[Any], None]:
        def freed(_: Any) -> None:
            if self._numbers.get(key) == number:
                del self._numbers[key]
            self.events.append(Event("free", "", number))

        return freed

    def _answered(self, func: Any, args: Any) -> Optional[Tuple[Any]]:
        """What the meta device cannot answer, because it depends on numbers; None otherwise."""
        packet = getattr(func, "overloadpacket", None)
        if packet in (_ATEN._local_scalar_dense, _ATEN.is_nonzero, _ATEN.equal):
            return (0,)
        if packet is _ATEN.nonzero:
            shape = (self._rows(args[0]), args[0].dim())
            return (args[0].new_empty(shape, dtype=torch.long),)
        if packet is _ATEN.bincount:
            length = args[2] if len(args) > 2 else 1
            return (args[0].new_empty((length,), dtype=torch.long),)
        if packet is _GROUPED and args[0].dim() == 2 and args[1].dim() == 3:
            return (args[0].new_empty((args[0].shape[0], args[1].shape[-1])),)
        return None

    def _rows(self, mask: Any) -> int:
        """How many places of a mask are set: every token goes to the first expert, once a block."""
        if self._tokens not in mask.shape:
            return 1
        here = self._stack[-1]
        if here in self._routed:
            return 0
        self._routed.add(here)
        return int(max(mask.shape))


def address(tensor: Any) -> int:
    """What tells the storages apart that are alive."""
    found: int = tensor.untyped_storage()._cdata
    return found


def tensors_of(model: Any) -> Iterator[Any]:
    """Parameters and buffers, tied ones as often as they are tied."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)


def moved_to_meta(model: Any) -> None:
    """Take the memory of a model's tensors away, also where a release keeps buffers on the CPU."""
    moved: Dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device.type != "meta":
                    if id(tensor) not in moved:
                        moved[id(tensor)] = tensor, _like(tensor)
                    tensors[name] = moved[id(tensor)][1]
        for name, value in vars(module).items():  # a second reference to a buffer
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                setattr(module, name, value.to("meta"))


def _like(tensor: Any) -> Any:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=False)
    return empty


@contextmanager
def watched(model: Any, tokens: int) -> Iterator[Watch]:
    """A watch over what happens meanwhile, on the meta device and without gradients."""
    watch = Watch(model, tokens)
    call = torch.nn.Module.__call__

    def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
        return watch.call(module, lambda *a, **k: call(module, *a, **k), args, kwargs)

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("meta"))
        stack.enter_context(replaced(torch, "autocast", _no_autocast))
        stack.enter_context(replaced(torch.nn.Module, "__call__", noted))
        functional = torch.nn.functional
        if hasattr(functional, "scaled_dot_product_attention"):
            stack.enter_context(replaced(functional, "scaled_dot_product_attention", _attention))
        for kind in _kinds_without_forward(model):
            stack.enter_context(_stood_in(kind))
        stack.enter_context(watch)
        yield watch


def _no_autocast(*args: Any, **kwargs: Any) -> Any:
    """Instead of `torch.autocast`, which does not know the meta device."""
    return nullcontext()


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """What the kernels of an accelerator leave: no scores of every token with every other."""
    *front, heads, length = query.shape[:-1]
    return torch.empty(
        (*front, length, heads, value.shape[-1]), dtype=query.dtype, device=query.device
    ).transpose(-2, -3)


def _kinds_without_forward(model: Any) -> Set[Any]:
    """Classes of layers whose weights are packed: they cannot compute before these are loaded."""
    linear = torch.nn.Linear
    return {
        kind
        for kind in {type(module): module for module in model.modules()}
        if _features(kind, model) and kind.forward is not linear.forward
    }


def _features(kind: Any, model: Any) -> bool:
    name = f"{kind.__module__}.{kind.__name__}"
    return name.startswith("bitsandbytes.") or (
        not name.startswith(("torch.", "transformers.models.")) and "Linear" in kind.__name__
    )


@contextmanager
def _stood_in(kind: Any) -> Iterator[None]:
    """A packed layer that takes what unpacking its weight takes, and gives the right shape."""

    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        inside, outside = _sides(self)
        weight = torch.empty((outside, inside), dtype=x.dtype)
        result = torch.empty((*x.shape[:-1], outside), dtype=x.dtype)
        del weight
        return result

    before = vars(kind).get("forward")
    kind.forward = forward
    try:
        yield
    finally:
        if before is None:
            del kind.forward
        else:
            kind.forward = before


def _sides(layer: Any) -> Tuple[int, int]:
    for inside, outside in (("in_features", "out_features"), ("infeatures", "outfeatures")):
        if hasattr(layer, inside):
            return int(getattr(layer, inside)), int(getattr(layer, outside))
    raise TypeError(f"{type(layer).__name__} does not say how wide it is")


def cached_tensors(kept: Any) -> List[Tuple[str, Any]]:
    """The tensors of a cache, whatever holds them, with what each is reached by; each once."""
    found: List[Tuple[str, Any]] = []
    seen: Set[int] = set()
    stack: List[Tuple[str, Any]] = [("", kept)]
    while stack:
        path, item = stack.pop()
        if id(item) in seen or item is None:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append((path, item))
        else:
            inside = [(f"{path}.{name}", each) for name, each in _inside(item)]
            stack.extend(reversed(inside))
    return found


def _inside(item: Any) -> List[Tuple[Any, Any]]:
    if isinstance(item, (list, tuple)):
        return list(enumerate(item))
    if isinstance(item, Mapping):
        return list(item.items())
    if type(item).__module__.startswith(("transformers", "torch.nn")) and hasattr(item, "__dict__"):
        return [(name, each) for name, each in vars(item).items() if name != "config"]
    return []
