// Wires the parts together. #L2H3 opens a head, #L2H3:entropy a head and a statistic; the address follows what is open.
function fromAddress(address = location.hash, quietly = false) {
  const found = address.match(/^#L(\d+)H(\d+)(?::(.+))?$/);
  if (!found || Number(found[1]) >= LAYERS || Number(found[2]) >= HEADS) return false;
  const changes = { layer: Number(found[1]), head: Number(found[2]) };
  if (MEASURES.some((measure) => measure.id === found[3])) changes.measure = found[3];
  choose(changes);
  return !quietly;
}

// The miniature of a finding: the attention of its head, as in the thumbnails.
function buildCards() {
  for (const canvas of document.querySelectorAll("canvas[data-place]")) {
    const strip = DATA.details[canvas.dataset.place]?.strip, size = DATA.strip.length;
    if (!strip || !size) { canvas.remove(); continue; }
    canvas.width = canvas.height = size;
    const paint = () => { const bytes = atob(strip), ink = inkOf(canvas); fillCanvas(canvas, (index) => [...ink, bytes.charCodeAt(index)]); };
    paint();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  }
}

// A link into a fold opens it.
function unfold() {
  const fold = document.getElementById(location.hash.slice(1))?.closest("details");
  if (fold) fold.open = true;
}

function start() {
  document.body.classList.add("js");
  if (!MEASURES.length) return;
  const select = document.getElementById("measure");
  buildHeatmap(document.getElementById("heatmap"));
  buildChooser(select);
  buildKinds(document.getElementById("kind"));
  buildSide(document.getElementById("side"));
  buildSliders();
  const opened = fromAddress() || fromAddress(`#${DATA.first}`, true);
  select.value = state.measure;
  paintHeatmap();
  paintHead();
  buildThumbnails(document.getElementById("thumbnails"));
  paintLayers();
  paintTraining();
  listeners.push((changed) => {
    select.value = state.measure;
    paintHeatmap();
    if (changed.has("layer") || changed.has("head") || changed.has("checkpoint") || changed.has("side")) paintHead();
    if (changed.has("layer") || changed.has("head") || changed.has("kind")) markThumbnails();
    if (changed.has("layer") || changed.has("head") || changed.has("measure")) {
      repaintMeasure();
      history.replaceState(null, "", `#L${state.layer}H${state.head}:${state.measure}`);
    } else markTraining();
  });
  buildCards();
  if (opened) revealHead(true);
  addEventListener("hashchange", () => (fromAddress() ? revealHead(true) : unfold()));
  for (const place of document.querySelectorAll("#meanings-table + .scroll td, .charts figcaption .note")) place.replaceChildren(...withClaims(place.textContent));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { attention.repaint?.(); thumbnails.paint?.(); });
  // On paper, what is folded away is shown.
  const folded = [];
  addEventListener("beforeprint", () => {
    folded.push(...document.querySelectorAll("details:not([open])"));
    for (const item of folded) item.open = true;
  });
  addEventListener("afterprint", () => {
    for (const item of folded.splice(0)) item.open = false;
  });
}
start();
