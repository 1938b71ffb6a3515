// One letter for each kind of heads, which stands in the squares of its heads.
const MARKS = { induction: "I", "first token": "F", "previous token": "P", "next token": "N", delimiter: "D", duplicate: "U", local: "L", diffuse: "E", dead: "X" };
// Layers by heads: a grid of cells, one in the tab order, arrows move, Enter or a click opens the head. Under it the legend of its colours.
const heat = { cells: [], readout: document.getElementById("heat-readout") };

function buildHeatmap(place) {
  const top = make("tr", { role: "row" }, make("td", { role: "presentation", className: "corner" }));
  for (let head = 0; head < HEADS; head += 1) top.append(make("th", { scope: "col", textContent: String(head), ariaLabel: `head ${head}` }));
  const body = make("tbody", { role: "rowgroup" });
  for (let layer = 0; layer < LAYERS; layer += 1) {
    const row = make("tr", { role: "row" }, make("th", { scope: "row", textContent: String(layer), ariaLabel: `layer ${layer}` }));
    heat.cells.push([]);
    for (let head = 0; head < HEADS; head += 1) {
      const marks = kindsOf(layer, head).map((kind) => MARKS[kind]).filter(Boolean).join("");
      const cell = make("td", { role: "gridcell", tabIndex: -1 }, make("span", { ariaHidden: "true" }), make("b", { ariaHidden: "true", textContent: marks }));
      cell.dataset.layer = layer;
      cell.dataset.head = head;
      heat.cells[layer].push(cell);
      row.append(cell);
    }
    body.append(row);
  }
  const table = make("table", { className: `heads${HEADS <= 8 && LAYERS <= 12 ? " roomy" : ""}${HEADS > 16 ? " wide" : ""}${LAYERS > 16 ? " tall" : ""}` });
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", "Heads by layer (rows) and head (columns)");
  table.append(make("thead", { role: "rowgroup" }, top), body);
  const at = (event) => event.target.closest("[data-layer]");
  const open = (cell) => choose({ layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) });
  table.addEventListener("click", (event) => {
    const cell = at(event);
    if (!cell) return;
    open(cell);
    revealHead();
  });
  table.addEventListener("pointerover", (event) => at(event) && tellCell(at(event)));
  table.addEventListener("pointerleave", () => tellCell(heat.cells[state.layer][state.head]));
  table.addEventListener("focusin", (event) => at(event) && tellCell(at(event)));
  table.addEventListener("keydown", (event) => {
    const cell = at(event);
    if (!cell || event.altKey || event.ctrlKey || event.metaKey) return;
    let [layer, head] = [Number(cell.dataset.layer), Number(cell.dataset.head)];
    if (event.key === "ArrowRight") head += 1;
    else if (event.key === "ArrowLeft") head -= 1;
    else if (event.key === "ArrowDown") layer += 1;
    else if (event.key === "ArrowUp") layer -= 1;
    else if (event.key === "Home") head = 0;
    else if (event.key === "End") head = HEADS - 1;
    else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      open(cell);
      revealHead(true);
      return;
    } else return;
    event.preventDefault();
    const next = heat.cells[layer]?.[head];
    if (next) focusCell(next);
  });
  place.replaceChildren(make("p", { className: "axis-name across", textContent: "head", ariaHidden: "true" }), make("p", { className: "axis-name down", textContent: "layer", ariaHidden: "true" }), table);
}

function focusCell(cell) {
  for (const row of heat.cells) for (const other of row) other.tabIndex = other === cell ? 0 : -1;
  cell.focus();
}

const withError = (measure, layer, head) => showError(valuesNow(measure)[layer][head], errorsNow(measure)?.[layer][head], measure.unit);

function tellCell(cell) {
  const [layer, head] = [Number(cell.dataset.layer), Number(cell.dataset.head)];
  const measure = chosenMeasure();
  const base = isStudied(measure) && measure.baseline ? `, baseline ${show(measure.baseline[layer][head])}` : "";
  heat.readout.textContent = `Layer ${layer}, head ${head}: ${measure.title} ${withError(measure, layer, head)}${base}`;
}

