"""Runs a user's reward function in a process of its own: `python -m stages.reward_function FILE FUNCTION`, JSON in and out.

The function is called once, `function(prompts, responses, references)`, lists of equal length, and returns a list of numbers.
"""

import importlib.util
import json
import sys
from pathlib import Path


def main() -> None:
    path, name = Path(sys.argv[1]), sys.argv[2]
    asked = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # what the function prints is not the answer
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if function is None:
        known = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        sys.exit(f"no function '{name}' in {path.name}; it has {', '.join(known) or 'none'}")
    found = function(asked["prompt"], asked["response"], asked["reference"])
    print(json.dumps([v.item() if hasattr(v, "item") else v for v in found]), file=out)


if __name__ == "__main__":
    main()
