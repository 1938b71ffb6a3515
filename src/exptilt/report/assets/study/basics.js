// What every part uses: the data, elements, numbers, colours, the chosen head and statistic.
// Text goes into the page by textContent alone: tokens are a stranger's text.
const DATA = JSON.parse(document.getElementById("data").textContent);
const [LAYERS, HEADS] = DATA.shape;
const MEASURES = DATA.measures.filter((measure) => measure.value);
const STEPS = DATA.training ? DATA.training.steps : null;
const SVG = "http://www.w3.org/2000/svg";

function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria")) element.setAttribute(`aria-${key.slice(4).toLowerCase()}`, value);
    else if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    // The page's policy refuses style attributes; a style set here is a property and passes.
    if (key === "style") Object.assign(element.style, value);
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// Claims of the theory, such as (F3), as links to the page's own list of them.
function withClaims(text) {
  return text.split(/\(([A-F]\d+)\)/).map((part, index) => {
    const claim = index % 2 ? part : null;
    if (claim === null) return part;
    return document.getElementById(`claim-${claim}`) ? make("a", { href: `#claim-${claim}`, textContent: `(${claim})` }) : `(${claim})`;
  });
}

// Three significant digits, a true minus sign.
function show(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "n/a";
  const size = Math.abs(value);
  let text;
  if (value === 0) text = "0";
  else if (size >= 1e5 || size < 1e-3) text = value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  else if (size >= 100) text = value.toFixed(0);
  else text = String(Number(value.toPrecision(3)));
  return text.replaceAll("-", "−") + (unit ? ` ${unit}` : "");
}

// A value with its standard error, to as many digits as the error gives meaning to.
function showError(value, error, unit = "") {
  if (value === null || !error || Math.max(Math.abs(value), error) >= 1e5 || error < 1e-5) return show(value, unit);
  const digits = Math.max(0, 1 - Math.floor(Math.log10(error)));
  return `${value.toFixed(digits)} ± ${error.toFixed(digits)}${unit ? ` ${unit}` : ""}`.replaceAll("-", "−");
}

// A few characters, for the inside of a cell.
function brief(value) {
  if (value === null) return "–";
  const size = Math.abs(value);
  let text;
  if (size >= 1e4 || (size < 1e-4 && size > 0)) text = value.toExponential(0).replace("e+", "e");
  else if (size >= 100) text = value.toFixed(0);
  else text = String(Number(value.toPrecision(size < 0.01 ? 1 : 2)));
  return text.replaceAll("-", "−");
}

function percent(share) {
  if (share < 0.0995) return share >= 1e-5 ? `${Number((100 * share).toPrecision(2))} %` : share === 0 ? "0 %" : "under 0.001 %";
  return share <= 0.99 || share === 1 ? `${Math.round(100 * share)} %` : `${Math.min(99.9, 100 * share).toFixed(1)} %`;
}
const known = (values) => values.flat(Infinity).filter((value) => value !== null && Number.isFinite(value));

// Colours are mixed from the page's own variables, so they follow light, dark and print by themselves.
function ramp(share, diverging) {
  const [first, middle, last] = diverging ? ["--below", "--middle", "--above"] : ["--ramp-0", "--ramp-1", "--ramp-2"];
  const low = share < 0.5;
  const part = Math.round(1000 * (low ? 2 * share : 2 * share - 1)) / 10;
  return `color-mix(in oklab, var(${low ? middle : last}) ${part}%, var(${low ? first : middle}))`;
}
// Where black and white letters are equally easy to read on the ramp, in the light and in the dark: the colours were chosen to that end.
const isDeep = (share, diverging) => (diverging ? Math.abs(share - 0.5) > 0.362 : share > 0.604);

// A line's colour by its place along the depth.
const depth = (index, count) => `color-mix(in oklab, var(--deep-1) ${count > 1 ? Math.round((100 * index) / (count - 1)) : 50}%, var(--deep-0))`;

