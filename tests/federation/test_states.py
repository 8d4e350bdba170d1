"""Client states: rows never written are the initial value, files and memory agree, checkpoints survive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from helpers import completed, process
from sartor.errors import DataError, SartorError
from sartor.federation import states as state
from sartor.federation.states import StateStore

CPU = torch.device("cpu")
PLACES = ("memory", "disk", "folder")


def store_of(place: str, folder: Path, clients: int = 10) -> StateStore:
    """A store in memory, in a temporary file or in files of a folder."""
    store = StateStore(clients, CPU, "memory" if place == "memory" else "disk")
    if place == "folder":
        store.keep_in(folder)
    return store


def numbers(*clients: int) -> np.ndarray:
    return np.array(clients, dtype=np.int64)


@pytest.mark.parametrize("place", PLACES)
def test_a_row_never_written_is_the_initial_value_and_others_are_what_was_written_last(
    place: str, tmp_path: Path
) -> None:
    store = store_of(place, tmp_path)
    initial = torch.tensor([[1.5, -2.0, 3.0]], dtype=torch.float64)
    store.declare("c", initial)
    table = initial.repeat(10, 1, 1)
    generator = np.random.default_rng(0)
    for _ in range(30):
        cohort = generator.permutation(10)[: generator.integers(0, 5)]
        rows = torch.randn(len(cohort), 1, 3, dtype=torch.float64)
        store.write("c", cohort, rows)
        table[torch.from_numpy(cohort)] = rows
        asked = generator.permutation(10)[: generator.integers(0, 11)]
        assert torch.equal(store.rows("c", asked), table[torch.from_numpy(asked)])
        if generator.random() < 0.3:
            store.save()
    assert torch.equal(store["c"], table)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "initial",
    [
        torch.tensor(3),
        torch.tensor(True),
        torch.tensor([0.1, 0.2], dtype=torch.bfloat16),
        torch.zeros(2, 0),
        torch.eye(3, dtype=torch.float64).T[1:],
    ],
    ids=["integer", "truth", "bfloat16", "empty", "view"],
)
def test_states_of_any_type_and_shape(place: str, initial: Tensor, tmp_path: Path) -> None:
    store = store_of(place, tmp_path, clients=4)
    store.declare("s", initial)
    rows = torch.stack([torch.zeros_like(initial), torch.ones_like(initial)])
    store.write("s", numbers(3, 1), rows)
    expected = torch.stack([initial, rows[1], initial, rows[0]])
    again = store_of(place, tmp_path, clients=4)
    again.load(store.save())
    for found in (store, again):
        assert found["s"].dtype == initial.dtype
        assert torch.equal(found["s"], expected)


def test_what_is_read_and_saved_is_a_copy() -> None:
    store = StateStore(3, CPU)
    store.declare("c", torch.zeros(2))
    store.write("c", numbers(0, 1), torch.ones(2, 2))
    saved = store.save()
    store.rows("c", numbers(0))[:] = 9
    store["c"][:] = 9
    assert torch.equal(store["c"], torch.tensor([[1.0, 1], [1, 1], [0, 0]]))
    store.write("c", numbers(0, 2), torch.full((2, 2), 5.0))
    store.load(saved)
    assert torch.equal(store["c"], torch.tensor([[1.0, 1], [1, 1], [0, 0]]))


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_declaring_a_large_state_for_a_million_clients_costs_nothing(where: str) -> None:
    store = StateStore(10**6, CPU, where)
    tracemalloc.start()
    begin = time.process_time()
    store.declare("c", torch.zeros(5770))
    seconds = time.process_time() - begin
    store.write("c", numbers(999_999, 5), torch.ones(2, 5770))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.1
    # NumPy's arrays are counted whole though their pages are untouched: two places of 8 bytes for a client.
    assert peak < 20e6
    assert store.rows("c", numbers(5, 4)).sum(1).tolist() == [5770, 0]


@pytest.mark.cuda
def test_states_on_a_device_are_read_and_written_without_waiting_for_it() -> None:
    device = torch.device("cuda")
    store, expected = StateStore(1000, device), StateStore(1000, CPU)
    for one in (store, expected):
        one.declare("c", torch.zeros(50, device=one.device))
    values = torch.randn(5, 100, 50)
    there = values.cuda()
    generator = np.random.default_rng(0)
    cohorts = [generator.permutation(1000)[:100] for _ in range(5)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for turn, cohort in enumerate(cohorts):  # the table grows meanwhile
            store.write("c", cohort, store.rows("c", cohort) + there[turn])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for turn, cohort in enumerate(cohorts):
        expected.write("c", cohort, expected.rows("c", cohort) + values[turn])
    assert store["c"].is_cuda
    assert torch.equal(store["c"].cpu(), expected["c"])


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_states_too_large_for_a_device_lie_on_the_host(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "ON_DEVICE_BYTES", 0)
    before = torch.cuda.memory_allocated()
    store = StateStore(100, torch.device("cuda"), where)
    store.declare("c", torch.zeros(1000))
    store.write("c", np.arange(100), torch.ones(100, 1000, device="cuda"))
    assert store.rows("c", numbers(3)).is_cuda
    assert float(store["c"].sum()) == 100 * 1000
    assert torch.cuda.memory_allocated() - before < 100 * 1000 * 4


def test_size_decides_where_states_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(state, "free_bytes", lambda device: 4 * 10 * 8 * 100)
    store = StateStore(10, CPU)
    store.keep_in(tmp_path)
    store.declare("a", torch.zeros(60, dtype=torch.float64))
    store.declare("b", torch.zeros(41, dtype=torch.float64))  # together more than a quarter
    store.declare("c", torch.zeros(40, dtype=torch.float64))
    for name in "abc":
        store.write(name, numbers(1), store.rows(name, numbers(1)))
    assert [path.name for path in tmp_path.iterdir()] == ["b.0.rows"]
    with pytest.raises(SartorError, match=r"engine\.states = 'tape': must be one of auto, memory, disk"):
        StateStore(10, CPU, "tape")


def test_other_states_are_gone_after_loading_and_those_loaded_need_no_declaring() -> None:
    first, second = StateStore(5, CPU), StateStore(5, CPU)
    first.declare("a", torch.zeros(2))
    first.write("a", numbers(4), torch.ones(1, 2))
    second.declare("b", torch.zeros(2))
    second.load(first.save())
    assert list(second) == ["a"]
    assert torch.equal(second["a"], first["a"])


@given(
    steps=st.lists(
        st.one_of(
            st.lists(st.integers(0, 5), unique=True, max_size=6),
            st.sampled_from(["save", "resume", "resume before"]),
        ),
        max_size=25,
    )
)
@settings(max_examples=60)
def test_any_checkpoint_of_the_last_two_gives_back_what_it_saw(
    steps: list[list[int] | str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files are compacted at every chance, so that old versions go as soon as they may."""
    folder = tmp_path_factory.mktemp("states")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "COMPACT_BYTES", 0)
        store = store_of("folder", folder, clients=6)
        store.declare("c", torch.full((3,), -1.0))
        table = store["c"]
        checkpoints = [(store.save(), table.clone())] * 2
        for turn, step in enumerate(steps):
            if step == "save":
                checkpoints = [checkpoints[1], (store.save(), table.clone())]
            elif isinstance(step, str):
                saved, seen = checkpoints[0 if step == "resume before" else 1]
                checkpoints = [(saved, seen)] * 2
                store = store_of("folder", folder, clients=6)
                store.load(saved)
                table = seen.clone()
            else:
                rows = torch.arange(3.0 * len(step)).view(-1, 3) + 100 * turn
                store.write("c", np.array(step, dtype=np.int64), rows)
                table[step] = rows
            assert torch.equal(store["c"], table)


