"""What a running `from_pretrained` was asked, per thread, and what became of it.

transformers 4.30-4.49 plan inside it: the planner sees budgets that were balanced and reduced
before, so it needs the caller's own. In every release an error that is raised later, about the
map or an argument, is explained with what was noted.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from bnb_dispatch_fix.backport.balanced import no_split_names
from bnb_dispatch_fix.backport.shapes import Installed
from bnb_dispatch_fix.model.budgets import BITSANDBYTES_SHARE
from bnb_dispatch_fix.model.requests import Request, copied, lone_share, release_of
from bnb_dispatch_fix.model.sizers import call_sizer
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import STRATEGIES


class Load:
    """One running `from_pretrained`: its arguments, and what became of them at the planner.

    `model_class` is the class it was called on, None where that is not known.
    `max_memory` is None where it was not given; `arguments` are all that were named, `call` takes
    others in their place (see `measured`); `outcome` is the exact search's, None where nobody
    looked; `later` are log lines that are due once the release has accepted the plan.
    """

    def __init__(
        self,
        device_map: Any,
        max_memory: Any,
        arguments: Optional[Mapping[str, Any]] = None,
        call: Optional[Callable[..., Any]] = None,
        model_class: Any = None,
    ) -> None:
        self.device_map = device_map
        self.arguments = dict(arguments or {})
        self.call = call
        self.model_class = model_class
        self.max_memory = dict(max_memory) if isinstance(max_memory, Mapping) else max_memory
        self.request: Optional[Request] = None
        self.outcome: Any = None
        self.planned: Any = None
        self.later: List[Tuple[str, ...]] = []

    @property
    def strategy(self) -> Optional[str]:
        """The strategy asked for; None where `device_map` is something else."""
        asked = self.device_map
        return asked if isinstance(asked, str) and asked in STRATEGIES else None

    @property
    def quantization(self) -> Any:
        """What the call asks for, or None; the checkpoint may be stored quantized all the same."""
        switches = [name for name in ("load_in_4bit", "load_in_8bit") if self.arguments.get(name)]
        return self.arguments.get("quantization_config") or switches or None


class _Loads(threading.local):
    def __init__(self) -> None:
        self.running: List[Load] = []
        self.measuring = False


class _Measured(BaseException):
    """Carries a request out of `from_pretrained`; no `except Exception` may hold it up."""

    def __init__(self, request: Optional[Request]) -> None:
        super().__init__()
        self.request = request


_loads = _Loads()


class _Quantizer(NamedTuple):
    """Stands for the `HfQuantizer` that the planner is not given; knows its configuration."""

    quantization_config: Any
    pre_quantized: bool


@contextmanager
def running(load: Load) -> Iterator[None]:
    """Note what this thread loads while the block runs."""
    _loads.running.append(load)
    try:
        yield
    finally:
        _loads.running.pop()


def is_asking(model: Any) -> bool:
    """Whether it is the `from_pretrained` that runs in this thread that asks to plan `model`.

    It asks once. Whoever asks later in it, such as an adapter, or about a model of another class,
    asks for itself.
    """
    load = _loads.running[-1] if _loads.running else None
    if load is None or load.strategy is None or load.request is not None:
        return False
    return not isinstance(load.model_class, type) or isinstance(model, load.model_class)


def remember(request: Request, outcome: Any, planned: Any) -> None:
    """Note what a planner was asked and answered, for the `from_pretrained` around it.

    A planner that is not told the strategy was asked by somebody else.
    """
    if _loads.running and request.strategy:
        load = _loads.running[-1]
        load.request, load.outcome, load.planned = request, outcome, planned


def say_later(line: str, *arguments: str) -> None:
    """Have a line of `wording.LINES` logged once the running `from_pretrained` has loaded."""
    if _loads.running:
        _loads.running[-1].later.append((line, *arguments))


def measured(load: Load) -> Optional[Request]:
    """The request that this load would make with device_map="auto"; None where it makes none.

    The installed `from_pretrained` is called again, without any access to a network, and left at
    its planner: no weights are read.
    """
    if load.call is None:
        return None
    torch: Any = sys.modules["torch"]
    default = torch.get_default_dtype()
    changes = {"device_map": "auto", "max_memory": None, "local_files_only": True}
    again = Load("auto", None, {**load.arguments, **_fresh_config(load), **changes})
    _loads.measuring = True
    try:
        with running(again):
            load.call(**again.arguments)
    except _Measured as found:
        return found.request
    except Exception:  # noqa: BLE001  # it fails before it plans
        return None
    finally:
        _loads.measuring = False
        torch.set_default_dtype(default)  # 4.x leaves its own behind where it is interrupted
    return None


def _fresh_config(load: Load) -> Dict[str, Any]:
    """The caller's configuration without the quantization that 4.30-4.37 have written into it."""
    config = load.arguments.get("config")
    asked = getattr(config, "quantization_config", None)
    if asked is None or isinstance(asked, Mapping) or load.quantization is None:
        return {}
    fresh: Any = copy.copy(config)
    del fresh.quantization_config
    return {"config": fresh}


