"""What every test folder shares: tests/support on the path, and a fair share of the processors."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

# Workers of pytest-xdist, the servers and the compilers they start would each take every processor;
# torch, here and in those processes, reads this when it is imported.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if workers > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
