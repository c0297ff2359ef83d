"""Start-up files: what is written, what is refused, what a Python with them does."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from fakes import fake_packages, finished_python, shim_folder, write_files

from bnb_dispatch_fix import cli
from bnb_dispatch_fix.startup import autoload

NAMES = ["_bnb_dispatch_fix_start.py", "bnb_dispatch_fix.pth", "bnb_dispatch_fix.start"]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment: its Python and its site-packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    scripts = "Scripts" if os.name == "nt" else "bin"
    python = folder / scripts / ("python.exe" if os.name == "nt" else "python")
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    answer = subprocess.run([python, "-c", purelib], capture_output=True, text=True, check=True)
    return python, Path(answer.stdout.strip())


@pytest.fixture
def enabled(environment):
    autoload.enable(environment[1])
    yield environment
    autoload.disable(environment[1])


def outcome(finished):
    assert finished.stderr == "", finished.stderr
    assert finished.returncode == 0
    return finished.stdout.split()


class TestFiles:
    def test_enable_then_disable_leaves_the_folder_as_it_was(self, tmp_path):
        (tmp_path / "other.pth").write_text("# somebody else's")
        assert autoload.state(tmp_path) == "disabled"

        written = autoload.enable(tmp_path)

        assert sorted(path.name for path in written) == NAMES
        assert names_in(tmp_path) == sorted([*NAMES, "other.pth"])
        assert autoload.state(tmp_path) == "enabled"

        removed = autoload.disable(tmp_path)

        assert sorted(removed) == sorted(written)
        assert names_in(tmp_path) == ["other.pth"]
        assert autoload.disable(tmp_path) == []

    def test_enable_twice_writes_the_same(self, tmp_path):
        first = {path: path.read_bytes() for path in autoload.enable(tmp_path)}
        assert {path: path.read_bytes() for path in autoload.enable(tmp_path)} == first

    def test_each_file_says_how_to_remove_it(self, tmp_path):
        for path in autoload.enable(tmp_path):
            first_line = path.read_text().splitlines()[0]
            assert first_line.startswith("#")
            assert "autoload disable" in first_line

    def test_formats(self, tmp_path):
        """`site` takes a .pth line that starts with "import"; PEP 829 takes "module:callable"."""
        autoload.enable(tmp_path)
        [pth] = (tmp_path / "bnb_dispatch_fix.pth").read_text().splitlines()[1:]
        [start] = (tmp_path / "bnb_dispatch_fix.start").read_text().splitlines()[1:]
        module, _, function = start.partition(":")
        assert pth == f"import {module}"
        code = f"import {module}; print({module}.{function}())"
        assert outcome(finished_python("-c", code, paths=(tmp_path,))) == ["None"]

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("kind", ["file", "link", "folder", "dangling link", "not text"])
    def test_a_file_of_somebody_else_is_refused_and_nothing_is_touched(self, tmp_path, name, kind):
        folder = tmp_path / "site"
        folder.mkdir()
        foreign = folder / name
        theirs = tmp_path / "theirs"
        if kind == "folder":
            foreign.mkdir()
        elif kind == "not text":
            foreign.write_bytes(b"\xff\xfe\x00")
        elif kind == "file":
            foreign.write_text("import theirs\n")
        else:
            if kind == "link":
                theirs.write_text("import theirs\n")
            foreign.symlink_to(theirs)

        for change in (autoload.enable, autoload.disable):
            with pytest.raises(autoload.AutoloadError, match="not written by bnb-dispatch-fix"):
                change(folder)
            assert names_in(folder) == [name]
        assert autoload.state(folder) == "foreign"
        assert kind != "link" or theirs.read_text() == "import theirs\n"

    @pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
    def test_the_mode_of_a_file_is_kept_and_a_new_one_follows_the_umask(self, tmp_path):
        before = os.umask(0o027)
        try:
            paths = autoload.enable(tmp_path)
            assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o640}
            for path in paths:
                path.chmod(0o600)
            autoload.enable(tmp_path)
            assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        finally:
            os.umask(before)

    @pytest.mark.parametrize("step", ["write", "chmod", "replace"])
    def test_a_failure_half_way_leaves_no_half_file(self, tmp_path, monkeypatch, step):
        def fail(*args, **kwargs):
            raise OSError(28, "No space left on device")

        if step == "write":
            monkeypatch.setattr(os, "fdopen", fail)
        else:
            monkeypatch.setattr(Path, step, fail)
        with pytest.raises(autoload.AutoloadError, match=r"No space left on device.*--user"):
            autoload.enable(tmp_path)
        assert names_in(tmp_path) == []

    def test_a_folder_that_cannot_be_written(self, tmp_path):
        """A file where the folder should be fails for root too, unlike a read-only folder."""
        (tmp_path / "site").write_text("")
        with pytest.raises(autoload.AutoloadError, match="cannot be written"):
            autoload.enable(tmp_path / "site")

    @pytest.mark.skipif(
        os.name == "nt" or os.geteuid() == 0, reason="root may write into a read-only folder"
    )
    def test_a_read_only_folder(self, tmp_path):
        tmp_path.chmod(0o555)
        try:
            with pytest.raises(autoload.AutoloadError, match="cannot be written"):
                autoload.enable(tmp_path)
        finally:
            tmp_path.chmod(0o755)


class TestStart:
    STATE = """
