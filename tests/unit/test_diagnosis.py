"""Notes on errors, arguments that are misspelt, budgets as a user types them; no torch."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bnb_dispatch_fix import wording
from bnb_dispatch_fix.explain import arguments, notes, offload_disk, proofs, reading, recipes
from bnb_dispatch_fix.explain import refusal as diagnosis
from bnb_dispatch_fix.model.load import Load
from bnb_dispatch_fix.placement.records import Impossible, SearchComplete
from bnb_dispatch_fix.wording import bytes_in

GIB = 2**30
HAS_NOTES = hasattr(BaseException, "add_note")


def text_of(error):
    """All that a traceback shows of an error."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


# --- notes ---------------------------------------------------------------------------------------


def test_a_note_leaves_type_and_beginning_of_the_text():
    error = ValueError("first\nsecond")
    notes.attach(error, ["a", "b"])
    assert type(error) is ValueError
    assert text_of(error) == "first\nsecond\nbnb-dispatch-fix: a\nb"
    assert error.__cause__ is None


@pytest.mark.skipif(not HAS_NOTES, reason="exceptions have notes since Python 3.11")
def test_with_notes_the_text_itself_is_not_changed():
    error = ValueError("text")
    notes.attach(error, ["a"])
    assert repr(error) == "ValueError('text')"


class Plain(ValueError):
    """An error as it is before Python 3.11."""

    add_note = None


def test_without_notes_the_text_is_continued():
    error = Plain("text")
    notes.attach(error, ["a", "b"])
    assert str(error) == "text\nbnb-dispatch-fix: a\nb"
    assert notes.attached(error)


@pytest.mark.parametrize("error", [Plain(), Plain(3), Plain("a", "b")], ids=repr)
def test_without_notes_an_error_whose_text_is_no_single_argument_stays(error):
    before = error.args
    notes.attach(error, ["a"])
    assert error.args == before


class PlainKeyError(KeyError):
    """A missing key as it is before Python 3.11."""

    add_note = None


@pytest.mark.parametrize("key", ["lm_head.weight", 3])
def test_without_notes_a_missing_key_stays_and_is_shown_with_the_lines(key):
    error = PlainKeyError(key)
    notes.attach(error, ["a", "b"])
    assert str(error) == f"{key!r}\nbnb-dispatch-fix: a\nb"
    assert error.args == (key,)
    assert {key: "found"}[error.args[0]] == "found"
    assert notes.attached(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.args) == (str(error), (key,))


def test_without_notes_a_missing_key_of_another_kind_stays():
    error = PlainKeyError(("a", "b"))
    notes.attach(error, ["a"])
    assert error.args == (("a", "b"),)
    assert str(error) == "('a', 'b')"


def test_no_note_is_endless():
    error = ValueError("text")
    notes.attach(error, [str(number) for number in range(1000)])
    assert len(text_of(error).splitlines()) == 1 + notes.MOST_LINES
    assert "941 more lines" in text_of(error)


def test_a_note_is_found_again():
    error = ValueError("text")
    assert not notes.attached(error)
    notes.attach(error, ["a"])
    assert notes.attached(error)


# --- what a refusal is, and the map in its frames ----------------------------------------------


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("Some modules are dispatched on the CPU or the\n   disk.", True),
        ("a device_map that contains a CPU or disk device", True),
        ("a device_map that contains a cpu/disk device", True),
        ("Device 7 is not recognized, available devices are 'mps', 'cpu' and 'disk'", False),
        ("max() arg is an empty sequence", False),
        ("diskette and cpus", False),
    ],
)
def test_refusals_are_told_by_their_text(text, refusal):
    assert diagnosis.is_refusal(ValueError(text)) is refusal
    assert not diagnosis.is_refusal(KeyError(text))


@pytest.mark.parametrize(
    ("error", "about"),
    [
        (KeyError(1), True),
        (IndexError("list index out of range"), True),
        (ValueError("max() arg is an empty sequence"), True),
        (ValueError("a device_map that contains a CPU or disk device"), True),
        (ValueError("this quantization needs compute capability 8.9"), False),
    ],
    ids=repr,
)
def test_only_errors_about_a_placement_are_explained_by_one(error, about):
    assert diagnosis.is_about_placement(error) is about


