"""Well-known models for `plan --example`: their public configurations, no weights.

configs/ has a file for each, with what decides its sizes and its cache, as its config.json says it.
"""

from __future__ import annotations

import json
import pkgutil
from typing import Any, Dict, Mapping

#: By name: the transformers that first builds it as it was published.
SINCE: Mapping[str, str] = {
    "deepseek-v3": "4.51",
    "gemma-2-27b": "4.42",
    "gemma-3-27b": "4.50",
    "glm-4.5-air": "4.54",
    "gpt-oss-120b": "4.55",
    "gpt-oss-20b": "4.55",
    "llama-3-70b": "4.30",
    "llama-3-8b": "4.30",
    "llama-4-scout": "4.51",
    "mistral-small-24b": "4.43",
    "mixtral-8x7b": "4.36",
    "qwen3-235b-a22b": "4.51",
    "qwen3-30b-a3b": "4.51",
    "qwen3-8b": "4.51",
}


def configuration(name: str) -> Dict[str, Any]:
    """What the config.json of an example says."""
    raw = pkgutil.get_data(__package__, f"configs/{name}.json")
    found: Dict[str, Any] = json.loads(raw or b"{}")
    return found


def hint(name: str) -> str:
    """What to say of a name that is none: the one that was likely meant, or all there are."""
    import difflib  # for a misspelt name only

    near = difflib.get_close_matches(name.lower().rpartition("/")[2], SINCE, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(SINCE)}"
