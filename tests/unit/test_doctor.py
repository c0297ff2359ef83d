"""The doctor in broken surroundings: stand-in packages on the path, never an exception."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types

import pytest

import bnb_dispatch_fix
from bnb_dispatch_fix import doctor
from bnb_dispatch_fix.cli import main
from bnb_dispatch_fix.doctor import checks, surroundings, tested
from bnb_dispatch_fix.doctor.surroundings import Answer
from bnb_dispatch_fix.model import machine
from bnb_dispatch_fix.patching import bystanders
from bnb_dispatch_fix.patching.patches import Patch, PatchedFunction
from bnb_dispatch_fix.startup import autoload
from bnb_dispatch_fix.states import PatchStatus, Status

GIB = 2**30
GPU = {"id": 0, "name": "NVIDIA X", "free": 22 * GIB, "total": 24 * GIB}
VERSIONS = {"bitsandbytes": "0.49.2", "accelerate": "1.14.0", "transformers": "5.12.1"}


def place(folder, **packages):
    """Write stand-in packages (name -> source) and return the folder."""
    for name, source in packages.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return folder


def found(checkup, topic):
    return [(f.level, f.text, f.hint) for f in checkup.findings if f.topic == topic]


def only(checkup, topic):
    (finding,) = found(checkup, topic)
    return finding


@pytest.fixture
def answers(monkeypatch):
    """Healthy answers of a machine with one GPU; a test changes what it needs broken."""
    table = {
        "torch": Answer("ok", "", {"version": "2.13.0", "build": "cuda 12.8", "devices": [GPU]}),
        **{name: Answer("ok", "", {"version": v}) for name, v in VERSIONS.items()},
    }
    table["bitsandbytes"].facts["gpu"] = True
    monkeypatch.setattr(surroundings, "look", lambda timeout: table)
    monkeypatch.setattr(checks, "nvidia_driver", lambda: "version 570.1")
    monkeypatch.setattr(tested.platform, "python_version_tuple", lambda: ("3", "11", "7"))
    monkeypatch.setattr(bnb_dispatch_fix, "status", lambda: status_of())
    monkeypatch.setattr(autoload, "state", lambda folder: "disabled")
    monkeypatch.setattr(autoload, "starts_with_shim", lambda: False)
    for name in ("BNB_DISPATCH_FIX", "CUDA_VISIBLE_DEVICES", "BNB_CUDA_VERSION"):
        monkeypatch.delenv(name, raising=False)
    return table


def status_of(*patches, problem=None):
    return Status("0", ("backport",), {}, patches, problem)


def seam(module="mod", attribute="plan", state="applied", fixes=(47203,), missing=()):
    return PatchStatus("x", module, attribute, state, fixes, "a reason", missing)


@pytest.mark.parametrize(
    "source, said",
    [
        ("raise ImportError('no libcuda')", "ImportError: no libcuda"),
        ("raise OSError('libcudart.so.12: no such file')", "OSError: libcudart.so.12"),
        ("raise RuntimeError('CUDA Setup failed\\nsee above')", "CUDA Setup failed see above"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(7)", "exit code 7"),
        ("syntax error", "SyntaxError"),
    ],
)
def test_a_package_that_breaks_on_import(tmp_path, monkeypatch, source, said):
    monkeypatch.syspath_prepend(str(place(tmp_path, torch=source, accelerate="")))
    looked = surroundings.look(["torch", "accelerate"])
    assert looked["torch"].state == "broken"
    assert said in looked["torch"].error
    assert "\n" not in looked["torch"].error
    assert looked["accelerate"].state == "broken"  # it has no `accelerate.utils`
    assert "accelerate.utils" in looked["accelerate"].error


def test_an_import_that_hangs_is_ended_and_the_others_are_answered(tmp_path, monkeypatch):
    hang = "import time; time.sleep(3600)"
    monkeypatch.syspath_prepend(str(place(tmp_path, torch=hang, bitsandbytes=hang)))
    looked = surroundings.look(["torch", "bitsandbytes"], timeout=2)
    assert [answer.state for answer in looked.values()] == ["broken", "broken"]
    assert "did not end within 2 s" in looked["torch"].error


def test_what_is_printed_on_import_does_not_hide_the_answer(tmp_path, monkeypatch):
    source = "import sys; print('=== BUG REPORT ===', end=''); sys.stderr.write('x' * 100000)"
    monkeypatch.syspath_prepend(str(place(tmp_path, noisy=source)))
    assert surroundings.look(["noisy"])["noisy"].state == "ok"


def test_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(
        surroundings,
        "look",
        lambda timeout: {
            name: Answer("missing", "", {"version": None}) for name in surroundings.PACKAGES
        },
    )
    checkup = doctor.examine()
    assert only(checkup, "torch") == ("ERROR", "is not installed", "pip install torch")
    assert only(checkup, "transformers")[0] == only(checkup, "accelerate")[0] == "ERROR"
    assert only(checkup, "bitsandbytes")[0] == "WARN"
    assert not checkup.healthy


def test_one_planner_is_enough(answers):
    answers["transformers"] = Answer("missing", "", {"version": None})
    checkup = doctor.examine()
    assert only(checkup, "transformers")[0] == "WARN"
    assert checkup.healthy


def test_a_healthy_machine(answers):
    checkup = doctor.examine()
    assert checkup.healthy
    assert {finding.level for finding in checkup.findings} == {"PASS"}
    assert only(checkup, "devices")[1] == "0: NVIDIA X, 22.00 of 24.00 GiB free"
    assert only(checkup, "tested")[1] == "this very combination is tested"


@pytest.mark.parametrize(
    "build, driver, topic, level",
    [
        ("cpu", "version 570.1", "torch", "ERROR"),
        ("cpu", None, "torch", "PASS"),
        ("cpu", None, "devices", "WARN"),
        ("cuda 12.8", "version 570.1", "devices", "ERROR"),
        ("cuda 12.8", None, "devices", "WARN"),
    ],
)
def test_torch_that_sees_no_gpu(answers, monkeypatch, build, driver, topic, level):
    answers["torch"].facts.update(build=build, devices=[])
    monkeypatch.setattr(checks, "nvidia_driver", lambda: driver)
    got, text, hint = only(doctor.examine(), topic)
    assert got == level
    assert bool(hint) == (level != "PASS")
    if level == "ERROR":
        assert "570.1" in text


def test_a_gpu_that_others_fill(answers):
    answers["torch"].facts["devices"] = [
        {**GPU, "free": GIB},
        {**GPU, "id": 1, "free": None, "error": "RuntimeError: busy"},
    ]
    full, unknown = found(doctor.examine(), "devices")
    assert full[:2] == ("WARN", "0: NVIDIA X, 1.00 of 24.00 GiB free")
    assert unknown[0] == "ERROR"
    assert "RuntimeError: busy" in unknown[1]


def test_bitsandbytes_without_its_gpu_library(answers):
    answers["bitsandbytes"].facts["gpu"] = False
    assert only(doctor.examine(), "bitsandbytes")[0] == "ERROR"
    answers["torch"].facts["devices"] = []
    assert only(doctor.examine(), "bitsandbytes")[0] == "WARN"


def test_torch_breaks_the_others_and_is_said_to(answers):
    for name in answers:
        answers[name] = Answer("broken", "OSError: libc10.so", {"version": "1"})
    checkup = doctor.examine()
    assert only(checkup, "torch")[1] == "1 cannot be imported: OSError: libc10.so"
    assert only(checkup, "transformers")[2] == "torch is what breaks it, see above"


@pytest.mark.parametrize("version", ["4.29.2", "99.0.0", "0+unknown.local.build~7"])
def test_versions_outside_the_tested_ones(answers, version):
    answers["transformers"].facts["version"] = version
    level, text, _ = only(doctor.examine(), "tested")
    assert level == "WARN"
    assert f"transformers {version} is outside the tested versions 4." in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"torch": "2.12.1+cu130"},
            "torch 2.13.0, Python 3.11, accelerate 1.14.0, {}torch 2.12.1+cu130",
        ),
        (
            {"accelerate": "1.13.0"},
            "torch 2.13.0, Python 3.11, accelerate 1.14.0, {}accelerate 1.13.0",
        ),
        (
            {"transformers": "4.30.2", "torch": "1.13.1", "accelerate": "0.20.3"},
            "torch 1.12.1, Python 3.8, accelerate 0.20.3, "
            "bitsandbytes 0.39.1; here torch 1.13.1, Python 3.11, bitsandbytes 0.49.2",
        ),
    ],
)
def test_a_combination_that_is_not_tested_as_it_is(answers, changes, said):
    """It differs in torch, in Python or in a release: the nearest row, and how."""
    for package, version in changes.items():
        answers[package].facts["version"] = version
    level, text, _ = only(doctor.examine(), "tested")
    assert level == "PASS"
    transformers = changes.get("transformers", VERSIONS["transformers"])
    said = said.format("bitsandbytes 0.49.2; here ")
    assert text == f"nearest tested: transformers {transformers}, {said}"


def test_the_same_releases_under_another_python_are_not_tested(answers, monkeypatch):
    monkeypatch.setattr(tested.platform, "python_version_tuple", lambda: ("3", "9", "1"))
    assert only(doctor.examine(), "tested")[1].endswith("bitsandbytes 0.49.2; here Python 3.9")


# --- wrecks: what each import and each environment said when it was built -----------------------

ASKED = "is required for a normal functioning of this module, but found"


@pytest.mark.parametrize(
    ("package", "error", "pin"),
    [
        ("accelerate", "ModuleNotFoundError: No module named 'pkg_resources'", "'setuptools<81'"),
        ("bitsandbytes", "ModuleNotFoundError: No module named 'scipy'", "pip install scipy"),
        (
            "transformers",
            f"ImportError: tokenizers>=0.11.1,!=0.11.3,<0.14 {ASKED} tokenizers==0.20.3. Try: pip",
            "pip install 'tokenizers>=0.11.1,!=0.11.3,<0.14'",
        ),
        (
            "transformers",
            f"ImportError: huggingface-hub>=0.19.3,<1.0 {ASKED} huggingface-hub==1.2.0. Try: pip",
            "pip install 'huggingface-hub>=0.19.3,<1.0'",
        ),
        (
            "bitsandbytes",
            "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected "
            "96 from C header, got 88 from PyObject",
            "pip install 'numpy<2'",
        ),
        ("transformers", "NameError: name 'nn' is not defined", "2.4 for 5.x"),
    ],
)
def test_a_wreck_that_cannot_be_imported_is_known_with_its_pin(answers, package, error, pin):
    answers[package] = Answer("broken", error, {"version": "1"})
    level, text, hint = only(doctor.examine(), package)
    assert level == "ERROR"
    assert error in text
    assert pin in hint


def test_an_error_that_is_no_known_wreck_keeps_its_hint(answers):
    answers["transformers"] = Answer("broken", "ImportError: cannot import name 'x'", {})
    assert "for the whole traceback" in only(doctor.examine(), "transformers")[2]


def test_numpy_2_under_an_old_torch(answers):
    answers["torch"].facts.update(numpy="2.0.2", numpy_error="RuntimeError: Numpy is not available")
    level, text, hint = only(doctor.examine(), "numpy")
    assert (level, hint) == ("ERROR", "pip install 'numpy<2'")
    assert text == (
        "torch 2.13.0 was not built for numpy 2.0.2: RuntimeError: Numpy is not available"
    )


@pytest.mark.parametrize(
    ("version", "found"), [("4.57.6", False), ("5.0.0rc0", True), ("5.12.1", True)]
)
def test_set_submodule(answers, version, found):
    """torch before 2.5 lacks it; transformers 5 calls it."""
    answers["torch"].facts.update(version="2.4.1", set_submodule=False)
    answers["transformers"].facts["version"] = version
    said = [line for line in doctor.examine().findings if "set_submodule" in line.text]
    assert [(line.level, line.hint) for line in said] == (
        [("ERROR", "pip install 'torch>=2.5', or 'transformers<5'")] if found else []
    )


@pytest.mark.parametrize(
    ("unmet", "hint"),
    [
        (("scipy", ">=1.9", "none"), "pip install 'scipy>=1.9'"),
        (
            ("kernels", ">=0.19.1", "none"),
            "pip install 'kernels>=0.19.1', "
            "or set USE_HUB_KERNELS=NO where there is no such release",
        ),
    ],
)
def test_a_requirement_that_pip_did_not_meet(answers, unmet, hint):
    answers["transformers"].facts["unmet"] = [unmet]
    healthy, warned = found(doctor.examine(), "transformers")
    assert healthy[0] == "PASS"
    assert warned[0] == "WARN"
    assert warned[1] == f"transformers 5.12.1 asks for {unmet[0]}{unmet[1]}, found none"
    assert warned[2] == hint


def test_kernels_that_are_switched_off_are_no_warning(answers, monkeypatch):
    answers["transformers"].facts["unmet"] = [("kernels", ">=0.19.1", "0.17.2")]
    monkeypatch.setenv("USE_HUB_KERNELS", "NO")
    assert {level for level, _, _ in found(doctor.examine(), "transformers")} == {"PASS"}


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("cuda 10.2", "no library for CUDA 10.2, only for some of 11.0–12.1"),
        ("cuda 11.7", "it did not find this torch's CUDA runtime"),
    ],
)
def test_a_library_for_the_cpu_beside_a_gpu(answers, build, said):
    """PyPI's torch 1.12.1 is built for CUDA 10.2; bitsandbytes 0.39.1 begins with 11.0."""
    answers["torch"].facts["build"] = build
    answers["bitsandbytes"].facts.update(gpu=False, built_for=["110", "117", "121"])
    level, _, hint = only(doctor.examine(), "bitsandbytes")
    assert level == "ERROR"
    assert said in hint


