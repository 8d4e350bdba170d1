"""Clients at home at several processes: any number of them takes what any other number saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sartor.engines.sharded import Ranks
from sartor.federation.homes import Homes
from sartor.federation.states import KEPT, StateStore

CPU = torch.device("cpu")
CLIENTS = 11
EQUAL = np.full(CLIENTS, 7)
RAGGED = np.array([3, 9, 9, 0, 5, 4, 12, 1, 9, 2, 30])
PLACES = ("memory", "files", "folder")


def homes_of(counts: np.ndarray, ranks: int) -> list[Homes]:
    return [Homes(CLIENTS)] if ranks == 1 else [Ranks(counts, rank, ranks) for rank in range(ranks)]


def stores_of(counts: np.ndarray, ranks: int, place: str, folder: Path) -> list[StateStore]:
    """The store of every process of a run."""
    where = "memory" if place == "memory" else "disk"
    stores = [StateStore(CLIENTS, CPU, where, homes=homes) for homes in homes_of(counts, ranks)]
    for store in stores:
        if place == "folder":
            store.keep_in(folder)
    return stores


def whole(counts: np.ndarray, stores: list[StateStore]) -> Tensor:
    """All clients' rows, each read at its home."""
    table = torch.full((CLIENTS, 2), torch.nan)
    for homes, store in zip(homes_of(counts, len(stores)), stores, strict=True):
        own = np.arange(CLIENTS)[homes.here(np.arange(CLIENTS))]
        table[torch.from_numpy(own)] = store.rows("c", own)
    return table


@pytest.mark.parametrize("counts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 15])
def test_every_client_has_one_home_and_one_row_there(counts: np.ndarray, ranks: int) -> None:
    everyone = np.arange(CLIENTS)
    seen = []
    for homes in homes_of(counts, ranks):
        own = everyone[homes.here(everyone)]
        assert len(own) == homes.count
        assert sorted(homes.rows(own).tolist()) == list(range(homes.count))
        assert homes.numbers(homes.rows(own)).tolist() == own.tolist()
        seen += own.tolist()
    assert sorted(seen) == everyone.tolist()


def test_homes_have_large_and_small_clients() -> None:
    loads = [RAGGED[homes.numbers(np.arange(homes.count))].sum() for homes in homes_of(RAGGED, 2)]
    # Dealt by size: of neighbours in that order, the homes have one each.
    assert 0 <= loads[0] - loads[1] <= RAGGED.max()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("counts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("ranks", [(1, 3), (3, 1), (2, 3), (4, 2), (3, 3)])
def test_what_some_homes_saved_any_number_of_homes_take(
    place: str, counts: np.ndarray, ranks: tuple[int, int], tmp_path: Path
) -> None:
    before, after = (stores_of(counts, count, place, tmp_path) for count in ranks)
    expected = torch.full((CLIENTS, 2), -1.0)
    for store in before:
        store.declare("c", expected[0])
    for turn, cohort in enumerate(([6, 2, 9, 0], [2, 5, 10], [1])):
        rows = torch.arange(2.0 * len(cohort)).view(-1, 2) + 100 * turn
        expected[cohort] = rows
        for store in before:  # all processes see all rows; each keeps its own
            store.write("c", np.array(cohort), rows)
    saved = [store.save() for store in before]
    rest = [len(part["c.numbers"]) for part in saved]
    assert sum(rest) == 7
    for _ in range(2):  # killed before its first checkpoint, it is loaded again
        after = stores_of(counts, ranks[1], place, tmp_path)
        for rank, store in enumerate(after):
            own = [saved[rank]] if ranks[0] == ranks[1] else saved
            store.load(own[0])
            for part in own[1:]:
                store.add(part)
        assert torch.equal(whole(counts, after), expected)
        for store in after:
            store.write("c", np.array([3, 6]), torch.zeros(2, 2))
    expected[[3, 6]] = 0
    assert torch.equal(whole(counts, after), expected)


def test_files_of_other_homes_stay_while_a_checkpoint_may_refer_to_them(tmp_path: Path) -> None:
    before = stores_of(EQUAL, 2, "folder", tmp_path)
    for store in before:
        store.declare("c", torch.zeros(2))
        store.write("c", np.arange(CLIENTS), torch.ones(CLIENTS, 2))
    saved = [store.save() for store in before]
    after = stores_of(EQUAL, 3, "folder", tmp_path)
    for store in after:
        store.load(saved[0])
        store.add(saved[1])
    for call in range(KEPT + 2):
        old = sorted(path.parent.name for path in tmp_path.rglob("*-of-2/*.rows"))
        assert old == (["0-of-2", "1-of-2"] if call <= KEPT else [])
        for store in after:
            store.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-of-3", "1-of-3", "2-of-3"]
    assert torch.equal(whole(EQUAL, after), torch.ones(CLIENTS, 2))
