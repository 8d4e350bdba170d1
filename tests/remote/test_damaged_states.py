"""A node's states with any byte of their file changed: what was kept, or one message."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from sartor.errors import DataError
from sartor.remote.journal import Journal, rows_of

LETTERS = b"FIUC"
"""Types begin with these in the file's head: as many bytes of another type would be read as other numbers."""


def test_any_byte_that_is_another_is_refused_or_harms_nothing(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "damaged"
    Journal(whole).stage(1, rows_of(torch.tensor([3, 5]), {"c": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}))
    (path,) = whole.iterdir()
    content = path.read_bytes()
    refused = 0
    for place, byte in enumerate(content):
        for other in {*(LETTERS if byte in LETTERS else ()), byte ^ 1} - {byte}:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / path.name).write_bytes(content[:place] + bytes([other]) + content[place + 1 :])
            try:
                numbers, rows = Journal(folder).settle(1, [3])["c"]
            except DataError:
                refused += 1
                continue
            assert numbers.tolist() == [3]
            assert rows.dtype == torch.float32
            assert rows.tolist() == [[1.0, 2.0]]
    assert refused > len(content) / 2