def test_a_bitsandbytes_without_any_library_for_cuda(answers):
    """Newer ones can be imported like that."""
    answers["torch"].facts["build"] = "cuda 11.7"
    answers["bitsandbytes"].facts.update(gpu=False, built_for=[])
    level, _, hint = only(doctor.examine(), "bitsandbytes")
    assert level == "ERROR"
    assert "without any library for CUDA" in hint
    assert hint.endswith("pip install --force-reinstall --no-deps bitsandbytes==0.49.2")


#: What bitsandbytes 0.41.1 raises beside a GPU, and what transformers 4.33 makes of it.
SETUP_FAILED = "CUDA Setup failed despite GPU being available. Please run the following command"
WRAPPED = "Failed to import transformers.generation.utils because of the following error (look up)"


@pytest.mark.parametrize(
    ("built_for", "said"),
    [
        ([], "--no-deps bitsandbytes==0.41.1"),
        (["110", "116"], "no library for CUDA 11.7, only for some of 11.0–11.6"),
        (["110", "117"], "LD_LIBRARY_PATH"),
        (None, "LD_LIBRARY_PATH"),
    ],
)
def test_a_bitsandbytes_that_breaks_the_others_beside_a_gpu(answers, built_for, said):
    facts = {"version": "0.41.1", "built_for": built_for}
    answers["torch"].facts["build"] = "cuda 11.7"
    answers["bitsandbytes"] = Answer("broken", f"RuntimeError: {SETUP_FAILED}", facts)
    answers["accelerate"] = Answer("broken", f"RuntimeError: {SETUP_FAILED}", {})
    answers["transformers"] = Answer("broken", f"RuntimeError: {WRAPPED}: {SETUP_FAILED}", {})
    checkup = doctor.examine()
    assert said in only(checkup, "bitsandbytes")[2]
    for package in ("accelerate", "transformers"):
        assert only(checkup, package)[2] == "bitsandbytes is what breaks it, see above"


