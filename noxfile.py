# /// script
# dependencies = ["nox[uv]>=2025.2.9", "PyYAML"]
# ///
"""Test sessions: lint, types, unit tests, the demo, and one cell per row of compat_matrix.yaml.

`nox` runs what every change must pass; `nox -s matrix` runs all rows, `nox -s matrix -- 4.57`
those whose name contains "4.57"; `nox -s legacy` those of legacy environments.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import nox
import yaml
from packaging.version import Version

ROOT = Path(__file__).parent
RESULTS = ROOT / "results"
TEST_TOOLS = ["pytest>=8.3", "pytest-xdist>=3.6", "hypothesis>=6.113", "jsonschema>=4.17"]
#: mutmut's operators are called from here, so that another release may need another call.
MUTATION_TOOLS = ["mutmut==3.8.1", "coverage>=7.6", "rich"]
#: Keys of a row that are not "package: version".
ROW_SETTINGS = {
    *("python", "torch", "bounds", "ci", "deep", "quantizers"),
    *("demo", "expected", "bench", "true_sizes", "fuzz", "overrides", "environment", "legacy"),
    "loads",
}

#: What every cell shows; rows with `deep` run all of tests/release.
CORE = (
    *("from_pretrained", "status", "parity", "parity_accelerate", "probe", "rescue", "orders"),
    *("one_function", "accelerate_callers", "kinds", "budgets", "old_torch", "true_loads", "even"),
)
#: Legacy rows show the commands, too.
LEGACY_PARTS = (*CORE, "plan", "doctor")
#: Releases that answer in a way of their own, beside those with `deep`.
ANSWERED = ("4.30.2", "4.33.3", "4.44.2")
#: Rows with `torch: false`: its planners cannot be imported.
WITHOUT_TORCH = ("status", "probe", "without_torch")
#: Rows with diffusers.
DIFFUSERS = ("from_pretrained", "status", "diffusers")
#: Rows with `quantizers` have others beside bitsandbytes installed.
QUANTIZERS = ("from_pretrained", "status", "other_quantizers", "prequantized")

#: Its planner spreads, too; benchmarks run it beside `even`.
PEER = "unsloth_zoo==2026.10.9"
#: The wheel of this run, once it is built.
BUILT: list[str] = []
#: By Python: the site-packages of the cell before, with the byte code that its run has left.
COMPILED: dict[str, Path] = {}

Row = dict[str, Any]
MATRIX = yaml.safe_load((ROOT / "compat_matrix.yaml").read_text("utf-8"))
ROWS: list[Row] = [row for row in MATRIX["tested"] if not row.get("legacy")]
LEGACY: list[Row] = [row for row in MATRIX["tested"] if row.get("legacy")]
#: Libraries that plan with the functions of these, see the file.
DOWNSTREAM: list[Row] = yaml.safe_load((ROOT / "tests/downstream/cells.yaml").read_text("utf-8"))
#: The release of torch that every other row was seen to work with.
TORCH: str = MATRIX["torch"]
#: What names a legacy row, among its many pins.
NAMING = ("torch", "transformers", "accelerate", "bitsandbytes")


def pins(row: Row) -> list[str]:
    return [f"{key}=={row[key]}" for key in row if key not in ROW_SETTINGS]


def name(row: Row) -> str:
    """A row as people write it: "py3.11 transformers4.57.6 accelerate1.14.0 ..."."""
    if row.get("legacy"):
        return "-".join([f"py{row['python']}", *(f"{key}{row[key]}" for key in NAMING)])
    parts = [f"py{row['python']}", *(pin.replace("==", "") for pin in pins(row))]
    parts += ["lowest"] if row.get("bounds") == "lowest" else []
    return "-".join(parts if row.get("torch", True) else [*parts, "no_torch"])


def cells(rows: list[Row], tag: str = "") -> list[Any]:
    """Parameters of a session, one for each row; rows that have the key *tag* get it as a tag."""
    return [
        nox.param(row["python"], row, id=name(row), tags=[tag] if row.get(tag) else [])
        for row in rows
    ]


# Importing torch and transformers is most of a cell's work; compiling them each time doubles it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Interpreters that pyenv has installed but does not put forward; last, so that nothing changes.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
os.environ["PATH"] += "".join(f":{folder}" for folder in sorted(PYENV.glob("versions/3.*/bin")))

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "unit", "demo"]
nox.options.sessions += [f"matrix({name(row)})" for row in ROWS if row.get("ci")]
nox.options.sessions += [f"legacy({name(row)})" for row in LEGACY if row.get("ci")]


def torch_cpu(python: str) -> list[str]:
    """Install arguments for a CPU build of torch; never a CUDA build.

    From the folder that UV_FIND_LINKS or PIP_FIND_LINKS names where it has a wheel for this
    Python, else `TORCH` from PyTorch's own CPU index.
    """
    tag = "cp" + python.replace(".", "")
    folders = f"{os.environ.get('UV_FIND_LINKS', '')} {os.environ.get('PIP_FIND_LINKS', '')}"
    for folder in folders.replace(",", " ").split():
        wheels = Path(folder.replace("file://", "")).glob(f"torch-*+cpu-{tag}-{tag}-*.whl")
        versions = [wheel.name.split("-")[1] for wheel in wheels]
        if versions:
            return ["--find-links", folder, f"torch=={max(versions, key=Version)}"]
    return ["--torch-backend", "cpu", f"torch=={TORCH}"]


def wheel(session: nox.Session) -> str:
    """The project's wheel, built once per run from its sdist: packaging is tested with the code."""
    out = session.cache_dir / "wheel"
    if not BUILT:
        shutil.rmtree(out, ignore_errors=True)
        session.run_install("uv", "build", "--quiet", "--out-dir", str(out), str(ROOT))
        BUILT.extend(str(path) for path in out.glob("*.whl"))
    return BUILT[0]


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """On all cores; a file stays on one of them, because its tests share what is slow to make."""
    junit = RESULTS / "junit" / f"{session.name}.xml"
    session.run(
        "pytest", "--numprocesses=auto", "--dist=loadfile", f"--junitxml={junit}", *arguments
    )


