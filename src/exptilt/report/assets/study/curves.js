// Lines along the depth of the model, and over its training.
function shortPlace(place, index) {
  const number = place.match(/\d+/);
  return number ? number[0] : index === 0 ? place.slice(0, 5) : place.slice(0, 6);
}

// p-values are drawn on a logarithmic axis, those below 1e-16 as that.
const isP = (curve) => curve.id === "gaussian_p";
const floored = (curve, values) => (isP(curve) ? values.map((value) => (value === null ? null : Math.max(value, 1e-16))) : values);

function layerChart(curve) {
  const { places, value } = curve;
  const spectrum = Array.isArray(value[0]);
  if (spectrum) {
    const xs = value[0].map((_, index) => index + 1);
    const series = value.map((line, index) => ({ values: line, colour: depth(index, value.length), faint: true }));
    return lineChart({ label: `${curve.title} by component, one line a place`, xs, series, xTicks: ticks(1, xs.length, 4).filter((tick) => tick >= 1).map((tick) => [tick, String(tick)]), xLabel: "component (faint: first place, strong: last)", logarithmic: known(value).every((item) => item > 0), tell: (index) => `component ${index + 1}: ${places[0]} ${show(value[0][index])}, ${places.at(-1)} ${show(value.at(-1)[index])}` });
  }
  const xs = places.map((_, index) => index);
  const tell = (index) => `${places[index]}: ${showError(value[index], curve.error?.[index], curve.unit)}`;
  return lineChart({ label: `${curve.title} from ${places[0]} to ${places.at(-1)}`, xs, series: [{ values: floored(curve, value), error: curve.error, colour: "var(--series-0)", strong: true }], logarithmic: isP(curve), xTicks: xs.map((index) => [index, shortPlace(places[index], index)]), xLabel: "place along the depth", tell });
}

function paintLayers() {
  for (const place of document.querySelectorAll("[data-curve]")) {
    const curve = DATA.curves.find((other) => other.id === place.dataset.curve);
    place.replaceChildren(layerChart(curve));
  }
}

function trainingCard(title, unit, plot, text) {
  const name = make("h3", { textContent: title }, ...(unit ? [make("span", { className: "unit", textContent: `, ${unit}` })] : []));
  const card = make("figure", { className: "card" }, name, make("div", { className: "chart" }, plot), make("figcaption", {}, make("p", { className: "note", textContent: text })));
  card.mark = plot.mark;
  return card;
}

const overSteps = () => ({ xs: STEPS, spread: "log", xTicks: STEPS.map((step) => [step, step >= 1e4 ? `${step / 1000}k` : String(step)]), xLabel: "training step, logarithmic", onPick: (index) => choose({ checkpoint: index }) });

// The chosen statistic of every head: a layer's heads in one line's colour, the open head above them.
function measureCard() {
  const measure = chosenMeasure();
  if (!measure.training) return make("figure", { className: "card", hidden: true });
  const curve = (layer, head) => measure.training.map((values) => values[layer][head]);
  const series = measure.value.map((row, layer) => ({ lines: row.map((_, head) => curve(layer, head)), colour: depth(layer, LAYERS), faint: true }));
  const mine = curve(state.layer, state.head);
  series.push({ values: mine, colour: "var(--series-1)", strong: true });
  return trainingCard(measure.title, measure.unit, lineChart({ ...overSteps(), label: `${measure.title} of every head over training`, series, tell: (index) => `step ${STEPS[index]}, L${state.layer}H${state.head}: ${show(mine[index])}` }), `Every head; faint lines are early layers, strong ones late. In orange: layer ${state.layer}, head ${state.head}.`);
}

const training = { card: null };

function paintTraining() {
  const place = document.getElementById("training-charts");
  if (!place) return;
  const cards = [measureCard()], { loss, layers } = DATA.training, common = overSteps();
  if (known(loss).length) cards.unshift(trainingCard("Loss", "nats a token", lineChart({ ...common, label: "Loss over training", series: [{ values: loss, colour: "var(--series-1)", strong: true }], tell: (index) => `step ${STEPS[index]}: ${show(loss[index])}` }), "Mean loss of the next token on these texts."));
  for (const curve of DATA.curves) {
    const values = layers[curve.id];
    if (!values || Array.isArray(values[0][0])) continue;
    const count = values[0].length;
    const series = values[0].map((_, index) => ({ values: floored(curve, values.map((row) => row[index])), colour: depth(index, count), faint: true }));
    cards.push(trainingCard(curve.title, curve.unit, lineChart({ ...common, label: `${curve.title} at every place over training`, series, logarithmic: isP(curve), tell: (index) => `step ${STEPS[index]}: first ${show(values[index][0])}, last ${show(values[index].at(-1))}` }), `One line a place, from ${curve.places[0]} (faint) to ${curve.places.at(-1)} (strong).`));
  }
  place.replaceChildren(...cards);
  training.card = cards[known(loss).length ? 1 : 0];
  markTraining();
}

// Another statistic or head: only its own picture is drawn anew.
function repaintMeasure() {
  if (!training.card) return;
  const card = measureCard();
  training.card.replaceWith(card);
  training.card = card;
  card.mark?.(state.checkpoint);
}

function markTraining() {
  if (!STEPS) return;
  for (const card of document.getElementById("training-charts").children) card.mark?.(state.checkpoint);
  for (const slider of document.querySelectorAll(".checkpoint")) {
    slider.value = state.checkpoint;
    slider.setAttribute("aria-valuetext", checkpointName());
    document.getElementById(`${slider.id}-shown`).textContent = checkpointName();
  }
}

function buildSliders() {
  for (const slider of document.querySelectorAll(".checkpoint")) slider.addEventListener("input", () => choose({ checkpoint: Number(slider.value) }));
  const atEnd = () => state.checkpoint >= STEPS.length - 1;
  const play = document.getElementById("play");
  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
  play?.addEventListener("click", () => {
    if (timer) return stop();
    play.textContent = "Stop";
    if (atEnd()) choose({ checkpoint: 0 });
    timer = setInterval(() => { if (!atEnd()) choose({ checkpoint: state.checkpoint + 1 }); if (atEnd()) stop(); }, 600);
  });
}