import sys
import transformers.integrations.accelerate
import bnb_dispatch_fix
print(*[patch.state for patch in bnb_dispatch_fix.status().patches])
"""

    def test_a_program_is_patched_without_a_word_of_it(self, enabled, tmp_path):
        folder = fake_packages(tmp_path)
        code = """
import transformers.integrations.accelerate as planner
print(type(planner.get_balanced_memory).__name__)
"""
        finished = finished_python(
            "-c",
            code,
            paths=(folder,),
            python=enabled[0],
            PYTHONWARNINGS="error",
        )
        assert outcome(finished) == ["PatchedFunction"]

    def test_off_by_the_environment(self, enabled, tmp_path):
        folder = fake_packages(tmp_path)
        finished = finished_python(
            "-c", self.STATE, paths=(folder,), python=enabled[0], BNB_DISPATCH_FIX="off"
        )
        states = set(outcome(finished))
        assert "disabled" in states
        assert states <= {"disabled", "skipped"}

    def test_nothing_of_the_package_is_loaded_before_it_is_needed(self, enabled, tmp_path):
        code = "import sys; print(*[name for name in sys.modules if 'dispatch_fix' in name])"
        finished = finished_python("-c", code, paths=(fake_packages(tmp_path),), python=enabled[0])
        assert outcome(finished) == ["_bnb_dispatch_fix_start"]

    def test_merely_installed_nothing_happens(self, environment, tmp_path):
        code = "import sys, transformers; print(*[n for n in sys.modules if 'dispatch_fix' in n])"
        finished = finished_python(
            "-c", code, paths=(fake_packages(tmp_path),), python=environment[0]
        )
        assert outcome(finished) == []

    def test_after_an_uninstall_it_is_silent(self, enabled, tmp_path):
        folder = fake_packages(tmp_path)
        code = "import transformers.integrations.accelerate as a; print(a.get_balanced_memory(0))"
        finished = subprocess.run(
            [enabled[0], "-W", "error", "-c", code],
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            cwd=folder,
        )
        assert outcome(finished) == ["installed"]

    def test_a_broken_install_is_silent(self, enabled, tmp_path):
        folder = fake_packages(tmp_path)
        write_files(folder, {"bnb_dispatch_fix/__init__.py": "1 / 0"})
        finished = subprocess.run(
            [enabled[0], "-c", "import transformers; print(transformers.__version__)"],
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            cwd=folder,
        )
        assert outcome(finished) == ["5.12.1"]

    def test_once_where_site_processes_the_folder_twice(self, enabled):
        code = f"""