def test_a_file_holds_at_most_twice_what_counts_and_saving_again_copies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "COMPACT_BYTES", 0)
    store = store_of("folder", tmp_path)
    store.declare("c", torch.zeros(100))
    size = 10 * 100 * 4
    for turn in range(20):
        store.write("c", np.arange(10), torch.full((10, 100), float(turn)))
        store.write("c", np.arange(10), torch.full((10, 100), turn + 0.5))  # not yet saved: in place
        saved = store.save()
        assert sum(value.nbytes for value in saved.values()) < size / 2  # an index, not the rows
        newest = max(tmp_path.iterdir(), key=lambda path: int(path.name.split(".")[1]))
        assert newest.stat().st_size <= 2 * size
    assert len(list(tmp_path.iterdir())) <= 1 + state.KEPT
    assert (store["c"] == 19.5).all()


def test_a_store_that_does_not_own_the_files_copies_from_them(tmp_path: Path) -> None:
    owner, guest = store_of("folder", tmp_path), StateStore(10, CPU, "disk")
    owner.declare("c", torch.zeros(4))
    owner.write("c", numbers(8, 2), torch.arange(8.0).view(2, 4))
    saved, before = owner.save(), (tmp_path / "c.0.rows").read_bytes()
    guest.keep_in(tmp_path, continues=False)
    guest.load(saved)
    guest.write("c", numbers(2, 3), torch.ones(2, 4))
    assert guest["c"][[8, 2, 3, 0]].tolist() == [[0, 1, 2, 3], [1] * 4, [1] * 4, [0] * 4]
    assert (tmp_path / "c.0.rows").read_bytes() == before


