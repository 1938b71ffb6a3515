// The attention of one head over a short text: the words, shaded by how much the chosen one attends to them, and the whole matrix beside.
// Of a picture, or the spectrogram of a sound, the words are its cells, drawn over it.
const attention = { query: null };

function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return Float32Array.from(bytes, (byte) => (byte / 255) ** 2);
}

// A head's strip and its number of tokens: at the checkpoint where strips were kept, else of the model studied.
function stripNow(detail) {
  const strips = DATA.training?.strips;
  if (atStudied() || !strips) return [detail.strip, DATA.strip.length];
  return [strips.at[state.checkpoint][detail.place], strips.size];
}

const SHOWN = DATA.picture?.kind ?? "text";

// Fill a canvas pixel by pixel, row by row: each is red, green, blue and opacity, 0 to 255.
function fillCanvas(canvas, pixel) {
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  for (let index = 0; index < canvas.width * canvas.height; index += 1) image.data.set(pixel(index), 4 * index);
  context.putImageData(image, 0, 0);
}
const inkOf = (element) => getComputedStyle(element).color.match(/[\d.]+/g).slice(0, 3).map(Number);

function pictureCanvas({ width, height, pixels }) {
  const canvas = make("canvas", { width, height, className: "pixels" }), bytes = atob(pixels);
  fillCanvas(canvas, (index) => [0, 1, 2].map((part) => bytes.charCodeAt(3 * index + part)).concat(255));
  canvas.setAttribute("aria-hidden", "true");
  return canvas;
}

// The words in a row, or those that have a place in the picture over it.
function arrange(words) {
  if (!DATA.picture) return words;
  const { special, columns, rows } = DATA.picture;
  const grid = make("div", { className: "patches" }, ...words.slice(special));
  grid.style.gridTemplate = `repeat(${rows}, 1fr) / repeat(${columns}, 1fr)`;
  for (const word of words.slice(special)) word.classList.add("patch");
  return [make("div", { className: "placeless" }, ...words.slice(0, special)), make("div", { className: "overlaid" }, pictureCanvas(DATA.picture), grid)];
}

function attentionView(detail, name) {
  const [packed, size] = stripNow(detail), tokens = DATA.strip.slice(0, size);
  if (!size) return make("p", { className: "note", textContent: "No text was kept for this head." });
  const weights = unpack(packed);
  if (attention.query === null || attention.query >= size) attention.query = Math.min(size - 1, Math.floor(size * 0.7));
  const words = tokens.map((token, index) => {
    const word = make("button", { type: "button", className: "token", tabIndex: -1 }, make("span", { textContent: token }));
    word.dataset.index = index;
    if (token.includes("↵")) word.classList.add("break");
    return word;
  });
  const told = make("p", { className: "readout" });
  const canvas = make("canvas", { width: size, height: size, className: "matrix" });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Attention of ${name}: rows are queries, columns keys, ${size} tokens. The same numbers are in the words beside.`);
  const line = make("div", { className: "row-mark" });

  function paintMatrix() {
    const ink = inkOf(canvas);
    fillCanvas(canvas, (index) => [...ink, Math.round(255 * Math.sqrt(weights[index]))]);
  }

  function select(query, focus = false) {
    attention.query = query;
    const row = weights.subarray(query * size, (query + 1) * size);
    let best = 0;
    words.forEach((word, index) => {
      const share = row[index]; // of all attention, not of the most: even attention is pale
      if (row[index] > row[best]) best = index;
      if (word.classList.contains("patch")) word.style.background = share > 0.004 ? `rgb(255 96 0 / ${Math.round(100 * (0.08 + 0.82 * Math.sqrt(share)))}%)` : "";
      else word.style.background = share > 0.004 ? ramp(0.12 + 0.88 * Math.sqrt(share), false) : "";
      word.classList.toggle("shaded", share > 0.004);
      word.classList.toggle("deep", share > 0.004 && isDeep(0.12 + 0.88 * Math.sqrt(share), false));
      word.classList.toggle("query", index === query);
      word.tabIndex = index === query ? 0 : -1;
      word.setAttribute("aria-pressed", String(index === query));
      word.title = `${percent(row[index])} of the attention of token ${query}`;
      word.setAttribute("aria-label", `token ${index} “${tokens[index]}”, gets ${percent(row[index])}`);
    });
    if (focus) words[query].focus();
    line.style.top = `${(100 * query) / size}%`;
    line.style.height = `${100 / size}%`;
    const gone = DATA.picture ? 0 : 1 - row.reduce((sum, share) => sum + share, 0); // to keys beyond those shown, which the model sees
    const rest = gone > 0.05 ? ` Beyond the tokens shown goes ${percent(gone)}.` : "";
    told.textContent = row[best] > 0 ? `From “${tokens[query]}” (token ${query}), ${gone > 0.05 ? "of those shown, " : ""}most goes to “${tokens[best]}” (token ${best}): ${percent(row[best])}.${rest}` : `“${tokens[query]}” (token ${query}) attends to nothing that is shown.`;
  }

  const strip = make("div", { className: DATA.picture ? "strip whole" : "strip", role: "group", ariaLabel: `The ${SHOWN}, shaded by attention. Choose a token to look from.` }, ...arrange(words));
  strip.addEventListener("click", (event) => {
    const word = event.target.closest(".token");
    if (word) select(Number(word.dataset.index), true);
  });
  strip.addEventListener("keydown", (event) => {
    const row = DATA.picture && attention.query >= DATA.picture.special ? DATA.picture.columns : 1;
    const step = { ArrowRight: 1, ArrowDown: row, ArrowLeft: -1, ArrowUp: -row }[event.key];
    const next = step ? attention.query + step : { Home: 0, End: size - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    if (next >= 0 && next < size) select(next, true);
  });
  const frame = make("div", { className: "matrix-frame" }, canvas, line);
  const follow = (event) => {
    const box = canvas.getBoundingClientRect();
    select(Math.min(size - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * size))));
  };
  canvas.addEventListener("pointerdown", follow);
  canvas.addEventListener("pointermove", (event) => event.buttons && follow(event));
  requestAnimationFrame(paintMatrix);
  attention.repaint = paintMatrix;
  select(attention.query);
  return make("div", { className: "attention" }, make("div", {}, strip, told), make("div", {}, frame, make("p", { className: "note", textContent: "All pairs: rows are queries, columns are keys." })));
}