def raised(device_map, inner):
    def validate(device_map):
        raise ValueError("no")

    try:
        validate(inner)
    except ValueError as error:
        return error


def test_the_innermost_map_of_names_is_the_refused_one():
    error = raised({"a": 0}, {"a": "cpu"})
    assert diagnosis.refused_map(error) == {"a": "cpu"}


@pytest.mark.parametrize("other", ["auto", None, {}, {0: "cpu"}], ids=repr)
def test_what_is_no_map_is_passed_over(other):
    assert diagnosis.refused_map(raised({"a": 0}, other)) == {"a": 0}
    assert diagnosis.refused_map(raised(other, other)) is None


# --- budgets as a user types them ------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (13.7 / 0.9 * GIB, "15.3GiB"),  # 15.222...
        (24 * GIB, "24GiB"),
        (24 * GIB + 1, "24.1GiB"),
        (GIB, "1GiB"),
        (GIB - 1, "1024MiB"),
        (1.5 * 2**20, "1.5MiB"),
        (1023, "1KiB"),
        (0, "1KiB"),
    ],
)
def test_budgets_are_rounded_up(size, text):
    assert recipes.typeable(size) == text


@given(st.integers(1, 2**50))
def test_a_typed_budget_is_never_less_and_hardly_more(size):
    # accelerate reads int(float(number) * unit): a tenth may be lost by rounding, no more.
    typed = bytes_in(recipes.typeable(size))
    assert size - 1 <= typed <= max(size * 1.1 + 1, 1024)


# --- arguments --------------------------------------------------------------------------------


NOT_A_DEVICE = ValueError("Device {} is not recognized, available devices are integers")
NOT_A_SIZE = ValueError("`size` {} is not in a valid format. Use an integer for bytes")


def said(error, device_map="auto", max_memory=None):
    return arguments.lines(error, Load(device_map, max_memory))


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("0", "write the number 0, without quotes"),
        ("cuda:1", "write the number 1, without quotes"),
        ("gpu0", "write the number 0, without quotes"),
        ("CPU", "'cpu'"),
    ],
)
def test_keys_of_max_memory(key, right):
    (line,) = said(NOT_A_DEVICE, max_memory={key: "5GiB", "cpu": "9GiB"})
    assert repr(key) in line
    assert right in line


@pytest.mark.parametrize(
    ("size", "right"),
    [
        ("46G", "'46GiB' (× 2**30 bytes) or '46GB'"),
        ("46 Gi", "'46GiB'"),
        ("1.5g", "'1.5GiB'"),
        ("900m", "'900MiB'"),
        ("46", "20GiB"),
        ("lots", "20GiB"),
        ("46T", "20GiB"),
    ],
)
def test_sizes_of_max_memory(size, right):
    (line,) = said(NOT_A_SIZE, max_memory={0: size, 1: "20Gib", "cpu": "5GB"})
    assert line.startswith(f"max_memory[0]={size!r} is no size")
    assert right in line


def test_max_memory_that_is_no_dict():
    (line,) = said(TypeError("string indices must be integers"), max_memory="46gb")
    assert line.startswith("max_memory='46gb': expected a dict")
    assert "{0: '46GB', 'cpu': '30GiB'}" in line


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("atuo", "'auto'"), ("Balanced", "'balanced'"), ("balanced_low0", "'balanced_low_0'")],
)
def test_unknown_strategies(asked, meant):
    error = ValueError(f"When passing device_map as a string ... but found {asked}.")
    (line,) = said(error, device_map=asked)
    assert line.endswith(f"did you mean {meant}?")
    assert "'sequential'" in line


def test_a_strategy_that_resembles_none():
    (line,) = said(ValueError("device_map ... found gpu."), device_map="gpu")
    assert "did you mean" not in line


def test_a_device_in_quotes_in_a_map():
    (line,) = said(RuntimeError("Invalid device string: '0'"), device_map={"": "0"})
    assert "write 0 or 'cuda:0'" in line


