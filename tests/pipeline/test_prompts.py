"""A snapshot gives back every row as it was written, and says so when it can't."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfd.errors import StateError
from rlhfd.pipeline.prompts import Snapshot
from rlhfd.workers.render import Rendered
from rlhfd.workers.snapshot import write_snapshot

ROWS = [([1, 2, 3], "1 + 1", {"answer": "2"}), ([4], [{"role": "user", "content": "ü"}], {}), ([2**31 - 1], "x", {})]


def write(directory, rows):
    rendered = (
        Rendered(
            tokens=tokens,
            text=json.dumps(text).encode(),
            columns=json.dumps(columns).encode(),
            names=frozenset(columns),
        )
        for tokens, text, columns in rows
    )
    return write_snapshot(rendered, directory, "tokenizer")


@pytest.fixture
def directory(tmp_path):
    write(tmp_path, ROWS)
    return tmp_path


def test_rows_come_back_in_any_order(directory):
    with closing(Snapshot.open(directory)) as snapshot:
        assert snapshot.rows == 3
        for number in (2, 0, 1):
            prompt = snapshot.row(number)
            tokens, text, columns = ROWS[number]
            assert (prompt.row, list(prompt.tokens)) == (number, tokens)
            assert (json.loads(prompt.text), json.loads(prompt.columns)) == (text, columns)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
            st.text(max_size=5),
            st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_was_written_is_read(tmp_path_factory, rows):
    directory = tmp_path_factory.mktemp("snapshot")
    written = write(directory, rows)
    with closing(Snapshot.open(directory)) as snapshot:
        read = [snapshot.row(number) for number in range(snapshot.rows)]
    assert [(list(p.tokens), json.loads(p.text), json.loads(p.columns)) for p in read] == rows
    assert (written.rows, written.tokens_max) == (len(rows), max(len(tokens) for tokens, _, _ in rows))


@pytest.mark.parametrize("number", [-1, 3])
def test_a_row_that_is_not_there_is_an_index_error(directory, number):
    with closing(Snapshot.open(directory)) as snapshot, pytest.raises(IndexError):
        snapshot.row(number)


@pytest.mark.parametrize("name", ["prompts.bin", "prompts.idx"])
@pytest.mark.parametrize("cut", [None, 0, 9, -1])
def test_missing_or_cut_files_are_damage(directory, name, cut):
    path = directory / name
    if cut is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StateError, match=str(directory)) as refused:
        Snapshot.open(directory)
    assert refused.value.exit_status == 65


def test_a_row_of_garbage_is_damage(directory):
    path = directory / "prompts.bin"
    path.write_bytes(b"\xc1" * path.stat().st_size)
    with closing(Snapshot.open(directory)) as snapshot, pytest.raises(StateError, match="row 0 does not decode"):
        snapshot.row(0)


def test_an_index_that_runs_backwards_is_damage(directory):
    index = directory / "prompts.idx"
    content = bytearray(index.read_bytes())
    content[8:16] = (2**40).to_bytes(8, "little")
    index.write_bytes(content)
    with closing(Snapshot.open(directory)) as snapshot, pytest.raises(StateError, match="ends before it starts"):
        snapshot.row(1)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_no_descriptor_is_left_open(directory):
    before = descriptors()
    with closing(Snapshot.open(directory)):
        pass
    (directory / "prompts.idx").unlink()
    with pytest.raises(StateError):
        Snapshot.open(directory)
    assert descriptors() == before


def test_the_hash_follows_rows_and_tokenizer(tmp_path):
    def digest(rows, tokenizer):
        rendered = [Rendered(tokens=t, text=b"{}", columns=b"{}", names=frozenset()) for t in rows]
        return write_snapshot(rendered, tmp_path, tokenizer).sha256

    assert digest([[1], [2]], "a") == digest([[1], [2]], "a")
    assert len({digest(rows, t) for rows in ([[1], [2]], [[2], [1]], [[1, 2]]) for t in ("a", "b")}) == 6