def install_row(session: nox.Session, row: Row, *extra: str) -> None:
    torch = torch_cpu(row["python"]) if row.get("torch", True) else []
    extra += overrides(session, row)
    session.env.update(row.get("environment", {}))
    try:
        if row.get("bounds") == "lowest":
            lowest = ["--resolution", "lowest-direct", "-r", "pyproject.toml"]
            session.install("--quiet", *lowest)
        session.install("--quiet", *torch, *pins(row), *extra, wheel(session))
    except nox.command.CommandFailed:
        session.error(f"cannot install {name(row)}")
    share_byte_code(session, row["python"])


def overrides(session: nox.Session, row: Row) -> tuple[str, ...]:
    """Install arguments that put the row's `overrides` in place of what its packages require."""
    if "overrides" not in row:
        return ()
    file = Path(session.virtualenv.location) / "overrides.txt"
    file.write_text("".join(f"{requirement}\n" for requirement in row["overrides"]), "utf-8")
    return ("--override", str(file))


def share_byte_code(session: nox.Session, python: str) -> None:
    """Link what the cell before has compiled of the same files: torch's takes seconds per cell."""
    [here] = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    before = COMPILED.get(python, here)
    for compiled in before.glob("**/__pycache__/*.pyc"):
        folder = here / compiled.parents[1].relative_to(before)
        source = compiled.stem.partition(".")[0] + ".py"
        link = folder / "__pycache__" / compiled.name
        # One file under two names: uv links what it installs to its cache.
        linked = folder / source
        if linked.exists() and linked.samefile(compiled.parents[1] / source) and not link.exists():
            link.parent.mkdir(exist_ok=True)
            os.link(compiled, link)
    COMPILED[python] = here


