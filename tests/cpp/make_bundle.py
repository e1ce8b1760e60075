"""`python -m tests.cpp.make_bundle DIR`: the tiny bundle with segments that the C++ unit tests run on."""

import shutil
import sys
from pathlib import Path

from tests.runtime.tiny_bundle import make_bundle

if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    make_bundle(Path(sys.argv[1]), segmented=True)
