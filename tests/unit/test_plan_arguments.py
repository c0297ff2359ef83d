"""What `plan` is asked: sizes, devices and models are read, or refused in one clear line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import plans
import pytest

import bnb_dispatch_fix
from bnb_dispatch_fix import child
from bnb_dispatch_fix.cli import main
from bnb_dispatch_fix.doctor import surroundings
from bnb_dispatch_fix.doctor.surroundings import Answer
from bnb_dispatch_fix.planning import PlanError, checkpoint, examples, question
from bnb_dispatch_fix.planning import command as plan_command
from bnb_dispatch_fix.planning.command import Spinner, parse_budgets, parse_size

GIB = 2**30


@pytest.mark.parametrize(
    "text, size",
    [
        ("22GiB", 22 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("22gib", 22 * GIB),
        ("1GB", 10**9),
        ("512MiB", 2**29),
        ("3KB", 3000),
        ("1TiB", 2**40),
        ("4096", 4096),
        ("0", 0),
        ("22g", 22 * GIB),
        ("22 G", 22 * GIB),
        ("22Gi", 22 * GIB),
        ("22000MiB", 22000 * 2**20),
        ("22000m", 22000 * 2**20),
        ("1t", 2**40),
        ("1024PB", None),
        ("1048576TiB", 2**60),
    ],
)
def test_sizes(text, size):
    if size is None:
        with pytest.raises(PlanError, match="is no size"):
            parse_size(text)
    else:
        assert parse_size(text) == size


@pytest.mark.parametrize("text", ["24", " 24 ", "1023", "1.5"])
def test_a_size_without_a_unit_gets_the_likely_one(text):
    with pytest.raises(PlanError, match=f"has no unit.*; {text.strip()}GiB is likely meant"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1048577TiB", "9" * 400 + "GiB", "9" * 5000, "1" * 310 + ".5kb"])
def test_sizes_that_nothing_has(text):
    with pytest.raises(PlanError, match="is too large; at most 1024 PiB") as refusal:
        parse_size(text)
    assert len(str(refusal.value)) < 120


@pytest.mark.parametrize("text", ["", "GiB", "3QiB", "-1GiB", "1e3", "3 G B", "1.2.3GiB", "0x10"])
def test_what_is_no_size(text):
    with pytest.raises(PlanError, match="is no size; expected bytes"):
        parse_size(text)


@pytest.mark.parametrize(
    "text, budgets",
    [
        ("3x2GiB", [(0, 2 * GIB), (1, 2 * GIB), (2, 2 * GIB)]),
        ("2x2GiB,cpu=60GiB", [(0, 2 * GIB), (1, 2 * GIB), ("cpu", 60 * GIB)]),
        ("0=22GiB,1=2GiB", [(0, 22 * GIB), (1, 2 * GIB)]),
        ("3=1GiB, 1=2GiB , disk=1TiB", [(3, GIB), (1, 2 * GIB), ("disk", 2**40)]),
        ("mps=16GiB", [("mps", 16 * GIB)]),
        ("2x24GiB,1x12GiB", [(0, 24 * GIB), (1, 24 * GIB), (2, 12 * GIB)]),
        ("0=22GiB,CPU=60GiB,1x2g", [(0, 22 * GIB), ("cpu", 60 * GIB), (1, 2 * GIB)]),
        ("5=1GiB,2 × 2 GiB", [(5, GIB), (6, 2 * GIB), (7, 2 * GIB)]),
        ("128x1GiB", [(number, GIB) for number in range(128)]),
        ("127=1GiB", [(127, GIB)]),
        ("002x1GiB", [(0, GIB), (1, GIB)]),
    ],
)
def test_budgets(text, budgets):
    assert parse_budgets(text) == budgets


@pytest.mark.parametrize(
    "text, said",
    [
        ("22GiB", "expected COUNTxSIZE or DEVICE=SIZE, found '22GiB'"),
        ("", "found ''"),
        ("2x3GiB,", "found ''"),
        ("cuda:0=3GiB", "'cuda:0' is no device"),
        ("GPU0=3GiB", "'GPU0' is no device"),
        ("2x3GiB,1=4GiB", "device 1 is there twice"),
        ("0=3Gigs", "'3Gigs' is no size"),
        ("24", "found '24'; such as 1x24GiB"),
        ("2x24", "'24' has no unit"),
        ("0x3GiB", "'0x3GiB' names no device; expected 1 to 128"),
        ("000x3GiB", "names no device"),
        ("129x1GiB", "names too many devices; at most 128, 0 to 127"),
        ("3000000000x1GiB", "names too many devices; at most 128"),
        ("999999999999x1GiB", "names too many devices; at most 128"),
        ("9" * 5000 + "x1GiB", "names too many devices; at most 128"),
        ("100x1GiB,100x1GiB", "names too many devices; at most 128"),
        ("128=1GiB", "'128' is no device; the largest number is 127"),
        ("9" * 5000 + "=1GiB", "is no device; the largest number is 127"),
        ("0=" + "9" * 400 + "GiB", "is too large; at most 1024 PiB"),
        ("²=5GiB", "'²' is no device"),
        ("²x5GiB", "expected COUNTxSIZE"),
        ("0=²GiB", "'²GiB' is no size"),
        ("٣x5GiB", "expected COUNTxSIZE"),
        ("1=3GiB,2x3GiB,2=3GiB", "device 2 is there twice"),
        ("cpu=3GiB,CPU=3GiB", "device cpu is there twice"),
        ("\x1b[2J=3GiB", r"'\\\\x1b\[2J' is no device"),
    ],
)
def test_budgets_that_cannot_be_read(text, said):
    with pytest.raises(PlanError, match=said) as refusal:
        parse_budgets(text)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 200


@pytest.fixture
def asked(monkeypatch):
    """The jobs that were asked for; the answer is a plan made by hand."""
    jobs = []

    def rehearse(job, on_wait=None):
        jobs.append(job)
        return plans.plan() if job["strategy"] != "sequential" else plans.plan_that_does_not_fit()

    monkeypatch.setattr(plan_command, "rehearse", rehearse)
    return jobs


def test_the_command_answers_with_its_exit_code(asked, capsys):
    command = ["plan", "--example", "llama-3-8b", "--max-memory", "2x4GiB"]
    assert main(command) == 0
    assert "-> fits with the backport" in capsys.readouterr().out
    assert main([*command, "--device-map", "sequential"]) == 1
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out[captured.out.index("\n{") :])["fits"] is True


def test_even_is_asked_for_where_it_is_wanted(asked, capsys, monkeypatch):
    command = ["plan", "--example", "llama-3-8b", "--max-memory", "2x4GiB"]
    assert main([*command, "--even"]) == main(command) == 0
    monkeypatch.setattr(question, "rehearse", plan_command.rehearse)
    bnb_dispatch_fix.plan("folder", max_memory={0: 5}, even=True)
    assert [job.get("even") for job in asked] == [True, None, True]


def test_the_job_says_what_the_options_say(asked, capsys):
    command = ["plan", "--example", "mixtral-8x7b", "--max-memory", "1x4GiB"]
    main([*command, "--bits", "4"])
    main([*command, "--bits", "8", "--dtype", "float32"])
    main([*command, "--bits", "16"])
    main([*command, "--bits", "4dq"])
    four, eight, sixteen, nested = asked
    assert four["quantization"] == {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert nested["quantization"] == {**four["quantization"], "bnb_4bit_use_double_quant": True}
    assert not [job for job in asked if "compare" in job]
    assert four["max_memory"] == [(0, 4 * GIB)]
    assert four["config"]["num_local_experts"] == 8
    assert (eight["quantization"], eight["dtype"]) == ({"load_in_8bit": True}, "float32")
    assert sixteen["quantization"] is None


@pytest.mark.parametrize(
    "settings, own",
    [({}, False), ({"quantization_config": {}}, True), ({"quantization_config": None}, False)],
)
def test_without_bits_all_are_compared_unless_the_checkpoint_is_quantized(
    asked, tmp_path, settings, own
):
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    for path in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", str(path), "--max-memory", "1x4GiB"]) == 0
        assert asked[-1].get("compare", False) != own
        assert asked[-1]["quantization"] is None


@pytest.mark.parametrize(
    "options, said",
    [
        ([], "expected one of MODEL"),
        (["a-folder", "--example", "llama-3-8b"], "expected one of MODEL"),
        (["--example", "llama-3-8b", "--max-memory", "3"], "expected COUNTxSIZE"),
        (["--example", "llama-3-8b", "--max-memory", "1x1GiB", "--html", "no/such/f"], "--html"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(asked, capsys, options, said):
    assert main(["plan", *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("bnb-dispatch-fix plan: ")


@pytest.mark.parametrize(
    "options", [["--example", "gpt-9"], ["--bits", "5"], ["--device-map", "x"]]
)
def test_unknown_choices_are_exit_code_2(capsys, options):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *options])
    assert stopped.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, said",
    [
        ("llama3-8b", "invalid choice: 'llama3-8b' (did you mean llama-3-8b?)"),
        ("Mixtral-8x7B", "did you mean mixtral-8x7b?"),
        ("openai/gpt-oss-20B", "did you mean gpt-oss-20b?"),
        ("qwen3-235b", "did you mean qwen3-235b-a22b?"),
        ("llama4-scout", "did you mean llama-4-scout?"),
        ("gemma3-27b", "did you mean gemma-3-27b?"),
        ("glm4.5-air", "did you mean glm-4.5-air?"),
        ("gpt-9", "(choose from "),
    ],
)
def test_a_misspelt_example_gets_the_nearest(capsys, name, said):
    with pytest.raises(SystemExit):
        main(["plan", "--example", name])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("given, expected", [([], None), (["--trust-remote-code"], True)])
def test_code_of_a_checkpoint_is_trusted_only_when_that_is_said(asked, given, expected):
    main(["plan", "a-folder", "--max-memory", "1x4GiB", *given])
    assert asked[0].get("trust_remote_code") == expected


@pytest.mark.parametrize(
    "auto_map, file",
    [
        ({"AutoConfig": "configuration_x.XConfig"}, "configuration_x.py"),
        ({"AutoConfig": ["a.b.XConfig", None]}, "a.b.py"),
        ({"AutoConfig": "owner/name--configuration_x.XConfig"}, "owner/name: configuration_x.py"),
        ({"AutoModelForCausalLM": "modeling_x.X"}, None),
        ({"AutoConfig": 7}, None),
        ({"AutoConfig": []}, None),
        ("configuration_x.XConfig", None),
        (None, None),
    ],
)
def test_the_file_with_a_checkpoint_s_own_code(auto_map, file):
    assert checkpoint.own_code({"auto_map": auto_map}) == file
    assert checkpoint.own_code({}) is checkpoint.own_code(None) is None


def test_the_picture_is_written(asked, tmp_path):
    path = tmp_path / "plan.html"
    main(["plan", "--example", "llama-3-8b", "--max-memory", "1x4GiB", "--html", str(path)])
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_budgets_of_this_machine(asked, monkeypatch):
    devices = [{"id": 0, "free": 5}, {"id": 1, "free": None}, {"id": 2, "free": 7}]
    looked = {"torch": Answer("ok", "", {"devices": devices})}
    monkeypatch.setattr(surroundings, "look", lambda packages: looked)
    main(["plan", "--example", "llama-3-8b"])
    assert asked[0]["max_memory"] is None
    assert asked[0]["free"][:2] == [[0, 5], [2, 7]]
    assert asked[0]["free"][2][0] == "cpu"


def test_a_machine_without_accelerators_needs_budgets(monkeypatch, capsys):
    looked = {"torch": Answer("missing", "", {})}
    monkeypatch.setattr(surroundings, "look", lambda packages: looked)
    assert main(["plan", "--example", "llama-3-8b"]) == 2
    assert "no accelerator is seen here" in capsys.readouterr().err


class Model:
    def named_modules(self):
        return []


@pytest.mark.parametrize(
    "model, arguments, said",
    [
        (Model(), {}, "model: expected a checkpoint folder"),
        (7, {}, "found builtins.int"),
        ("x", {"max_memory": "46GB"}, "max_memory: expected a dict"),
        ("x", {"max_memory": {0: object()}}, "neither bytes nor a text"),
        ("x", {"max_memory": "0x4GiB"}, "max_memory: '0x4GiB' names no device"),
        ("x", {"max_memory": "2x4"}, "max_memory: '4' has no unit"),
        ("/dev/zero", {}, "/dev/zero: is no regular file"),
        ("x", {"device_map": "autoo"}, "device_map: expected one of auto, balanced"),
        ("x", {"device_map": {"": 0}}, "device_map: expected one of"),
        ("x", {"quantization_config": 4}, "quantization_config: expected"),
    ],
)
def test_arguments_of_the_function(model, arguments, said):
    with pytest.raises(PlanError, match=said) as raised:
        bnb_dispatch_fix.plan(model, **{"max_memory": {0: GIB}, **arguments})
    assert isinstance(raised.value, ValueError)
    assert "\n" not in str(raised.value)


class Config:
    """A quantization configuration as transformers makes them."""

    def to_dict(self):
        return {"load_in_4bit": True, "bnb_4bit_compute_dtype": Dtype()}


class Dtype:
    def __str__(self):
        return "torch.float16"


def test_what_the_other_process_is_sent(monkeypatch):
    sent = []

    def ask(task, job, **options):
        sent.append(job)
        return child.Ending([{"error": "x"}], 0, "")

    monkeypatch.setattr(child, "ask", ask)
    with pytest.raises(PlanError, match="x"):
        bnb_dispatch_fix.plan(
            Path("folder"),
            max_memory={1: 2.5, 0: "3GiB", "cpu": 7},
            quantization_config=Config(),
            dtype=Dtype(),
        )
    assert sent == [
        {
            "path": "folder",
            "max_memory": [[1, 2.5], [0, "3GiB"], ["cpu", 7]],
            "quantization": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"},
            "strategy": "auto",
            "dtype": "float16",
        }
    ]
    json.dumps(sent)


def test_budgets_as_one_text(monkeypatch):
    sent = []

    def ask(task, job, **options):
        sent.append(job)
        return child.Ending([{"error": "\x1b[2J"}], 0, "")

    monkeypatch.setattr(child, "ask", ask)
    with pytest.raises(PlanError) as refusal:
        bnb_dispatch_fix.plan("folder", max_memory="2x24GiB,cpu=60g", trust_remote_code=True)
    assert sent[0]["max_memory"] == [[0, 24 * GIB], [1, 24 * GIB], ["cpu", 60 * GIB]]
    assert sent[0]["trust_remote_code"] is True
    assert str(refusal.value) == r"\x1b[2J"


@pytest.mark.parametrize("executable", [None, "", "/no/such/python"])
def test_without_a_python_to_ask(monkeypatch, capsys, executable):
    monkeypatch.setattr(sys, "executable", executable)
    for options in ([], ["--max-memory", "1x4GiB"]):
        assert main(["plan", "--example", "llama-3-8b", *options]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert "started" in captured.err
    assert main(["demo"]) == 2
    assert "the demo cannot run here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "source, said",
    [
        ("raise ImportError('broken')", "transformers cannot be imported: ImportError: broken"),
        ("import os; os._exit(9)", "ended without an answer: exit code 9"),
        ("print('noise'); raise RuntimeError('a\\nb')", "transformers cannot be imported: Run"),
    ],
)
def test_a_transformers_that_breaks_the_other_process(tmp_path, monkeypatch, source, said):
    (tmp_path / "transformers.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PlanError, match=said):
        bnb_dispatch_fix.plan("folder", max_memory={0: GIB})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_spinner_waits_a_second_and_cleans_up():
    now = [10.0]
    terminal = Terminal()
    spinner = Spinner("llama", terminal, lambda: now[0])
    spinner.turn()
    assert terminal.getvalue() == ""
    now[0] = 12.0
    spinner.turn()
    assert "planning llama without its weights, 2 s" in terminal.getvalue()
    spinner.clear()
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_the_spinner_s_line_is_narrower_than_a_terminal():
    terminal = Terminal()
    spinner = Spinner("\x1b[2J" + "x" * 500, terminal, iter([0.0, 9.0]).__next__)
    spinner.turn()
    assert "\\x1b[2Jxxx" in terminal.getvalue()
    assert len(terminal.getvalue()) < 80


def test_no_spinner_where_nobody_watches():
    pipe = io.StringIO()
    spinner = Spinner("llama", pipe, iter([0.0, 9.0]).__next__)
    spinner.turn()
    spinner.clear()
    assert pipe.getvalue() == ""


def test_help_is_light():
    code = (
        "import sys; from bnb_dispatch_fix.cli import main\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'wrapt', 'yaml', 'rich'}\n"
        "sys.exit(f'loads {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", examples.SINCE)
def test_examples_are_whole(name):
    config = examples.configuration(name)
    [architecture] = config["architectures"]
    assert architecture.endswith(("ForCausalLM", "ForConditionalGeneration"))
    assert ("text_config" in config) == architecture.endswith("ForConditionalGeneration")
    text = config.get("text_config", config)
    assert text["hidden_size"] % text["num_attention_heads"] == 0 or "head_dim" in text
    assert text["num_attention_heads"] % text["num_key_value_heads"] == 0


def test_each_example_has_its_file_and_each_file_is_an_example():
    folder = Path(examples.__file__).with_name("configs")
    assert {file.name for file in folder.iterdir()} == {f"{name}.json" for name in examples.SINCE}


def test_examples_are_read_from_an_archive_too(tmp_path):
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        package = Path(bnb_dispatch_fix.__file__).parent
        for file in package.rglob("*"):
            if file.suffix in (".py", ".json"):
                archive.write(file, file.relative_to(package.parent))
    code = (
        "from bnb_dispatch_fix.planning import examples\n"
        "print(examples.__file__, examples.configuration('gpt-oss-20b')['num_hidden_layers'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "package.zip")}
    printed = subprocess.run(
        [sys.executable, "-c", code],
        check=True, capture_output=True, text=True, cwd=tmp_path, env=environment,
    ).stdout  # fmt: skip
    assert "package.zip" in printed
    assert printed.endswith(" 24\n")


def test_the_documents_name_the_release_of_each_example():
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text("utf-8")
    rows = re.findall(r"^\| (4\.\d+) \| (.+) \|$", text, re.MULTILINE)
    named = {name: since for since, names in rows for name in re.findall("`(.+?)`", names)}
    assert named == dict(examples.SINCE)