def test_modules_that_a_map_misses():
    names = [f"model.layers.{i}.{part}.weight" for i in range(2, 6) for part in ("a.q", "a.k")]
    error = ValueError(
        "The device_map provided does not give any device for the following parameters: "
        + ", ".join([*names, "model.norm.weight"])
    )
    device_map = {"model.embed": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 1}
    (line,) = said(error, device_map=device_map)
    assert "no device for model.layers.2–5, model.norm:" in line
    assert '"": 0' in line


@pytest.mark.parametrize(
    "error",
    [ValueError("lm_head.weight doesn't have any device set."), KeyError("lm_head.weight")],
    ids=repr,
)
def test_the_first_module_that_a_map_misses(error):
    (line,) = said(error, device_map={"model": 0})
    assert "no device for lm_head, and perhaps others" in line


def test_a_switch_that_no_release_has():
    (line,) = said(TypeError("unexpected keyword argument 'load_in_8bit_fp32_cpu_offload'"))
    assert "llm_int8_enable_fp32_cpu_offload=True" in line


@pytest.mark.parametrize(
    "error",
    [
        OSError("no such checkpoint"),
        ValueError("something else"),
        KeyError("model.embed.weight"),
        KeyError(3),
        KeyError(),
        TypeError("unexpected keyword argument 'x'"),
        RuntimeError("CUDA out of memory"),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    ("device_map", "max_memory"),
    [("auto", {0: "5GiB"}), ("auto", None), ({"model": 0}, None), ("cuda:0", None), (None, None)],
    ids=repr,
)
def test_other_errors_are_left_alone(error, device_map, max_memory):
    assert said(error, device_map, max_memory) == []


# --- the whole model on the disk -----------------------------------------------------------------

REFUSED = ValueError("You are trying to offload the whole model to the disk.")


def test_a_map_that_the_caller_wrote():
    first, *_, last = offload_disk.lines(REFUSED, Load({"": "disk"}, None))
    assert "{'': 'disk'}" in first
    assert "#4083" in last


def test_the_folder_that_is_missing():
    error = ValueError("had weights offloaded to the disk. Please provide an `offload_folder`")
    assert 'offload_folder="offload"' in offload_disk.lines(error, Load("auto", None))[-1]


def test_a_release_that_takes_disk_for_a_device():
    found = offload_disk.lines(OSError("device disk is invalid"), Load({"": "disk"}, None))
    assert 'device_map={"model": "disk", "lm_head": "disk"}' in found[-1]


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("Expected one of cpu, cuda")])
def test_errors_that_are_not_about_the_disk(error):
    assert offload_disk.lines(error, Load({"": 0}, None)) == []


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_a_torch_for_the_cpu_beside_a_driver(monkeypatch, platform):
    class Torch:
        __version__ = "2.13.0+cpu"
        version = None

    monkeypatch.setitem(sys.modules, "torch", Torch())
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(reading, "nvidia_driver", lambda: "version 560.35")
    found = "\n".join(offload_disk.lines(REFUSED, Load({"": "disk"}, None)))
    assert "an NVIDIA driver is here (version 560.35), but torch 2.13.0+cpu" in found
    assert ("Windows" in found) == (platform == "win32")


# --- sizes, proofs and what is read -------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text", "in_table"),
    [
        (0, "0 bytes", "0.00"),
        (1, "1 byte", "1 byte"),
        (512, "512 bytes", "512 bytes"),
        (1500, "1.46 KiB", "1.46 KiB"),
        (30 * 2**20 // 10, "3.00 MiB", "3.00 MiB"),
        (30 * 2**20, "0.03 GiB", "0.03"),
        (-512, "-512 bytes", "-512 bytes"),
        (int(5.21 * GIB), "5.21 GiB", "5.21"),
    ],
)
def test_a_size_has_the_unit_that_shows_it(size, text, in_table):
    assert wording.amount(size) == text
    assert wording.cell(size) == in_table


