"""All benchmarks of this folder, one after the other: the start with a million clients, results on real data, speed.

python benchmarks/federated/run.py [--peers PYTHON_WITH_PFL_AND_FLOWER]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

for words in (["million.py"], ["results.py"], ["speed.py", *sys.argv[1:]]):
    subprocess.run([sys.executable, str(Path(__file__).parent / words[0]), *words[1:]], check=True)
