"""Explains a refusal: what is missing, in numbers, what lies where, and what to write instead."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Tuple

from bnb_dispatch_fix import features
from bnb_dispatch_fix.backport.dispatch import all_on_disk
from bnb_dispatch_fix.explain import (
    arguments,
    experts,
    hand_written,
    notes,
    offload_disk,
    proofs,
    reading,
    whole_model,
)
from bnb_dispatch_fix.explain.offloading import stored_quantized
from bnb_dispatch_fix.explain.recipes import on_accelerators, recipes
from bnb_dispatch_fix.model.budgets import UNLIMITED
from bnb_dispatch_fix.model.device_map import refused_map
from bnb_dispatch_fix.model.layout import Part, collapsed, describe_model, parts_by_device
from bnb_dispatch_fix.model.load import Load
from bnb_dispatch_fix.model.machine import memory_of
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import Outcome, search
from bnb_dispatch_fix.model.units import Units
from bnb_dispatch_fix.placement.records import Device, Placement
from bnb_dispatch_fix.states import contained
from bnb_dispatch_fix.wording import HOST, amount, cell, device_name, kind_of, log

#: How bitsandbytes and the other quantizers word that a map has modules where they cannot be.
_REFUSAL = re.compile(r"\bcpu\b.{0,40}\bdisk\b", re.IGNORECASE | re.DOTALL)
#: From this share on, what is not quantized is said first.
_LARGE_SHARE = 0.2
_MOST_PARTS = 6
_TRIED = (
    "no max_memory",
    "every GPU named",
    "higher budgets",
    "double quantization, of which no planner takes account",
    "4 instead of 8 bits",
    "16 instead of 32",
    "head and embedding on the CPU",
    "blocks on the CPU",
    "more GPUs",
)
#: Of parts that are left over, those smaller than this share of the model are not listed.
_TINY = 0.001
#: Scales up to this share of the model are not shown.
_SMALL_SCALES = 0.01
#: What balancing comes to where no accelerator has a budget: transformers 4.30-4.49, accelerate.
_STUMBLES = (ArithmeticError, LookupError, TypeError, ValueError)


def explain(
    error: Exception,
    request: Request,
    outcome: Optional[Outcome] = None,
    device_map: Optional[Mapping[str, Device]] = None,
) -> None:
    """Attach the explanation to an error about a placement; no exception leaves it.

    `outcome` is what the exact search found, made here where it is None; `device_map` is the map
    that was refused, read from the error's traceback where it is None.
    """
    try:
        if notes.attached(error) or not is_about_placement(error):
            return
        outcome = outcome or search(request)
        if outcome.device_map is not None and "rescue" in features.on():
            return  # it would have been used: the error is about something else
        notes.attach(error, lines(request, outcome, device_map or refused_map(error)))
    except Exception as fault:  # noqa: BLE001  # the error that is explained must get through
        log(contained("unexplained", fault), "unexplained", fault)


def explain_load(error: Exception, load: Load) -> None:
    """Attach to an error of `from_pretrained` what can be said about it; no exception leaves it."""
    try:
        if notes.attached(error):
            return
        if load.request is not None and is_refusal(error):
            explain(error, load.request, load.outcome, refused_map(error) or load.planned)
            return
        if isinstance(load.device_map, Mapping) and is_refusal(error):
            found = arguments.swapped(load) or hand_written.lines(error, load)
        else:
            found = offload_disk.lines(error, load) or arguments.lines(error, load)
        if not found and load.request is not None and isinstance(error, _STUMBLES):
            found = reading.hardly_anything(load.request)
        if found and load.request is not None and reading.hardly_anything(load.request):
            found += [
                f"{recipe.what} it loads (planned): {recipe.arguments}"
                for recipe in on_accelerators(load.request)
            ]
        if found:
            notes.attach(error, found)
    except Exception as fault:  # noqa: BLE001  # the error that is explained must get through
        log(contained("unexplained", fault), "unexplained", fault)


def warn_of_whole_model(load: Load) -> None:
    """Log why a model that loaded lies on the CPU or the disk as a whole; no exception leaves it.

    Where a planner could tell at once, it has been told (see `whole_model.warn`).
    """
    try:
        request = load.request
        if request is None:
            return
        if not all_on_disk(load.planned):
            if request.refuses_offload and request.decided_later:
                whole_model.warn(request, load.planned)
        elif not request.refuses_offload:
            offload_disk.warn(load)
    except Exception as fault:  # noqa: BLE001  # no load is lost to a note
        log(contained("disk unexplained", fault), "disk unexplained", fault)


def is_about_placement(error: BaseException) -> bool:
    """Whether a map was refused, or a planner stumbled over valid input (see `PLANNER_ERRORS`)."""
    stumbled = isinstance(
        error, (KeyError, IndexError, ZeroDivisionError)
    ) or "empty sequence" in str(error)
    return stumbled or is_refusal(error)


def is_refusal(error: BaseException) -> bool:
    """Whether a quantizer says that a map has modules on the CPU or the disk."""
    text = str(error)
    unread = "not recognized" in text  # a device of max_memory; the text lists those there are
    return isinstance(error, ValueError) and not unread and _REFUSAL.search(text) is not None


def lines(
    request: Request, outcome: Outcome, device_map: Optional[Mapping[str, Device]]
) -> List[str]:
    """The explanation, line by line, without the title; sizes in GiB."""
    fine = request._replace(no_split=frozenset()).units()
    held = list(reading.held_by_others(request))
    model = describe_model(fine)
    placed = {} if device_map is None else parts_by_device(outcome.units, fine, device_map)
    return [
        *held,
        *_not_quantized(request, fine, model),
        _verdict(outcome),
        *_scales(fine),
        *_odd_budgets(request, outcome),
        *_table(request, outcome, placed, bool(held)),
        *_left_over(placed, model["total"]),
        *_largest(fine, model),
        *_switch(request),
        *_recipes(request, outcome),
    ]


def _scales(fine: Units) -> List[str]:
    """What is stored beside the weights, where that shows; no release counts it."""
    if fine.scales <= _SMALL_SCALES * fine.total:
        return []
    return [f"stored: {amount(fine.total)} weights + {amount(fine.scales)} scales (bitsandbytes')"]


def _not_quantized(request: Request, fine: Units, model: Mapping[str, Any]) -> List[str]:
    """What stays as it is though a quantizer is there, where that is much."""
    total, plain = model["total"], model["total"] - model["quantized"]
    if request.quantizer is None or not total or plain < _LARGE_SHARE * total:
        return []
    kinds = sorted(describe_model(fine)["largest"], key=lambda kind: kind.quantized - kind.size)
    named = [kind for kind in kinds if kind.unquantized >= 0.05 * plain][:3]
    text = ", ".join(f"{kind.name} {cell(kind.unquantized)}" for kind in named)
    return [
        f"{cell(plain)} of {amount(total)} are not quantized: {text}",
        *experts.lines(request, fine),
    ]


def _verdict(outcome: Outcome) -> str:
    result = outcome.result
    if not outcome.budgets.accelerators:
        return f"needs {amount(outcome.units.total)}, no accelerator has a budget"
    if isinstance(result, Placement):
        return "it fits: a placement of every module within the budgets exists"
    return proofs.told(result)


def _odd_budgets(request: Request, outcome: Outcome) -> List[str]:
    """Why hardly anything may go to accelerators, where that is so."""
    if not reading.hardly_anything(request):
        return []
    causes = [
        *reading.oddities(request),
        *_room_kept(outcome),
        *reading.no_accelerator(),
    ]
    return [f"- {cause}" for cause in causes]


def _room_kept(outcome: Outcome) -> List[str]:
    """Why a budget of the CPU that is smaller than the model may stay unused."""
    usable, units = outcome.budgets.host.get("cpu"), outcome.units
    largest = max((unit.size for unit in units.units), default=0)
    if outcome.budgets.accelerators or not usable or usable >= units.total:
        return []
    return [
        f"the CPU's {amount(usable)} do not hold the model; of them {amount(largest)}, the size of "
        "the largest module, stay free to run what is on the disk"
    ]


def _switch(request: Request) -> List[str]:
    """What offloading takes, and how the switch is called; transformers 4.x names it wrongly."""
    if not request.refuses_offload or not hasattr(request.quantizer, "quantization_config"):
        return []
    if stored_quantized(request):
        return [
            "its weights are stored quantized: layers of it cannot be offloaded unquantized, and "
            "a quantization_config in the call does not replace the checkpoint's"
        ]
    return [
        "offloading is off: llm_int8_enable_fp32_cpu_offload=True in BitsAndBytesConfig switches "
        "it on; other keys, such as load_in_8bit_fp32_cpu_offload, are ignored there"
    ]


def _table(
    request: Request, outcome: Outcome, placed: Mapping[Device, List[Part]], held: bool
) -> List[str]:
    """Device by device: what was given, what of it is usable, what lies there, what is left.

    Where something else holds a card, what there is in all stands before that.
    """
    budgets = outcome.budgets
    head = "free" if request.max_memory is None else "given"
    totals = {d: memory_of(d) for d in budgets.given} if held else {}
    rows = [("", *(["total"] if totals else []), head, "usable", "placed", "left")]
    for device in dict.fromkeys([*budgets.given, *placed]):
        usable = budgets.usable.get(device)
        load = sum(part.size for part in placed.get(device, ()))
        known = usable is not None and usable < UNLIMITED and placed
        rows.append(
            (
                device_name(device),
                *([cell(totals.get(device))] if totals else []),
                _size(budgets.given.get(device)),
                _size(usable),
                cell(load) if placed else "-",
                cell(usable - load) if known and usable is not None else "-",
            )
        )
    width = max(len(row[0]) for row in rows)
    column = max(10, 2 + max(len(text) for row in rows for text in row[1:]))
    table = ["  " + row[0].ljust(width) + "".join(c.rjust(column) for c in row[1:]) for row in rows]
    if not placed:
        table.append("  (the planner raised before it had a map)")
    return [*table, *_why_usable(request, outcome)]


def _size(size: Optional[int]) -> str:
    return "unlimited" if size == UNLIMITED else cell(size)


def _why_usable(request: Request, outcome: Outcome) -> List[str]:
    """The factors between what was given and what is usable."""
    budgets = outcome.budgets
    devices = [device for device in budgets.accelerators if budgets.given.get(device)]
    if not devices:
        return []
    share = budgets.usable[devices[0]] / budgets.given[devices[0]]
    lone = request.max_memory is None and len(devices) == 1 and request.lone_share < 1
    kept = share / request.lone_share if lone else share
    parts = []
    if lone:
        parts.append(f"{request.lone_share:.2g} because there is one accelerator and no max_memory")
    if kept < 0.995:
        parts.append(f"{kept:.2g} because the quantizer keeps the rest for its own buffers")
    if not parts:
        return []
    return [f"  usable = {head_of(request)} × {' × '.join(parts)} ({share:.2f})"]


def head_of(request: Request) -> str:
    """What a budget is called: a caller's, or what is free."""
    return "free" if request.max_memory is None else "given"


