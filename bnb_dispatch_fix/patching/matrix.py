"""`compat_matrix.yaml` as typed records, and the versions that are installed here."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from bnb_dispatch_fix.features import FEATURES

#: The one schema this release of the shim reads.
SCHEMA = 1
#: The packages the shim looks at, in the order they are shown.
PACKAGES = ("transformers", "accelerate", "bitsandbytes", "torch")
#: Where one of these is older than every seam of it, nothing is patched, in no package: what is
#: patched in the other would reach it half. Other packages only hold these packages' functions.
CORE = ("transformers", "accelerate")
#: A larger matrix is not ours (bytes); the released one has about 20 kB.
SIZE_LIMIT = 1_000_000
#: So is one that nests more; the released one has 5 levels.
DEPTH_LIMIT = 16
#: A number that takes long to read: in base 60, or of more digits than any of ours.
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*:|[-+.]?[0-9][0-9_.a-zA-Z]{40}")

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class MatrixError(ValueError):
    """The matrix cannot be used; the message names the file, what was expected and found."""


class Fix(NamedTuple):
    """An upstream change and the first release of `package` that has it."""

    pr: int
    package: str
    first: str
    what: str


class Seam(NamedTuple):
    """One name that is called: where it is, what stands behind it, what may be missing there."""

    id: str
    features: Tuple[str, ...]
    package: str
    versions: str
    module: str
    attribute: str
    implementation: str
    fixes: Tuple[int, ...]

    def not_covered(self, version: Optional[str]) -> Optional[str]:
        """Why this is none of an installed version's seams; None where it is one."""
        if in_range(version, self.versions):
            return None
        return f"{self.package} {version} is not covered; expected {self.versions}"


class Implementation(NamedTuple):
    """One known body of a function and the fixes it lacks."""

    fingerprint: str
    lacks: Tuple[int, ...]
    releases: Tuple[str, ...]


class Matrix(NamedTuple):
    """The whole file. `implementations` maps a function's key to its known bodies."""

    fixes: Tuple[Fix, ...]
    seams: Tuple[Seam, ...]
    implementations: Dict[str, Tuple[Implementation, ...]]

    def known(self, key: str, fingerprint: Optional[str]) -> Optional[Implementation]:
        """The known body of function `key` with this fingerprint, or None."""
        for body in self.implementations.get(key, ()):
            if body.fingerprint == fingerprint:
                return body
        return None

    def packages(self) -> Tuple[str, ...]:
        """The packages whose modules are patched, each once."""
        return tuple(dict.fromkeys(seam.package for seam in self.seams))

    def expected(self) -> Tuple[Seam, ...]:
        """The seams the installed versions should have; all of a package's where none fits.

        Other packages than transformers and accelerate count where their module is loaded.
        """
        found: List[Seam] = []
        for package in self.packages():
            mine = [seam for seam in self.seams if seam.package == package]
            if package not in CORE:
                mine = [seam for seam in mine if seam.module in sys.modules]
            version = installed_version(package) if mine else None
            found += [seam for seam in mine if in_range(version, seam.versions)] or mine
        return tuple(found)


def matrix_path() -> Path:
    """The matrix inside the installed package, or at the top of a source checkout."""
    package = Path(__file__).absolute().parent.parent
    shipped = package / "compat_matrix.yaml"
    at_the_top = package.resolve().parent / "compat_matrix.yaml"
    return at_the_top if at_the_top.exists() and not shipped.exists() else shipped


def load_matrix(path: Optional[Path] = None) -> Matrix:
    """Read the matrix.

    Raises:
        MatrixError: the file is missing, too large, not YAML, of another schema or incomplete.
    """
    path = matrix_path() if path is None else path
    try:
        raw = _read(path)
    except OSError as error:
        raise MatrixError(
            f"{path}: cannot be read ({error}); reinstall bnb-dispatch-fix"
        ) from error
    if len(raw) > SIZE_LIMIT:
        raise MatrixError(f"{path}: larger than {SIZE_LIMIT} bytes; reinstall bnb-dispatch-fix")
    try:
        _check_structure(raw)
        data = yaml.load(raw, Loader=_LOADER)  # noqa: S506  # a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MatrixError(
            f"{path}: no usable YAML ({_short(error)}); reinstall bnb-dispatch-fix"
        ) from error
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MatrixError(
            f"{path}: expected schema {SCHEMA} with fixes, seams and implementations, "
            f"found {type(error).__name__}: {_short(error)}; reinstall bnb-dispatch-fix"
        ) from error


def _read(path: Path) -> bytes:
    """The file, or the part of it that shows it is too large; also out of a zipped package."""
    archive = getattr(__spec__.loader if __spec__ else None, "archive", None)
    if archive is not None and str(path).startswith(archive):
        return bytes(__spec__.loader.get_data(str(path)))  # type: ignore[union-attr]
    with path.open("rb") as stream:
        return stream.read(SIZE_LIMIT + 1)