@pytest.mark.parametrize("error", ["ImportError: 0", "KeyError: 10", "KeyError"])
def test_another_error_is_not_taken_for_that_of_bitsandbytes(answers, error):
    answers["bitsandbytes"] = Answer("broken", "KeyError: 0.1", {})
    answers["transformers"] = Answer("broken", error, {})
    assert "bitsandbytes" not in only(doctor.examine(), "transformers")[2]


def test_libraries_of_a_package_that_cannot_be_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('no')", encoding="utf-8")
    (package / "libbitsandbytes_cpu.so").touch()
    assert surroundings.look(["bitsandbytes"])["bitsandbytes"].facts["built_for"] == []
    for name in ("cuda117.so", "cuda118_nocublaslt.so", "cuda110.so", "cuda118.so"):
        (package / f"libbitsandbytes_{name}").touch()
    looked = surroundings.look(["bitsandbytes"])["bitsandbytes"]
    assert looked.state == "broken"
    assert looked.facts["built_for"] == ["110", "117", "118"]


def test_requirements_are_read_from_the_metadata(tmp_path, monkeypatch):
    info = tmp_path / "wreck-1.dist-info"
    info.mkdir()
    asked = ["pytest<1", "pytest>=2", "no-such-thing>=3; extra == 'all'", "no-such-thing>3"]
    lines = ["Metadata-Version: 2.1", "Name: wreck", "Version: 1"]
    lines += [f"Requires-Dist: {requirement}" for requirement in asked]
    (info / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(str(place(tmp_path, wreck="")))
    unmet = surroundings.look(["wreck"])["wreck"].facts["unmet"]
    assert unmet == [["pytest", "<1", pytest.__version__], ["no-such-thing", ">3", "none"]]


@pytest.mark.parametrize(
    "state, missing, level",
    [
        ("applied", (), "PASS"),
        ("already-fixed", (), "PASS"),
        ("disabled", (47203,), "WARN"),
        ("pending", (47203,), "WARN"),
        ("replaced", (), "WARN"),
        ("replaced", (47203,), "ERROR"),
        ("skipped", (47203,), "ERROR"),
        ("failed", (), "ERROR"),
    ],
)
def test_each_state_of_a_seam(answers, monkeypatch, state, missing, level):
    patch = seam("accelerate.utils", state=state, missing=missing)
    monkeypatch.setitem(sys.modules, "accelerate.utils", types.ModuleType("accelerate.utils"))
    monkeypatch.setattr(bnb_dispatch_fix, "status", lambda: status_of(patch))
    got, text, hint = only(doctor.examine(), "seams")
    assert (got, bool(hint)) == (level, level != "PASS")
    assert text == f"{state}: accelerate.utils.plan (a reason)"


def test_an_unusable_matrix_is_an_error(answers, monkeypatch):
    monkeypatch.setattr(bnb_dispatch_fix, "status", lambda: status_of(problem="no matrix"))
    assert only(doctor.examine(), "seams")[:2] == ("ERROR", "no matrix")


@pytest.mark.parametrize(
    "name, value, level, said",
    [
        ("CUDA_VISIBLE_DEVICES", "", "WARN", "CUDA_VISIBLE_DEVICES=''"),
        ("CUDA_VISIBLE_DEVICES", "1,0", "PASS", "'1,0'"),
        ("BNB_CUDA_VERSION", "118", "WARN", "'118'"),
        ("BNB_DISPATCH_FIX", "off", "WARN", "nothing is patched"),
        ("BNB_DISPATCH_FIX", "rescu", "WARN", "rescu is no feature"),
        ("BNB_DISPATCH_FIX", "backport", "PASS", "allows backport"),
    ],
)
def test_environment_switches(answers, monkeypatch, name, value, level, said):
    monkeypatch.setenv(name, value)
    lines = found(doctor.examine(), "environment")
    assert [line[0] for line in lines if said in line[1]] == [level]


@pytest.mark.parametrize(
    "state, starts, level, said",
    [
        ("disabled", False, "PASS", "not enabled"),
        ("enabled", True, "PASS", "a new Python starts with the shim"),
        ("enabled", False, "WARN", "starts without the shim"),
        ("incomplete", True, "WARN", "incomplete start-up files in"),
        ("foreign", None, "WARN", "foreign start-up files in"),
    ],
)
def test_autoload(answers, monkeypatch, state, starts, level, said):
    monkeypatch.setattr(autoload, "state", lambda folder: state)
    monkeypatch.setattr(autoload, "starts_with_shim", lambda: starts)
    first = found(doctor.examine(), "autoload")[0]
    assert first[0] == level
    assert said in first[1]


def test_a_check_that_fails_is_a_finding(answers, monkeypatch):
    def broken(timeout):
        raise OSError("no process can be started")

    monkeypatch.setattr(surroundings, "look", broken)
    monkeypatch.setattr(bnb_dispatch_fix, "status", broken)
    checkup = doctor.examine()
    assert only(checkup, "imports")[:2] == (
        "ERROR",
        "this check failed: OSError: no process can be started",
    )
    assert only(checkup, "seams")[0] == "ERROR"


@pytest.mark.parametrize("broken", ["wrapt", "yaml", "packaging"])
def test_without_a_dependency_of_ours(tmp_path, broken):
    place(tmp_path, **{broken: "raise ImportError('gone')"})
    run = subprocess.run(
        [sys.executable, "-m", "bnb_dispatch_fix", "doctor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "reinstall bnb-dispatch-fix with its dependencies" in run.stdout


def test_the_command_prints_lines_or_json(answers, capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PASS   python")
    assert lines[-1].endswith("0 warnings, 0 errors")
    answers["torch"].facts.update(build="cpu", devices=[])
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is False
    assert set(told["findings"][0]) == {"level", "topic", "text", "hint"}


def test_lines_fit_a_terminal_and_names_cannot_steer_it(answers, monkeypatch):
    answers["torch"].facts["devices"] = [{**GPU, "name": "\x1b[2J " + "very long " * 20}]
    text = doctor.as_text(doctor.examine(), width=72, colour=True)
    plain = re.sub(r"\x1b\[3[123]m(\w+ *)\x1b\[0m", r"\1", text)
    assert plain.replace("\n", "").isprintable()
    assert r"0: \x1b[2J very" in plain
    short = [line for line in plain.splitlines() if sys.executable not in line]
    assert max(map(len, short)) <= 72
    assert " ".join(plain.split()).count("very long") == 20


def test_signs_of_a_driver(tmp_path):
    assert machine.nvidia_driver(tmp_path) is None
    control = tmp_path / "dev/nvidiactl"
    control.parent.mkdir()
    control.touch()
    assert machine.nvidia_driver(tmp_path) == str(control)
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Fri May", "utf-8"
    )
    assert machine.nvidia_driver(tmp_path) == "version 570.133.20"


@pytest.fixture
def patched(monkeypatch):
    """A module whose `plan` is patched, one that kept the old function, and the status."""

    def plan():
        return "installed"

    target, late = types.ModuleType("mod"), types.ModuleType("late_library")
    target.plan = late.their_plan = plan
    monkeypatch.setitem(sys.modules, "mod", target)
    monkeypatch.setitem(sys.modules, "late_library", late)
    monkeypatch.setitem(sys.modules, "not_a_module", 7)
    monkeypatch.setattr(bystanders, "_AT_HOME", (*bystanders._AT_HOME, __name__.partition(".")[0]))
    patch = Patch(target, "plan", PatchedFunction(plan, lambda wrapped, args, kwargs: wrapped()))
    patch.apply()
    return target, patch


def test_modules_that_kept_the_old_function_are_named(patched):
    assert bystanders.unpatched_references([seam()]) == ("late_library.their_plan",)


def test_a_seam_that_only_watches_is_missed_too(patched):
    """A planner that was taken before is neither rescued nor explained there."""
    assert bystanders.unpatched_references([seam(fixes=())]) == ("late_library.their_plan",)


def test_nothing_is_named_where_nothing_is_patched(patched):
    patched[1].undo()
    assert bystanders.unpatched_references([seam()]) == ()


def foreign(function, name="patcher_library"):
    """A wrapper as another library makes it, with that library's globals."""
    scope = {"__name__": name, "function": function}
    exec("def wrapper(): return function()", scope)
    scope["wrapper"].__wrapped__ = function
    scope["wrapper"].__module__ = "transformers"  # as functools.wraps copies it
    return scope["wrapper"]


def test_other_patchers_above_and_below_are_named(patched):
    target, patch = patched
    assert bystanders.other_patchers(status_of(seam())) == ()
    target.plan = foreign(target.plan)
    ((name, patcher),) = bystanders.other_patchers(status_of(seam()))
    assert name == "mod.plan"
    assert patcher.startswith("patcher_library (")
    wrapper = PatchedFunction(foreign(patch.original, "below"), lambda wrapped, args, kwargs: 0)
    below = Patch(target, "plan", wrapper)
    below.apply()
    assert [p[1][:5] for p in bystanders.other_patchers(status_of(seam()))] == ["below"]


def test_a_seam_of_other_releases_is_no_unpatched_reference(patched, monkeypatch):
    """A name that is a seam in other releases only is left as it is, on purpose."""
    theirs = types.ModuleType("accelerate.big_modeling")
    theirs.dispatch_model = patched[1].original
    monkeypatch.setitem(sys.modules, "accelerate.big_modeling", theirs)
    seams = [seam(), seam("accelerate.big_modeling", "dispatch_model", "pending")]
    assert bystanders.unpatched_references(seams) == ("late_library.their_plan",)
