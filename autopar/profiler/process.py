"""A process that measures for ``autopar profile``: ``python -m autopar.profiler.process FOLDER`` under torchrun."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from autopar.profiler.profiling import run_process

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    sys.exit(run_process(Path(sys.argv[1]), logging.getLogger(__name__).info))
