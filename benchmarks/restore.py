"""How long a checkpoint takes to come back from the local cache: linked, and every byte hashed again.

python benchmarks/restore.py [--gib 1] [--files 4]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--files", type=int, default=4, help="Shards, as in a checkpoint of several files.")
    asked = parser.parse_args()
    from stages import manifest
    from stages.store import Store

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        root = Path(scratch)
        subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=root, check=True)
        folder = root / "made"
        folder.mkdir()
        block = os.urandom(2**24)
        for i in range(asked.files):
            with (folder / f"model-{i}.safetensors").open("wb") as file:
                for _ in range(int(asked.gib * 64 / asked.files)):
                    file.write(block)
        store = Store(root)
        began = time.perf_counter()
        outputs = manifest.hash_tree(folder)
        store.put("0" * 32, folder, {"outputs": outputs, "content": ""}, {})
        print(f"stored {asked.gib} GiB: {time.perf_counter() - began:.2f} s")
        began = time.perf_counter()
        assert store.restore("0" * 32, root / "restored")
        print(f"restored {asked.gib} GiB: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
