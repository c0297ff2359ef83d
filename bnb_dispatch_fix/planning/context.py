"""Whether what loads also runs: what a context takes on each device of each planner's map."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from bnb_dispatch_fix.model.device_map import ancestors
from bnb_dispatch_fix.model.layout import collapsed, device_of, parts_by_device
from bnb_dispatch_fix.model.search import Outcome
from bnb_dispatch_fix.model.units import Units
from bnb_dispatch_fix.placement.packing import pack
from bnb_dispatch_fix.placement.records import Device, Placement
from bnb_dispatch_fix.planning import cache
from bnb_dispatch_fix.planning.room import (
    MOST_TOKENS,
    Need,
    Pass,
    most_tokens,
    needs,
    short_of,
)
from bnb_dispatch_fix.wording import HOST, amount, device_name

#: What configurations call the most tokens that a model was made for.
_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length",
           "max_target_positions")  # fmt: skip
_HOW = {
    "release": "in the installed release",
    "": "with the device_map below",
    "backport": "with the backport",
}
#: An entry of a run's devices: device, given, usable, placed, parts.
_Entry = Tuple[Any, ...]


class Candidate(NamedTuple):
    """A device map that loads: of the run of that name, or of the exact search ("")."""

    name: str
    device_map: Dict[str, Device]


class _Room:
    """What is asked for, and what each device has for it."""

    def __init__(self, job: Mapping[str, Any], request: Any, exact: Outcome, fine: Units) -> None:
        self.context: Optional[int] = job.get("context")
        self.batch: int = job.get("batch") or 1
        self.kv_dtype: Optional[str] = job.get("kv_dtype")
        self.reserve: int = job.get("reserve") or 0
        self.model = request.model
        self.exact, self.fine = exact, fine
        self.names = [unit.name for unit in exact.units.units]
        self.dtype = self.kv_dtype or str(self.model.dtype).replace("torch.", "")

    def law(self) -> cache.Law:
        """What is taken for a number of tokens; measured where somebody asks for a context."""
        if self.context is not None:
            return cache.law(self.model, self.names, self.context, self.batch, self.kv_dtype)
        found = cache.from_configuration(self.model, self.names, self.batch, self.kv_dtype)
        return cache.Law(found, "worked out from the configuration")

    def scales(self, device_map: Mapping[str, Device]) -> Dict[Device, int]:
        found: Dict[Device, int] = {}
        for name, facts in self.fine.facts.items():
            device = device_of(name, device_map) if facts.scales else None
            if device is not None:
                found[device] = found.get(device, 0) + facts.scales
        return found

    def free(self, device_map: Mapping[str, Device]) -> Dict[Device, int]:
        """Bytes that each accelerator has beside the weights, their scales and the reserve."""
        scales, loads = self.scales(device_map), self.fine.loads(device_map)
        return {
            device: given - loads.get(device, 0) - scales.get(device, 0) - self.reserve
            for device, given in self.exact.budgets.given.items()
            if device not in HOST and device in self.exact.budgets.accelerators
        }

    def needs(self, passed: Pass, device_map: Mapping[str, Device]) -> Dict[Device, Need]:
        first = next(iter(device_map.values()))
        return needs(passed, lambda module: device_of(module, device_map), first)

    def short(self, passed: Pass, device_map: Mapping[str, Device]) -> Dict[Device, int]:
        """By how many bytes each accelerator is short; negative where some are left."""
        free = self.free(device_map)
        taken = self.needs(passed, device_map)
        return short_of({**dict.fromkeys(free, Need(0, 0)), **taken}, free)

    def placed(self, passed: Pass) -> Optional[Dict[str, Device]]:
        """A map with room for the context: weights and cache balanced; None where none is found."""
        kept = dict.fromkeys(self.names, 0)
        for module, size in passed.cache:
            around = (name for name in (module, *ancestors(module)) if name in kept)
            home = next(around, None)
            if home is not None:
                kept[home] += size
        stored = self.exact.units.stored()
        units = [unit._replace(size=unit.size + kept[unit.name]) for unit in stored.units]
        everything = self.needs(passed, {"": 0})[0]
        budgets = {
            device: given - self.reserve - everything.working
            for device, given in self.exact.budgets.given.items()
            if device in self.exact.budgets.accelerators
        }
        found = pack(units, budgets, merit="even")
        if not isinstance(found, Placement) or not found.devices:
            return None
        return self.exact.units.device_map(found.devices)


def added(
    job: Mapping[str, Any], request: Any, exact: Outcome, fine: Units, answer: Dict[str, Any]
) -> Dict[str, Any]:
    """What an answer says of the context: "room", and the runs, verdict, map and notes with it."""
    room = _Room(job, request, exact, fine)
    loading = [run for run in answer["runs"] if run["outcome"] == "loads"]
    candidates = [Candidate(run["name"], dict(run["device_map"])) for run in loading]
    if not candidates and answer["device_map"] is not None:
        candidates = [Candidate("", dict(answer["device_map"]))]
    told = {"context": room.context, "batch": room.batch, "kv_dtype": room.dtype}
    told.update(reserve=room.reserve, limit=limit_of(room.model.config), source=None)
    told.update(most=None, enough=None, shown=None, devices=[])
    if not candidates:
        return {"room": None if room.context is None else {**told, "most": 0, "enough": False}}
    try:
        law = room.law()
    except cache.Unknown as error:
        if room.context is None:
            return {"room": None}
        reason = f"what {room.context} tokens take is not known: {error}"
        return {"room": {**told, "source": reason}, "notes": [*answer["notes"], reason]}
    told["source"] = law.source
    if room.context is None:
        chosen = candidates[0]
        most = most_tokens(lambda n: _worst(room, law.of(n), chosen), MOST_TOKENS)
        return {"room": {**told, "most": most}}
    return _asked(room, law, candidates, told, answer)


def _asked(
    room: _Room,
    law: cache.Law,
    candidates: List[Candidate],
    told: Dict[str, Any],
    answer: Dict[str, Any],
) -> Dict[str, Any]:
    """The answer for a context that was asked for."""
    assert room.context is not None  # noqa: S101  # or `added` would have answered
    passed = law.of(room.context)
    running = _running(room, passed, candidates)
    told["enough"] = running is not None
    if running is not None:
        chosen = running
    else:
        chosen, told["most"] = _longest(room, law, candidates)
    told["shown"] = chosen.name or None
    told["devices"] = _entries(room, passed, chosen.device_map)
    runs = [_with_context(room, passed, run) for run in answer["runs"]]
    return {
        "room": told,
        "runs": runs,
        "notes": [*answer["notes"], *_warnings(room, passed, told)],
        "verdict": _verdict(room, passed, chosen, told),
        "device_map": list(chosen.device_map.items()),
    }


def _running(room: _Room, passed: Pass, candidates: List[Candidate]) -> Optional[Candidate]:
    """The map to paste: the first that runs; None where none does.

    Where `even` is among the planners, a map that balances weights and cache goes before theirs.
    """
    wants_even = any(candidate.name == "even" for candidate in candidates)
    running = [each for each in candidates if _worst(room, passed, each) <= 0]
    if wants_even or not running:
        balanced = _balanced(room, passed)
        if balanced is not None and _worst(room, passed, balanced) <= 0:
            return balanced
    return running[0] if running else None


def _balanced(room: _Room, passed: Pass) -> Optional[Candidate]:
    found = room.placed(passed)
    return None if found is None else Candidate("", found)


def _longest(room: _Room, law: cache.Law, candidates: List[Candidate]) -> Tuple[Candidate, int]:
    """The map with which the largest context runs, where the one asked for does not; and that.

    Looked at are the planners' map that is short by the least, and maps balanced for a shorter one.
    """
    asked = room.context or 1

    def short(tokens: int) -> int:
        found = _balanced(room, law.of(tokens))
        return tokens if found is None else _worst(room, law.of(tokens), found)

    def most(candidate: Candidate) -> int:
        return most_tokens(lambda tokens: _worst(room, law.of(tokens), candidate), asked)

    best = min(candidates, key=lambda each: _worst(room, law.of(asked), each))
    longest = most(best)
    roomy = most_tokens(short, asked)
    balanced = _balanced(room, law.of(roomy)) if roomy > longest else None
    return (best, longest) if balanced is None else (balanced, most(balanced))


def _worst(room: _Room, passed: Pass, candidate: Candidate) -> int:
    return max(room.short(passed, candidate.device_map).values(), default=0)


def _with_context(room: _Room, passed: Pass, run: Dict[str, Any]) -> Dict[str, Any]:
    """A run whose devices say what the context takes, where it loads."""
    if run["outcome"] != "loads":
        return run
    more = _more(room, passed, dict(run["device_map"]))
    entries = [(*entry, *more.get(entry[0], ())) for entry in run["devices"]]
    return {**run, "devices": entries}


def _more(
    room: _Room, passed: Pass, device_map: Mapping[str, Device]
) -> Dict[Device, Tuple[int, int, int, int]]:
    """Scales, cache, working memory and reserve of each accelerator."""
    taken, scales = room.needs(passed, device_map), room.scales(device_map)
    nothing = Need(0, 0)
    return {
        device: (scales.get(device, 0), *taken.get(device, nothing), room.reserve)
        for device in room.exact.budgets.accelerators
    }


def _entries(room: _Room, passed: Pass, device_map: Mapping[str, Device]) -> List[_Entry]:
    """The devices of the map to paste, with what lies on them."""
    placed = parts_by_device(room.exact.units, room.fine, device_map)
    budgets = room.exact.budgets
    entries: List[_Entry] = []
    for device, more in _more(room, passed, device_map).items():
        parts = collapsed(placed.get(device, ()))
        size = sum(part.size for part in parts)
        told = [astuple(part) for part in parts]
        entries.append((device, budgets.given[device], budgets.usable[device], size, told, *more))
    return entries


def _warnings(room: _Room, passed: Pass, told: Mapping[str, Any]) -> List[str]:
    limit, asked = told["limit"], room.context or 0
    notes = []
    if limit and asked > limit:
        notes.append(f"{asked} tokens are more than the {limit} that the model was made for")
    if not passed.cache:
        notes.append(f"{type(room.model).__name__} keeps no cache: it reads its input at once")
    return notes


def _verdict(room: _Room, passed: Pass, chosen: Candidate, told: Mapping[str, Any]) -> str:
    how = _HOW.get(chosen.name, f"with {chosen.name}")
    asked = f"{room.context} tokens × {room.batch}"
    if told["enough"]:
        return f"loads and runs with {asked} {how}"
    short = room.short(passed, chosen.device_map)
    device = max(short, key=lambda each: short[each])
    missing = f"with {asked} {device_name(device)} is short by {amount(short[device])}"
    if not told["most"]:
        return f"loads {how}, but runs with no context; {missing}"
    most = f"{told['most']} token{'' if told['most'] == 1 else 's'} × {room.batch}"
    return f"loads {how}, but runs only to {most}; {missing}"


def limit_of(config: Any) -> Optional[int]:
    """The most tokens that a model was made for, by its configuration; None where it is silent."""
    text = getattr(config, "text_config", None) or config
    found = (getattr(text, name, None) for name in _LIMITS)
    return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)
