"""Calls of transformers' `from_pretrained` for a job, on a checkpoint without weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

from bnb_dispatch_fix.model.requests import release_of
from bnb_dispatch_fix.planning import checkpoint, simulation
from bnb_dispatch_fix.planning.examples import SINCE
from bnb_dispatch_fix.planning.records import PlanError, told


def configuration(job: Mapping[str, Any]) -> Any:
    """The transformers configuration to build; PlanError where the release does not know it."""
    try:
        from transformers import AutoConfig  # found, not required
    except Exception as error:
        raise PlanError(f"transformers cannot be imported: {told(error)}") from error
    _refuse_older(job)
    trust = bool(job.get("trust_remote_code"))
    try:
        if "path" in job:
            if not trust:
                _refuse_own_code(job["path"])
            config = AutoConfig.from_pretrained(job["path"], trust_remote_code=trust)
        else:
            settings = dict(job["config"])
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(_unknown_model(job, error)) from error
    if getattr(config, "quantization_config", True) is None:
        del config.quantization_config  # null: as if the key were missing
    return config


def _refuse_own_code(path: str) -> None:
    """Some releases ask on the terminal whether to run a checkpoint's code; nobody is there."""
    from transformers import CONFIG_MAPPING, PretrainedConfig  # found, not required

    settings, _ = PretrainedConfig.get_config_dict(path)
    file = checkpoint.own_code(settings)
    if file is not None and settings.get("model_type") not in CONFIG_MAPPING:
        raise PlanError(
            f"{path}: it needs code of its own ({file}), and none was run; trust_remote_code "
            "(--trust-remote-code) runs it, in the process that plans"
        )


def _refuse_older(job: Mapping[str, Any]) -> None:
    """Before an example's release it is unknown, or built in another shape than it has."""
    since = job.get("since")
    if since and release_of("transformers") < tuple(map(int, since.split("."))):
        import transformers  # found, not required

        raise PlanError(
            f"{job['label']} is not known to transformers {transformers.__version__}; "
            f"it came with {since}"
        )


def _unknown_model(job: Mapping[str, Any], error: Exception) -> str:
    import transformers  # found, not required

    if "path" in job and not Path(job["path"]).exists():
        return (
            f"{job['path']}: no such folder or file, and no such model in the local Hugging Face "
            f"cache; expected a checkpoint folder or a config.json{_likely_example(job['path'])}"
        )
    label = job.get("path") or job["config"].get("model_type")
    return f"{label}: transformers {transformers.__version__} cannot read it: {told(error)}"


def _likely_example(name: str) -> str:
    """A hint where the name is that of an example."""
    return f" (--example {name} plans a well-known model)" if name in SINCE else ""


class Loader:
    """Calls of `from_pretrained` with a job's arguments, on a checkpoint without weights.

    `model_class` is the class that will be made, None where transformers has no such.
    """

    def __init__(self, job: Mapping[str, Any], config: Any, folder: str) -> None:
        import torch  # found, not required

        self._job, self._folder = job, folder
        self._loading_class = _own_class(job, config) or _model_class(job, config)
        self.model_class = _made(self._loading_class, config)
        _write_checkpoint(config, folder)
        dtype = job["dtype"] or getattr(config, "torch_dtype", None) or "float16"
        try:
            dtype = getattr(torch, str(dtype).replace("torch.", ""))
        except AttributeError:
            raise PlanError(f"dtype: torch has no {dtype}; try float16 or bfloat16") from None
        old_name = release_of("transformers") < (4, 56)
        self._arguments = {
            "device_map": job["strategy"],
            ("torch_dtype" if old_name else "dtype"): dtype,
        }

    def __call__(self, quantization: Optional[Mapping[str, Any]]) -> Callable[[], Any]:
        """The call with this quantization; None asks for none."""
        arguments = dict(self._arguments)
        if quantization is not None:
            arguments["quantization_config"] = _quantization(quantization)

        def load() -> Any:
            budgets = self._job["max_memory"]
            given = None if budgets is None else dict(budgets)
            return self._loading_class.from_pretrained(self._folder, max_memory=given, **arguments)

        return load


def _made(loading_class: Any, config: Any) -> Any:
    """The class of the model that a class of transformers loads, where that is known before."""
    if not loading_class.__module__.startswith("transformers.models.auto"):
        return loading_class
    mapping = getattr(loading_class, "_model_mapping", None)
    found = None if mapping is None else mapping.get(type(config), None)
    if isinstance(found, (tuple, list)):
        wanted = getattr(config, "architectures", None) or ()
        return next((each for each in found if each.__name__ in wanted), found[0])
    return found


def _model_class(job: Mapping[str, Any], config: Any) -> Any:
    """The caller's class, the one the configuration names, or transformers' choice for it."""
    import transformers  # found, not required

    if job.get("class"):
        module, name = job["class"]
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise PlanError(
                f"model: its class {module}.{name} cannot be imported by another process; "
                "move it to a module, or pass its configuration"
            ) from error
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _own_class(job: Mapping[str, Any], config: Any) -> Any:
    """The model class that a trusted checkpoint brings; None where it brings none."""
    classes = getattr(config, "auto_map", None) or {}
    if not job.get("trust_remote_code") or "path" not in job:
        return None
    reference = classes.get("AutoModelForCausalLM") or classes.get("AutoModel")
    if reference is None:
        return None
    from transformers import dynamic_module_utils as remote  # found, not required

    try:
        return remote.get_class_from_dynamic_module(reference, job["path"])
    except Exception as error:
        raise PlanError(f"{job['path']}: its code {reference}: {told(error)}") from error


def _write_checkpoint(config: Any, folder: str) -> None:
    """A checkpoint whose one file of weights holds none."""
    config.save_pretrained(folder)
    simulation.write_no_weights(Path(folder) / "model.safetensors")


def _quantization(settings: Mapping[str, Any]) -> Any:
    from transformers import BitsAndBytesConfig  # found, not required

    if settings.get("quant_method", "bitsandbytes") == "bitsandbytes":
        known = {key: value for key, value in settings.items() if not key.startswith("_")}
        known.pop("quant_method", None)
        return BitsAndBytesConfig(**known)
    from transformers.quantizers.auto import AutoQuantizationConfig  # as above

    return AutoQuantizationConfig.from_dict(dict(settings))
