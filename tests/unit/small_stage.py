"""A stage that writes its text: for tests of the runner."""

import time

from stages.errors import UserError


def run(context) -> None:
    text = context.params["text"]
    if text == "fail":
        (context.out / "out.txt").write_text("half")
        raise UserError("it says no")
    if text == "nothing":
        return
    if text == "slow":
        time.sleep(0.3)
    (context.out / "out.txt").write_text(text)
