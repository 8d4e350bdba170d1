"""Runs while they go, as a page of this machine: it reads run folders, shows them, and changes nothing.

The page is served to 127.0.0.1 alone, under a secret in its address, and asks nothing of any other place.
What it shows is read anew from the folders whenever it asks: simulations, the runs of a comparison as they
appear, and runs on real machines at their server.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sartor.errors import SartorError
from sartor.report.figures import evenly
from sartor.report.html import Markup, element, own_file, policy, style_of
from sartor.runs.durations import left
from sartor.runs.participation import by_round
from sartor.runs.record import CONFIG, RunFolder, to_json

SECONDS = 2.0
"""Between two looks of the page."""
MOST_POINTS = 400
"""Of a curve."""
MOST_CLIENTS = 50
"""Those that were heard of longest ago."""
STILL = 300.0
"""Seconds without a new round after which a run that has not finished is said to stand still."""
PLAIN = ("round", "cohort", "answered", "bytes_down", "bytes_up", "updates")
"""What every round records; of other numbers in its row the page tells what they are called."""


def state_of(paths: Iterable[Path]) -> dict[str, Any]:
    """What there is to show: every run in these folders, and when all of them will be done."""
    runs = [run_state(folder) for folder in folders_in(paths)]
    ended = ("error", "finished", "failed", "still")
    open_ones = [run["left"] for run in runs if not any(run.get(how) for how in ended)]
    known = [rest for rest in open_ones if rest is not None]
    return {"runs": runs, "left": sum(known) if known and len(known) == len(open_ones) else None}


def folders_in(paths: Iterable[Path]) -> list[Path]:
    """The run folders among these, and right inside of them."""
    found: dict[Path, None] = {}
    for path in paths:
        inside = [path] if (path / CONFIG).is_file() else sorted(path.iterdir()) if path.is_dir() else []
        found |= dict.fromkeys(child for child in inside if (child / CONFIG).is_file())
    return list(found)


def run_state(path: Path) -> dict[str, Any]:
    """One run as it stands; where its folder cannot be read just now, why."""
    try:
        folder = RunFolder.open(path)
        config, rows, finished = folder.config, folder.rounds, folder.finished
        summary = folder.summary if finished else {}
        failed = None if finished or folder.diverged is None else str(folder.diverged["message"])
        names = _names(folder)
    except SartorError as error:
        return {"name": path.name, "error": str(error)}
    rounds, done = int(config.get("rounds", 0)), int(rows[-1]["round"]) if rows else 0
    spent = float(sum((row.get("seconds") or 0) + (row.get("evaluation_seconds") or 0) for row in rows))
    headline = str(config.get("evaluate", {}).get("headline") or summary.get("headline") or "accuracy")
    quiet = time.time() - _touched(path)
    return {
        "name": path.name,
        "algorithm": config.get("algorithm"),
        "seed": config.get("seed"),
        "round": done,
        "rounds": rounds,
        "finished": finished,
        "stopped": summary.get("stopped"),
        "failed": failed,
        "still": not finished and quiet > STILL,
        "quiet": quiet,
        "left": 0.0 if finished else left(spent, done, rounds),
        "seconds": spent,
        "bytes": sum((row.get("bytes_down") or 0) + (row.get("bytes_up") or 0) for row in rows),
        "headline": headline,
        "curves": _curves(rows, headline),
        "last": _last(rows),
        "troubles": _troubles(rows),
        "clients": _unheard(rows, names),
    }


def _names(folder: RunFolder) -> Sequence[str]:
    """The clients' names, where the folder tells."""
    try:
        names = folder.signature["names"]
    except (SartorError, KeyError):
        return ()
    return [str(place) for place in range(names)] if isinstance(names, int) else names


def _touched(path: Path) -> float:
    """When a file of a folder was changed last."""
    times = [0.0]
    for child in path.iterdir():
        try:
            times.append(child.stat().st_mtime)
        except OSError:  # moved to its place meanwhile
            continue
    return max(times)


