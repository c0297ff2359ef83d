"""The generated part of the matrix: what is derived from sources, and what is never touched."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import refresh
import wheels
import yaml
from packaging.version import Version

OLD = "def get_balanced_memory():\n    return 'old'\n"
HALF = "def get_balanced_memory():\n    return 'half'\n"
NEW = "def get_balanced_memory():\n    return 'new'\n"
OTHER = "x = 1\n"
PLANNER = "transformers/integrations/accelerate.py"
ACCELERATE = "accelerate/utils/modeling.py"
HAND_WRITTEN = {
    "fixes": [
        {"pr": 1, "package": "transformers", "first": "5.2.0"},
        {"pr": 2, "package": "transformers", "first": "5.10.0"},
    ],
    "seams": [
        {"implementation": "transformers.get_balanced_memory", "fixes": [1, 2]},
        {"implementation": "accelerate.get_balanced_memory", "fixes": [2, 1]},
    ],
}


def release(version, package="transformers", yanked=False):
    return wheels.Release(package, Version(version), yanked)


def derived(texts, package="transformers", member=PLANNER):
    """The generated part, read back, for one file of one package in these releases."""
    sources = {release(v, package): {member: text} for v, text in texts.items()}
    found = refresh.fingerprints_of(sources)
    return yaml.safe_load(refresh.render(HAND_WRITTEN, found, list(sources)))["implementations"]


def test_each_text_has_one_entry_with_what_it_lacks():
    texts = {"5.0.0": OLD, "5.1.0": OLD, "5.2.0": HALF, "5.9.1": HALF, "5.10.0": NEW}
    entries = derived(texts)["transformers.get_balanced_memory"]

    assert [entry["releases"] for entry in entries] == [
        ["5.0.0–5.1.0"],
        ["5.2.0–5.9.1"],
        ["5.10.0"],
    ]
    assert [entry["lacks"] for entry in entries] == [[1, 2], [2], []]
    assert len({entry["fingerprint"] for entry in entries}) == 3


def test_a_package_without_the_fix_lacks_it_in_every_release():
    entries = derived({"0.20.0": OLD, "9.0.0": NEW}, "accelerate", ACCELERATE)
    assert [e["lacks"] for e in entries["accelerate.get_balanced_memory"]] == [[1, 2], [1, 2]]


def test_one_fix_is_looked_for_in_both_packages_and_each_has_its_own_first_release():
    matrix = {
        "fixes": [{"pr": 3, "package": "accelerate", "first": "1.16.0"}],
        "seams": [
            {"implementation": "accelerate.get_balanced_memory", "fixes": [3]},
            {"implementation": "transformers.get_balanced_memory", "fixes": [3]},
        ],
    }
    sources = {
        release("1.15.0", "accelerate"): {ACCELERATE: OLD},
        release("1.16.0", "accelerate"): {ACCELERATE: NEW},
        release("5.24.0"): {PLANNER: HALF},
        release("5.25.0"): {PLANNER: NEW},
    }
    found = refresh.fingerprints_of(sources)
    entries = yaml.safe_load(refresh.render(matrix, found, list(sources)))["implementations"]

    assert [e["lacks"] for e in entries["accelerate.get_balanced_memory"]] == [[3], []]
    assert [e["lacks"] for e in entries["transformers.get_balanced_memory"]] == [[3], [3]]


def test_a_text_that_comes_back_is_one_entry_with_two_ranges():
    texts = {"5.2.0": OLD, "5.3.0": HALF, "5.4.0": OLD, "5.5.0": OTHER, "5.6.0": OLD}
    first, second = derived(texts)["transformers.get_balanced_memory"]

    assert first["releases"] == ["5.2.0", "5.4.0", "5.6.0"]
    assert second["releases"] == ["5.3.0"]


def test_a_text_on_both_sides_of_a_fix_stops_the_refresh():
    with pytest.raises(refresh.MatrixConflict, match=r"5\.1\.0, which lacks #1.*5\.2\.0"):
        derived({"5.1.0": OLD, "5.2.0": OLD})


def test_text_is_valid_deterministic_and_narrow():
    known = [release(f"5.{minor}.0", yanked=minor == 10) for minor in range(40)]
    known += [release("1.0.0rc1", "accelerate")]
    text = refresh.render(HAND_WRITTEN, {}, known)
    data = yaml.safe_load(text)

    assert refresh.known_releases(data) == sorted(known, key=lambda r: r.package)
    assert data["releases"]["transformers"]["yanked"] == ["5.10.0"]
    assert max(map(len, text.splitlines())) <= 100
    assert text == refresh.render(HAND_WRITTEN, {}, known)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A matrix file and a cache of two releases in place of the real ones; no pip."""
    matrix = tmp_path / "compat_matrix.yaml"
    top = b"# kept: \xe2\x80\x93 \r\n" + yaml.safe_dump(HAND_WRITTEN).encode() + b"# \t \n"
    matrix.write_bytes(top + refresh.MARKER.encode() + b"implementations: {}\n")
    listed = {
        "transformers": [release("5.1.0"), release("5.2.0")],
        "accelerate": [],
        "diffusers": [],
    }
    sources = {release("5.1.0"): {PLANNER: OLD}, release("5.2.0"): {PLANNER: HALF}}
    monkeypatch.setattr(refresh, "MATRIX", matrix)
    monkeypatch.setattr(refresh, "list_releases", lambda package, _: listed[package])
    monkeypatch.setattr(
        refresh, "read_members", lambda releases, *_: {r: sources[r] for r in releases}
    )
    return matrix, top, listed, sources


