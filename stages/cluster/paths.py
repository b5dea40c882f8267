"""Where the local cluster keeps its state; small, because the thin client imports it."""

import os
import stat

MAX_SOCKET_PATH = 100
"""Linux holds 107 bytes of a unix socket's path."""


def state_dir() -> str:
    """The private folder (0700) of cluster.json, token, logs and sockets; made when missing.

    RLHF_STATE_DIR, else $XDG_STATE_HOME/rlhf-stages, else ~/.local/state/rlhf-stages.
    """
    folder = os.environ.get("RLHF_STATE_DIR")
    if not folder:
        base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        folder = os.path.join(base, "rlhf-stages")
    folder = os.path.abspath(folder)
    try:
        if not os.path.isdir(folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        if stat.S_IMODE(os.stat(folder).st_mode) != 0o700:
            os.chmod(folder, 0o700)
    except OSError as error:
        from stages.errors import UserError

        raise UserError(f"RLHF_STATE_DIR {folder}: {error.strerror}; name a folder of your own") from None
    return folder


def is_local(address: str | None) -> bool:
    """True when `cluster.address` means the head that we start ourselves."""
    return address in (None, "", "local", "auto")


def socket_dir() -> str:
    """The folder of the sockets: the state folder, or a private short one when that path is too long."""
    folder = state_dir()
    if len(os.fsencode(folder)) + 1 + len("123456789012-123456.sock") <= MAX_SOCKET_PATH:
        return folder
    import hashlib

    # not TMPDIR: it may be long too, and differ between the shells whose clients must find the same socket
    short = f"/tmp/rlhf-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    try:
        os.mkdir(short, 0o700)
    except FileExistsError:
        found = os.lstat(short)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            from stages.errors import UserError

            raise UserError(f"{short}: not a private folder of yours; set RLHF_STATE_DIR to a shorter path") from None
    return short


def socket_path(code_id: str, address: str | None = "local") -> str:
    """The socket of the dispatcher that runs this code on this cluster."""
    name = code_id[:12]
    if not is_local(address):
        import hashlib

        name += "-" + hashlib.sha256(address.encode()).hexdigest()[:6]
    return os.path.join(socket_dir(), name + ".sock")


def touch_activity() -> None:
    """Tell the head's supervisor that somebody uses it now: its idle time starts again."""
    path = os.path.join(state_dir(), "activity")
    with open(path, "a"):
        os.utime(path)
