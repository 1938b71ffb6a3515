// Lines along the depth of the model, and over its training.
function shortPlace(place, index) {
  const number = place.match(/\d+/);
  return number ? number[0] : index === 0 ? place.slice(0, 5) : place.slice(0, 6);
}

function layerChart(curve) {
  const { places, value } = curve;
  const spectrum = Array.isArray(value[0]);
  if (spectrum) {
    const xs = value[0].map((_, index) => index + 1);
    const series = value.map((line, index) => ({ name: places[index], values: line, colour: depth(index, value.length), faint: true }));
    return lineChart({ label: `${curve.title} by component, one line a place`, xs, series, xTicks: ticks(1, xs.length, 4).filter((tick) => tick >= 1).map((tick) => [tick, String(tick)]), xLabel: "component (faint: first place, strong: last)", logarithmic: known(value).every((item) => item > 0), tell: (index) => `component ${index + 1}: ${places[0]} ${show(value[0][index])}, ${places.at(-1)} ${show(value.at(-1)[index])}` });
  }
  const xs = places.map((_, index) => index);
  const tell = (index) => `${places[index]}: ${showError(value[index], curve.error?.[index], curve.unit)}`;
  return lineChart({ label: `${curve.title} from ${places[0]} to ${places.at(-1)}`, xs, series: [{ name: curve.title, values: value, error: curve.error, colour: "var(--series-0)", strong: true }], logarithmic: curve.id === "gaussian_p" && known(value).every((item) => item > 0), xTicks: xs.map((index) => [index, shortPlace(places[index], index)]), xLabel: "place along the depth", tell });
}

function paintLayers() {
  for (const place of document.querySelectorAll("[data-curve]")) {
    const curve = DATA.curves.find((other) => other.id === place.dataset.curve);
    place.replaceChildren(layerChart(curve));
  }
}

const training = { marks: [] };

function trainingCard(title, unit, plot, text) {
  training.marks.push(plot.mark);
  const name = make("h3", { textContent: title }, ...(unit ? [make("span", { className: "unit", textContent: `, ${unit}` })] : []));
  return make("figure", { className: "card" }, name, make("div", { className: "chart" }, plot), make("figcaption", {}, make("p", { className: "note", textContent: text })));
}

function paintTraining() {
  const place = document.getElementById("training-charts");
  if (!place) return;
  training.marks = [];
  const cards = [], measure = chosenMeasure(), { loss, layers } = DATA.training;
  const common = { xs: STEPS, spread: "log", xTicks: STEPS.map((step) => [step, step >= 1e4 ? `${step / 1000}k` : String(step)]), xLabel: "training step, logarithmic", onPick: (index) => choose({ checkpoint: index }) };
  if (known(loss).length) cards.push(trainingCard("Loss", "nats a token", lineChart({ ...common, label: "Loss over training", series: [{ values: loss, colour: "var(--series-1)", strong: true }], tell: (index) => `step ${STEPS[index]}: ${show(loss[index])}` }), "Mean loss of the next token on these texts."));
  if (measure.training) {
    const lines = [];
    for (let layer = 0; layer < LAYERS; layer += 1) {
      for (let head = 0; head < HEADS; head += 1) {
        const chosen = layer === state.layer && head === state.head;
        const line = { values: measure.training.map((values) => values[layer][head]), colour: chosen ? "var(--series-1)" : depth(layer, LAYERS), strong: chosen, faint: !chosen };
        if (chosen) lines.push(line);
        else lines.unshift(line);
      }
    }
    const mine = measure.training.map((values) => values[state.layer][state.head]);
    cards.push(trainingCard(measure.title, measure.unit, lineChart({ ...common, label: `${measure.title} of every head over training`, series: lines, tell: (index) => `step ${STEPS[index]}, L${state.layer}H${state.head}: ${show(mine[index])}` }), `Every head; faint lines are early layers, strong ones late. In orange: layer ${state.layer}, head ${state.head}.`));
  }
  for (const curve of DATA.curves) {
    const values = layers[curve.id];
    if (!values || Array.isArray(values[0][0])) continue;
    const count = values[0].length;
    const series = values[0].map((_, index) => ({ values: values.map((row) => row[index]), colour: depth(index, count), faint: true }));
    cards.push(trainingCard(curve.title, curve.unit, lineChart({ ...common, label: `${curve.title} at every place over training`, series, tell: (index) => `step ${STEPS[index]}: first ${show(values[index][0])}, last ${show(values[index].at(-1))}` }), `One line a place, from ${curve.places[0]} (faint) to ${curve.places.at(-1)} (strong).`));
  }
  place.replaceChildren(...cards);
  markTraining();
}

function markTraining() {
  if (!STEPS) return;
  for (const mark of training.marks) mark(state.checkpoint);
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
