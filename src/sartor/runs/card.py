"""A model card: what there is to know of a model in use, as data and as a text to read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sartor.runs.experiment import Experiment, to_mapping
from sartor.runs.record import environment

if TYPE_CHECKING:
    from sartor.runs.signature import Signature

MOST_CLIENTS = 1000
"""Clients whose metrics a card lists."""


def card_of(
    summary: Mapping[str, Any],
    clients: Mapping[str, Any],
    experiment: Experiment,
    signature: Signature,
    client: str | None,
    personal: bool,
) -> dict[str, Any]:
    """The card of a model: of a client's own, or of the shared one as a client, or all of them, use it."""
    rows = last_rows(clients)
    own = next((row for row in rows if row["client"] == client), None)
    return {
        "client": client,
        "model": "personal" if personal else "shared",
        "network": summary["model"],
        "parameters": summary["parameters"],
        "method": summary["algorithm"],
        "rounds": summary["rounds"],
        "data": {
            "name": summary["data"],
            "clients": summary["clients"],
            "classes": signature.classes,
            "labels": None if signature.labels is None else list(signature.labels),
            "columns": columns_of(signature),
            "training samples": None if own is None else own["n_train"],
            "test samples": None if own is None else own["n_test"],
            "hash": summary["partition_hash"],
        },
        "objective": summary["objective"],
        "headline": summary["headline"],
        "metrics": {name: cell for name, cell in summary["last"].items() if cell is not None},
        "clients": rows[:MOST_CLIENTS],
        "notes": summary.get("notes", []),
        "privacy": summary.get("privacy"),
        "settings": to_mapping(experiment),
        "model_sha256": summary["model_sha256"],
        "made": made(),
    }


def made() -> dict[str, Any]:
    """When, and with which versions."""
    told = environment()
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: told[name] for name in ("sartor", "torch")},
    }


def columns_of(signature: Signature) -> list[str] | None:
    """The columns of a table that a model needs; None where samples are arrays."""
    table = signature.preprocessing.table
    return None if table is None else list(table.columns)


def last_rows(clients: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the last evaluation, a dict each."""
    if not clients:
        return []
    last = max(clients["round"])
    places = [place for place, round in enumerate(clients["round"]) if round == last]
    return [{name: values[place] for name, values in clients.items()} for place in places]


def card_text(card: Mapping[str, Any]) -> str:
    """A card in Markdown."""
    who = "all clients" if card["client"] is None else card["client"]
    lines = [f"# Model of {who}", ""]
    lines += [f"- {name}: {value}" for name, value in _facts(card) if value is not None]
    lines += ["", "## Metrics", "", "Measured on test data after the last round.", ""]
    lines += _table(_metrics(card))
    if card["clients"]:
        lines += ["", "## Clients", ""]
        lines += _table([_client(row, card["headline"]) for row in card["clients"]])
    lines += [f"\nNote: {note}" for note in card["notes"]]
    lines += ["", "## Settings", ""]
    lines += [f"- `{name}` = {value}" for name, value in _flat(card["settings"])]
    return "\n".join(lines) + "\n"


def _facts(card: Mapping[str, Any]) -> list[tuple[str, Any]]:
    data, labels = card["data"], card["data"]["labels"]
    privacy = card["privacy"]
    return [
        ("model", f"{card['model']}, network {card['network']} with {card['parameters']} parameters"),
        ("method", f"{card['method']}, {card['rounds']} rounds"),
        ("trained for", card["objective"]),
        ("data", f"{data['name']} of {data['clients']} clients, hash {str(data['hash'])[:12]}"),
        ("training samples of this client", data["training samples"]),
        ("test samples of this client", data["test samples"]),
        ("classes", ", ".join(labels) if labels else data["classes"]),
        ("columns", ", ".join(data["columns"]) if data["columns"] else None),
        ("privacy spent", None if privacy is None else ", ".join(f"{k} {v}" for k, v in privacy.items())),
        ("SHA-256 of the run's models", card["model_sha256"]),
        ("made", ", ".join(f"{name} {value}" for name, value in card["made"].items())),
    ]


def _metrics(card: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each cell of the evaluation."""
    return [
        {"model and data": name.replace("_", ", "), **{k: v for k, v in cell.items() if _is_number(v)}}
        for name, cell in card["metrics"].items()
    ]


def _client(row: Mapping[str, Any], headline: str) -> dict[str, Any]:
    """Of a client's row what models are judged by."""
    shown = ("client", "n_train", "n_test", *(name for name in row if name.endswith(f"_local_{headline}")))
    return {name: row[name] for name in shown}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """A table in Markdown over the union of the rows' columns."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    return lines + [f"| {' | '.join(_cell(row.get(name)) for name in heads)} |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _flat(mapping: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Settings by ``section.key``."""
    found: list[tuple[str, Any]] = []
    for key, value in mapping.items():
        inner = isinstance(value, Mapping)
        found += _flat(value, f"{before}{key}.") if inner else [(f"{before}{key}", value)]
    return found
