"""The records that `status()` answers with."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

#: Every state a seam can be in.
STATES = ("applied", "already-fixed", "pending", "skipped", "replaced", "disabled", "failed")


class PatchStatus(NamedTuple):
    """One seam as it is now.

    `state` is one of `STATES`; `fixes` are the PRs the patch supplies; `missing` are the PRs
    that nobody supplies there.
    """

    id: str
    module: str
    attribute: str
    state: str
    fixes: Tuple[int, ...]
    reason: str
    missing: Tuple[int, ...] = ()


class Status(NamedTuple):
    """The shim, what is installed, and every seam; `problem` is what keeps all of it off."""

    version: str
    features: Tuple[str, ...]
    installed: Dict[str, Optional[str]]
    patches: Tuple[PatchStatus, ...]
    problem: Optional[str]

    @property
    def complete(self) -> bool:
        """Whether nothing that is missing stayed unpatched."""
        return self.problem is None and not any(patch.missing for patch in self.patches)

    def as_dict(self) -> Dict[str, Any]:
        """Plain data, as `bnb-dispatch-fix status --json` prints it."""
        return {
            "version": self.version,
            "features": list(self.features),
            "installed": dict(self.installed),
            "patches": [
                {
                    "id": patch.id,
                    "module": patch.module,
                    "attribute": patch.attribute,
                    "state": patch.state,
                    "fixes": list(patch.fixes),
                    "reason": patch.reason,
                }
                for patch in self.patches
            ],
        }
