"""Progress of a job on stderr: a live line in a terminal, plain lines in a log. Only what a thin client may import."""

import sys
import time
from typing import TextIO

LOG_INTERVAL_S = 5.0
BAR_WIDTH = 20


class Progress:
    """Shows progress events {phase, done, total, unit, tokens_per_s, metrics}.

    In a terminal one line is rewritten; in a log each phase gets a line at its start, at its end and at most every 5 s.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._drawn = False
        self._began: dict[str, tuple[float, float]] = {}
        self._shown: dict[str, float] = {}

    def update(self, event: dict) -> None:
        phase, done, total = str(event.get("phase", "")), event.get("done") or 0, event.get("total") or 0
        now = time.monotonic()
        if phase not in self._began or done < self._began[phase][1]:
            self._began[phase] = (now, done)
            self._shown.pop(phase, None)
        began, first = self._began[phase]
        left = (now - began) / (done - first) * (total - done) if done > first and total else None
        if self._live:
            if now - self._shown.get(phase, 0.0) > 0.1 or done >= total:
                self._shown[phase] = now
                self._draw(describe(event, left, bar=True))
        elif phase not in self._shown or done >= total or now - self._shown[phase] >= LOG_INTERVAL_S:
            self._shown[phase] = now
            self._stream.write(f"rlhf: {describe(event, left)}\n")
            self._stream.flush()

    def say(self, message: str) -> None:
        """A line that stays."""
        self.clear()
        self._stream.write(f"rlhf: {message}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the live line away."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False

    def _draw(self, text: str) -> None:
        import shutil

        self._stream.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        self._stream.flush()
        self._drawn = True


def describe(event: dict, left_s: float | None, *, bar: bool = False) -> str:
    """`ppo update ━━━━──── 12/64 step, 5,800 tokens/s, loss 0.12, 35 s left`"""
    done, total = event.get("done") or 0, event.get("total") or 0
    parts = [f"{done}/{total} {event.get('unit') or 'step'}"]
    if event.get("tokens_per_s"):
        parts.append(f"{event['tokens_per_s']:,.0f} tokens/s")
    parts += [f"{name} {value:.4g}" for name, value in (event.get("metrics") or {}).items() if isinstance(value, (int, float))]
    if left_s is not None and done < total:
        parts.append(f"{left_s:.0f} s left" if left_s < 120 else f"{left_s / 60:.0f} min left")
    full = round(BAR_WIDTH * min(1.0, done / total)) if total else 0
    drawn = "━" * full + "─" * (BAR_WIDTH - full) + " " if bar else ""
    return f"{event.get('phase', '')} {drawn}{', '.join(parts)}"