def test_a_proof_that_nobody_verified_says_so():
    proof = SearchComplete(4, 3)
    assert "not verified" in proofs.told(Impossible(proof, verified=False))
    assert "not verified" not in proofs.told(Impossible(proof, verified=True))


@pytest.mark.parametrize(
    ("accelerate", "size", "text"),
    [
        ("0.21.0", 6.65 * GIB, "6810MiB"),
        ("0.21.0", 24 * GIB, "24GiB"),
        ("0.22.0", 6.65 * GIB, "6.7GiB"),
    ],
)
def test_old_accelerate_reads_whole_numbers_only(accelerate, size, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace(__version__=accelerate))
    assert recipes.typeable(size) == text


class Free:
    """A request for what is free."""

    max_memory = None

    def budgets(self):
        return SimpleNamespace(given={0: 2 * GIB, 1: 23 * GIB, "cpu": 60 * GIB})


def test_a_card_that_another_process_holds(monkeypatch):
    monkeypatch.setattr(reading, "memory_of", {0: 24 * GIB, 1: 24 * GIB}.get)
    monkeypatch.setattr(reading, "reserved_here", {0: 5 * GIB, 1: 0}.get)
    (line,) = reading.held_by_others(Free())
    assert line == (
        "GPU 0: 2.00 GiB of 24.00 GiB are free; 22.00 GiB are held already, "
        "5.00 GiB of it by this process"
    )


@pytest.mark.parametrize(
    ("device_map", "budgets"),
    [
        ({0: "10GiB", 1: "10GiB"}, "{0: '10GiB', 1: '10GiB'}"),
        ({"cuda:0": "10GB", "cpu": "1TB"}, "{0: '10GB', 'cpu': '1TB'}"),
        ({0: 10 * GIB}, f"{{0: {10 * GIB}}}"),
    ],
)
def test_budgets_given_as_a_device_map(device_map, budgets):
    (line,) = said(AttributeError("'int' object has no attribute 'count'"), device_map=device_map)
    assert line.endswith(f"device_map='auto', max_memory={budgets}")


@pytest.mark.parametrize("device_map", [{"": 0}, {0: 1}, {"cpu": "cpu"}, {"model": "10GiB"}, {}])
def test_a_device_map_is_not_taken_for_budgets(device_map):
    assert arguments.swapped(Load(device_map, None)) == []


@pytest.mark.parametrize(
    ("size", "right"),
    [("6.7GiB", "'6861MiB'"), ("1.5GB", "'1500MB'"), ("0.5MiB", "'512KiB'")],
)
def test_fractions_that_old_accelerate_cannot_read(size, right):
    number = size.rstrip("GMiB")
    error = ValueError(f"invalid literal for int() with base 10: '{number}'")
    (line,) = said(error, max_memory={0: size, "cpu": "60GiB"})
    assert line.endswith(f"write {right}")


def test_keys_that_a_configuration_ignores(monkeypatch):
    class BitsAndBytesConfig:
        def __init__(self, load_in_8bit=False, llm_int8_enable_fp32_cpu_offload=False, **unused):
            pass

    known = SimpleNamespace(BitsAndBytesConfig=BitsAndBytesConfig, __version__="5.0.0")
    monkeypatch.setitem(sys.modules, "transformers", known)
    config = {"load_in_8bit": True, "load_in_8bit_fp32_cpu_offload": True, "_private": 1}
    load = Load("auto", None, {"quantization_config": config})
    (line,) = arguments.wrong_keys(load)
    assert line.endswith("it is called llm_int8_enable_fp32_cpu_offload")


# --- nothing leaves explain ----------------------------------------------------------------------


class Broken:
    """A request of which nothing can be read."""

    def __getattr__(self, name):
        raise RuntimeError("broken")


def test_a_fault_of_our_own_changes_nothing():
    error = ValueError("Some modules are dispatched on the CPU or the disk")
    diagnosis.explain(error, Broken())
    load = Load("auto", None)
    load.request = Broken()
    diagnosis.explain_load(error, load)
    diagnosis.warn_of_whole_model(load)
    assert repr(error) == "ValueError('Some modules are dispatched on the CPU or the disk')"
    assert not notes.attached(error)
