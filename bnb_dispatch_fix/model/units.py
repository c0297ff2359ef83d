"""Turns a model on the meta device into the units that a placement moves, and sizes them."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import (
    AbstractSet,
    Any,
    Collection,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Set,
    Tuple,
    Union,
)

from bnb_dispatch_fix.backport.shapes import Model, Module, Tensor
from bnb_dispatch_fix.model.device_map import ancestors, compact
from bnb_dispatch_fix.model.sizers import Sizer, Storage
from bnb_dispatch_fix.placement.records import Device, Unit

# A path to look at: the name of a module or tensor, itself, and the module a tensor belongs to.
_Step = Tuple[str, Any, Any]


@dataclass(frozen=True)
class UnitFacts:
    """What a unit is made of; all sizes in bytes.

    `names` are the names of the module or tensor, more than one where it is registered twice.
    `keys` are the device map keys that cover it: its names, or, where a tensor of it is excluded,
    the names of its parts. `sizes` maps a dtype ("float16", "4-bit") to the bytes stored so;
    `scales` are the bytes beside them that bitsandbytes reads them with; no planner counts these.
    """

    names: Tuple[str, ...]
    keys: Tuple[str, ...]
    module_class: str
    sizes: Dict[str, int]
    quantized: int
    scales: int = 0

    @property
    def unquantized(self) -> int:
        """Bytes that stay in a dtype of their own."""
        return sum(self.sizes.values()) - self.quantized


@dataclass(frozen=True)
class Units:
    """The units of a model in model order, the facts about each, and what is not placed (bytes)."""

    units: List[Unit]
    facts: Dict[str, UnitFacts]
    excluded: Dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all units; tied tensors count once, excluded ones do not."""
        return sum(unit.size for unit in self.units)

    @property
    def scales(self) -> int:
        """Bytes beside the weights that bitsandbytes needs to read them."""
        return sum(facts.scales for facts in self.facts.values())

    def stored(self) -> Units:
        """The same units with what is stored beside their weights in their sizes."""
        if not self.scales:
            return self
        units = [
            unit._replace(size=unit.size + self.facts[unit.name].scales) for unit in self.units
        ]
        return Units(units, self.facts, self.excluded)

    def loads(self, device_map: Mapping[str, Device]) -> Dict[Device, int]:
        """Return the bytes a device map puts on each device; what it does not cover is left out."""
        loads: Dict[Device, int] = {}
        for unit in self.units:
            covering = [name for name in (*ancestors(unit.name), unit.name) if name in device_map]
            if covering:
                device = device_map[covering[-1]]
                loads[device] = loads.get(device, 0) + unit.size
        return loads

    def device_map(self, devices: Mapping[str, Device]) -> Dict[str, Device]:
        """Return the shortest device map for a placement (unit name → device)."""
        pairs = [(key, devices[name]) for name, facts in self.facts.items() for key in facts.keys]
        return compact(pairs, self.excluded)


def measure(
    model: Model,
    *,
    no_split_module_classes: Union[Collection[str], str, None],
    sizer: Sizer,
    no_placement_params: Collection[str] = (),
) -> Units:
    """Return the units of a model: what goes to one device whole.

    That is a module whose class is named in `no_split_module_classes`, a module without children
    that has tensors, and each direct parameter or buffer of a module that is split. Non-persistent
    buffers count, as they take memory. A tensor that several units share counts in the first of
    them, or where `model.all_tied_weights_keys` (transformers 5, which ties after planning) says
    its source is; these units have one `tie`. On transformers 4.x call `model.tie_weights()`
    before, as `from_pretrained` does.

    `sizer` gives the bytes per element (see `sizers.sizer_for`); a unit's bytes are rounded up.
    `no_placement_params` (transformers 5.16+, `model._no_placement_params`) are names, relative to
    a module that may not be split, of parameters to leave out of the units and of the device map;
    the planner of that release does so only where the module does not fit with them.
    """
    if isinstance(no_split_module_classes, str):
        no_split_module_classes = [no_split_module_classes]
    no_split = frozenset(no_split_module_classes or ())
    walk = _Walk(model, no_split, sizer, frozenset(no_placement_params))
    with _as_tensors():
        walk.run()
    return walk.result()