import site, sys
site.addsitedir({str(enabled[1])!r})
site.main()
print([getattr(finder, "__name__", "") for finder in sys.meta_path].count("Waiting"))
"""
        assert outcome(finished_python("-c", code, python=enabled[0])) == ["1"]

    def test_with_an_import_of_the_package_as_well(self, enabled, tmp_path):
        folder = fake_packages(tmp_path)
        code = "import bnb_dispatch_fix\n" + self.STATE
        assert outcome(finished_python("-c", code, paths=(folder,), python=enabled[0])) == [
            "applied"
        ]

    @pytest.mark.parametrize(
        "option, waits", [("-I", True), ("-E", True), ("-s", True), ("-S", False)]
    )
    def test_interpreter_options(self, enabled, option, waits):
        """-S leaves `site` out, and start-up files with it; the others do not."""
        code = "import sys; print('_bnb_dispatch_fix_start' in sys.modules)"
        assert outcome(finished_python(option, "-c", code, python=enabled[0])) == [str(waits)]


class TestCommand:
    def test_enable_status_disable(self, environment, capsys, monkeypatch):
        python, folder = environment
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setenv("PYTHONPATH", str(shim_folder()))
        where = ["--path", str(folder)]

        assert cli.main(["autoload", "enable", *where]) == 0
        out = capsys.readouterr().out
        for name in NAMES:
            assert f"wrote {folder / name}" in out
        assert f"undo: bnb-dispatch-fix autoload disable --path {folder}" in out
        assert "checked: a new" in out

        assert cli.main(["autoload", "status", *where]) == 0
        assert f"{folder}: enabled" in capsys.readouterr().out

        assert cli.main(["autoload", "disable", *where]) == 0
        assert capsys.readouterr().out.count("removed ") == 3
        assert not (folder / "__pycache__").exists() or not list(
            (folder / "__pycache__").glob("_bnb_dispatch_fix_start*")
        )

        assert cli.main(["autoload", "status", *where]) == 1
        assert f"{folder}: disabled" in capsys.readouterr().out

    @pytest.mark.parametrize("said", ["hello", "bnb-dispatch-fix is there", "\udcff\x1b"])
    def test_what_other_start_up_files_print_is_no_answer(self, enabled, monkeypatch, said):
        python, folder = enabled
        code = f"import sys; sys.stdout.buffer.write({said.encode('utf-8', 'surrogateescape')!r})"
        write_files(folder, {"noise.pth": f"{code}\n"})
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setenv("PYTHONPATH", str(shim_folder()))
        assert autoload.starts_with_shim() is True
        autoload.disable(folder)
        assert autoload.starts_with_shim() is False
        (folder / "noise.pth").unlink()

    @pytest.mark.skipif(os.name == "nt", reason="a POSIX shell reads it")
    @pytest.mark.parametrize("name", ["my dir", "it's", "$HOME;`x`", "\x1b[2J'\\", "ü\udcff", "-x"])
    def test_the_undo_line_can_be_pasted(self, tmp_path, capfd, monkeypatch, name):
        bash = shutil.which("bash")
        if bash is None:
            pytest.skip("no bash here")
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path)
        cli.main(["autoload", "enable", f"--path={name}"])
        [undo] = [line for line in capfd.readouterr().out.splitlines() if line.startswith("undo: ")]
        assert undo.isprintable()
        path = undo.partition(" --path ")[2]
        printed = subprocess.run(
            [bash, "-c", f"printf %s {path}"], stdout=subprocess.PIPE, check=True, cwd="/"
        )
        assert Path(os.fsdecode(printed.stdout)) == tmp_path / name

    def test_a_folder_that_python_does_not_look_at_is_told(self, tmp_path, capsys):
        assert cli.main(["autoload", "enable", "--path", str(tmp_path)]) == 1
        assert "does not look at that folder" in capsys.readouterr().out

    def test_user_site_packages_in_an_environment_without(self, monkeypatch, capsys):
        monkeypatch.setattr("site.ENABLE_USER_SITE", False)
        for action in ("enable", "disable", "status"):
            assert cli.main(["autoload", action, "--user"]) == 1
            assert "leave --user out" in capsys.readouterr().err

    def test_user_site_packages(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr("site.ENABLE_USER_SITE", True)
        monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path / "not" / "yet"))
        cli.main(["autoload", "enable", "--user"])
        assert "autoload disable --user" in capsys.readouterr().out
        assert names_in(tmp_path / "not" / "yet") == NAMES

    def test_a_foreign_file(self, tmp_path, capsys):
        (tmp_path / NAMES[1]).write_text("import theirs")
        for action in ("enable", "disable"):
            assert cli.main(["autoload", action, "--path", str(tmp_path)]) == 1
            assert "not written by bnb-dispatch-fix" in capsys.readouterr().err
