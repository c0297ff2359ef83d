"""README and docs show what is printed, in the cell whose versions they show."""

import re

import pytest
import readme
from cell import installed

TEXTS = {str(path.relative_to(readme.ROOT)): path.read_text("utf-8") for path in readme.DOCUMENTS}
BLOCKS = [
    pytest.param(label, body, id=f"{name}-{number}-{label}")
    for name, text in TEXTS.items()
    for number, (label, body) in enumerate(readme.blocks(text))
    if label not in readme.ON_FILE
]
OUTPUTS = "".join(
    body for text in TEXTS.values() for label, body in readme.blocks(text) if label[:6] == "output"
)
SHOWN = {
    package: set(re.findall(rf"\b{package} (\d+\.\d+\.\d+)", OUTPUTS))
    for package in ("transformers", "accelerate", "bitsandbytes")
}
HERE = all(installed(package) in versions for package, versions in SHOWN.items())
pytestmark = pytest.mark.skipif(
    not HERE, reason="README and docs show the outputs of another combination"
)


@pytest.mark.parametrize(("label", "body"), BLOCKS)
def test_block_shows_what_is_printed(label, body):
    found = readme.render(label, body)
    if "NVIDIA driver" in found:
        pytest.skip("the docs show a machine without an NVIDIA driver, this one has one")
    assert readme.on_any_machine(found) == readme.on_any_machine(body)


def test_the_picture_shows_what_is_planned():
    assert readme.picture() == readme.PICTURE.read_text("utf-8")


def test_every_kind_of_block_is_compared():
    kinds = {re.split("[: ]", block.values[0])[0] for block in BLOCKS}
    assert kinds == {"output", "python", "explained", "setup"}