def _check_structure(raw: bytes) -> None:
    """Refuse what takes long to read: aliases, deep nesting, long numbers, tags that make them."""
    depth = 0
    for event in yaml.parse(raw, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ValueError(f"it has the tag {tag}")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
            _check_number(event.value)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH_LIMIT:
            raise ValueError(f"nested more than {DEPTH_LIMIT} levels deep")


def _check_number(text: str) -> None:
    if _LONG_NUMBER.match(text):
        raise ValueError(f"{text[:20]!r} is no number of ours")


def _whole(value: Any) -> int:
    """A number as it is; True is 1 and 47203.5 is 47203 to `int`, and infinity breaks it."""
    if type(value) is not int:
        raise TypeError(f"expected a whole number, found {value!r}")
    return value


def _short(error: Exception) -> str:
    """One line; an error may quote the file, whatever that is."""
    return " ".join(str(error)[:400].split())


def _parse(data: Any) -> Matrix:
    if not isinstance(data, Mapping):
        raise TypeError("the top level is no mapping")
    if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
        raise ValueError(f"schema {data.get('schema')!r}")
    seams = tuple(_seam(entry) for entry in data["seams"])
    if len({seam.id for seam in seams}) != len(seams):
        raise ValueError("two seams share an id")
    return Matrix(
        fixes=tuple(
            Fix(_whole(e["pr"]), str(e["package"]), str(e["first"]), str(e["what"]))
            for e in data["fixes"]
        ),
        seams=seams,
        implementations={
            str(key): tuple(
                Implementation(
                    str(body["fingerprint"]),
                    tuple(_whole(pr) for pr in body["lacks"]),
                    tuple(str(r) for r in body["releases"]),
                )
                for body in bodies
            )
            for key, bodies in data["implementations"].items()
        },
    )


def _seam(entry: Mapping[str, Any]) -> Seam:
    lists = ("features", "fixes")
    texts = {field: entry[field] for field in Seam._fields if field not in lists}
    for field, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"seam {entry.get('id')!r}: {field} is no text")
    if not isinstance(entry["features"], list) or not set(entry["features"]) <= set(FEATURES):
        raise ValueError(f"seam {entry['id']!r}: features {entry['features']!r}")
    SpecifierSet(entry["versions"])  # InvalidSpecifier is a ValueError
    return Seam(
        features=tuple(str(feature) for feature in entry["features"]),
        fixes=tuple(_whole(pr) for pr in entry["fixes"]),
        **texts,
    )


def installed_version(package: str) -> Optional[str]:
    """The version of `package` here, None where it is not installed.

    The module that is loaded decides (a vendored copy may have no metadata); nothing is imported.
    """
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    try:
        version: Any = importlib.metadata.version(package)
    except Exception:  # noqa: BLE001  # not there, or its metadata cannot be read
        return None
    return version if isinstance(version, str) else None


def installed_versions() -> Dict[str, Optional[str]]:
    """Version, or None, of each package the shim looks at."""
    return {package: installed_version(package) for package in PACKAGES}


def is_readable(version: Optional[str]) -> bool:
    """Whether a text is a version as PEP 440 has it."""
    try:
        return version is not None and bool(Version(version))
    except InvalidVersion:
        return False


def too_old(matrix: Matrix) -> Optional[str]:
    """Why nothing at all is patched with the versions that are installed here (see `CORE`)."""
    for package in CORE:
        ranges = [seam.versions for seam in matrix.seams if seam.package == package]
        version = installed_version(package)
        if ranges and not any(in_range(version, text) for text in ranges):
            return f"{package} {version} is not covered; expected {_oldest(ranges)}"
    return None


def _oldest(ranges: List[str]) -> str:
    """The lowest version that is in one of the ranges, as a range."""
    bounds = [bound for text in ranges for bound in SpecifierSet(text) if bound.operator == ">="]
    lowest = min((Version(bound.version) for bound in bounds), default=None)
    return ranges[0] if lowest is None else f">={lowest.base_version}"


def in_range(version: Optional[str], versions: str) -> bool:
    """Whether a version, pre-releases included, is in a range; an unreadable one always is.

    A version nobody can read does not decide: the code behind the name does.
    """
    try:
        return version is None or SpecifierSet(versions).contains(
            Version(version), prereleases=True
        )
    except (InvalidVersion, InvalidSpecifier):
        return True


def missing_by_version(matrix: Matrix, seam: Seam, version: Optional[str]) -> Tuple[int, ...]:
    """The fixes of a seam that its package's version lacks, going by the matrix alone.

    A fix of another package than the one whose code stands there is in no release of it. A
    version that nobody can read has none.
    """
    home = seam.implementation.partition(".")[0]
    if home != seam.package:
        version = installed_version(home)
    released = {
        fix.pr
        for fix in matrix.fixes
        if fix.package == home and is_readable(version) and in_range(version, f">={fix.first}")
    }
    return tuple(pr for pr in seam.fixes if pr not in released)
