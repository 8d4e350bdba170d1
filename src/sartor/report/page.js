"use strict";
/* Draws the figures in the reader's colours, lets them be switched, and sorts tables. */
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;

  const property = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // "@name" and "@name/opacity" stand for the colours of the style sheet.
  const inked = (value) => {
    if (Array.isArray(value)) return value.map(inked);
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, inked(part)]));
    }
    const named = typeof value === "string" && /^@([a-z]+(?:-\d+)?)(?:\/([\d.]+))?$/.exec(value);
    if (!named) return value;
    const hex = property(named[1]);
    if (named[2] === undefined) return hex;
    const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
    return `rgba(${parts.join(",")},${named[2]})`;
  };

  const layoutOf = (view, width) => {
    const narrow = width < 560;
    const perRow = Math.max(1, Math.floor(width / 150));
    const legend = view.legend ? 24 * Math.ceil(view.legend / perRow) : 0;
    const axis = (own) => ({
      automargin: true, gridcolor: property("rule"), zerolinecolor: property("rule"),
      linecolor: property("quiet"), ...inked(own),
    });
    return {
      ...inked(view.layout),
      xaxis: axis(view.layout.xaxis), yaxis: axis(view.layout.yaxis),
      width, height: view.height + legend,
      margin: { l: 48, r: narrow ? 8 : 16, t: 12, b: 44, pad: 2 },
      paper_bgcolor: property("background"), plot_bgcolor: property("background"),
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 13, color: property("text") },
      hoverlabel: { namelength: -1 },
      showlegend: view.legend > 0,
      legend: { orientation: "h", x: 0, xanchor: "left", y: 0, yref: "container", yanchor: "bottom", itemwidth: 44 },
      dragmode: coarse ? false : "zoom",
    };
  };

  // The largest dot fills a cell of the grid, however large the axes have come out.
  const fitDots = (plot, view) => {
    const area = plot.querySelector("rect.nsewdrag");
    const sides = ["width", "height"].map((side, place) => Number(area.getAttribute(side)) / view.cells[place]);
    const cell = Math.max(4, 0.9 * Math.min(...sides));
    return Plotly.restyle(plot, { "marker.sizeref": view.largest / (cell * cell) });
  };

  const fillTable = (details, rows) => {
    details.hidden = rows.length === 0;
    const table = details.querySelector("table");
    table.replaceChildren();
    rows.forEach((row, place) => {
      const line = (place === 0 ? table.createTHead() : table.tBodies[0] || table.createTBody()).insertRow();
      row.forEach((text, column) => {
        const cell = document.createElement(place === 0 || column === 0 ? "th" : "td");
        cell.scope = place === 0 ? "col" : "row";
        if (cell.tagName === "TD") cell.removeAttribute("scope");
        cell.textContent = text;
        line.append(cell);
      });
    });
  };

  const controlsOf = (element) => [...element.querySelectorAll("[data-choice]")];
  const placeOf = (control) => (control.type === "range" ? Number(control.value) : control.selectedIndex);

  const draw = (element) => {
    const figure = figures[element.dataset.figure];
    const plot = element.querySelector(".plot");
    const caption = element.querySelector("figcaption");
    const key = controlsOf(element).map(placeOf).join("-");
    const view = figure[key];
    element.querySelectorAll("output").forEach((output) => {
      const slider = output.parentElement.querySelector("[data-choice]");
      output.value = slider.dataset.options.split(" ")[placeOf(slider)];
    });
    if (!view) {
      Plotly.purge(plot);
      plot.replaceChildren();
      caption.textContent = "Nothing was recorded for this choice.";
      plot.setAttribute("aria-label", caption.textContent);
      fillTable(element.querySelector("details"), []);
      return;
    }
    caption.textContent = view.sentence;
    plot.setAttribute("aria-label", view.sentence);
    fillTable(element.querySelector("details"), view.table);
    const width = plot.clientWidth;
    const drawn = Plotly.react(plot, inked(view.data), layoutOf(view, width), { displayModeBar: false });
    if (view.cells) drawn.then(() => fitDots(plot, view));
  };

  const elements = [...document.querySelectorAll("[data-figure]")];
  const drawAll = () => elements.forEach(draw);

  // What is chosen in one figure is chosen in all that offer it, so that they are of the same thing.
  const follow = (changed, from) => {
    elements.forEach((element) => {
      if (element !== from) {
        controlsOf(element).forEach((control) => {
          const same = control.dataset.choice === changed.dataset.choice && control.tagName === "SELECT";
          if (same && [...control.options].some((option) => option.value === changed.value)) {
            if (control.value !== changed.value) {
              control.value = changed.value;
              draw(element);
            }
          }
        });
      }
    });
  };

  elements.forEach((element) => {
    controlsOf(element).forEach((control) => {
      const slider = control.type === "range";
      control.addEventListener(slider ? "input" : "change", () => {
        draw(element);
        if (!slider) follow(control, element);
      });
    });
  });

  const compare = (one, other) => {
    const numbers = [one, other].map(Number);
    return numbers.some(Number.isNaN) ? one.localeCompare(other) : numbers[0] - numbers[1];
  };

  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const value = (row) => row.cells[column].dataset.value;
        const rows = [...body.rows].sort((one, other) => {
          const [first, second] = [value(one), value(other)];
          if (first === "" || second === "") return (first === "") - (second === ""); // the empty ones last
          return (down ? -1 : 1) * compare(first, second);
        });
        body.append(...rows);
      });
    });
  });

  let wait = 0;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(wait);
    wait = setTimeout(drawAll, 150);
  });
  dark.addEventListener("change", drawAll);
  drawAll();
  document.documentElement.dataset.drawn = "yes";
})();
