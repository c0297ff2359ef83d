"""The fingerprint of a function's source: the same everywhere, and None rather than a guess."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest
import wrapt

from bnb_dispatch_fix.patching import recognition
from bnb_dispatch_fix.patching.recognition import fingerprint_text, source_fingerprint

PLAIN = dedent('''\
    def target(model, low_zero=False):
        """One line."""
        return model, low_zero
    ''')

#: name -> (what stands before, the function, what stands after). Written for Python 3.8.
CASES = {
    "plain": ("import sys\n\n\n", PLAIN, "\n\nX = 1\n"),
    "alone in the file": ("", PLAIN, ""),
    "another function follows": ("", PLAIN, "def other():\n    return 1\n"),
    "comments follow": ("", PLAIN, "    # belongs to nobody\n# nor does this\n\nX = 1\n"),
    "defined twice": ("def target():\n    return 0\n\n\n", PLAIN, ""),
    "the name in a string": ('TEXT = """\ndef target():\n    pass\n"""\n', PLAIN, ""),
    "one line": ("", "def target(x): return x\n", "target.x = 1\n"),
    "string at column 0": (
        "",
        "def target(x):\n    text = '''\ndef target(x):\n    return 1\n'''\n    return text, x\n",
        "X = 1\n",
    ),
    "comment at column 0": ("", "def target(x):\n    y = x\n# why\n    return y\n", "X = 1\n"),
    "bracket at column 0": (
        "",
        "def target(\n    x,\n    y=(1,\n2),\n):\n    return [\nx\n]\n",
        "X = 1\n",
    ),
    "backslash": ("", "def target(x):\n    return 1 + \\\nx\n", "X = 1\n"),
    "decorated": (
        "def same(*_):\n    return lambda f: f\n\n\n",
        "@same(1)\n@same(\n    2,\n    3,\n)\ndef target(x):\n    return x\n",
        "X = 1\n",
    ),
    "nested functions": (
        "",
        "def target(x):\n    def inner(y):\n        return y\n\n    return inner(x)\n",
        "def inner():\n    return 2\n",
    ),
    "async": ("", "async def target(x):\n    return x\n", "X = 1\n"),
    "f-string": ("", "def target(x):\n    return f\"{x!r:>{4}} {'a' 'b'}\"\n", "X = 1\n"),
    "not ASCII, form feed": (
        "# é\n\x0c\n",
        "def target(x):\n    '''größer\x0c\u2028 als'''\n    return x\n",
        "",
    ),
}


def digest(function_text: str) -> str:
    return hashlib.sha256(function_text.encode("utf-8")).hexdigest()[:16]


def load(path: Path, name: str = "target"):
    """Imports a file as a module of its own and returns one of its functions."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8"))
    return path


@pytest.mark.parametrize(("before", "function", "after"), CASES.values(), ids=CASES)
def test_the_function_alone_is_hashed(tmp_path, before, function, after):
    text = before + function + after
    installed = load(write(tmp_path / "installed.py", text))

    assert source_fingerprint(installed) == digest(function)
    assert fingerprint_text(text, "target") == digest(function)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", "\r"),
        lambda text: text.replace("\n", "  \t\n"),
        lambda text: text.rstrip("\n"),
        lambda text: "\n\n" + text + "\n\n\n",
        lambda text: "if True:\n    " + text.replace("\n", "\n    ").rstrip() + "\n",
    ],
    ids=["CRLF", "CR", "trailing blanks", "no last newline", "blank lines around", "indented"],
)
def test_layout_that_changes_no_meaning_does_not_count(tmp_path, change):
    installed = load(write(tmp_path / "installed.py", change(PLAIN)))

    assert source_fingerprint(installed) == digest(PLAIN)


def test_line_ends_of_a_wheel_do_not_count():
    assert fingerprint_text(PLAIN.replace("\n", "\r\n"), "target") == digest(PLAIN)


@pytest.mark.parametrize(
    ("old", "new"),
    [("return model", "return  model"), ("One line", "A line"), ("return", "# why\n    return")],
    ids=["code", "docstring", "comment"],
)
def test_any_other_change_counts(tmp_path, old, new):
    changed = PLAIN.replace(old, new)
    installed = load(write(tmp_path / "installed.py", changed))

    assert source_fingerprint(installed) == fingerprint_text(changed, "target") != digest(PLAIN)


