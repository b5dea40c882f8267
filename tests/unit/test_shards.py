"""Checkpoints in files of bounded size: the same files whoever writes them, and read back whole or not at all."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from stages.cluster import shards
from stages.errors import UserError


def test_names_share_files_in_their_order_up_to_the_limit():
    assert shards.split({"a": 3, "b": 4, "c": 5, "d": 1, "e": 9}, 8) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_name_larger_than_the_limit_has_a_file_of_its_own():
    assert shards.split({"a": 1, "b": 100, "c": 1}, 8) == [["a"], ["b"], ["c"]]


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 30)), st.integers(1, 40))
def test_every_name_is_in_one_file_and_no_two_neighbours_would_fit_in_one(sizes, limit):
    files = shards.split(sizes, limit)
    assert [name for names in files for name in names] == list(sizes)
    assert all(len(names) == 1 or sum(sizes[n] for n in names) <= limit for names in files)
    assert all(sum(sizes[n] for n in one) + sizes[other[0]] > limit for one, other in itertools.pairwise(files))


TENSORS = {name: torch.full((4,), float(i)) for i, name in enumerate(["w1", "w2", "w3", "w4", "w5"])}
SIZES = dict.fromkeys(TENSORS, 32)


def write(folder, *, world):
    kept = []
    for rank in range(world):

        def gather(name, keep, rank=rank):
            kept.append((rank, name)) if keep else None
            return {f"{name}/a": TENSORS[name], f"{name}/b": -TENSORS[name]} if keep else {}

        shards.write(folder / "state", SIZES, gather, rank=rank, world=world)
    return kept


@pytest.mark.parametrize("world", [2, 3, 7])
def test_any_number_of_ranks_writes_the_files_that_one_writes(tmp_path, monkeypatch, world):
    monkeypatch.setattr(shards, "LIMIT", 64)
    write(tmp_path / "one", world=1)
    kept = write(tmp_path / "many", world=world)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert sorted(files) == [f"state-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "many").iterdir()}
    assert sorted(name for _, name in kept) == sorted(TENSORS), "no rank keeps what another one writes"


def test_what_fits_is_one_file_without_a_number(tmp_path):
    write(tmp_path, world=2)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]
    assert set(load_file(tmp_path / "state.safetensors")) == {f"{n}/{x}" for n in TENSORS for x in "ab"}


@pytest.mark.parametrize("limit", [64, 10**6])
def test_tensors_are_read_back(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(shards, "LIMIT", limit)
    write(tmp_path, world=2)
    found = shards.Tensors(tmp_path / "state")
    assert len(found) == 10 and torch.equal(found["w4/b"], -TENSORS["w4"])


def test_a_missing_file_of_several_is_an_error_that_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "LIMIT", 64)
    write(tmp_path, world=1)
    (tmp_path / "state-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"state\.safetensors: missing or not whole"):
        shards.Tensors(tmp_path / "state")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "LIMIT", 64)
    (tmp_path / "state-00003-of-00003.safetensors").mkdir()
    with pytest.raises(Exception, match="directory"):
        write(tmp_path, world=1)
