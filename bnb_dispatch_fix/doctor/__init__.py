"""What is wrong here: this environment in, findings with a level and a hint each out.

Public: `examine()` and `as_text()`. Called by the command and by programs; planning/ asks it for
the devices of this machine.
"""

from bnb_dispatch_fix.doctor.checks import examine
from bnb_dispatch_fix.doctor.findings import as_text

__all__ = ["as_text", "examine"]