def _as_tensors() -> ContextManager[Any]:
    """Asks bitsandbytes' weights as plain tensors: their own way takes twice as long."""
    core = getattr(sys.modules.get("torch"), "_C", None)
    for name in ("DisableTorchFunctionSubclass", "DisableTorchFunction"):  # since, and before 2.0
        if hasattr(core, name):
            disabled: ContextManager[Any] = getattr(core, name)()
            return disabled
    return nullcontext()


@dataclass
class _Draft:
    """A unit while the walk goes on."""

    names: List[str]
    item: Any  # the module or tensor
    elements: Dict[Storage, int] = field(default_factory=dict)
    excluded: List[str] = field(default_factory=list)  # names within the unit

    def size(self) -> int:
        return math.ceil(sum(count * storage.bytes for storage, count in self.elements.items()))

    def facts(self) -> UnitFacts:
        sizes: Dict[str, int] = {}
        quantized, scales = 0, 0.0
        for storage, count in self.elements.items():
            size = math.ceil(count * storage.bytes)
            sizes[storage.label] = sizes.get(storage.label, 0) + size
            quantized += size if storage.quantized else 0
            scales += count * storage.scales
        keys = [key for name in self.names for key in self._keys(name)]
        kind = type(self.item).__name__
        return UnitFacts(tuple(self.names), tuple(keys), kind, sizes, quantized, math.ceil(scales))

    def _keys(self, name: str) -> Iterator[str]:
        """The unit under one of its names, or all parts of it that hold nothing excluded."""
        if not self.excluded:
            yield name
            return
        opened = {before for path in self.excluded for before in ancestors(path)}
        stack: List[_Step] = [(name, self.item, None)]
        while stack:
            path, module, _ = stack.pop()
            for step in _parts(path, module):
                within = _within(name, step[0])
                if within in opened:
                    stack.append(step)
                elif within not in self.excluded:
                    yield step[0]