def _left_over(placed: Mapping[Device, List[Part]], total: int) -> List[str]:
    """The modules on the CPU and the disk, neighbours as one."""
    found = []
    for device in HOST:
        every = collapsed(placed.get(device, ()))
        parts = [part for part in every if part.size >= _TINY * total] or every
        if parts:
            shown = [f"{part.name} {cell(part.size)}" for part in parts[:_MOST_PARTS]]
            more = len(parts) - len(shown)
            shown += [f"and {more} more"] if more > 0 else []
            where = "the CPU" if device == "cpu" else "the disk"
            found.append(f"on {where}: {', '.join(shown)}")
    return found


def _largest(fine: Units, model: Mapping[str, Any]) -> List[str]:
    """The largest kinds of modules, and how they are stored."""
    kinds: List[Part] = model["largest"][:4]
    stored = _stored(fine)
    return [
        "largest: "
        + "; ".join(
            f"{kind.name} {cell(kind.size)}"
            f"{f' ({kind.modules} of them)' if kind.modules > 1 else ''} {stored[kind.name]}"
            for kind in kinds
        )
    ]


def _stored(fine: Units) -> Dict[str, str]:
    """By kind of module ("layers.*.mlp"), how most of it is stored."""
    sizes: Dict[str, Dict[Tuple[str, bool], int]] = {}
    for name, facts in fine.facts.items():
        kind = sizes.setdefault(kind_of(name), {})
        for label, size in facts.sizes.items():
            key = (label, facts.quantized > 0)
            kind[key] = kind.get(key, 0) + size
    return {
        name: f"{max(kind, key=lambda k: kind[k])[0]}"
        + ("" if max(kind, key=lambda k: kind[k])[1] else ", not quantized")
        for name, kind in sizes.items()
        if kind
    }


def _recipes(request: Request, outcome: Outcome) -> List[str]:
    """The changes that work, numbered; each was fed back to the release before."""
    found = recipes(request, outcome)
    untried = "other changes were not tried: planning this model takes long" * (not found.complete)
    if not found.recipes:
        return [
            untried
            or "no change of budgets, bits or offloading was found that would load it "
            f"(tried where they apply: {', '.join(_TRIED)})"
        ]
    listed = ["any one of these loads it (each was planned):"]
    for number, recipe in enumerate(found.recipes, 1):
        listed.append(f"  {number}. {recipe.what}{':' if recipe.arguments else ''}")
        if recipe.arguments:
            listed.append(f"     {recipe.arguments}")
    return [*listed, *([untried] if untried else [])]
