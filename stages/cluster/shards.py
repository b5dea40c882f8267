"""Checkpoint tensors in files of bounded size, each gathered and written by one rank.

Which tensors share a file depends on their sizes alone: one rank and a hundred write the same bytes, and no rank ever
holds more than the file that it writes and the one that it gathers meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.errors import UserError

LIMIT = 4 * 2**30
"""Most bytes of a file, unless one name alone has more."""


def split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, cut into runs of at most `limit` bytes."""
    files: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        if not files or size > left:
            files.append([])
            left = limit
        files[-1].append(name)
        left -= size
    return files


def write(stem: Path, sizes: Mapping[str, int], gather: Callable[[str, bool], dict[str, Tensor]], *, rank: int, world: int) -> None:
    """`<stem>.safetensors`, or `<stem>-00001-of-0000N.safetensors` and so on, spread over the ranks. Collective.

    sizes: bytes of what each name gathers. gather: (name, whether this rank keeps it) -> tensors on the CPU; called on every rank
    for every name, in order.
    """
    files = split(sizes, LIMIT)
    stem.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as writer:
        written = None
        for index, names in enumerate(files):
            mine, tensors = index % world == rank, {}
            for name in names:
                found = gather(name, mine)
                if mine:
                    tensors |= found
            if mine:
                if written is not None:
                    written.result()
                written = writer.submit(_write, _place(stem, index, len(files)), tensors)
                del tensors
        if written is not None:
            written.result()


class Tensors(Mapping[str, Tensor]):
    """What `write` wrote, each tensor read when it is asked for."""

    def __init__(self, stem: Path):
        whole = _place(stem, 0, 1)
        paths = [whole] if whole.exists() else sorted(stem.parent.glob(f"{stem.name}-*-of-*.safetensors"))
        if not paths or paths != [_place(stem, i, len(paths)) for i in range(len(paths))]:
            raise UserError(f"{whole}: missing or not whole; delete {stem.parent} and run the same command again")
        self._files = [safe_open(str(path), "pt") for path in paths]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _place(stem: Path, index: int, count: int) -> Path:
    return stem.with_name(f"{stem.name}.safetensors" if count == 1 else f"{stem.name}-{index + 1:05d}-of-{count:05d}.safetensors")


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in sorted(tensors.items())}, str(path))