def run_hooks(session: nox.Session, *ids: str) -> None:
    """Run hooks of .pre-commit-config.yaml on all files; versions and commands stand there."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    chosen = [hooks[id] for id in ids]
    session.install("--quiet", *{pin for hook in chosen for pin in hook["additional_dependencies"]})
    for hook in chosen:
        session.run(*shlex.split(hook["entry"]))


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, the direction of the imports, the workflow and the pre-commit file."""
    run_hooks(session, "ruff-check", "ruff-format", "import-linter")
    run_hooks(session, "workflow", "workflow-timeouts", "pre-commit")


@nox.session
def types(session: nox.Session) -> None:
    run_hooks(session, "mypy")


@nox.session
def unit(session: nox.Session) -> None:
    """Unit and property tests: no torch, seconds."""
    session.install("--quiet", *TEST_TOOLS, "rich", wheel(session))
    run_pytest(session, "tests/unit", *session.posargs)


def tests(row: Row) -> list[str]:
    """What pytest runs in a cell."""
    if "transformers" not in row:
        return ["tests/unit"]
    # Importing an old release warns, also while tests are collected: that is its affair.
    warnings = ["-W", "default", "-W", "error:::bnb_dispatch_fix"]
    if row.get("deep"):
        return [*warnings, "tests/release"]
    if row.get("legacy"):
        return [*warnings, *(f"tests/release/test_{part}.py" for part in LEGACY_PARTS)]
    if not row.get("torch", True):
        parts = WITHOUT_TORCH
    elif "diffusers" in row:
        parts = DIFFUSERS
    else:
        parts = QUANTIZERS if row.get("quantizers") else CORE
    if row["transformers"] in ANSWERED and parts is CORE:
        parts = (*parts, "answers")
    return [*warnings, *(f"tests/release/test_{part}.py" for part in parts)]


@nox.session
@nox.parametrize("python,row", cells(ROWS, tag="ci"))
def matrix(session: nox.Session, row: Row) -> None:
    """One cell: a released combination and the project's wheel."""
    if not all(part in name(row) for part in session.posargs):
        session.skip(f"its name does not contain {' '.join(session.posargs)}")
    install_row(session, row, *TEST_TOOLS)
    result = RESULTS / "cells" / f"{name(row)}.json"
    run_pytest(session, *tests(row), f"--cell-result={result}")


@nox.session
@nox.parametrize("python,row", cells(LEGACY, tag="ci"))
def legacy(session: nox.Session, row: Row) -> None:
    """A legacy environment with all its pins, the wheel put in by its own pip; gone afterwards.

    Beside the tests the demo runs there, before anything of the tests is installed.
    """
    if not all(part in name(row) for part in session.posargs):
        session.skip(f"its name does not contain {' '.join(session.posargs)}")
    # A cache of its own: a CUDA build of torch takes gigabytes, and no other cell has its use.
    cache = session.cache_dir / "legacy"
    try:
        install_pins(session, f"torch=={row['torch']}", *pins(row), cache=cache)
        session.run("python", "tests/matrix/own_pip.py", wheel(session))
        session.run("bnb-dispatch-fix", "demo")
        install_pins(session, *TEST_TOOLS, *pins(row), cache=cache)
        result = RESULTS / "legacy" / f"{name(row)}.json"
        run_pytest(session, *tests(row), f"--cell-result={result}")
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)


def install_pins(session: nox.Session, *requirements: str, cache: Path) -> None:
    """Install what a legacy row says; what cannot be installed ends the cell in one line."""
    problem = not_installed(session, "--cache-dir", str(cache), *requirements)
    if problem:
        session.error(f"cannot install: {problem}")


def not_installed(session: nox.Session, *arguments: str) -> str:
    """Install, and say in one line what kept uv from it; "" where nothing did."""
    said = session.run_install(
        *("uv", "pip", "install", "--quiet", "--color", "never"),
        *arguments,
        silent=True,
        success_codes=range(256),
    )
    # With --quiet, only what went wrong is said.
    return " ".join(said.split())[:400] if isinstance(said, str) else ""


