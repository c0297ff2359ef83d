"""Stand-ins that let the real `from_pretrained` plan for GPUs that are not there.

Used by the demo and by the tests. Everything is real, the checkpoint, the quantizer, the planner,
up to the moment when weights would be copied to a GPU; there the device map is taken and loading
stops.
"""

from __future__ import annotations

import importlib
import json
import struct
import sys
import types
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple, Union

from bnb_dispatch_fix.model.device_map import refused_map
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST, MIB

#: Eight GPUs on which the checkpoint of `build_checkpoint` fits, and the releases without
#: #47203 and #47211 leave seven of them empty (bytes).
EIGHT_SMALL_GPUS: Dict[Device, int] = {**dict.fromkeys(range(8), 1_468_006), "cpu": 1024 * MIB}


@dataclass(frozen=True)
class Outcome:
    """What `from_pretrained` decided: the device map, and the error if it refused that map.

    `device_map` is None where the error came before there was a map.
    """

    device_map: Optional[Dict[str, Device]]
    error: Optional[Exception]

    @property
    def loads_on_gpus(self) -> bool:
        """Whether it went on to load, with nothing on the CPU or the disk."""
        return self.error is None and not self.offloaded

    @property
    def offloaded(self) -> bool:
        """Whether a module was planned for the CPU or the disk."""
        return any(str(device) in HOST for device in (self.device_map or {}).values())


class Planned(BaseException):
    """Carries the device map out of `from_pretrained`; no `except Exception` may hold it up."""

    def __init__(self, device_map: Dict[str, Device]) -> None:
        super().__init__()
        self.device_map = device_map


def build_checkpoint(folder: Union[str, Path], *, intermediate_size: int = 176) -> None:
    """Write a Llama checkpoint of 2.77 MiB to `folder`: fp16, embedding and head 1 MiB each.

    To be computed with on the CPU, `intermediate_size` must be a multiple of 32.
    """
    import torch  # found, not required
    from transformers import LlamaConfig, LlamaForCausalLM  # found, not required

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).half().save_pretrained(folder, safe_serialization=True)


def write_no_weights(file: Path) -> None:
    """A file of weights that holds none (safetensors: length, then a header)."""
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def plan_checkpoint(
    folder: Union[str, Path],
    max_memory: Optional[Mapping[Device, Union[int, str]]],
    *,
    device_map: str = "auto",
    bits: int = 4,
    free: Optional[Mapping[Device, int]] = None,
) -> Outcome:
    """Run `from_pretrained` with bitsandbytes on simulated GPUs.

    Args:
        folder: a checkpoint.
        max_memory: budgets in bytes (or "1GiB") per device; None takes them from `free`.
        device_map: the strategy.
        bits: 4 (nf4) or 8.
        free: bytes that each simulated GPU and the "cpu" report as free.
    """
    import torch  # found, not required
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # found, not required

    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float16}
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, **(four if bits == 4 else {})
    )
    return outcome_of(
        lambda: AutoModelForCausalLM.from_pretrained(
            folder,
            device_map=device_map,
            max_memory=None if max_memory is None else dict(max_memory),
            quantization_config=config,
        ),
        free,
    )


def outcome_of(
    from_pretrained: Callable[[], Any], free: Optional[Mapping[Device, int]] = None
) -> Outcome:
    """Call a function that ends in `from_pretrained`, on simulated GPUs (see `plan_checkpoint`)."""
    import torch  # found, not required

    default = torch.get_default_dtype()
    with simulated_gpus(free):
        try:
            from_pretrained()
        except Planned as planned:
            return Outcome(planned.device_map, None)
        except Exception as error:  # noqa: BLE001  # any error is the outcome
            return Outcome(refused_map(error), error)
        finally:  # 4.x leaves its own behind when it does not come to an end
            torch.set_default_dtype(default)
    raise AssertionError("from_pretrained returned, although its loading step was replaced")


