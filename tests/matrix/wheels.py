"""Lists the releases of a package and reads source files out of their wheels, with pip.

Only the files that were asked for are kept, so that the cache of some 250 releases stays small;
a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterable, NamedTuple, Sequence

from packaging.version import InvalidVersion, Version

TRIES = 3


class WheelError(RuntimeError):
    """A release could not be listed or downloaded; the message names it."""


class Release(NamedTuple):
    """One release of a package as the package index has it."""

    package: str
    version: Version
    yanked: bool

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"


def list_releases(package: str, lowest: str) -> list[Release]:
    """Returns all releases of *package* from *lowest* on, in order, pre-releases and yanked too.

    Raises WheelError if pip does not list them.
    """
    # pip names every candidate when none will do, and leaves yanked ones out of "index versions";
    # newer ones name these apart.
    refusal = _pip("download", "--no-deps", "--ignore-requires-python", f"{package}==0.dev0").stderr
    listed = re.search(r"from versions: ([^)]*)\)", refusal)
    ignored = re.search(r"Ignored the following yanked versions: (.*)", refusal)
    offered = _pip("index", "versions", "--pre", "--ignore-requires-python", package).stdout
    available = re.search(r"Available versions: (.*)", offered)
    if listed is None or available is None:
        raise WheelError(f"{package}: pip lists no releases: {refusal.strip()[-300:]}")
    not_yanked = set(_versions(available[1]))
    found = {*_versions(listed[1]), *_versions(ignored[1] if ignored else "")}
    wanted = sorted(version for version in found if version >= Version(lowest))
    return [Release(package, version, version not in not_yanked) for version in wanted]


def read_members(
    releases: Sequence[Release], members: Iterable[str], cache: Path, jobs: int
) -> dict[Release, dict[str, str]]:
    """Returns the text of *members* in each release's wheel; a member it has not is left out.

    Downloads with *jobs* workers what *cache* does not hold. Raises WheelError, once all have
    been tried, if some could not be downloaded.
    """
    wanted = tuple(members)
    missing = [release for release in releases if not _complete(cache, release, wanted)]
    failures = []
    with ThreadPoolExecutor(jobs) as pool:
        for count, failure in enumerate(pool.map(lambda r: _fill(cache, r, wanted), missing), 1):
            print(f"[{count}/{len(missing)}] {failure or missing[count - 1].pin}", flush=True)
            failures += [failure] if failure else []
    if failures:
        raise WheelError(f"{len(failures)} of {len(releases)} failed, first: {failures[0]}")
    return {release: _read(_folder(cache, release), wanted) for release in releases}


def default_cache() -> Path:
    """Returns the folder for files read from wheels, in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bnb-dispatch-fix" / "wheels"


def _folder(cache: Path, release: Release) -> Path:
    return cache / f"{release.package}-{release.version}"


def _complete(cache: Path, release: Release, members: Iterable[str]) -> bool:
    return all((_folder(cache, release) / member).exists() for member in members)


def _fill(cache: Path, release: Release, members: Sequence[str]) -> str | None:
    """Puts the members of one wheel into the cache, whole or not at all; returns what failed."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as scratch:
        wheel = _download(release, Path(scratch, "wheel"))
        if isinstance(wheel, str):
            return wheel
        kept = Path(scratch, "kept")
        with zipfile.ZipFile(wheel) as archive:
            for member in members:
                path = kept / member
                path.parent.mkdir(parents=True, exist_ok=True)
                # Empty stands for "not in this wheel": absence is remembered, too.
                path.write_bytes(archive.read(member) if member in archive.namelist() else b"")
        shutil.rmtree(_folder(cache, release), ignore_errors=True)
        shutil.move(str(kept), str(_folder(cache, release)))
    return None


def _download(release: Release, folder: Path) -> Path | str:
    """Downloads one wheel; returns its path, or what went wrong."""
    command = ["download", "--no-deps", "--no-cache-dir", "--ignore-requires-python"]
    command += ["--only-binary", ":all:", "--dest", str(folder), release.pin]
    for _ in range(TRIES):
        answer = _pip(*command)
        wheels = list(folder.glob("*.whl"))
        if answer.returncode == 0 and wheels:
            return wheels[0]
    return f"{release.pin} cannot be downloaded: {answer.stderr.strip()[-300:]}"


def _read(folder: Path, members: Iterable[str]) -> dict[str, str]:
    texts = {member: (folder / member).read_text("utf-8") for member in members}
    return {member: text for member, text in texts.items() if text}


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _versions(text: str) -> list[Version]:
    """Reads a comma-separated list; a version that nobody can order is left out."""
    found = []
    for part in text.split(","):
        try:
            found.append(Version(part.strip()))
        except InvalidVersion:
            continue
    return found