def short_name(row: Row) -> str:
    """The library first, and what it plans with."""
    first, *others = pins(row)
    named = [pin for pin in others if pin.startswith(("transformers==", "accelerate=="))]
    return "-".join(pin.replace("==", "") for pin in (first, *named))


@nox.session
@nox.parametrize(
    "python,row", [nox.param(row["python"], row, id=short_name(row)) for row in DOWNSTREAM]
)
def downstream(session: nox.Session, row: Row) -> None:
    """A library's own loading function, without the shim and with it; ends with a table.

    `nox -s downstream -- peft` for the cells of one library.
    """
    if not all(part in short_name(row) for part in session.posargs):
        session.skip(f"its name does not contain {' '.join(session.posargs)}")
    session.notify("downstream_table")
    result = RESULTS / "downstream" / f"{short_name(row)}.json"
    result.unlink(missing_ok=True)
    torch, replaced = torch_cpu(row["python"]), overrides(session, row)
    problem = not_installed(session, *torch, *pins(row), *replaced, *TEST_TOOLS, wheel(session))
    if problem:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps({"cannot install": problem}), "utf-8")
        session.error(f"cannot install: {problem}")
    share_byte_code(session, row["python"])
    warnings = ["-W", "default", "-W", "error:::bnb_dispatch_fix", f"--cell-result={result}"]
    if row["loads"] == "own_tests":
        sdist = unpacked_sdist(session, f"accelerate=={row['accelerate']}")
        run_pytest(session, "tests/downstream/test_own_tests.py", *warnings, f"--sdist={sdist}")
        return
    files = ["tests/downstream/test_loads.py"]
    files += ["tests/downstream/test_peft.py"] if row["loads"] == "peft" else []
    run_pytest(session, *files, *warnings, f"--loads={row['loads']}")


