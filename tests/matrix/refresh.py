"""Derives the generated part of compat_matrix.yaml from the released wheels, or audits it.

`python tests/matrix/refresh.py` rewrites what stands below the marker line and keeps every byte
above it. With `--audit` nothing is written: the releases that the matrix knows are derived again
and any difference is printed and fails; releases it does not know are reported, and fail too with
`--fail-on-news`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Mapping, NamedTuple, Sequence

import yaml
from packaging.version import Version
from wheels import Release, WheelError, default_cache, list_releases, read_members

from bnb_dispatch_fix.patching.recognition import fingerprint_text

MATRIX = Path(__file__).resolve().parents[2] / "compat_matrix.yaml"
MARKER = "# --- written by `nox -s refresh`; do not edit below this line ---\n"
WIDTH = 100
#: The lowest release of each package that is looked at.
LOWEST = {"accelerate": "0.20.0", "diffusers": "0.31.0", "transformers": "4.30.0"}
#: Wheel member -> the functions that are fingerprinted in it.
SOURCES = {
    "accelerate/big_modeling.py": ("dispatch_model",),
    "accelerate/utils/modeling.py": (
        "compute_module_sizes",
        "get_balanced_memory",
        "get_max_memory",
        "infer_auto_device_map",
    ),
    "diffusers/models/model_loading_utils.py": ("_determine_device_map",),
    "transformers/integrations/accelerate.py": (
        "_get_device_map",
        "compute_module_sizes",
        "get_balanced_memory",
        "get_max_memory",
        "infer_auto_device_map",
    ),
    "transformers/modeling_utils.py": ("_get_device_map",),
}

#: Function key ("package.function") -> release -> fingerprint.
Fingerprints = Dict[str, Dict[Release, str]]


class MatrixConflict(ValueError):
    """One source text would both have and lack a fix; the hand-written `fixes` are wrong."""


class Claim(NamedTuple):
    """A fix that some seam needs in a function: in its package since `first`, or never."""

    pr: int
    first: Version | None

    def missing_in(self, release: Release) -> bool:
        return self.first is None or release.version < self.first


def fingerprints_of(sources: Mapping[Release, Mapping[str, str]]) -> Fingerprints:
    """Returns the fingerprint of every wanted function in every release that defines it."""
    found: Fingerprints = {}
    for release, members in sources.items():
        for member, text in members.items():
            for function in SOURCES[member]:
                fingerprint = fingerprint_text(text, function)
                if fingerprint is not None:
                    found.setdefault(f"{release.package}.{function}", {})[release] = fingerprint
    return found


def claims(matrix: Mapping[str, Any], key: str) -> list[Claim]:
    """Returns the fixes that the hand-written seams look for behind the function *key*.

    A fix that the function's own package does not list is one that none of its releases has.
    """
    package = key.split(".", 1)[0]
    firsts = {f["pr"]: Version(f["first"]) for f in matrix["fixes"] if f["package"] == package}
    prs = {pr for s in matrix["seams"] if s["implementation"] == key for pr in s["fixes"]}
    return [Claim(pr, firsts.get(pr)) for pr in sorted(prs)]


def implementations(
    matrix: Mapping[str, Any], found: Fingerprints, releases: Sequence[Release]
) -> dict[str, list[dict[str, Any]]]:
    """Returns one entry per function and distinct source text, oldest first.

    Raises MatrixConflict if a text occurs on both sides of a fix.
    """
    entries: dict[str, list[dict[str, Any]]] = {}
    for key, by_release in sorted(found.items()):
        order = [release for release in releases if release.package == key.split(".", 1)[0]]
        entries[key] = []
        for fingerprint in dict.fromkeys(by_release[r] for r in order if r in by_release):
            having = [r for r in order if by_release.get(r) == fingerprint]
            lacks = [c.pr for c in claims(matrix, key) if _lacking(c, key, fingerprint, having)]
            ranges = compact(having, order)
            entries[key].append({"fingerprint": fingerprint, "lacks": lacks, "releases": ranges})
    return entries


def _lacking(claim: Claim, key: str, fingerprint: str, releases: Iterable[Release]) -> bool:
    answers = {claim.missing_in(release): release for release in releases}
    if len(answers) > 1:
        raise MatrixConflict(
            f"{key} {fingerprint} is the same in {answers[True].pin}, which lacks #{claim.pr}, and "
            f"in {answers[False].pin}, which has it: correct `first` of #{claim.pr} in `fixes`"
        )
    return True in answers


def compact(having: Iterable[Release], order: Sequence[Release]) -> list[str]:
    """Writes releases as ranges of neighbours in *order*: ``["1.0.0–1.2.1", "1.4.0"]``."""
    positions = [order.index(release) for release in having]
    runs: list[list[int]] = []
    for position in sorted(positions):
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    ends = [list(dict.fromkeys((run[0], run[-1]))) for run in runs]
    return ["–".join(str(order[i].version) for i in pair) for pair in ends]


def render(matrix: Mapping[str, Any], found: Fingerprints, releases: Sequence[Release]) -> str:
    """Returns the generated part of the matrix file as YAML text."""
    lines = ["# Releases that were looked at; yanked ones can still be installed by exact version."]
    lines.append("releases:")
    for package in sorted(LOWEST):
        own = [release for release in releases if release.package == package]
        lines += [f"  {package}:"]
        lines += _flow_list("known", [str(r.version) for r in own])
        lines += _flow_list("yanked", [str(r.version) for r in own if r.yanked])
    lines += ["", "# One entry per distinct source text, oldest first; `lacks` are PR numbers."]
    lines.append("implementations:")
    for key, entries in implementations(matrix, found, releases).items():
        lines.append(f"  {key}:")
        for entry in entries:
            ranges = ", ".join(f'"{text}"' for text in entry["releases"])
            lines.append(
                f'    - {{fingerprint: "{entry["fingerprint"]}", lacks: {entry["lacks"]}, '
                f"releases: [{ranges}]}}"
            )
    return "\n".join(lines) + "\n"


def _flow_list(name: str, items: Sequence[str]) -> list[str]:
    """Writes a list over as few lines as fit; quoted, or YAML may read a version as a number."""
    lines = [f"    {name}: ["]
    for index, item in enumerate(items):
        text = f'"{item}"' + ("," if index < len(items) - 1 else "")
        if len(lines[-1]) + len(text) + 2 > WIDTH:
            lines.append("      " + text)
        else:
            lines[-1] += text if lines[-1].endswith("[") else " " + text
    lines[-1] += "]"
    return lines


def split_at_marker(text: str) -> tuple[str, str]:
    """Splits the matrix file into the hand-written part, marker included, and the generated one.

    Raises ValueError if the marker line is not there exactly once.
    """
    if text.count(MARKER) != 1:
        raise ValueError(f"expected exactly one line {MARKER.strip()!r} in {MATRIX.name}")
    above, below = text.split(MARKER)
    return above + MARKER, below


def derive(matrix: Mapping[str, Any], releases: Sequence[Release], cache: Path, jobs: int) -> str:
    """Returns the generated part for *releases*, downloading what is not in *cache*."""
    sources: dict[Release, dict[str, str]] = {}
    for package in sorted(LOWEST):
        own = [release for release in releases if release.package == package]
        members = [member for member in SOURCES if member.startswith(f"{package}/")]
        sources.update(read_members(own, members, cache, jobs))
    return render(matrix, fingerprints_of(sources), releases)


def known_releases(matrix: Mapping[str, Any]) -> list[Release]:
    """Returns the releases that the generated part lists."""
    return [
        Release(package, Version(version), version in listed["yanked"])
        for package, listed in sorted(matrix.get("releases", {}).items())
        for version in listed["known"]
    ]


def audit(
    matrix: Mapping[str, Any], generated: str, cache: Path, jobs: int, *, fail_on_news: bool = False
) -> bool:
    """Prints how the matrix differs from the wheels; returns whether it does not.

    Releases that appeared, or were yanked, after the last refresh are reported. They are no
    difference, because nothing that the matrix says has become wrong by them, but count as one
    with *fail_on_news*.
    """
    known = known_releases(matrix)
    derived = derive(matrix, known, cache, jobs)
    diff = list(
        difflib.unified_diff(
            generated.splitlines(keepends=True),
            derived.splitlines(keepends=True),
            "compat_matrix.yaml",
            "derived from the wheels",
        )
    )
    sys.stdout.writelines(diff)
    listed = [r for p in sorted(LOWEST) for r in list_releases(p, LOWEST[p])]
    news = list(_news(known, listed))
    for line in news:
        print(f"audit: {line}")
    verdict = "differs from" if diff else "agrees with"
    print(f"audit: compat_matrix.yaml {verdict} the wheels of {len(known)} releases")
    return not diff and not (news and fail_on_news)


def _news(known: Sequence[Release], listed: Sequence[Release]) -> Iterator[str]:
    """Yields a line for each listed release that is not known, or not known as yanked or not."""
    yanked = {(r.package, r.version): r.yanked for r in known}
    for release in listed:
        before = yanked.get((release.package, release.version))
        if before is None:
            others = [r.version for r in known if r.package == release.package]
            newer = all(release.version > version for version in others)
            kind = "newer than the matrix" if newer else "not in the matrix"
            yield f"{release.pin} is {kind}; run `nox -s refresh`"
        elif before != release.yanked:
            yield f"{release.pin} was {'' if release.yanked else 'un-'}yanked meanwhile"


def main(arguments: Sequence[str] | None = None) -> int:
    """Refreshes the matrix, or audits it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="refresh", description=__doc__.split("\n")[0])
    parser.add_argument("--audit", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument("--fail-on-news", action="store_true", help="so does a release it lacks")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder for sources")
    parser.add_argument("--jobs", type=int, default=4, help="downloads at the same time")
    options = parser.parse_args(arguments)
    above, below = split_at_marker(MATRIX.read_bytes().decode("utf-8"))
    matrix = yaml.safe_load(above + below)
    try:
        if options.audit:
            news = options.fail_on_news
            same = audit(matrix, below, options.cache, options.jobs, fail_on_news=news)
            return 0 if same else 1
        releases = [r for p in sorted(LOWEST) for r in list_releases(p, LOWEST[p])]
        derived = derive(matrix, releases, options.cache, options.jobs)
    except (WheelError, MatrixConflict) as error:
        print(f"refresh: {error}", file=sys.stderr)
        return 1
    MATRIX.write_bytes((above + derived).encode("utf-8"))
    state = "unchanged" if derived == below else "rewritten"
    print(f"refresh: {len(releases)} releases, compat_matrix.yaml {state}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
