"""Installs the wheel with the environment's own pip, and fails where that moves anything else.

`python tests/matrix/own_pip.py WHEEL`; once with `--require-hashes` and `--no-deps`, as a locked
requirements file does it, once by its name alone. No index is asked.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "bnb-dispatch-fix"


def pip(*arguments):
    """What pip prints; where it fails, its errors are shown and this ends."""
    finished = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
    if finished.returncode:
        sys.exit(f"pip {' '.join(arguments)}: exit code {finished.returncode}\n{finished.stdout}")
    return finished.stdout


def frozen():
    return set(pip("freeze", "--all").splitlines())


def ours(lines):
    return {line for line in lines if line.replace("_", "-").startswith(NAME)}


def main(wheel):
    version = wheel.name.split("-")[1]
    before = frozen()
    assert not ours(before), f"{NAME} is installed already"
    print(pip("--version").strip(), f"and {len(before)} distributions", sep="; ")
    with tempfile.TemporaryDirectory() as folder:
        locked = Path(folder) / "requirements.txt"
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        locked.write_text(f"{NAME}=={version} --hash=sha256:{digest}\n", encoding="utf-8")
        offline = ["install", "--quiet", "--no-index", "--find-links", str(wheel.parent)]
        ways = [
            [*offline, "--no-deps", "--require-hashes", "-r", str(locked)],
            [*offline, f"{NAME}=={version}"],
        ]
        for number, way in enumerate(ways):
            if number:
                pip("uninstall", "--quiet", "--yes", NAME)
                assert frozen() == before
            pip(*way)
            moved = (frozen() ^ before) - ours(frozen())
            if moved:
                sys.exit(f"pip {' '.join(way)} has moved: {', '.join(sorted(moved))}")
            print(f"pip {' '.join(way[5:])}: nothing else has moved")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
