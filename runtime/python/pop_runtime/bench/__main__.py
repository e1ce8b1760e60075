"""`python -m pop_runtime.bench` is `pop-bench`."""

import sys

from pop_runtime.bench.cli import main

sys.exit(main())
