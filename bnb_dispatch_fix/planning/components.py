"""Folders of diffusers, to be planned: a component with its own planner; a pipeline names its own.

A component's config.json names its class and the diffusers that wrote it.
"""

from __future__ import annotations

import importlib
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

from bnb_dispatch_fix.model.diffusers import alone, from_diffusers
from bnb_dispatch_fix.patching.matrix import installed_version, installed_versions
from bnb_dispatch_fix.planning import checkpoint, simulation
from bnb_dispatch_fix.planning.records import PlanError, told

INDEX = "model_index.json"
_WEIGHTS = "diffusion_pytorch_model.safetensors"


def settings_of(job: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """What a component's config.json says; None where a job is about something else.

    Raises:
        PlanError: it is a pipeline's folder, or one without any configuration; one line.
    """
    if "path" not in job or not Path(job["path"]).exists():
        return None
    path = Path(job["path"])
    if path.is_dir() and not (path / "config.json").exists():
        raise PlanError(_without_config(path))
    found = checkpoint.settings(str(path)) or {}
    return found if "_diffusers_version" in found and "_class_name" in found else None


def _without_config(path: Path) -> str:
    index = path / INDEX
    listed = (checkpoint.settings(str(index)) or {}) if index.exists() else None
    if listed is None:
        return f"{path}: no config.json there, nor a {INDEX}; expected a checkpoint folder"
    parts = [
        f"{path / name} ({entry[1]})"
        for name, entry in listed.items()
        if isinstance(entry, list) and len(entry) == 2 and (path / name / "config.json").exists()
    ]
    whole = "a pipeline of diffusers, which puts each component on a device whole"
    return f"{path}: {whole}; plan one of them: {', '.join(parts) or 'none has a config.json'}"


def loader(
    job: Mapping[str, Any], settings: Dict[str, Any], folder: str
) -> Callable[[Optional[Mapping[str, Any]]], Callable[[], Any]]:
    """Calls of `from_pretrained` with the job's arguments, on a component without weights.

    Each is made for a quantization; None asks for none.
    """
    import torch  # found, not required

    try:
        diffusers = importlib.import_module("diffusers")
    except Exception as error:
        raise PlanError(f"diffusers cannot be imported: {told(error)}") from error
    name = str(settings["_class_name"])
    model_class = getattr(diffusers, name, None)
    if model_class is None:
        raise PlanError(f"{job['path']}: diffusers {diffusers.__version__} has no {name}")
    (Path(folder) / "config.json").write_text(json.dumps(settings), "utf-8")
    simulation.write_no_weights(Path(folder) / _WEIGHTS)
    dtype = getattr(torch, str(job["dtype"] or "float16").replace("torch.", ""), None)
    if dtype is None:
        raise PlanError(f"dtype: torch has no {job['dtype']}; try float16 or bfloat16")
    arguments: Dict[str, Any] = {"device_map": job["strategy"], "torch_dtype": dtype}

    def call(quantization: Optional[Mapping[str, Any]]) -> Callable[[], Any]:
        own = {} if quantization is None else {"quantization_config": _quantization(quantization)}

        def load() -> Any:
            budgets = None if job["max_memory"] is None else dict(job["max_memory"])
            return model_class.from_pretrained(folder, max_memory=budgets, **arguments, **own)

        return load

    return call


def _quantization(settings: Mapping[str, Any]) -> Any:
    kept = {key: value for key, value in settings.items() if not key.startswith("_")}
    method = kept.pop("quant_method", "bitsandbytes")
    if method != "bitsandbytes":
        raise PlanError(f"quantization_config: {method} is not planned for diffusers")
    return importlib.import_module("diffusers").BitsAndBytesConfig(**kept)


@contextmanager
def gpus() -> Iterator[None]:
    """diffusers asks torch itself whether there is a GPU for bitsandbytes."""
    import torch  # found, not required

    with simulation.replaced(torch.cuda, "is_available", lambda: True):
        yield


def request_of(installed: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """What the planner is asked for."""
    return from_diffusers(alone(installed), args, kwargs)


def accepted(ask: Callable[[], Any], request: Any) -> Any:
    """The planner's map, once the quantizer has accepted it; raises what either raises."""
    device_map = ask()
    if request.quantizer is not None:
        request.quantizer.validate_environment(device_map=device_map)
    return device_map


def versions(request: Any) -> Dict[str, str]:
    """What planned: the packages that are installed, diffusers first where the model is its."""
    found = {name: version for name, version in installed_versions().items() if version}
    own = installed_version("diffusers") if request.is_diffusers else None
    return found if own is None else {"diffusers": own, **found}
