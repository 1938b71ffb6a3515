// All heads at a glance: the attention of each over the same text as a small picture. They are drawn when they are first looked at.
const thumbnails = { buttons: [], paint: null };

function buildThumbnails(place) {
  if (!place || !DATA.strip.length) return;
  const size = DATA.strip.length, canvases = [];
  const grid = make("div", { className: "thumbnails", role: "group", ariaLabel: "Attention of every head over the same text" });
  for (let layer = 0; layer < LAYERS; layer += 1) {
    for (let head = 0; head < HEADS; head += 1) {
      const detail = DATA.details[`L${layer}H${head}`];
      if (!detail) continue;
      const canvas = make("canvas", { width: size, height: size });
      const kinds = kindsOf(layer, head), name = headName(layer, head) + (kinds.length ? `: ${kinds.join(", ")}` : "");
      const button = make("button", { type: "button", ariaLabel: `Open ${name}`, title: name }, canvas, make("span", { textContent: `L${layer}H${head}`, ariaHidden: "true" }));
      button.addEventListener("click", () => { choose({ layer, head }); revealHead(true); });
      canvases.push([canvas, detail.strip]);
      thumbnails.buttons.push([button, layer, head]);
      grid.append(button);
    }
  }
  place.append(grid);
  thumbnails.paint = () => {
    const ink = inkOf(grid);
    for (const [canvas, strip] of canvases) {
      const bytes = atob(strip);
      fillCanvas(canvas, (index) => [...ink, bytes.charCodeAt(index)]);
    }
  };
  const fold = place.closest("details");
  const first = () => { if (fold.open) { thumbnails.paint(); fold.removeEventListener("toggle", first); } };
  fold.addEventListener("toggle", first);
  first();
  markThumbnails();
}

function markThumbnails() {
  for (const [button, layer, head] of thumbnails.buttons) {
    button.classList.toggle("aside", !isShown(layer, head));
    button.setAttribute("aria-pressed", String(layer === state.layer && head === state.head));
  }
}
