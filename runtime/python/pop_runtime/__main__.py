"""`python -m pop_runtime` is `pop-run`."""

import sys

from pop_runtime.cli import main

sys.exit(main())
