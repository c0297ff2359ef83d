"""`python -m bnb_dispatch_fix` is the command `bnb-dispatch-fix`."""

import sys

from bnb_dispatch_fix.cli import main

if __name__ == "__main__":
    sys.exit(main())
