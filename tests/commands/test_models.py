"""``sartor models`` lists the networks and their settings."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from sartor.commands.main import app


def test_networks_are_listed_with_their_settings() -> None:
    shown = CliRunner().invoke(app, ["models", "--json"])
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert {"mlp", "resnet18", "vit", "lstm", "transformer", "table"} <= set(rows)
    assert "custom" not in rows
    assert rows["resnet8"]["settings"] == ["norm"]
    one = json.loads(CliRunner().invoke(app, ["models", "lstm", "--json"]).stdout)
    assert {row["key"] for row in one} >= {"model.vocabulary", "model.hidden"}
    assert "model.layers" in CliRunner().invoke(app, ["models", "lstm"]).stdout


def test_an_unknown_network_is_one_message() -> None:
    wrong = CliRunner().invoke(app, ["models", "lstn"])
    assert wrong.exit_code != 0
    assert "lstm" in wrong.stderr
