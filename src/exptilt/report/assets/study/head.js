// The panel of one head: what stands out, its attention over a text, what it looks at, how its numbers are spread, all of its statistics.
const panel = document.getElementById("head");

function revealHead(focus = false) {
  const title = panel.querySelector("h3");
  if (focus) title.focus({ preventScroll: true });
  const box = title.getBoundingClientRect();
  if (box.top < 0 || box.top > window.innerHeight * 0.6) title.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

// Tokens, sorted by the attention they get over their share under uniform attention.
function tokenBars(tokens) {
  if (!tokens.length) return make("p", { className: "note", textContent: "Not measured for this head." });
  const most = Math.max(...tokens.map(([, , , lift]) => lift ?? 0), 1e-9);
  const rows = tokens.map(([token, mass, count, lift]) => {
    const bar = make("span", { className: "fill" });
    bar.style.width = `${(100 * (lift ?? 0)) / most}%`;
    const share = make("td", { textContent: percent(mass), title: `mean share of a query that sees it; the token occurs ${count} times in the text` });
    return make("tr", {}, make("th", { scope: "row" }, make("code", { textContent: token })), make("td", { className: "amount" }, bar, make("span", { textContent: `${show(lift)}×` })), share);
  });
  const header = make("thead", {}, make("tr", {}, ...["token", "times uniform", "share"].map((text) => make("th", { scope: "col", textContent: text }))));
  return make("table", { className: "tokens" }, header, make("tbody", {}, ...rows));
}

function rankOf(measure, layer, head) {
  const value = valuesNow(measure)[layer][head];
  if (value === null) return "";
  const values = known(valuesNow(measure));
  return `${values.filter((other) => other > value).length + 1} of ${values.length}`;
}

function statisticsTable(layer, head, measures) {
  const based = measures.some((measure) => measure.baseline);
  const columns = ["statistic", "value", ...(based ? ["baseline"] : []), "rank"];
  const body = measures.map((measure) => {
    const name = make("th", { scope: "row", textContent: measure.title, title: measure.about });
    if (!measure.value) return make("tr", { className: "absent" }, name, make("td", { colSpan: columns.length - 1, textContent: `not measured: ${measure.reason}` }));
    const base = isStudied(measure) && measure.baseline ? show(measure.baseline[layer][head]) : "";
    const value = withError(measure, layer, head);
    return make("tr", {}, name, make("td", { textContent: value }), ...(based ? [make("td", { textContent: base })] : []), make("td", { textContent: rankOf(measure, layer, head) }));
  });
  const header = make("tr", {}, ...columns.map((text) => make("th", { scope: "col", textContent: text })));
  const table = make("table", { className: "statistics" }, make("thead", {}, header), make("tbody", {}, ...body));
  return make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "All statistics of this head" }, table);
}

// Plain statistics, and those of the theory behind a fold that stays as the reader left it.
let theoryOpen = false;
function statistics(layer, head) {
  const theory = DATA.measures.filter(isTheory);
  const parts = [statisticsTable(layer, head, DATA.measures.filter((measure) => !isTheory(measure)))];
  if (theory.length) {
    const fold = make("details", { open: theoryOpen }, make("summary", { textContent: "Theory: ascent, Gaussian keys, link" }), statisticsTable(layer, head, theory));
    fold.addEventListener("toggle", () => { theoryOpen = fold.open; });
    parts.push(fold);
  }
  return parts;
}

function stepper(text, label, change) {
  const index = (state.layer * HEADS + state.head + change + LAYERS * HEADS) % (LAYERS * HEADS);
  const button = make("button", { type: "button", textContent: text, ariaLabel: label, title: label });
  button.addEventListener("click", () => {
    choose({ layer: Math.floor(index / HEADS), head: index % HEADS });
    panel.querySelector(`button[aria-label="${label}"]`).focus();
  });
  return button;
}

function paintHead() {
  const { layer, head } = state, detail = DATA.details[`L${layer}H${head}`];
  const title = make("h3", { textContent: `Layer ${layer}, head ${head}`, tabIndex: -1, id: `L${layer}H${head}` });
  const bar = make("div", { className: "head-bar" }, title, make("div", { className: "steppers" }, stepper("←", "Previous head", -1), stepper("→", "Next head", 1)));
  const part = (name, ...children) => make("div", { className: "part" }, make("h4", { textContent: name }), ...children);
  const parts = [bar];
  if (detail) {
    const kinds = kindsOf(layer, head);
    if (kinds.length && atStudied()) parts.push(make("ul", { className: "chips", ariaLabel: "Kinds of this head" }, ...kinds.map((kind) => make("li", { textContent: kind }))));
    if (atStudied()) parts.push(make("p", { textContent: detail.reading }));
    const module = DATA.names[layer] ?? "", shown = { other: DATA.against, difference: `the difference from ${DATA.against}` }[state.side] ?? checkpointName(), moved = !atStudied() && DATA.training.strips;
    const last = state.side || !atStudied() ? `statistics${moved ? " and attention" : ""} of ${shown}; ${moved ? "spread" : "pictures"} and tokens are of the model studied` : "";
    if (module || last) parts.push(make("p", { className: "note" }, make("code", { textContent: module }), module && last ? ", " : "", last));
    parts.push(part(`Attention over a ${SHOWN}`, make("p", { className: "note", textContent: [DATA.picture ? "Click a patch; stronger patches get more of its attention." : "Click a token; darker tokens get more of its attention.", panel.dataset.stripNote].filter(Boolean).join(" ") }), attentionView(detail, headName(layer, head))));
    const pictures = Object.entries(detail.histograms).map(([id, { edges, counts }]) => {
      const measure = DATA.measures.find((other) => other.id === id);
      const name = measure?.title ?? id.replaceAll("_", " ");
      const picture = histogram({ label: `${name} over queries, from ${show(edges[0])} to ${show(edges[edges.length - 1])}`, edges, counts, unit: measure?.unit ?? "", mark: measure?.value?.[layer][head] });
      return make("figure", {}, make("figcaption", { textContent: name }), picture);
    });
    if (pictures.length) parts.push(part("Spread over queries", make("div", { className: "small" }, ...pictures)));
    parts.push(make("div", { className: "uneven" }, part("What it looks at", tokenBars(detail.tokens)), part("All statistics", ...statistics(layer, head))));
  } else parts.push(part("All statistics", ...statistics(layer, head)));
  panel.replaceChildren(...parts);
}
