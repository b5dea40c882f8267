"""The one exception for wrong use: the program prints its message alone, without a traceback."""


class UserError(Exception):
    """A message that names the key or file at fault and the remedy: one line, or one line per fault."""

    def __init__(self, message: object = "") -> None:
        super().__init__("\n".join(" ".join(line.split()) for line in str(message).splitlines() if line.strip()))
