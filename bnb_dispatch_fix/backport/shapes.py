"""What this package relies on of torch, transformers, accelerate and bitsandbytes, as shapes.

Their releases differ and most are untyped: a shape names what every release has. What only some
have is asked for by `getattr` or `hasattr` where it is used, with the releases that have it.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Mapping, Optional, Protocol, Sequence, Tuple


class Tensor(Protocol):
    """A parameter or a buffer, on whatever device."""

    @property
    def dtype(self) -> Any:
        """A torch dtype."""

    @property
    def device(self) -> Any:
        """A torch device."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes, by dimension."""

    def dim(self) -> int:
        """How many dimensions it has."""

    def numel(self) -> int:
        """How many elements it has."""

    def is_floating_point(self) -> bool:
        """Whether a dtype that is asked for applies to it."""


class Module(Protocol):
    """A torch module: what it holds itself, and what is below it."""

    _modules: Mapping[str, Any]
    _parameters: Mapping[str, Optional[Tensor]]
    _buffers: Mapping[str, Optional[Tensor]]

    def named_modules(self, *, remove_duplicate: bool = True) -> Iterator[Tuple[str, Any]]:
        """Dotted name and module, this one ("") first."""

    def named_parameters(self) -> Iterator[Tuple[str, Tensor]]:
        """Dotted name and parameter, shared ones once."""

    def parameters(self) -> Iterator[Tensor]:
        """The parameters, shared ones once."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Dotted name and tensor of all that is saved."""


class Model(Module, Protocol):
    """A transformers model: a module with a configuration and, in most, an input embedding."""

    def get_input_embeddings(self) -> Module:
        """The input embedding; some models do not implement it."""


class Quantizer(Protocol):
    """transformers' `HfQuantizer` (4.38 and newer), as far as planning goes.

    accelerate's `BnbQuantizationConfig` and what stands for a quantizer before 4.38 have none of
    it: functions that take any of them say `Any` and look first.
    """

    quantization_config: Any

    def adjust_max_memory(self, max_memory: Dict[Any, Any]) -> Dict[Any, Any]:
        """Take off each budget (bytes) what the quantizer needs for itself."""

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Bytes of an element once it is loaded (transformers 5)."""

    def validate_environment(self, *, device_map: Mapping[str, Any]) -> None:
        """Raise where it cannot load with this device map."""


class Installed(Protocol):
    """An installed function: called as it is, its module's names read beside it."""

    @property
    def __globals__(self) -> Dict[str, Any]:
        """The variables of its module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as the installed release does."""


class GetMaxMemory(Protocol):
    """The installed `get_max_memory`: budgets as written, or None for what is free, to bytes."""

    def __call__(self, max_memory: Optional[Dict[Any, Any]] = None) -> Dict[Any, Any]:
        """Return bytes by device; the argument may be changed in place."""
