"""The real transformers without torch: nothing can be patched, nothing breaks, all is said."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cell import installed, run

pytestmark = pytest.mark.skipif(installed("torch") is not None, reason="torch is installed")

SHIM = "import bnb_dispatch_fix as shim"
ORDERS = {
    "shim first": f"{SHIM}; import transformers",
    "shim last": f"import transformers; {SHIM}",
    "a name of it, shim": f"from transformers import AutoConfig; {SHIM}",
    "shim twice": f"{SHIM}; shim.activate(); import transformers; shim.activate()",
}
LOOK = """
import json
def states():
    return {patch.id: [patch.state, patch.reason] for patch in shim.status().patches}
found = [states()]
shim.deactivate()
found.append(states())
shim.activate()
found.append(states())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers():
    head = "import warnings; warnings.simplefilter('ignore')\n"
    return {
        name: json.loads(run(["-c", f"{head}{order}\n{LOOK}"]).splitlines()[-1])
        for name, order in ORDERS.items()
    }


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_ends_in_the_same_states(answers, order):
    before, undone, after = answers[order]
    assert before == after == answers["shim first"][0]
    assert "pending" in {state for state, _ in before.values()}
    for seam, (state, reason) in before.items():
        assert state in ("pending", "skipped", "failed") and reason
        assert undone[seam][0] == ("skipped" if state == "skipped" else "disabled")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["doctor"], 1, "ERROR  torch"),
        (["plan", "--example", "llama-3-8b", "--max-memory", "24GiB"], 2, "--max-memory"),
        (["plan", "--example", "llama-3-8b", "--max-memory", "0=24GiB"], 2, "doctor"),
        (["demo"], 2, "the demo cannot run here"),
        (["autoload", "status"], 1, "disabled"),
        (["--version"], 0, "."),
    ],
)
def test_commands_say_so_in_one_line(arguments, code, said):
    result = subprocess.run(
        [sys.executable, "-m", "bnb_dispatch_fix", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert said in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    if code == 2:
        assert len(result.stderr.strip().splitlines()) == 1
