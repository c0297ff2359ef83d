"""What this machine has, as torch and the operating system tell it; imports and starts nothing."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, Optional

from bnb_dispatch_fix.placement.records import Device


def accelerators_seen() -> int:
    """How many accelerators torch sees."""
    torch: Any = sys.modules.get("torch")
    counts = [0]
    for name in ("cuda", "xpu", "npu", "mlu", "musa", "hpu"):
        try:
            counts.append(int(getattr(torch, name).device_count()))
        except Exception:  # noqa: BLE001, PERF203, S112  # torch has no such backend here, or it is broken
            continue
    return max(counts)


def memory_of(device: Device) -> Optional[int]:
    """All bytes of a GPU; None where torch does not see it."""
    torch: Any = sys.modules.get("torch")
    try:
        if not isinstance(device, int) or device >= torch.cuda.device_count():
            return None
        return int(torch.cuda.get_device_properties(device).total_memory)
    except Exception:  # noqa: BLE001  # no such device, another backend, a broken driver
        return None


def reserved_here(device: Device) -> int:
    """Bytes of a GPU that torch's allocator holds in this process, used or not."""
    torch: Any = sys.modules.get("torch")
    try:
        return int(torch.cuda.memory_reserved(device))
    except Exception:  # noqa: BLE001  # no such device, another backend
        return 0


def nvidia_driver(root: Path = Path("/")) -> Optional[str]:
    """What tells of an NVIDIA driver on this machine, None where nothing does; starts nothing."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text("utf-8", errors="replace")
        version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
        return f"version {version.group()}" if version else "/proc/driver/nvidia"
    except OSError:
        pass
    windows = Path(os.environ.get("SYSTEMROOT", "C:/Windows"))
    places = [root / "dev/nvidiactl", root / "usr/lib/wsl/lib/libcuda.so.1"]
    if sys.platform == "win32":
        places.append(windows / "System32/nvcuda.dll")
    return next((str(place) for place in places if place.exists()), None)