def _curves(rows: Sequence[Mapping[str, Any]], headline: str) -> dict[str, list[list[float]]]:
    """By cell the rounds and values of the headline, thinned out evenly where they are many."""
    curves: dict[str, list[list[float]]] = {}
    for row in rows:
        for cell, scores in (row.get("evaluation") or {}).items():
            value = scores.get(headline) if isinstance(scores, Mapping) else None
            if value is not None:
                curves.setdefault(cell, []).append([row["round"], value])
    return {
        cell: [points[place] for place in evenly(len(points), MOST_POINTS)] for cell, points in curves.items()
    }


def _last(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the last round says of itself."""
    row = rows[-1] if rows else {}
    return {key: row[key] for key in ("cohort", "answered", "seconds") if key in row}


def _troubles(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How often replies were late, refused or wrong, by what the rounds call it, and how many never came.

    Where replies arrive one by one, those of a round's cohort that have not come are still under way.
    """
    found: dict[str, int] = {}
    for row in rows:
        if "answered" in row and "arrivals" not in row and row.get("cohort", 0) > row["answered"]:
            found["not answered"] = found.get("not answered", 0) + row["cohort"] - row["answered"]
        for key, value in row.items():
            told = value if isinstance(value, Mapping) else {key: value}
            for what, count in {} if key in PLAIN or key in ("evaluation", "observed") else told.items():
                if isinstance(count, int) and not isinstance(count, bool) and count:
                    found[str(what)] = found.get(str(what), 0) + count
    return found


def _unheard(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The clients that were heard of longest ago, with the round that last used an answer of theirs."""
    last: dict[int, int] = {}
    times: dict[int, int] = {}
    for round, clients in by_round(rows).items():
        for client in clients:
            last[client], times[client] = round, times.get(client, 0) + 1
    if not last:
        return []
    numbers = sorted(range(len(names)) if names else last, key=lambda client: (last.get(client, 0), client))
    return [
        {
            "client": names[client] if client < len(names) else str(client),
            "last": last.get(client),
            "rounds": times.get(client, 0),
        }
        for client in numbers[:MOST_CLIENTS]
    ]


def page() -> str:
    """The page; what it shows it asks for."""
    script = own_file("watch.js")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        Markup(
            f'<meta http-equiv="Content-Security-Policy" content="{policy([script])}; connect-src \'self\'">'
        ),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", "Sartor: runs under way"),
        element("style", Markup(style_of())),
    )
    body = element(
        "body",
        element("header", element("h1", "Runs under way"), element("p", "", class_="quiet", id="overview")),
        element("main", id="runs", data_seconds=str(SECONDS)),
        element("noscript", element("p", "This page needs JavaScript; `sartor report` does without.")),
        element("script", Markup(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en-GB')}\n"


class Watch:
    """The page of some folders, served to this machine until it is closed."""

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        for path in paths:
            if not path.is_dir():
                raise SartorError(f"{path}: no such folder; give run folders, or folders that hold some")
        self._paths, self._page = list(paths), page().encode()
        self.token = secrets.token_urlsafe(24)
        watch = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                watch._answer(self)

            def log_message(self, *words: Any) -> None:
                """Nothing: the address has the secret."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise SartorError(f"port {port}: {error.strerror or error}; give another --port") from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Answer until :meth:`close`."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        # A page of somewhere else that has its name point here does not know the secret, nor this name.
        hosts = (f"127.0.0.1:{self.port}", f"localhost:{self.port}")
        token, _, rest = request.path.lstrip("/").partition("/")
        known = secrets.compare_digest(token.encode(), self.token.encode())
        if request.headers.get("Host") not in hosts or not known or rest not in ("", "state"):
            request.send_error(HTTPStatus.NOT_FOUND)
            return
        if rest == "state":
            content, kind = to_json(state_of(self._paths)).encode(), "application/json"
        else:
            content, kind = self._page, "text/html; charset=utf-8"
        request.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            request.send_header(name, value)
        request.end_headers()
        try:
            request.wfile.write(content)
        except OSError:  # whoever asked has left
            return
