"""What loading a quantized checkpoint takes beside room: libraries, kernels, a capable GPU."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib import metadata, util
from typing import Any, List, Mapping, NamedTuple, Optional, Tuple

from packaging.version import InvalidVersion, Version

from bnb_dispatch_fix.model.requests import release_of
from bnb_dispatch_fix.planning.stored import Stored


class _Package(NamedTuple):
    """A distribution and the oldest version that will do, if that is known."""

    name: str
    least: Optional[str] = None


#: By method, for transformers 4 and 5: what is to be installed.
_PACKAGES: Mapping[str, Tuple[Tuple[_Package, ...], Tuple[_Package, ...]]] = {
    "awq": ((_Package("autoawq"),), (_Package("gptqmodel"),)),
    "compressed-tensors": ((_Package("compressed-tensors"),), (_Package("compressed-tensors"),)),
    "fp8": ((), ()),
    "gptq": (
        (_Package("optimum", "1.24"), _Package("gptqmodel", "1.4.3")),
        (_Package("optimum", "1.24"), _Package("gptqmodel", "1.4.3")),
    ),
    "hqq": ((_Package("hqq", "0.2.1"),), (_Package("hqq", "0.2.1"),)),
    "mxfp4": (
        (_Package("triton", "3.4"), _Package("kernels")),
        (_Package("triton", "3.4"), _Package("kernels")),
    ),
    "torchao": ((_Package("torchao"),), (_Package("torchao"),)),
}
#: The compute capability that a method's kernels take, where its quantizer's code does not say.
_CAPABILITY = {"fp8": "8.9", "mxfp4": "7.5"}


def line(method: str) -> str:
    """What loading will need, what of it is missing here, and what becomes of it without."""
    import transformers  # found, not required

    release = f"transformers {transformers.__version__}"
    if not knows(method):
        return f"{release} does not know {method}: it cannot load this checkpoint"
    wanted = [_told(package) for package in _packages(method)]
    capability = _capability(method)
    if capability is not None:
        wanted.append(f"a GPU of compute capability {capability} or newer")
    needed = " and ".join(wanted) or "nothing else"
    without = f"; without, {release} loads it dequantized" if can_dequantize(method) else ""
    return f"loading needs {needed}{without}"


def experts(stored: Stored, fused: bool) -> List[str]:
    """What is said of experts that the release holds in another way than the checkpoint."""
    if not fused or stored.method in ("fp8", "mxfp4"):  # which transformers converts itself
        return []
    import transformers  # found, not required

    return [
        f"transformers {transformers.__version__} holds experts as one tensor per layer; they are "
        f"counted as the linear layers that a {stored.method} checkpoint has for them"
    ]


def knows(method: str) -> bool:
    """Whether the installed release has a quantizer for a method; 4.30-4.37 have one of GPTQ's."""
    try:
        auto = importlib.import_module("transformers.quantizers.auto")
    except ImportError:
        return method == "gptq"
    return method in auto.AUTO_QUANTIZER_MAPPING


def can_dequantize(method: str) -> bool:
    """Whether the release loads such a checkpoint unquantized where its kernels are missing."""
    try:
        auto = importlib.import_module("transformers.quantizers.auto")
        config = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        return "dequantize" in inspect.signature(config).parameters
    except (ImportError, KeyError, TypeError, ValueError):
        return False


def _packages(method: str) -> List[_Package]:
    generation = 0 if release_of("transformers") < (5,) else 1
    found = list(_PACKAGES[method][generation])
    if method == "fp8" and _names("transformers.integrations.finegrained_fp8", "kernels"):
        found.append(_Package("kernels"))
    return found


def _told(package: _Package) -> str:
    """The package, and whether it is installed."""
    name = package.name if package.least is None else f"{package.name} {package.least} or newer"
    try:
        installed = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return f"{name} (not installed here)"
    try:
        old = package.least is not None and Version(installed) < Version(package.least)
    except InvalidVersion:
        old = False
    return f"{name} ({installed} is installed here)" if old else name


def _capability(method: str) -> Optional[str]:
    """What the quantizer asks of a GPU, such as "8.9"."""
    if method not in _CAPABILITY:
        return None
    name = {"fp8": "quantizer_finegrained_fp8", "mxfp4": "quantizer_mxfp4"}[method]
    source = _source(f"transformers.quantizers.{name}")
    found = re.search(r"compute_capability >= \((\d+), (\d+)\)", source)
    return _CAPABILITY[method] if found is None else f"{found.group(1)}.{found.group(2)}"


def _names(module: str, word: str) -> bool:
    return re.search(rf"\b{word}\b", _source(module)) is not None


def _source(module: str) -> str:
    """The code of a module, found without running it; "" where there is none."""
    try:
        spec: Any = util.find_spec(module)
        return str(spec.loader.get_source(module) or "")
    except (ImportError, AttributeError, ValueError, OSError):
        return ""