def damaged(folder: Path, how: str) -> None:
    path = folder / "c.0.rows"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content if how == "changed" else content[:-1])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("gone", r"c\.0\.rows: client states cannot be opened: No such file"),
        ("short", r"c\.0\.rows: cut short; the client states in it are lost"),
        ("changed", r"c\.0\.rows: the state of client 2 is not the one the checkpoint was made with"),
    ],
)
def test_a_damaged_file_is_found_when_it_is_loaded(how: str, message: str, tmp_path: Path) -> None:
    store = store_of("folder", tmp_path)
    store.declare("c", torch.zeros(4))
    store.write("c", numbers(8, 2), torch.arange(8.0).view(2, 4))
    saved = store.save()
    damaged(tmp_path, how)
    with pytest.raises(DataError, match=message):
        store_of("folder", tmp_path).load(saved)
    with pytest.raises(DataError, match="'c' lie in files of a run folder"):
        StateStore(10, CPU).load(saved)


WRITER = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from safetensors.torch import save_file
from sartor.federation import states as state
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state.COMPACT_BYTES = 0
store = state.StateStore(50, torch.device("cpu"), "disk")
store.keep_in(folder / "states")
store.declare("c", torch.zeros(3000))
generator = np.random.default_rng(0)
for turn in range(1, 100_000):
    cohort = generator.permutation(50)[:7]
    store.write("c", cohort, torch.full((7, 3000), float(turn)))
    saved = store.save()
    save_file({**saved, "turn": torch.tensor(turn)}, folder / "new.safetensors")
    (folder / "new.safetensors").rename(folder / "last.safetensors")
    print(turn, flush=True)
"""


def expected_after(turns: int) -> Tensor:
    """What the writer's clients hold after so many turns."""
    generator = np.random.default_rng(0)
    table = torch.zeros(50, 3000)
    for turn in range(1, turns + 1):
        table[torch.from_numpy(generator.permutation(50)[:7])] = turn
    return table


def check_last(folder: Path) -> int:
    saved = load_file(folder / "last.safetensors")
    turns = int(saved.pop("turn"))
    store = store_of("folder", folder / "states", clients=50)
    store.load(saved)
    assert torch.equal(store["c"], expected_after(turns))
    return turns


def test_a_process_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    killed: list[int] = []
    with process([sys.executable, "-c", WRITER, str(tmp_path), "0"]) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for pause in np.random.default_rng(1).uniform(0, 0.1, 6):
            # The same as many kills at less cost: what lies on the disk while the process is stopped.
            time.sleep(pause)
            os.kill(writer.pid, signal.SIGSTOP)
            copy = tmp_path.with_name(f"{tmp_path.name}-{len(killed)}")
            subprocess.run(["cp", "-r", tmp_path, copy], check=True)
            killed.append(check_last(copy))
            os.kill(writer.pid, signal.SIGCONT)
        while int(writer.stdout.readline()) <= 5:
            pass
        writer.kill()
    killed.append(check_last(tmp_path))
    assert killed == sorted(killed)
    assert killed[-1] > 5


def test_a_full_disk_ends_in_one_message_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    limit = 15 * 3000 * 4
    writer = completed([sys.executable, "-c", WRITER, str(tmp_path), str(limit)])
    assert writer.returncode != 0
    assert "c.0.rows: client states cannot be written: File too large; make room" in writer.stderr
    assert check_last(tmp_path) == 2