def test_refresh_keeps_what_is_above_the_marker_and_audit_agrees(offline, capsys):
    matrix, top, _, _ = offline

    assert refresh.main(["--audit"]) == 1
    assert refresh.main([]) == 0
    assert matrix.read_bytes().startswith(top + refresh.MARKER.encode())
    written = matrix.read_bytes()
    assert refresh.main([]) == 0
    assert matrix.read_bytes() == written
    capsys.readouterr()
    assert refresh.main(["--audit"]) == 0
    assert capsys.readouterr().out == (
        "audit: compat_matrix.yaml agrees with the wheels of 2 releases\n"
    )


def test_audit_fails_and_shows_the_line_when_the_wheels_say_otherwise(offline, capsys):
    matrix, _, _, sources = offline
    refresh.main([])
    before = matrix.read_bytes()
    sources[release("5.2.0")] = {PLANNER: NEW}
    capsys.readouterr()

    assert refresh.main(["--audit"]) == 1
    changed = [line for line in capsys.readouterr().out.splitlines() if line[0] in "+-"][2:]
    assert [line[0] for line in changed] == ["-", "+"]
    assert all("5.2.0" in line for line in changed)
    assert matrix.read_bytes() == before


def test_audit_reports_releases_that_the_matrix_does_not_know(offline, capsys):
    _, _, listed, _ = offline
    refresh.main([])
    listed["transformers"] = [
        release("5.1.0", yanked=True),
        release("5.1.1"),
        release("5.2.0"),
        release("5.3.0"),
    ]
    capsys.readouterr()

    assert refresh.main(["--audit"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "audit: transformers==5.1.0 was yanked meanwhile",
        "audit: transformers==5.1.1 is not in the matrix; run `nox -s refresh`",
        "audit: transformers==5.3.0 is newer than the matrix; run `nox -s refresh`",
    ]


def test_news_fail_the_audit_only_where_that_is_asked_for(offline):
    _, _, listed, _ = offline
    refresh.main([])
    assert refresh.main(["--audit", "--fail-on-news"]) == 0

    listed["transformers"].append(release("5.3.0"))
    assert refresh.main(["--audit"]) == 0
    assert refresh.main(["--audit", "--fail-on-news"]) == 1


def test_a_matrix_without_the_marker_is_refused():
    with pytest.raises(ValueError, match="exactly one line"):
        refresh.split_at_marker("schema: 1\n")


class FakePip:
    """Answers as pip does for one package; writes wheels with the files it is given."""

    #: Before pip 26 yanked releases stood among the candidates.
    REFUSAL = (
        "ERROR: Could not find a version that satisfies the requirement some==0.dev0 "
        "(from versions: 0.9.0, 1.0.0, 1.1.0, 1.2.0rc1, bad-version)\n"
    )

    def __init__(self, files, refusal=REFUSAL):
        self.files = files
        self.refusal = refusal
        self.downloads = []

    def __call__(self, *arguments):
        answer = {"args": arguments, "returncode": 0, "stdout": "", "stderr": ""}
        if arguments[-1].endswith("==0.dev0"):
            answer.update(returncode=1, stderr=self.refusal)
        elif arguments[0] == "index":
            answer["stdout"] = "some (1.1.0)\nAvailable versions: 1.2.0rc1, 1.1.0, 0.9.0\n"
        elif arguments[-1] in self.files:
            self.downloads.append(arguments[-1])
            folder = Path(arguments[arguments.index("--dest") + 1])
            folder.mkdir()
            with zipfile.ZipFile(folder / "some.whl", "w") as archive:
                for name, text in self.files[arguments[-1]].items():
                    archive.writestr(name, text)
        else:
            answer.update(returncode=1, stderr="ERROR: no network")
        return wheels.subprocess.CompletedProcess(**answer)


YANKED_APART = (
    "ERROR: Ignored the following yanked versions: 0.8.0, 1.0.0\n"
    "ERROR: Could not find a version that satisfies the requirement some==0.dev0 "
    "(from versions: 0.9.0, 1.1.0, 1.2.0rc1, bad-version)\n"
)


@pytest.mark.parametrize("refusal", [FakePip.REFUSAL, YANKED_APART])
def test_releases_are_listed_with_pre_releases_and_yanked_ones(monkeypatch, refusal):
    monkeypatch.setattr(wheels, "_pip", FakePip({}, refusal))
    assert wheels.list_releases("some", "1.0.0") == [
        release("1.0.0", "some", yanked=True),
        release("1.1.0", "some"),
        release("1.2.0rc1", "some"),
    ]


def test_a_listing_that_pip_does_not_give_is_an_error(monkeypatch):
    silent = wheels.subprocess.CompletedProcess([], 1, stdout="", stderr="no network")
    monkeypatch.setattr(wheels, "_pip", lambda *_: silent)
    with pytest.raises(wheels.WheelError, match="some: pip lists no releases: no network"):
        wheels.list_releases("some", "1.0.0")


def test_only_wanted_files_are_kept_and_a_cut_off_run_goes_on(tmp_path, monkeypatch, capsys):
    first, second = release("1.0.0", "some"), release("1.1.0", "some")
    pip = FakePip({"some==1.0.0": {"some/a.py": "a = 1\n", "some/big.py": "b"}})
    monkeypatch.setattr(wheels, "_pip", pip)
    wanted = ["some/a.py", "some/absent.py"]

    with pytest.raises(
        wheels.WheelError,
        match=r"1 of 2 failed, first: some==1\.1\.0 cannot be downloaded: .*network",
    ):
        wheels.read_members([first, second], wanted, tmp_path, jobs=2)
    pip.files["some==1.1.0"] = {"some/absent.py": "c = 1\n"}
    read = wheels.read_members([first, second], wanted, tmp_path, jobs=2)

    assert read == {first: {"some/a.py": "a = 1\n"}, second: {"some/absent.py": "c = 1\n"}}
    assert pip.downloads == ["some==1.0.0", "some==1.1.0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some-1.0.0", "some-1.1.0"]
    assert not list(tmp_path.rglob("big.py"))
    wheels.read_members([first], [*wanted, "some/big.py"], tmp_path, jobs=1)
    assert pip.downloads == ["some==1.0.0", "some==1.1.0", "some==1.0.0"]
