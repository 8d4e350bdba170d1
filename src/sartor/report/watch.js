"use strict";
// Asks for the state of the runs every few seconds and draws it. Text is set as text, never as markup.
const place = document.getElementById("runs");
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;

function made(name, text, attributes = {}) {
  const element = document.createElement(name);
  if (text !== null) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function drawn(name, attributes, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} minutes`;
  return `${(seconds / 3600).toFixed(1)} hours`;
}

function status(run) {
  if (run.stopped) return `stopped after round ${run.stopped.round}: ${run.stopped.reason}`;
  if (run.finished) return `finished, ${run.round} rounds in ${duration(run.seconds)}`;
  const going = `round ${run.round} of ${run.rounds}`;
  if (run.failed) return `failed after ${going}: ${run.failed}`;
  if (run.still) return `${going}; nothing new for ${duration(run.quiet)}`;
  return run.left === null ? going : `${going}, about ${duration(run.left)} left`;
}

function curves(run) {
  const names = Object.keys(run.curves);
  const points = names.flatMap((name) => run.curves[name]);
  const width = 640, height = 220, left = 50, bottom = 30, top = 10, right = 150;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "curves" });
  const best = names.map((name) => `${name.replace("_", " ")} ${run.curves[name].at(-1)[1].toPrecision(3)}`);
  svg.setAttribute("aria-label", `${run.headline} by round: ${best.join(", ")}`);
  const low = Math.min(...points.map((point) => point[1])), high = Math.max(...points.map((point) => point[1]));
  const span = high - low || 1, rounds = Math.max(run.rounds, 1);
  const x = (round) => left + (round / rounds) * (width - left - right);
  const y = (value) => top + (1 - (value - low) / span) * (height - top - bottom);
  const axis = { stroke: "var(--rule)" };
  svg.append(drawn("line", { x1: left, y1: height - bottom, x2: width - right, y2: height - bottom, ...axis }));
  svg.append(drawn("line", { x1: left, y1: top, x2: left, y2: height - bottom, ...axis }));
  const text = { fill: "var(--quiet)", "font-size": 11 };
  svg.append(drawn("text", { x: left - 5, y: y(high) + 8, "text-anchor": "end", ...text }, high.toPrecision(3)));
  svg.append(drawn("text", { x: left - 5, y: y(low), "text-anchor": "end", ...text }, low.toPrecision(3)));
  svg.append(drawn("text", { x: width - right, y: height - 12, "text-anchor": "end", ...text }, `round ${run.rounds}`));
  names.forEach((name, number) => {
    const colour = `var(--series-${number % COLOURS})`;
    const line = run.curves[name].map(([round, value]) => `${x(round).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    svg.append(drawn("polyline", { points: line, fill: "none", stroke: colour, "stroke-width": 2 }));
    const [round, value] = run.curves[name].at(-1);
    svg.append(drawn("circle", { cx: x(round), cy: y(value), r: 3, fill: colour }));
    svg.append(drawn("text", { x: width - right + 10, y: 20 + 16 * number, fill: colour, "font-size": 12 }, name.replace("_", " ")));
  });
  return svg;
}

function table(heads, rows) {
  const made_table = made("table", null), head = made("tr", null);
  heads.forEach((text) => head.append(made("th", text, { scope: "col" })));
  made_table.append(head);
  for (const row of rows) {
    const line = made("tr", null);
    row.forEach((text) => line.append(made("td", String(text))));
    made_table.append(line);
  }
  return made_table;
}

function section(run, open) {
  const element = made("section", null, { "data-run": run.name });
  element.append(made("h2", run.error ? run.name : `${run.algorithm}, seed ${run.seed}`));
  element.append(made("p", run.error ? run.error : status(run), { class: "status" }));
  if (run.error) return element;
  element.append(made("progress", null, { max: Math.max(run.rounds, 1), value: run.round, "aria-label": "rounds" }));
  element.append(made("p", `${run.name}; ${(run.bytes / 1e6).toFixed(1)} MB sent`, { class: "quiet" }));
  if (Object.keys(run.curves).length) element.append(curves(run));
  const troubles = Object.entries(run.troubles);
  if (troubles.length) {
    const told = troubles.map(([what, count]) => `${what.replaceAll("_", " ")}: ${count}`).join(", ");
    element.append(made("p", `Replies that were not used so far: ${told}.`, { class: "troubles" }));
  }
  if (run.clients.length) {
    const details = made("details", null, { "data-clients": run.name });
    details.open = open.has(run.name);
    details.append(made("summary", "Clients, those heard of longest ago first"));
    const rows = run.clients.map((client) => [client.client, client.last ?? "never", client.rounds]);
    details.append(table(["client", "last heard in round", "rounds it took part in"], rows));
    element.append(details);
  }
  return element;
}

function show(state) {
  const open = new Set([...document.querySelectorAll("details[open]")].map((each) => each.dataset.clients));
  const done = state.runs.filter((run) => run.finished).length;
  const rest = state.left ? `; about ${duration(state.left)} left for those under way` : "";
  document.getElementById("overview").textContent = `${done} of ${state.runs.length} runs finished${rest}.`;
  place.replaceChildren(...state.runs.map((run) => section(run, open)));
  document.documentElement.dataset.drawn = "yes";
}

async function look() {
  try {
    const answer = await fetch("state", { cache: "no-store" });
    show(await answer.json());
  } catch {
    document.getElementById("overview").textContent = "Nobody answers any more: `sartor watch` has ended.";
    document.documentElement.dataset.drawn = "lost";
  }
  setTimeout(look, 1000 * Number(place.dataset.seconds));
}

look();
