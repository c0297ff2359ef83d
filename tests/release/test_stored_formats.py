"""The tensors of quantized weights, against those that the libraries make of a layer."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="makes real layers: needs torch")

from bnb_dispatch_fix.planning import formats
from bnb_dispatch_fix.planning.formats import Weight

#: No multiples of a block or of each other.
OUTSIDE, INSIDE = 96, 320
WEIGHT = Weight(OUTSIDE, INSIDE, 0, "bfloat16")


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(INSIDE, OUTSIDE, bias=False, dtype=torch.bfloat16)


def planned(tensors):
    """Bytes by name."""
    return {
        name: math.prod(shape) * torch.empty((), dtype=getattr(torch, dtype)).element_size()
        for name, (shape, dtype) in tensors.items()
    }


def made(tensors):
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


@pytest.mark.parametrize("group_size", [64, 32, None])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_hqq(bits, axis, group_size):
    quantize = pytest.importorskip("hqq.core.quantize", reason="hqq makes the layer")
    how = {"nbits": bits, "group_size": group_size, "axis": axis}
    layer = quantize.HQQLinear(
        linear(),
        quantize.BaseQuantizeConfig(**how),
        compute_dtype=torch.bfloat16,
        device="cpu",
    )
    real = {"W_q": layer.W_q, "scale": layer.meta["scale"], "zero": layer.meta["zero"]}
    assert planned(formats.hqq({"weight_quant_params": how}, WEIGHT)) == made(real)


INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
GROUPS = {"strategy": "group", "group_size": 64}
TOKENS = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
#: Format, weights, activations.
COMPRESSED = [
    ("pack-quantized", {"num_bits": 4, **INT, **GROUPS}, None),
    ("pack-quantized", {"num_bits": 3, **INT, **GROUPS}, None),
    ("pack-quantized", {"num_bits": 4, **INT, **GROUPS, "symmetric": False}, None),
    ("pack-quantized", {"num_bits": 8, **INT, "strategy": "channel"}, None),
    ("int-quantized", {"num_bits": 8, **INT, "strategy": "channel"}, {"type": "int", **TOKENS}),
    ("int-quantized", {"num_bits": 8, **INT, "strategy": "tensor"}, {"type": "int", **TOKENS}),
    ("float-quantized", {"num_bits": 8, **FLOAT, "strategy": "channel"}, {**FLOAT, **TOKENS}),
    (
        "float-quantized",
        {"num_bits": 8, **FLOAT, "strategy": "tensor"},
        {**FLOAT, "num_bits": 8, "dynamic": False, "strategy": "tensor"},
    ),
    (
        "float-quantized",
        {"num_bits": 8, **FLOAT, "strategy": "block", "block_structure": [128, 128]},
        None,
    ),
    (
        "nvfp4-pack-quantized",
        {"num_bits": 4, **FLOAT, "strategy": "tensor_group", "group_size": 16},
        {**FLOAT, "num_bits": 4, "dynamic": "local", "strategy": "tensor_group", "group_size": 16},
    ),
    (
        "mxfp4-pack-quantized",
        {"num_bits": 4, **FLOAT, "strategy": "group", "group_size": 32},
        None,
    ),
]


@pytest.mark.parametrize("kind, weights, inputs", COMPRESSED)
def test_compressed_tensors(kind, weights, inputs):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors makes the layer")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    model = torch.nn.Sequential(linear())
    config = QuantizationConfig(
        config_groups={"group_0": group}, format=kind, quantization_status="compressed"
    )
    apply_quantization_config(model, config)
    for name, tensor in model[0].named_parameters():
        if "scale" in name:
            tensor.data.fill_(1)
    ModelCompressor(quantization_config=config).compress_model(model)
    real = {**dict(model[0].named_parameters()), **dict(model[0].named_buffers())}
    settings = {**group, "input_activations": inputs, "format": kind}
    assert planned(formats.compressed(settings, WEIGHT)) == made(real)


def flat(tensor, name=""):
    """The plain tensors that a subclass is made of, by the last part of their names."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {name: tensor}
    inner = [flat(getattr(tensor, part), part) for part in tensor.__tensor_flatten__()[0]]
    return {key: value for found in inner for key, value in found.items()}


TORCHAO = [
    ("Int8WeightOnlyConfig", {}),
    ("Int8DynamicActivationInt8WeightConfig", {}),
    ("Float8WeightOnlyConfig", {}),
    ("IntxWeightOnlyConfig", {}),
    ("Int8DynamicActivationIntxWeightConfig", {}),
]


@pytest.mark.parametrize("name, arguments", TORCHAO)
def test_torchao(name, arguments):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao makes the layer")
    if not hasattr(quantization, name):
        pytest.skip(f"this torchao has no {name}")
    from torchao.core.config import config_to_dict

    config = getattr(quantization, name)(**arguments)
    model = torch.nn.Sequential(linear())
    quantization.quantize_(model, config)
    written = config_to_dict(config)
    settings = {"_type": written["_type"], **written["_data"]}
    assert planned(formats.torchao(settings, WEIGHT)) == made(flat(model[0].weight))