class _Walk:
    """One pass over a model's modules and tensors; it keeps a stack, so no model is too deep."""

    def __init__(
        self,
        model: Model,
        no_split: AbstractSet[str],
        sizer: Sizer,
        no_placement: AbstractSet[str],
    ) -> None:
        self.model = model
        self.no_split = no_split
        self.sizer = sizer
        self.no_placement = no_placement
        self.drafts: List[_Draft] = []
        self.groups: List[int] = []  # union-find over the drafts: what is tied
        self.unit_of: Dict[int, int] = {}  # id of a unit's module or tensor → its draft
        self.home: Dict[int, int] = {}  # id of a tensor → the first draft that holds it
        self.counted: Set[int] = set()  # ids of tensors, where copies are tied later
        self.excluded: Dict[str, int] = {}
        # Tied later: name of the copy → name of the source, as transformers 5 declares it.
        self.tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        self.sources: Dict[str, Optional[int]] = dict.fromkeys(self.tied.values())
        self.copies: List[Tuple[int, str, Any, Any]] = []

    def run(self) -> None:
        """Visit all names in the order of `named_parameters`, each module's own buffers last."""
        stack: List[_Step] = [("", self.model, None)]
        while stack:
            name, item, owner = stack.pop()
            if owner is not None:
                self._add(self._unit(name, item), name, item, owner)
            elif self._is_whole(item):
                self._visit_whole(name, item)
            else:
                stack.extend(reversed(list(_parts(name, item))))
        self._settle_copies()

    def result(self) -> Units:
        roots = [self._root(index) for index in range(len(self.drafts))]
        tied = {root for index, root in enumerate(roots) if root != index}
        embedding = self._embedding()
        units = [
            Unit(draft.names[0], draft.size(), root if root in tied else None, index == embedding)
            for index, (draft, root) in enumerate(zip(self.drafts, roots))
        ]
        facts = {draft.names[0]: draft.facts() for draft in self.drafts}
        return Units(units, facts, self.excluded)

    def _is_whole(self, module: Any) -> bool:
        children = module._modules.values()
        return type(module).__name__ in self.no_split or all(child is None for child in children)

    def _unit(self, name: str, item: Any) -> int:
        """The draft of a module or tensor; a second name of the same object is added to it."""
        index = self.unit_of.setdefault(id(item), len(self.drafts))
        if index == len(self.drafts):
            self.drafts.append(_Draft([name], item))
            self.groups.append(index)
        else:
            self.drafts[index].names.append(name)
        return index

    def _visit_whole(self, name: str, module: Any) -> None:
        no_placement = self.no_placement if type(module).__name__ in self.no_split else ()
        home, sizer, plain = self.home, self.sizer, not (no_placement or self.tied)
        index = -1
        stack = [(name, module)]
        while stack:
            path, current = stack.pop()
            parameters, children = current._parameters, current._modules
            buffers = current._buffers
            dotted = f"{path}." if path and (parameters or buffers or children) else ""
            for tensors in (parameters, buffers) if buffers else (parameters,):
                for leaf, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if index < 0:  # a module without tensors is no unit
                        index = self._unit(name, module)
                        elements = self.drafts[index].elements
                    full = dotted + leaf
                    if plain and id(tensor) not in home:  # nearly all: `_add` without the calls
                        home[id(tensor)] = index
                        storage = sizer(full, tensor, current)
                        elements[storage] = elements.get(storage, 0) + tensor.numel()
                    elif no_placement and _within(name, full) in no_placement:
                        self._leave_out(index, full, tensor, current)
                    else:
                        self._add(index, full, tensor, current)
            if children:
                reverse = reversed(children.items())
                stack += [(dotted + leaf, child) for leaf, child in reverse if child is not None]

    def _add(self, index: int, name: str, tensor: Tensor, owner: Module) -> None:
        key = id(tensor)
        counted = key in (self.counted if self.tied else self.home)
        first = self.home.setdefault(key, index)
        if first != index:
            self._tie(first, index)
        if self.tied:
            if name in self.sources:
                self.sources[name] = index
            if name in self.tied:
                self.copies.append((index, name, tensor, owner))
                return
        if not counted:
            self._count(index, name, tensor, owner)

    def _count(self, index: int, name: str, tensor: Tensor, owner: Module) -> None:
        self.counted.add(id(tensor))
        storage = self.sizer(name, tensor, owner)
        elements = self.drafts[index].elements
        elements[storage] = elements.get(storage, 0) + tensor.numel()

    def _leave_out(self, index: int, name: str, tensor: Tensor, owner: Module) -> None:
        storage = self.sizer(name, tensor, owner)
        self.excluded[name] = math.ceil(tensor.numel() * storage.bytes)
        within = _within(self.drafts[index].names[-1], name)
        if within not in self.drafts[index].excluded:
            self.drafts[index].excluded.append(within)

    def _settle_copies(self) -> None:
        """Tie what will be tied later; a copy whose source is not in the model counts itself."""
        for index, name, tensor, owner in self.copies:
            source = self.tied[name]
            seen = {name}
            while source in self.tied and source not in seen:
                seen.add(source)
                source = self.tied[source]
            home = self.sources.get(source)
            if home is None:
                home = self.sources[source] = index
                if id(tensor) not in self.counted:
                    self._count(index, name, tensor, owner)
            self._tie(home, index)

    def _tie(self, one: int, other: int) -> None:
        one, other = self._root(one), self._root(other)
        self.groups[max(one, other)] = min(one, other)

    def _root(self, index: int) -> int:
        while self.groups[index] != index:
            self.groups[index] = index = self.groups[self.groups[index]]
        return index

    def _embedding(self) -> Optional[int]:
        """The draft that holds the model's input embedding, where the model has and knows one."""
        try:
            tensors = list(self.model.get_input_embeddings().parameters())
        except Exception:  # noqa: BLE001  # plain torch modules lack the method, some models do not implement it
            return None
        return next((self.home[id(tensor)] for tensor in tensors if id(tensor) in self.home), None)


def _parts(name: str, module: Any) -> Iterator[_Step]:
    """What a module is split into: its own parameters, its children, its own buffers."""
    dotted = f"{name}." if name else ""
    for leaf, tensor in module._parameters.items():
        if tensor is not None:
            yield dotted + leaf, tensor, module
    for leaf, child in module._modules.items():
        if child is not None:
            yield dotted + leaf, child, None
    for leaf, tensor in module._buffers.items():
        if tensor is not None:
            yield dotted + leaf, tensor, module


def _within(name: str, path: str) -> str:
    """A full name as seen from the module `name`."""
    return path[len(name) + 1 :] if name else path
