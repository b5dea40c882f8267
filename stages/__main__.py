"""`rlhf` and `python -m stages`. `run` is what rules call, thousands of times, so it imports next to nothing."""

import sys


def main() -> None:
    if sys.argv[1:2] == ["run"] and len(sys.argv) == 4 and not sys.argv[2].startswith("-"):
        import os
        import time

        began = time.time()
        from stages.client import run
        from stages.errors import UserError
        from stages.jobs import read

        try:
            runtime, job = read(sys.argv[3], "runtime", sys.argv[2])
        except UserError as error:
            print("rlhf: error:", error, file=sys.stderr)
            sys.exit(1)
        code = run(job, runtime | {"started": began})
        sys.stdout.flush()
        os._exit(code)
    from stages.cli import main as cli

    cli()


if __name__ == "__main__":
    main()
