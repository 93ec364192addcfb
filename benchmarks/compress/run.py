"""All tables of README.md from what the scripts of this folder measured; with --measure, they are measured first (hours).

python benchmarks/compress/run.py [--measure]
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = {
    "minilm": "MiniLM to a size",
    "onnxruntime_speed": "MiniLM in onnxruntime",
    "efficientnet": "EfficientNet-Lite0",
    "smollm": "SmolLM2-135M",
    "search_cost": "What a search costs",
    "codebooks": "Codebooks",
    "factorization": "Factorization",
    "digits": "Distillation",
    "distillation_defaults": "Defaults of distillation",
    "sparsity": "Sparse training",
    "exits": "Early exits",
}
MARK = "<!-- tables: what stands below is written by run.py -->"


def main() -> None:
    sys.path.insert(0, str(HERE))
    parts = []
    for name, title in SCRIPTS.items():
        if "--measure" in sys.argv:
            subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=True)
        kept = HERE / f"{name}.json"
        if kept.exists():
            table = importlib.import_module(name).table(json.loads(kept.read_text()))
            parts.append(f"## {title}\n\n`python benchmarks/compress/{name}.py`\n\n{table}\n")
    readme = HERE / "README.md"
    before = readme.read_text().partition(MARK)[0].rstrip()
    readme.write_text(f"{before}\n\n{MARK}\n\n" + "\n".join(parts))


if __name__ == "__main__":
    main()
