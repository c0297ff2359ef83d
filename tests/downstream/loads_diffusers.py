"""diffusers: a transformer in nf4 is planned by `_determine_device_map`."""

from __future__ import annotations

import pathlib

import flux
from flux import FIFTY, STRATEGIES, nf4
from tiny import Load, rooms

PACKAGE = "diffusers"


def loads(folder):
    import diffusers.loaders.single_file_model
    import diffusers.pipelines.pipeline_loading_utils  # noqa: F401  # they hold functions, too

    folder = pathlib.Path(folder) / "flux"
    model = flux.build().half()
    model.save_pretrained(folder)
    sizes = {name: int(size) for name, size in flux.parts(model)}
    for strategy in STRATEGIES:
        for count, times in FIFTY[::4]:
            max_memory = flux.budgets(sum(sizes.values()), count, times)

            def call(strategy=strategy, max_memory=max_memory):
                with flux.gpus():
                    flux.FluxTransformer2DModel.from_pretrained(
                        folder,
                        device_map=strategy,
                        max_memory=dict(max_memory),
                        torch_dtype=flux.torch.float16,
                        quantization_config=nf4(),
                    )

            yield Load(f"{strategy} {count}x{times}", call, sizes, rooms(max_memory))