def test_wheel_without_the_function():
    assert fingerprint_text("from elsewhere import target\n", "target") is None
    assert fingerprint_text("class A:\n    def target(self):\n        pass\n", "target") is None
    with pytest.raises(SyntaxError):
        fingerprint_text("def target(:\n", "target")


def plain():
    return 1


@functools.wraps(plain)
def wrapped():
    return plain()


class TestWrapped:
    def test_functools_wraps(self):
        assert source_fingerprint(plain) is not None
        assert source_fingerprint(wrapped) is None

    def test_wrapt(self):
        proxy = wrapt.FunctionWrapper(wrapped, lambda f, _instance, a, k: f(*a, **k))

        assert source_fingerprint(proxy) is None

    def test_wrapper_that_does_not_say_so_is_not_taken_for_what_it_wraps(self):
        def silent():
            return plain()

        silent.__name__ = silent.__qualname__ = "plain"
        assert source_fingerprint(silent) not in (None, source_fingerprint(plain))


class TestUnreadable:
    def test_made_by_exec(self):
        namespace = {}
        exec(compile(PLAIN, "<string>", "exec"), namespace)
        assert source_fingerprint(namespace["target"]) is None

    def test_byte_code_only(self, tmp_path):
        source = write(tmp_path / "compiled.py", PLAIN)
        byte_code = py_compile.compile(str(source), cfile=str(tmp_path / "only.pyc"))
        source.unlink()
        assert source_fingerprint(load(Path(byte_code))) is None

    def test_zip(self, tmp_path, monkeypatch):
        with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
            archive.writestr("zipped_source.py", PLAIN)
            source = write(tmp_path / "zipped_code.py", PLAIN)
            py_compile.compile(str(source), cfile=str(tmp_path / "zipped_code.pyc"))
            archive.write(tmp_path / "zipped_code.pyc", "zipped_code.pyc")
            source.unlink()
        monkeypatch.syspath_prepend(str(tmp_path / "lib.zip"))

        assert source_fingerprint(importlib.import_module("zipped_source").target) == digest(PLAIN)
        assert source_fingerprint(importlib.import_module("zipped_code").target) is None

    def test_file_changed_after_import(self, tmp_path):
        installed = load(write(tmp_path / "installed.py", PLAIN))
        write(tmp_path / "installed.py", "\n\nimport sys\n" + PLAIN.replace("model", "m"))
        assert source_fingerprint(installed) is None

    def test_what_is_no_function(self):
        class Hostile:
            def __getattribute__(self, name):
                raise RuntimeError(name)

        things = [None, len, int, Hostile(), Hostile, functools.partial(plain), "".join, lambda: 0]
        assert [source_fingerprint(thing) for thing in things] == [None] * len(things)


def test_import_is_light():
    heavy = ["torch", "yaml", "wrapt", "packaging", "inspect"]
    code = (
        f"import sys; before = set(sys.modules); import bnb_dispatch_fix.patching.recognition; "
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def interpreter(version: str) -> str | None:
    """A Python of this version on this machine, or None: on PATH, from pyenv or from uv."""
    name = f"python{version}"
    candidates = [Path(folder, name) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT", home / ".pyenv"))
    candidates += pyenv.glob(f"versions/{version}.*/bin/{name}")
    candidates += (home / ".local/share/uv/python").glob(f"cpython-{version}.*/bin/{name}")
    for candidate in [Path(sys.executable), *filter(Path.is_file, candidates)]:
        ask = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        # A pyenv shim is there for versions that are not active, too.
        if subprocess.run(ask, capture_output=True, text=True).stdout.strip() == version:
            return str(candidate)
    return None


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_the_same_under_another_python(tmp_path, version):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    texts = ["".join(case) for case in CASES.values()]
    paths = [str(write(tmp_path / f"case{i}.py", text)) for i, text in enumerate(texts)]
    script = dedent(f"""\
        import importlib.util, json, sys

        def load(name, path):
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        sys.dont_write_bytecode = True
        recognition = load("recognition", {recognition.__file__!r})
        paths = {paths!r}
        installed = [load("case%d" % i, path).target for i, path in enumerate(paths)]
        texts = [open(path, encoding="utf-8", newline="").read() for path in paths]
        print(json.dumps([
            [recognition.source_fingerprint(function) for function in installed],
            [recognition.fingerprint_text(text, "target") for text in texts],
        ]))
        """)
    answer = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True)

    assert answer.returncode == 0, answer.stderr
    expected = [digest(function) for _, function, _ in CASES.values()]
    assert json.loads(answer.stdout) == [expected, expected]