def leave_if_measuring(request: Optional[Request]) -> None:
    """At a planner: end a `from_pretrained` that was only called to come this far."""
    if _loads.measuring:
        raise _Measured(request)


def read_request(
    installed: Installed, args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Optional[Request]:
    """The request in a call of `infer_auto_device_map` under a noted `from_pretrained`."""
    load = _loads.running[-1] if _loads.running else None
    if load is None or load.strategy is None:
        return None
    given = inspect.signature(installed).bind(*args, **kwargs).arguments
    model = given["model"]
    get_max_memory = installed.__globals__["get_max_memory"]
    share = _share_left(load.max_memory, given.get("max_memory"), get_max_memory)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    quantizer = None if config is None else _Quantizer(config, load.quantization is None)
    return Request(
        model=model,
        strategy=load.strategy,
        max_memory=load.max_memory,
        no_split=frozenset(no_split_names(given.get("no_split_module_classes"))),
        quantizer=quantizer,
        get_max_memory=get_max_memory,
        adjust=lambda budgets: {device: size * share for device, size in budgets.items()},
        sizer=call_sizer(model, given.get("dtype"), given.get("special_dtypes"), quantizer),
        lone_share=lone_share(load.strategy, installed),
        call=(installed, given),
    )


def uncorrected(
    request: Request, installed: Installed, args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Any:
    """The installed planner's answer to budgets that no backport has corrected.

    To be called without the backport. Most planners balance themselves; transformers 4.30-4.49
    have balanced before they call theirs, so that is done again. Raises what is raised.
    """
    given = inspect.signature(installed).bind(*args, **kwargs).arguments
    balance = installed.__globals__.get("get_balanced_memory")
    if balance is None or "device_map" in given or request.strategy in ("", "sequential"):
        return installed(*args, **kwargs)
    caps = balance(
        given["model"],
        copied(request.max_memory),
        given.get("no_split_module_classes"),
        given.get("dtype"),
        given.get("special_dtypes"),
        request.strategy == "balanced_low_0",
    )
    adjusted = caps if request.adjust is None else request.adjust(caps)
    return installed(**{**given, "max_memory": adjusted})


def _share_left(
    asked: Optional[Mapping[Device, Any]],
    seen: Optional[Mapping[Device, Any]],
    get_max_memory: Callable[..., Dict[Device, Any]],
) -> float:
    """The part of every budget that the quantizer left, read off a budget nobody balanced.

    Balancing keeps the last accelerator's budget as it is. Free memory is not the same when
    read again, so without `max_memory` it is the tenth that bitsandbytes takes since 4.33.
    """
    if asked is None or seen is None:
        return BITSANDBYTES_SHARE if release_of("transformers") >= (4, 33) else 1.0
    budgets = get_max_memory(copied(asked))
    numbered = [d for d in budgets if isinstance(d, int) and budgets[d] > 0 and d in seen]
    if not numbered:
        return 1.0
    last = max(numbered)
    return round(min(1.0, float(seen[last] / budgets[last])), 6)