// How the values of a statistic become shares of the ramp: symmetric about 0 where both signs occur, in logarithms where positive values
// without an upper bound span a factor over 50, else straight from the lowest to the highest. Over all checkpoints, so that colours compare
// along the slider. Unbounded values far outside the rest (three times the middle half's width beyond it) take the end colours, and the
// legend says so.
function scaleOf(measure) {
  const apart = state.side === "difference" && measure.other;
  const values = known(apart ? valuesNow(measure) : [measure.value, measure.training ?? [], measure.other ?? []]).sort((a, b) => a - b);
  if (!values.length) return { low: 0, high: 1, diverging: false, logarithmic: false, flat: true, share: () => 0.5 };
  const [least, most] = apart ? [null, null] : measure.span;
  const logarithmic = most === null && values[0] > 0 && values.at(-1) / values[0] > 50;
  const bend = logarithmic ? Math.log : (value) => value;
  const unbend = logarithmic ? Math.exp : (value) => value;
  const quarter = (part) => bend(values[Math.floor(part * (values.length - 1))]);
  const reach = 3 * (quarter(0.75) - quarter(0.25));
  let low = bend(values[0]), high = bend(values.at(-1));
  if (reach > 0 && least === null) low = Math.max(low, quarter(0.25) - reach);
  if (reach > 0 && most === null) high = Math.min(high, quarter(0.75) + reach);
  // Differences that the errors do not bear out, or that are small beside the statistic itself, must not look like much: the colours span at
  // least twelve standard errors, and a tenth of the possible values or of the middle one.
  const errors = known(errorsNow(measure) ?? []).sort((a, b) => a - b);
  const error = errors.length ? errors[Math.floor(errors.length / 2)] : 0;
  const own = known(measure.value).map(Math.abs).sort((a, b) => a - b);
  const breadth = least !== null && most !== null ? most - least : own[Math.floor(own.length / 2)] ?? 0;
  const lacking = logarithmic ? 0 : Math.max(12 * error, 0.1 * breadth) - (high - low);
  if (lacking > 0) [low, high] = [low - lacking / 2, high + lacking / 2];
  const diverging = !logarithmic && low < 0 && high > 0 && -low > 0.02 * high;
  if (diverging) [low, high] = [-Math.max(-low, high), Math.max(-low, high)];
  const width = high - low;
  return {
    low: unbend(low), high: unbend(high), diverging, logarithmic, flat: lacking > 0, middle: unbend((low + high) / 2),
    below: bend(values[0]) < low, above: bend(values.at(-1)) > high,
    share: (value) => (width > 0 ? Math.min(1, Math.max(0, (bend(value) - low) / width)) : 0.5),
  };
}

// What is chosen, and who wants to know. The checkpoint after the last one stands for the model studied, which may be none of them.
const state = { kind: "", side: "", measure: MEASURES.length ? MEASURES[0].id : null, layer: 0, head: 0, checkpoint: STEPS ? DATA.training.studied : null };
const listeners = [];
function choose(changes) {
  const changed = new Set(Object.keys(changes).filter((key) => state[key] !== changes[key]));
  Object.assign(state, changes);
  if (changed.size) for (const listener of listeners) listener(changed);
}
const KINDS = new Map();
for (const { id, members } of DATA.kinds) for (const [layer, head] of members) KINDS.set(layer * HEADS + head, [...(KINDS.get(layer * HEADS + head) ?? []), id]);
const kindsOf = (layer, head) => KINDS.get(layer * HEADS + head) ?? [];
// Questions of the theory stand apart from what is plainly counted.
const isTheory = (measure) => /^(ascent|gaussian|local_gaussian|link)/.test(measure.id);
const isShown = (layer, head) => !state.kind || kindsOf(layer, head).includes(state.kind);
const chosenMeasure = () => MEASURES.find((measure) => measure.id === state.measure);
const atStudied = () => !STEPS || state.checkpoint === DATA.training.studied;
// The values the heatmap shows now: of the checkpoint where they were followed, else of the model studied.
const isStudied = (measure) => atStudied() || !measure.training;
// Of two studies side by side, the other one, or the first minus the other.
const pairwise = (one, other, join) => one.map((row, layer) => row.map((value, head) => (value === null || other[layer][head] === null ? null : join(value, other[layer][head]))));
function valuesNow(measure) {
  const own = isStudied(measure) ? measure.value : measure.training[state.checkpoint];
  if (!state.side || !measure.other) return own;
  return state.side === "other" ? measure.other : pairwise(own, measure.other, (a, b) => a - b);
}
function errorsNow(measure) {
  if (!isStudied(measure) && state.side !== "other") return null;
  if (!state.side || !measure.other) return measure.error;
  if (state.side === "other") return measure.otherError;
  return measure.error && measure.otherError ? pairwise(measure.error, measure.otherError, Math.hypot) : null;
}
const checkpointName = () => (!atStudied() ? `step ${STEPS[state.checkpoint]}` : STEPS && DATA.training.studied < STEPS.length ? `step ${STEPS.at(-1)}, the model studied` : "the model studied");
const headName = (layer, head) => `layer ${layer}, head ${head}`;