def unpacked_sdist(session: nox.Session, pin: str) -> Path:
    """A release's source distribution, which has its tests; they are not copied from there."""
    session.install("--quiet", "pip")
    folder = session.cache_dir / "sdist"
    command = ["-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
    package = pin.partition("==")[0]
    session.run("python", *command, "--no-binary", package, "--dest", str(folder), pin)
    [archive] = folder.glob(f"{pin.replace('==', '-')}.tar.gz")
    shutil.unpack_archive(archive, folder)
    return folder / pin.replace("==", "-")


@nox.session(venv_backend="none")
def downstream_table(session: nox.Session) -> None:
    """What the cells of `nox -s downstream` found."""
    names = [short_name(row) for row in DOWNSTREAM]
    shown = [each for each in names if all(part in each for part in session.posargs)]
    session.run("python3", "tests/downstream/table.py", str(RESULTS / "downstream"), *shown)


@nox.session(venv_backend="none")
def report(session: nox.Session) -> None:
    """Write docs/compatibility.md's table from the results of `nox -s matrix`."""
    names = [name(row) for row in ROWS if "transformers" in row]
    session.run("python3", "tests/matrix/report.py", str(RESULTS / "cells"), *names)


@nox.session
@nox.parametrize("python,row", cells([row for row in ROWS if row.get("bench")]))
def bench(session: nox.Session, row: Row) -> None:
    """How many models that fit are loaded, and what planning costs; docs/measurements.md."""
    install_row(session, row)
    session.run("python", "tests/benchmarks/bench_packing.py")
    session.run("python", "tests/benchmarks/bench_units.py")
    results = RESULTS / "bench"
    session.run("python", "tests/benchmarks/loadability.py", str(results / f"{name(row)}.json"))
    found = sorted(str(path) for path in results.glob("*.json"))
    session.run("python", "tests/benchmarks/loadability.py", "--table", *found)
    even_spread(session, row)


def even_spread(session: nox.Session, row: Row) -> None:
    """The part of `bench` about `even`; beside a peer's planner, where that can be installed."""
    session.install("--quiet", "--no-deps", PEER, success_codes=range(256), silent=True)
    results = RESULTS / "even"
    script = "tests/benchmarks/even_spread.py"
    session.run("python", script, str(results / f"{name(row)}.json"))
    found = sorted(str(path) for path in results.glob("*.json"))
    session.run("python", script, "--table", *found)


@nox.session
@nox.parametrize("python,row", cells([row for row in ROWS if row.get("true_sizes")]))
def true_sizes(session: nox.Session, row: Row) -> None:
    """Llama-3-8B's planned and loaded bytes, device by device; needs 8 GB of memory."""
    install_row(session, row)
    session.run("python", "tests/release/true_sizes.py", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Planned and allocated memory on a GPU of the environment at hand; says if there is none."""
    session.run("python", "tests/release/gpu.py", *session.posargs)


@nox.session
@nox.parametrize("python,row", cells([row for row in ROWS if row.get("expected")]))
def expected(session: nox.Session, row: Row) -> None:
    """Write tests/data/caps_5.24.0.json anew, by running 5.24.0 itself."""
    install_row(session, row)
    session.run("python", "tests/release/expected.py", env={"BNB_DISPATCH_FIX": "off"})


def recognise(session: nox.Session, *options: str) -> None:
    session.install("--quiet", "pip", wheel(session))
    cache = session.cache_dir / "wheels"
    session.run("python", "tests/matrix/refresh.py", "--cache", str(cache), *options)


@nox.session
def refresh(session: nox.Session) -> None:
    """Write the generated part of compat_matrix.yaml anew, from the released wheels."""
    recognise(session, *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """Fail where compat_matrix.yaml is not what the released wheels say; name new releases."""
    recognise(session, "--audit", *session.posargs)


@nox.session
@nox.parametrize("python,row", cells([row for row in ROWS if row.get("fuzz")]))
def fuzz(session: nox.Session, row: Row) -> None:
    """Random loads with and without the shim; fails where one is lost. Takes minutes to an hour.

    `nox -s fuzz -- --plans 1000 --seed 7` for fewer, or others.
    """
    install_row(session, row)
    session.run("python", "tests/fuzz/loads.py", *(session.posargs or ["--plans", "25000"]))


@nox.session(python="3.11")
def mutation(session: nox.Session) -> None:
    """Small changes to the code, and whether a unit test notices; in a copy. Takes hours.

    `nox -s mutation -- model/budgets --jobs 2` for some modules; with --survivors again only what
    has survived. Fails where a survivor has no reason in tests/mutation/reasons.yaml.
    """
    session.install("--quiet", *TEST_TOOLS, *MUTATION_TOOLS, "-r", "pyproject.toml")
    session.run("python", "tests/mutation/mutate.py", *session.posargs)


@nox.session
@nox.parametrize("python,row", cells([row for row in ROWS if row.get("demo")]))
def hosts(session: nox.Session, row: Row) -> None:
    """Programs that start programs: multiprocessing, torchrun, accelerate launch, Jupyter, ..."""
    install_row(session, row, *TEST_TOOLS, "loky", "ipykernel", "jupyter_client")
    run_pytest(session, "tests/release/test_hosts.py", *session.posargs)


@nox.session
@nox.parametrize("python,row", cells([row for row in ROWS if row.get("demo")]))
def startup(session: nox.Session, row: Row) -> None:
    """What the shim costs a Python that starts, and one that plans; docs/measurements.md."""
    install_row(session, row)
    session.run("python", "tests/benchmarks/startup.py", *session.posargs)


@nox.session(tags=["ci"])
@nox.parametrize("python,row", cells([row for row in ROWS if row.get("demo")]))
def demo(session: nox.Session, row: Row) -> None:
    """The error without the shim, the same model loading with it; simulated GPUs, no network."""
    install_row(session, row)
    session.run("bnb-dispatch-fix", "demo", *session.posargs)


@nox.session
@nox.parametrize("python,row", cells([row for row in ROWS if row.get("demo")]))
def readme(session: nox.Session, row: Row) -> None:
    """Write anew what commands and examples of README.md and docs/ print, and the picture."""
    install_row(session, row)
    session.run("python", "tests/matrix/readme.py")