@contextmanager
def simulated_gpus(free: Optional[Mapping[Device, int]] = None) -> Iterator[None]:
    """Make planning for CUDA devices possible on this machine; everything is put back after.

    Args:
        free: bytes that each GPU id and "cpu" report as free, for calls without `max_memory`.
            Without it torch says that it sees 16, and nothing about their memory.
    """
    import accelerate.utils.modeling  # found, not required
    import bitsandbytes  # noqa: F401  # before CUDA is pretended: it would look for a driver
    import torch  # found, not required
    import transformers  # found, not required

    with ExitStack() as stack:
        accelerates_torch = _Torch(torch, blank_tensors=free is not None)
        stack.enter_context(replaced(accelerate.utils.modeling, "torch", accelerates_torch))
        if hasattr(accelerate.utils.modeling, "get_torch_accelerator_backend"):
            # 1.16.0 and newer read devices and their memory from what this function gives.
            stack.enter_context(
                replaced(accelerate.utils.modeling, "get_torch_accelerator_backend", _cuda_backend)
            )
        if transformers.__version__.startswith("4."):
            # 4.x refuses bitsandbytes where torch sees no CUDA; 5.x asks bitsandbytes itself.
            stack.enter_context(replaced(torch.cuda, "is_available", lambda: True))
            _import_bitsandbytes_into_transformers()
        from transformers.modeling_utils import PreTrainedModel  # found, not required

        stop: Any = classmethod(_stop_before_loading)
        stack.enter_context(replaced(PreTrainedModel, "_load_pretrained_model", stop))
        if free is None:
            stack.enter_context(replaced(torch.cuda, "device_count", lambda: 16))
        else:
            _report_free_memory(stack, free)
        yield


@contextmanager
def sizes_looked_up_once() -> Iterator[None]:
    """accelerate works the size of a dtype out again for each tensor, and takes long about it."""
    from accelerate.utils import modeling  # found, not required

    once = lru_cache(maxsize=None)(modeling.dtype_byte_size)
    with replaced(modeling, "dtype_byte_size", once):
        yield


def _import_bitsandbytes_into_transformers() -> None:
    """4.30-4.44 import bitsandbytes only where CUDA was seen when their own module was imported."""
    for name in ("transformers.utils.bitsandbytes", "transformers.integrations.bitsandbytes"):
        module = sys.modules.get(name)
        if module is not None and not hasattr(module, "bnb"):
            importlib.reload(module)


def _stop_before_loading(cls: type, *args: Any, **kwargs: Any) -> None:
    """Instead of the step that copies weights: by now the quantizer has accepted the map.

    4.x passes `device_map`, 5.x an object that has it.
    """
    if "device_map" not in kwargs:
        load_config = next(arg for arg in (*args, *kwargs.values()) if hasattr(arg, "device_map"))
        raise Planned(load_config.device_map)
    raise Planned(kwargs["device_map"])


def _cuda_backend(check_available: bool = True) -> Tuple[str, Any]:
    """The kind of accelerator and the torch module that tells about it, with or without any."""
    import torch  # found, not required

    return "cuda", torch.cuda


class _Torch(types.ModuleType):
    """torch as accelerate's planner sees it, with devices that need no GPU.

    accelerate before 1.15.0 asks `torch.device(0).type`, which raises on a machine without GPU.
    With `blank_tensors`, the tensor that initialises a device before its memory is read is
    created on the CPU.
    """

    def __init__(self, torch: types.ModuleType, blank_tensors: bool) -> None:
        super().__init__(torch.__name__)
        self.__dict__.update(vars(torch))  # found at once; asked for with every tensor
        self._torch = torch
        self.device = _device_class(torch)
        if blank_tensors:
            self.tensor = lambda data, device=None: torch.tensor(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def _device_class(torch: Any) -> type:
    """`torch.device` where a bare number means a CUDA device, as it does where there are some."""

    class AnyDevice(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.device)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and isinstance(args[0], int):
                args = ("cuda", *args)
            return torch.device(*args, **kwargs)

    return AnyDevice("device", (), {})


def _report_free_memory(stack: ExitStack, free: Mapping[Device, int]) -> None:
    """Where accelerate reads free memory: the CUDA runtime and psutil."""
    import psutil  # found, not required
    import torch  # found, not required

    gpus = sorted(device for device in free if isinstance(device, int))
    memory = types.SimpleNamespace(available=free.get("cpu", 0), total=free.get("cpu", 0))
    stand_ins = [
        (torch.cuda, "device_count", lambda: len(gpus)),
        (torch.cuda, "mem_get_info", lambda gpu: (free[gpu], free[gpu])),
        (torch.cuda, "get_device_properties", lambda gpu: types.SimpleNamespace()),
        (psutil, "virtual_memory", lambda: memory),
    ]
    for owner, name, stand_in in stand_ins:
        stack.enter_context(replaced(owner, name, stand_in))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value under a name of a module or class; the one before it comes back after."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