function paintHeatmap() {
  const measure = chosenMeasure(), scale = scaleOf(measure), values = valuesNow(measure), errors = errorsNow(measure);
  const inside = document.activeElement?.closest("td[data-layer]") !== null && document.activeElement !== null;
  heat.cells.forEach((row, layer) => row.forEach((cell, head) => {
    const value = values[layer][head], share = value === null ? null : scale.share(value);
    cell.classList.toggle("missing", value === null);
    cell.classList.toggle("aside", !isShown(layer, head));
    cell.classList.toggle("deep", share !== null && isDeep(share, scale.diverging));
    cell.style.background = share === null ? "" : ramp(share, scale.diverging);
    cell.firstChild.textContent = brief(value);
    cell.setAttribute("aria-label", `${headName(layer, head)}: ${value === null ? "no value" : showError(value, errors?.[layer][head], measure.unit)}`);
    const chosen = layer === state.layer && head === state.head;
    cell.setAttribute("aria-selected", String(chosen));
    if (!inside) cell.tabIndex = chosen ? 0 : -1;
  }));
  document.getElementById("marks").textContent = atStudied() ? DATA.kinds.filter(({ members }) => members.length).map(({ id, members }) => `${MARKS[id] ?? ""} ${id} (${members.length})`).join(" · ") : "";
  document.getElementById("heatmap").classList.toggle("moved", !atStudied());
  paintLegend(measure, scale);
  tellCell(heat.cells[state.layer][state.head]);
  document.getElementById("heat-reading").textContent = readingNow(measure);
  document.getElementById("heat-about").replaceChildren(...withClaims([measure.about, measure.assumes && `Assumes: ${measure.assumes}`].filter(Boolean).join(" ")));
}

// What the heatmap shows, in words: of the model studied its reading, of a checkpoint its own numbers.
function readingNow(measure) {
  if (atStudied()) return measure.reading;
  if (!measure.training) return `Not followed over the checkpoints; shown is the model studied, not ${checkpointName()}. ${measure.reading}`;
  const values = known(valuesNow(measure)).sort((a, b) => a - b);
  if (!values.length) return `At ${checkpointName()} no head has a value.`;
  return `At ${checkpointName()}: from ${show(values[0])} to ${show(values.at(-1), measure.unit)}, the median head ${show(values[Math.floor(values.length / 2)])}.`;
}

function paintLegend(measure, scale) {
  const bar = make("div", { className: "bar" });
  const stops = Array.from({ length: 11 }, (_, index) => ramp(index / 10, scale.diverging));
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const ends = [`${scale.below ? "≤ " : ""}${show(scale.low)}`, show(scale.middle), `${scale.above ? "≥ " : ""}${show(scale.high)}`];
  const numbers = make("div", { className: "ends" }, ...ends.map((text) => make("span", { textContent: text })));
  const extra = [measure.unit, scale.logarithmic ? "logarithmic colours" : "", scale.flat ? "heads differ by little, so colours do" : "", state.side === "difference" ? `difference from ${DATA.against}` : measure.training ? "one scale for all checkpoints" : ""].filter(Boolean).join(", ");
  document.getElementById("legend").replaceChildren(bar, numbers, make("p", { className: "note", textContent: [measure.title, extra].filter(Boolean).join(" · ") }));
}

function buildSide(select) {
  select?.addEventListener("change", () => choose({ side: select.value }));
}

// The kinds of heads as a filter: heads of other kinds step back.
function buildKinds(select) {
  if (!select) return;
  for (const { id, members, about } of DATA.kinds) {
    const option = make("option", { value: id, textContent: `${id} (${members.length})`, title: about });
    option.disabled = !members.length;
    select.append(option);
  }
  select.addEventListener("change", () => choose({ kind: select.value }));
}

function buildChooser(select) {
  const theory = make("optgroup", { label: "Theory" });
  for (const measure of DATA.measures) {
    const option = make("option", { value: measure.id, textContent: measure.value ? measure.title : `${measure.title} (not measured)` });
    option.disabled = !measure.value;
    if (!measure.value) option.title = measure.reason;
    (isTheory(measure) ? theory : select).append(option);
  }
  if (theory.children.length) select.append(theory);
  select.value = state.measure;
  select.addEventListener("change", () => choose({ measure: select.value }));
}
