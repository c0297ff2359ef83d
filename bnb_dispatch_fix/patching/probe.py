"""Tells by running it on toy models which faults a `get_balanced_memory` of unknown source has.

Nothing installed is changed for that: the function is run as a copy that sees a stand-in for
torch and plain budgets, so that it plans for simulated accelerators on a machine without any
and other threads notice nothing.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, Callable, Iterable, NamedTuple, Sequence

from bnb_dispatch_fix.backport.rebound import rebound
from bnb_dispatch_fix.wording import folded, one_line

_FIRST_INSTANCE_ONLY = 47203
_LARGEST_LEAF_IGNORED = 47211
_BUDGETS_BY_POSITION = 4298

_DEVICES = 4
#: GPU 1 is missing: who counts positions asks for its budget.
_WITH_A_GAP = (0, 2, 3)
_BUDGET = 10**9
_FLOAT32_BYTES = 4


class ProbeResult(NamedTuple):
    """What the toy models told: PR numbers of faults by answer, and why, in one line."""

    confirmed: tuple[int, ...]
    ruled_out: tuple[int, ...]
    undecided: tuple[int, ...]
    reason: str


class _Case(NamedTuple):
    """A toy model that shows one fault, and the buffers (bytes) that tell.

    `blocks` lists the leaf sizes in bytes of each block that may not be split, `loose` those of
    the leaf modules outside. `needed` is the size of the largest piece, `faulty` the buffer that
    the fault makes of it.
    """

    pr: int
    blocks: tuple[tuple[int, ...], ...]
    loose: tuple[int, ...]
    needed: int
    faulty: int


# The buffer of 5.0-5.13 is int(1.25 * max(first block of its class, mean leaf module)).
_CASES = (
    # First block 2 leaves, second 16: a buffer for 128 instead of 1024 bytes. The largest leaf
    # (64) is the mean and smaller than the first block, so that fault 47211 does not show.
    _Case(_FIRST_INSTANCE_ONLY, ((64,) * 2, (64,) * 16), (), needed=1024, faulty=160),
    # One leaf of 1024 beside 8 equal blocks of 2 x 32: the mean leaf is int(1536 / 17) = 90. All
    # blocks are alike, so that fault 47203 does not show.
    _Case(_LARGEST_LEAF_IGNORED, ((32,) * 2,) * 8, (1024,), needed=1024, faulty=112),
)


def probe_balanced_fault(function: Callable[..., Any]) -> ProbeResult:
    """Runs *function* on toy models and returns which of faults 47203, 47211 and 4298 it has.

    A fault is confirmed only by exactly the budgets that the faulty formula gives, and ruled out
    by budgets with room for the largest piece; anything else is undecided. Works for the
    signatures of transformers 5.x and of accelerate, with or without accelerators. Sources: PR
    #47203 (first in transformers 5.14.0), PR #47211 (5.18.0) and accelerate PR #4298 (1.16.0).
    Needs torch; without it all is undecided. Never raises.
    """
    answers: dict[str, list[int]] = {"confirmed": [], "ruled out": [], "undecided": []}
    findings = []
    for case in _CASES:
        try:
            answer, finding = _judge(case, _caps(case, function))
        except Exception as error:  # noqa: BLE001  # unknown code may fail in any way
            answer = "undecided"
            finding = f"the toy model raised {one_line(error, 200)}"
        answers[answer].append(case.pr)
        findings.append(f"#{case.pr} {answer}: {finding}")
    if answers["undecided"]:  # an arithmetic that is not known is not replaced for its ids either
        answer, finding = "undecided", "as above"
    else:
        answer, finding = _judge_gaps(function)
    answers[answer].append(_BUDGETS_BY_POSITION)
    findings.append(f"#{_BUDGETS_BY_POSITION} {answer}: {finding}")
    return ProbeResult(
        confirmed=tuple(answers["confirmed"]),
        ruled_out=tuple(answers["ruled out"]),
        undecided=tuple(answers["undecided"]),
        reason="; ".join(findings),
    )


def signature_mismatch(function: object, expected_parameters: Sequence[str]) -> str | None:
    """Returns why *function* does not take exactly *expected_parameters*, or None if it does.

    All have to be there in this order, each usable by position and by name: a replacement would
    misread or refuse anything else. Never raises.
    """
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
        found = str(inspect.Signature(bare))
    except Exception as error:  # noqa: BLE001  # unknown code may fail in any way
        return f"its signature cannot be read ({folded(error, 200)})"
    expected = f"({', '.join(expected_parameters)})"
    return None if found == expected else f"expected the parameters {expected}, found {found}"


def _judge(case: _Case, caps: Any) -> tuple[str, str]:
    """Returns the answer and what it rests on for the budgets that came out of one case."""
    values = [caps[device] for device in range(_DEVICES - 1)]
    total = sum(map(sum, case.blocks)) + sum(case.loose)
    share = total // _DEVICES
    if set(values) == {share + case.faulty}:
        return "confirmed", f"the buffer is {case.faulty} bytes for a piece of {case.needed}"
    if all(share + case.needed <= value < _BUDGET for value in values):
        return "ruled out", f"the budgets have room for a piece of {case.needed} bytes"
    return "undecided", f"unexpected budgets {values} for a model of {total} bytes"


def _judge_gaps(function: Callable[..., Any]) -> tuple[str, str]:
    """Returns the answer to ids with a gap under "balanced_low_0", and what it rests on."""
    try:
        first, *others = _caps(_CASES[0], function, devices=_WITH_A_GAP, low_zero=True).values()
    except KeyError as error:
        return "confirmed", f"GPUs {_WITH_A_GAP} raise KeyError {error}"
    except Exception as error:  # noqa: BLE001  # unknown code may fail in any way
        return "undecided", f"the toy model raised {one_line(error, 200)}"
    if first == 0 and all(others):
        return "ruled out", f"GPUs {_WITH_A_GAP} are balanced"
    return "undecided", f"unexpected budgets {[first, *others]} for GPUs {_WITH_A_GAP}"


def _caps(
    case: _Case,
    function: Callable[..., Any],
    devices: Sequence[int] = range(_DEVICES),
    low_zero: bool = False,
) -> Any:
    """Calls a copy of *function* for one case with explicit budgets on simulated devices."""
    import torch  # found, not required

    budgets: dict[int | str, int] = dict.fromkeys(devices, _BUDGET)
    budgets["cpu"] = _BUDGET
    stand_ins = {"torch": _SimulatedTorch(torch), "get_max_memory": _explicit_budgets}
    model, block_class = _toy_model(torch, case)
    asked = {"low_zero": True} if low_zero else {}
    return rebound(function, stand_ins)(
        model, max_memory=budgets, no_split_module_classes=[block_class], **asked
    )


def _toy_model(torch: Any, case: _Case) -> tuple[Any, str]:
    """Builds the model of *case* on the meta device; also returns the class name of its blocks."""

    class ProbeBlock(torch.nn.Module):  # type: ignore[misc]
        pass

    def leaf(size: int) -> Any:
        module = torch.nn.Module()
        # float32 is named: the caller may have set another default.
        weight = torch.empty(size // _FLOAT32_BYTES, dtype=torch.float32, device="meta")
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        return module

    def fill(module: Any, name: str, parts: Iterable[Any]) -> Any:
        for index, part in enumerate(parts):
            module.add_module(f"{name}{index}", part)
        return module

    model = fill(torch.nn.Module(), "loose", map(leaf, case.loose))
    fill(model, "block", (fill(ProbeBlock(), "leaf", map(leaf, sizes)) for sizes in case.blocks))
    return model, ProbeBlock.__name__


class _SimulatedTorch:
    """Torch as the function under test sees it: integers are accelerators, CUDA is there.

    accelerate < 1.15.0 calls ``torch.device(<int>)``, an error where there is no accelerator, and
    accelerate < 0.22 plans nothing unless ``torch.cuda.is_available()``.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = SimpleNamespace(**vars(torch.cuda))
        self.cuda.is_available = lambda: True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def device(self, device: Any) -> Any:
        try:
            return self._torch.device(device)
        except RuntimeError:
            if not isinstance(device, int):
                raise
            return SimpleNamespace(type="cuda", index=device)


def _explicit_budgets(max_memory: Any = None, *_: Any, **__: Any) -> Any:
    """Stands in for `get_max_memory`: it warns about, or asks, devices that are only simulated."""
    return dict(max_memory)
