"""What `plan --context` says of a cache, byte by byte against the cache of a real `generate`."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="generates with real models: needs torch")

import small_models
import torch
import transformers
from cell import STANDS_FOR_OTHERS, TRANSFORMERS
from packaging.version import Version

import bnb_dispatch_fix
from bnb_dispatch_fix.planning import cache

if Version(torch.__version__.partition("+")[0]) < Version("2.1"):
    pytest.skip("this torch does not tell when memory is freed", allow_module_level=True)

NAMES = [name for name in small_models.MODELS if small_models.known(name)]
#: Until 4.55 `generate` makes the cache of these before, for as many tokens as there may be.
PREALLOCATED = ("gemma2", "gemma3") if Version("4.56") > TRANSFORMERS else ()
MADE_BEFORE = [name for name in PREALLOCATED if name in NAMES]
#: Its experts ask which tokens are theirs, which nothing on the meta device can tell.
UNMEASURED = ("mixtral",) if Version("4.40") > TRANSFORMERS else ()
#: Tokens of the prompt, new tokens, sequences: within the window of 16, and beyond it.
LENGTHS = [(6, 3, 1), (20, 9, 2)]


def tensors(item, seen):
    """Every tensor of a cache, once."""
    if item is None or id(item) in seen:
        return []
    seen[id(item)] = item
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, dict):
        parts = list(item.values())
    elif isinstance(item, (list, tuple)):
        parts = list(item)
    elif type(item).__module__.startswith("transformers") and not hasattr(item, "to_dict"):
        parts = list(vars(item).values())
    else:
        return []
    return [tensor for part in parts for tensor in tensors(part, seen)]


def generated(name, prompt, new, batch):
    """The bytes of the cache after a real `generate`, and how many tokens it has seen."""
    torch.manual_seed(0)
    model = small_models.build(name)
    outputs = []
    model.register_forward_hook(lambda module, given, output: outputs.append(output))
    ids = torch.randint(3, 80, (batch, prompt))
    seen = prompt + new - 1  # the last token is never read
    if model.config.is_encoder_decoder:
        new = seen = prompt  # its decoder begins with a token of its own
    model.generate(ids, min_new_tokens=new, max_new_tokens=new, do_sample=False)
    names = ("past_key_values", "cache_params")
    kept = [getattr(outputs[-1], each, None) for each in names]
    found = tensors(kept, {})
    assert found, type(outputs[-1])
    return sum(tensor.numel() * tensor.element_size() for tensor in found), seen


def law_of(name, tokens, batch, kv_dtype=None):
    with torch.device("meta"):
        model = small_models.build(name)
    units = [name for name, _ in model.named_modules()]
    return cache.law(model, units, tokens, batch, kv_dtype)


@pytest.mark.parametrize("prompt, new, batch", LENGTHS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in MADE_BEFORE])
def test_a_cache_is_planned_to_the_byte(name, prompt, new, batch):
    expected, tokens = generated(name, prompt, new, batch)
    law = law_of(name, tokens, batch)
    measured = f"measured on transformers {transformers.__version__}'s own forward pass"
    worked_out = "worked out from the configuration because transformers"
    assert law.source.startswith(worked_out if name in UNMEASURED else measured)
    assert sum(size for _, size in law.of(tokens).cache) == expected


if MADE_BEFORE:

    @pytest.mark.parametrize("name", [name for name in NAMES if name in MADE_BEFORE])
    def test_a_cache_that_is_made_before_is_worked_out(name):
        """Its windows are not counted there: it says at least what `generate` takes, and why."""
        expected, tokens = generated(name, 20, 9, 2)
        law = law_of(name, tokens + 1, 2)
        assert law.source.startswith("worked out from the configuration because transformers")
        assert sum(size for _, size in law.of(tokens + 1).cache) >= expected - 64


def test_the_architectures_that_are_promised():
    """At least eight in the newest releases; older ones know fewer."""
    assert len(NAMES) >= (18 if Version("4.57") <= TRANSFORMERS else 4)


@pytest.mark.parametrize("name", [name for name in ("llama", "mixtral", "t5") if name in NAMES])
def test_every_layer_keeps_its_own(name):
    kept = {}
    for module, size in law_of(name, 8, 1).of(8).cache:
        kept[module] = kept.get(module, 0) + size
    layers = {module for module in kept if any(part.isdigit() for part in module.split("."))}
    assert layers == set(kept)
    assert len(set(kept.values())) == 1


def test_keys_and_values_in_a_dtype_of_their_own():
    plain, packed = (law_of("llama", 8, 1, dtype).of(8) for dtype in (None, "fp8"))
    assert sum(size for _, size in plain.cache) == 4 * sum(size for _, size in packed.cache)


def test_the_configuration_says_the_same_of_plain_attention():
    with torch.device("meta"):
        model = small_models.build("llama")
    units = [name for name, _ in model.named_modules()]
    worked_out = cache.from_configuration(model, units, 2, None)(28)
    measured = law_of("llama", 28, 2).of(28)
    assert sum(dict(worked_out.cache).values()) == sum(size for _, size in measured.cache)


if STANDS_FOR_OTHERS:

    @pytest.fixture(scope="module")
    def config():
        settings = {**small_models.MODELS["llama"][1](), "vocab_size": 4096, "hidden_size": 512}
        settings.update(intermediate_size=1024, num_attention_heads=8, torch_dtype="float16")
        return transformers.LlamaConfig(**settings)

    def plan(config, size, context=None, **options):
        return bnb_dispatch_fix.plan(
            config, max_memory={0: size, 1: size}, context=context, **options
        )

    def test_the_largest_context_runs_and_one_token_more_does_not(config):
        planned = plan(config, "24MiB", 100_000)
        assert planned.fits
        assert not planned.runnable
        most = planned.room.most
        assert f"but runs only to {most} tokens × 1" in planned.verdict
        assert any("more than the 128" in note for note in planned.notes)
        assert 0 < most < 100_000
        assert plan(config, "24MiB", most).runnable
        assert plan(config, "24MiB", most + 1).room.most == most

    def test_a_context_that_runs(config):
        planned = plan(config, "64MiB", 64, batch=2, reserve="1MiB", kv_dtype="fp8")
        assert planned.verdict.startswith("loads and runs with 64 tokens × 2")
        kept = 4 * 2 * 2 * 64 * 64 * 2  # layers, k and v, groups, width, tokens, sequences
        assert sum(load.cache for load in planned.room.devices) == kept
        for load in planned.room.devices:
            taken = load.placed + load.scales + load.cache + load.working + 2**20
            assert load.left == load.given - taken
        json.dumps(planned.as_dict())

    def test_without_a_context_a_number_is_about_right(config):
        estimated = plan(config, "24MiB").room
        exact = plan(config, "24MiB", 100_000).room
        assert estimated.context is None
        assert exact.most / 3 < estimated.most < exact.most * 3

    def test_a_model_without_a_cache_says_so():
        small = transformers.BertConfig(
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
        )
        planned = plan(small, "64MiB", 64)
        assert any("keeps no cache" in note for note in planned.notes)
        assert planned.runnable
