"""The commands in the README print what it says, in the cell whose versions it shows."""

import re

import pytest
import readme
from cell import installed

COMMANDS = {
    label.partition(" ")[2]: body
    for label, body in readme.blocks(readme.README.read_text("utf-8"))
    if label.startswith("output: ")
}
SHOWN = {
    package: set(re.findall(rf"\b{package} (\d+\.\d+\.\d+)", "".join(COMMANDS.values())))
    for package in ("transformers", "accelerate", "bitsandbytes")
}
HERE = all(installed(package) in versions for package, versions in SHOWN.items())


@pytest.mark.skipif(not HERE, reason="the README shows the outputs of another combination")
@pytest.mark.parametrize("command", COMMANDS)
def test_command_prints_what_the_readme_says(command):
    assert readme.on_any_machine(readme.console(command)) == readme.on_any_machine(
        COMMANDS[command]
    )
