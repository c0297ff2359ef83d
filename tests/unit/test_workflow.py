"""What the public CI runs: pinned actions, every Python that is declared, sessions that exist."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
WORKFLOW = yaml.safe_load(TEXT)
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def commands():
    return [
        step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step
    ]


def test_actions_are_pinned_to_a_commit_that_is_named():
    used = re.findall(r"uses: (.*)", TEXT)
    assert len(used) == len(WORKFLOW["jobs"]) * 2
    for action in used:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    assert len(set(used)) == 2  # the same version everywhere


def test_it_may_only_read():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in WORKFLOW["jobs"].values())
    kept = [
        step["with"].get("persist-credentials")
        for job in WORKFLOW["jobs"].values()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/checkout@")
    ]
    assert kept == [False] * len(WORKFLOW["jobs"])


def test_unit_tests_run_on_every_declared_python():
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert WORKFLOW["jobs"]["unit"]["strategy"]["matrix"]["python"] == declared


@pytest.mark.parametrize("session", ["lint", "types", "unit", "audit"])
def test_each_session_is_run(session):
    assert any(re.search(rf"nox -s (\w+ )*{session}\b", command) for command in commands())


def test_no_command_holds_an_expression():
    """A value that comes from elsewhere reaches a command through its environment."""
    assert not [command for command in commands() if "${{" in command]
