"""Wrecks that environments with old pins arrive in, each by name and with the pin that mends it.

Every one was built in a virtual environment first; the signs are what was seen there.
"""

from __future__ import annotations

import os
import re
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Optional, Pattern, Tuple

from bnb_dispatch_fix.doctor.findings import ERROR, PASS, WARN, Finding
from bnb_dispatch_fix.doctor.surroundings import Answer

#: Switches the kernels that transformers 5.25 and newer fetch off; read there as YES or NO.
_KERNELS_SWITCH = "USE_HUB_KERNELS"
_NO = ("NO", "0", "OFF", "FALSE")
#: The first transformers that replaces layers with `set_submodule`, and the torch that has it.
_SET_SUBMODULE = ((5, 0), "2.5")


class _Sign(NamedTuple):
    """What an import error says where it is this wreck, and the hint that goes with it."""

    pattern: Pattern[str]
    hint: Callable[[re.Match[str]], str]


_SIGNS: Tuple[_Sign, ...] = (
    _Sign(
        re.compile(r"No module named 'pkg_resources'"),
        lambda _: (
            "setuptools is not installed, or so new that it has no pkg_resources any more: "
            "pip install 'setuptools<81'"
        ),
    ),
    _Sign(
        re.compile(r"No module named 'scipy'"),
        lambda _: "bitsandbytes 0.39-0.41 imports scipy and does not ask for it: pip install scipy",
    ),
    _Sign(
        re.compile(
            r"(\S+?)([<>=!~][^\s]*) is required for a normal functioning .*?found \1==(\S+)"
        ),
        lambda found: f"pip install '{found.group(1)}{found.group(2)}'",
    ),
    _Sign(
        re.compile(r"numpy\.dtype size changed|_ARRAY_API not found|multiarray failed to import"),
        lambda _: "a package built for numpy 1 meets numpy 2: pip install 'numpy<2'",
    ),
    _Sign(
        re.compile(r"NameError: name '(nn|torch)' is not defined"),
        lambda _: (
            "this transformers leaves a torch out that is older than it asks for (2.4 for "
            "5.x): install a newer torch, or the transformers of its time (see `tested` below)"
        ),
    ),
)


def hint_of(answer: Answer) -> Optional[str]:
    """The pin that mends an import that failed; None where it is no wreck that is known."""
    for sign in _SIGNS:
        found = sign.pattern.search(answer.error)
        if found is not None:
            return sign.hint(found)
    return None


def breaks(cause: Optional[Answer], answer: Answer) -> bool:
    """Whether an import fails with what another failed with, perhaps behind words of its own."""
    if cause is None or cause.state != "broken":
        return False
    message = cause.error.partition(": ")[2]
    return answer.error == cause.error or bool(message and answer.error.endswith(f": {message}"))


def behind(answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """What all imports hide: it fails when a model is loaded."""
    torch, transformers = answers.get("torch"), answers.get("transformers")
    if torch is not None and torch.state == "ok":
        yield from _numpy(torch)
        if transformers is not None:
            yield from _set_submodule(torch, transformers)
    for package, answer in answers.items():
        if answer.state == "ok":
            yield from _requirements(package, answer)


def _numpy(torch: Answer) -> Iterator[Finding]:
    error = torch.facts.get("numpy_error")
    if error:
        text = (
            f"torch {torch.facts.get('version')} was not built for numpy "
            f"{torch.facts.get('numpy')}: {error}"
        )
        yield Finding(ERROR, "numpy", text, "pip install 'numpy<2'")


def _set_submodule(torch: Answer, transformers: Answer) -> Iterator[Finding]:
    since, needed = _SET_SUBMODULE
    version = str(transformers.facts.get("version"))
    if torch.facts.get("set_submodule", True) or _release(version) < since:
        return
    text = (
        f"{torch.facts.get('version')} has no Module.set_submodule, which transformers "
        f"{version} quantizes with"
    )
    hint = f"pip install 'torch>={needed}', or 'transformers<{since[0]}'"
    yield Finding(ERROR, "torch", text, hint)


def _release(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _requirements(package: str, answer: Answer) -> Iterator[Finding]:
    """Requirements that no installed release meets: pip was told to, or could not, leave them."""
    for name, wanted, found in answer.facts.get("unmet", ()):
        text = f"{package} {answer.facts.get('version')} asks for {name}{wanted}, found {found}"
        hint = f"pip install '{name}{wanted}'"
        if name == "kernels" and os.environ.get(_KERNELS_SWITCH, "").upper() in _NO:
            yield Finding(PASS, package, f"{text}; {_KERNELS_SWITCH} says not to use it")
            continue
        if name == "kernels":
            hint += f", or set {_KERNELS_SWITCH}=NO where there is no such release"
        yield Finding(WARN, package, text, hint)


#: What bitsandbytes before 0.43 raises where torch sees a GPU and it has no library for it.
NO_LIBRARY = "CUDA Setup failed despite GPU being available"


def library_hint(facts: Mapping[str, Any], build: str) -> str:
    """Why a bitsandbytes beside a GPU has loaded its library for the CPU, and what mends it."""
    wanted = "".join(re.findall(r"\d+", build)[:2]) if build.startswith("cuda") else ""
    if wanted and facts.get("built_for") == []:
        return (
            "it was installed without any library for CUDA: pip install --force-reinstall "
            f"--no-deps bitsandbytes=={facts.get('version')}"
        )
    built_for: List[str] = list(facts.get("built_for") or ())
    if wanted and built_for and wanted not in built_for:
        shown = f"{_dotted(built_for[0])}–{_dotted(built_for[-1])}"
        return (
            f"it has no library for CUDA {_dotted(wanted)}, only for some of {shown}: install a "
            "build of the same torch for one of these"
        )
    return (
        "it did not find this torch's CUDA runtime: put the folder of libcudart.so on "
        "LD_LIBRARY_PATH; `python -m bitsandbytes` says more"
    )


def _dotted(digits: str) -> str:
    return f"{digits[:-1]}.{digits[-1]}"
