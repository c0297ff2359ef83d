"""Many threads import, activate, deactivate, plan and ask at once: no deadlock, no half state."""

from __future__ import annotations

import pytest
from fakes import fake_packages, run_python, write_files

#: 32 threads; each plan must be one of the two whole answers, in the end everything is in place.
STORM = """
import faulthandler, random, sys, threading
faulthandler.dump_traceback_later(100, exit=True)
sys.setswitchinterval(1e-5)
import logging; logging.disable()
import bnb_dispatch_fix

THREADS, ROUNDS = 32, 1000
start = threading.Barrier(THREADS)
wrong = []

def plan():
    import transformers.integrations.accelerate as planner
    return planner.get_balanced_memory(None, {0: 1000, 1: 1000})

def look():
    for patch in bnb_dispatch_fix.status().patches:
        if patch.state not in ("applied", "disabled", "pending", "replaced"):
            wrong.append(patch)

def work(number):
    chance = random.Random(number)
    start.wait()
    try:
        for _ in range(ROUNDS):
            action = chance.randrange(100)
            if action < 70:
                answer = plan()
                if answer not in ("installed", {0: 100, 1: 1000}):
                    wrong.append(answer)
            elif action < 80:
                bnb_dispatch_fix.activate()
            elif action < 90:
                bnb_dispatch_fix.deactivate()
            elif action < 91:
                look()
            else:
                import transformers, accelerate
    except BaseException as error:
        wrong.append(repr(error))

threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong[:3])
import transformers.integrations.accelerate as planner
bnb_dispatch_fix.activate()
print(plan(), [patch.state for patch in bnb_dispatch_fix.status().patches])
bnb_dispatch_fix.deactivate()
print(type(planner.get_balanced_memory).__name__, plan())
"""
QUIET = ["[]", "{0: 100, 1: 1000} ['applied']", "function installed"]


def test_a_storm(tmp_path):
    assert run_python(STORM, fake_packages(tmp_path)) == QUIET


def test_a_storm_while_the_modules_come_and_go(tmp_path):
    """Deleted and imported again under everybody's feet; a plan may then find no module."""
    vanishing = STORM.replace(
        "                import transformers, accelerate\n",
        "                sys.modules.pop('transformers.integrations.accelerate', None)\n",
    ).replace("ROUNDS = 32, 1000", "ROUNDS = 32, 100")
    vanishing = vanishing.replace(
        "    except BaseException as error:", "    except KeyError as error:"
    )
    lines = run_python(vanishing, fake_packages(tmp_path))
    assert lines[1:] == QUIET[1:]


@pytest.mark.parametrize("first", ["shim", "target"])
def test_everybody_imports_the_shim_or_the_target_at_once(tmp_path, first):
    folder = fake_packages(tmp_path)
    slow = "import time; time.sleep(0.05)\n"
    for name in ("__init__.py", "integrations/accelerate.py"):
        path = folder / "transformers" / name
        path.write_text(slow + path.read_text() + "\n" + slow)
    code = f"""
import faulthandler, sys, threading
faulthandler.dump_traceback_later(100, exit=True)
sys.setswitchinterval(1e-5)
start = threading.Barrier(16)
errors = []
def work(number):
    start.wait()
    try:
        if number % 2 == {int(first == "shim")}:
            import transformers.integrations.accelerate
        else:
            import bnb_dispatch_fix
            bnb_dispatch_fix.activate()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
import bnb_dispatch_fix, transformers.utils, transformers.late
import transformers.integrations.accelerate as planner
print(errors, planner.get_balanced_memory(None, {{0: 1000, 1: 1000}}))
"""
    write_files(folder, {"transformers/late.py": ""})
    assert run_python(code, folder) == ["[] {0: 100, 1: 1000}"]


#: What another thread does while this one judges the function, before it patches.
MEANWHILE = """
import bnb_dispatch_fix
from bnb_dispatch_fix import activation
judge, calls = activation.judge, []
def judging(*args):
    verdict = judge(*args)
    if not calls:
        calls.append(1)
        other = threading.Thread(target=meanwhile); other.start(); other.join()
    return verdict
activation.judge = judging
import sys, threading
"""


def test_who_patches_while_we_judge_is_not_overwritten(tmp_path):
    """Nor lost: the other's wrapper is judged in its turn."""
    code = f"""
{MEANWHILE}
def meanwhile():
    module = sys.modules["transformers.integrations.accelerate"]
    installed = module.get_balanced_memory
    module.get_balanced_memory = lambda *args, **kwargs: ("theirs", installed(*args, **kwargs))
import logging; logging.disable()
import transformers.integrations.accelerate as planner
print(planner.get_balanced_memory(None, {{0: 1000, 1: 1000}}))
print([patch.state for patch in bnb_dispatch_fix.status().patches])
"""
    assert run_python(code, fake_packages(tmp_path)) == ["('theirs', 'installed')", "['skipped']"]


def test_who_switches_off_while_we_judge_is_heard(tmp_path):
    code = f"""
{MEANWHILE}
meanwhile = bnb_dispatch_fix.deactivate
import transformers.integrations.accelerate as planner
print(type(planner.get_balanced_memory).__name__, planner.get_balanced_memory(None))
print([patch.state for patch in bnb_dispatch_fix.status().patches])
"""
    assert run_python(code, fake_packages(tmp_path)) == ["function installed", "['disabled']"]


def test_a_hook_that_waits_for_an_import_of_another_thread(tmp_path):
    """While we judge a module, another thread imports what judging needs: nobody waits for ever.

    The classic deadlock: one thread holds a library's lock and wants an import lock, the other
    the reverse. Our hooks run under the importing thread's import locks and no other.
    """
    folder = fake_packages(tmp_path)
    write_files(folder, {"needed.py": "import time; time.sleep(0.3)\nimport transformers.utils"})
    code = """
import faulthandler, threading
faulthandler.dump_traceback_later(60, exit=True)
import bnb_dispatch_fix
from bnb_dispatch_fix import activation
judge = activation.judge
def judging(*args):
    import needed
    return judge(*args)
activation.judge = judging
other = threading.Thread(target=__import__, args=("needed",))
other.start()
import transformers.integrations.accelerate as planner
other.join()
print(planner.get_balanced_memory(None, {0: 1000, 1: 1000}))
"""
    assert run_python(code, folder) == ["{0: 100, 1: 1000}"]
