"""Fed-Heart-Disease: the patients of four hospitals, from UCI's files, as FLamby prepares them.

Ten of the thirteen columns are kept, as the last three are missing almost everywhere outside Cleveland, and
patients with a value missing in these are left out. Kinds of chest pain and of the resting cardiogram
become columns of 0 and 1, without their first kind; what is told is whether there is any disease.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from sartor.data.clients import ClientData, from_clients
from sartor.data.readers import check_file
from sartor.errors import DataError

HOSPITALS = {
    "Cleveland": "cleveland",
    "Hungary": "hungarian",
    "Switzerland": "switzerland",
    "Long Beach": "va",
}
"""The hospitals, and the word that their file is named by."""
COLUMNS = 14
KEPT = 10
KINDS = {2: (1, 2, 3, 4), 6: (0, 1, 2)}
"""Columns of kinds: chest pain and the resting cardiogram, with the kinds there are."""


def from_heart_disease(
    folder: str | Path, *, test_fraction: float = 1 / 3, validation_fraction: float = 0.0, seed: int = 0
) -> ClientData:
    """The four hospitals, of UCI's ``processed.*.data`` in a folder.

    13 numbers for each patient, and the classes 0 (healthy) and 1 (ill).
    """
    return from_clients(
        read_heart_disease(folder),
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        name="heart-disease",
    )


def read_heart_disease(folder: str | Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The samples of the four hospitals."""
    files = {name: Path(folder) / f"processed.{word}.data" for name, word in HOSPITALS.items()}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise DataError(
            f"heart-disease: wanted in {folder}: {', '.join(missing)}; they are at "
            "https://archive.ics.uci.edu/dataset/45/heart+disease"
        )
    return {name: _read(file) for name, file in files.items()}


def _read(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The patients of one hospital."""
    check_file(file)
    patients = []
    lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        words = [word.strip() for word in line.split(",")]
        if not line.strip():
            continue
        if len(words) != COLUMNS:
            raise DataError(f"{file}: line {number}: {len(words)} columns, expected {COLUMNS}")
        used = [*words[:KEPT], words[-1]]
        if "?" in used:
            continue
        try:
            patients.append([float(word) for word in used])
        except ValueError:
            raise DataError(
                f"{file}: line {number}: has a value that is no number; expected numbers or ?"
            ) from None
        for column, kinds in KINDS.items():
            if patients[-1][column] not in kinds:
                raise DataError(
                    f"{file}: line {number}: column {column} is {used[column]}, expected one of {kinds}"
                )
    if len(patients) < 2:
        raise DataError(f"{file}: {len(patients)} patients without missing values; at least 2 are needed")
    table = np.array(patients)
    plain = [column for column in range(KEPT) if column not in KINDS]
    kinds_of = [table[:, column] == kind for column, kinds in KINDS.items() for kind in kinds[1:]]
    x = np.column_stack([table[:, plain], *kinds_of]).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy((table[:, KEPT] > 0).astype(np.int64))
