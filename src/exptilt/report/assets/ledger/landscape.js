// The landscape of G in two dimensions: points that are each other's patterns, moved by attention and a norm.
document.documentElement.classList.add("js");
{
  const get = (id) => document.getElementById(id);
  const canvas = get("plane"), context = canvas.getContext("2d");
  const reach = 2.6, cells = 64, size = canvas.width;
  let points = [], trails = [], taken = 0, playing = null, seed = 7;

  const random = () => { // a generator of our own: the same points for everyone
    seed = (seed * 1664525 + 1013904223) % 4294967296;
    return (seed + 0.5) / 4294967296;
  };
  const normal = () => Math.sqrt(-2 * Math.log(random())) * Math.cos(2 * Math.PI * random());
  const value = (id) => Number(get(id).value);
  const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;

  // G and its gradient at (x, y): log Σ e^{β<p,η>} and the attention output.
  function tilt(x, y) {
    const beta = value("beta");
    const scores = points.map(([a, b]) => beta * (a * x + b * y));
    const top = Math.max(...scores);
    let total = 0, u = 0, v = 0;
    scores.forEach((score, n) => {
      const weight = Math.exp(score - top);
      total += weight; u += weight * points[n][0]; v += weight * points[n][1];
    });
    return [top + Math.log(total), u / total, v / total];
  }

  const norms = {
    none: (list) => list,
    sphere: (list) => list.map(([x, y]) => { const r = Math.hypot(x, y) || 1; return [x / r, y / r]; }),
    layer: (list) => list.map(([x, y]) => { const d = (x - y) / 2, r = Math.abs(d) || 1; return [d / r, -d / r]; }),
    batch: (list) => {
      const scale = [0, 1].map((k) => {
        const m = mean(list.map((p) => p[k]));
        return [m, Math.sqrt(mean(list.map((p) => (p[k] - m) ** 2))) || 1];
      });
      return list.map((p) => p.map((x, k) => (x - scale[k][0]) / scale[k][1]));
    },
    whiten: (list) => {
      const [mx, my] = [0, 1].map((k) => mean(list.map((p) => p[k])));
      const a = mean(list.map(([x]) => (x - mx) ** 2)) + 1e-9, d = mean(list.map(([, y]) => (y - my) ** 2)) + 1e-9;
      const b = mean(list.map(([x, y]) => (x - mx) * (y - my)));
      // C^{1/2} = (C + √det)/√(tr + 2√det) in two dimensions, and its inverse.
      const s = Math.sqrt(Math.max(a * d - b * b, 1e-12)), t = Math.sqrt(a + d + 2 * s);
      const [p, q, r] = [(a + s) / t, b / t, (d + s) / t], det = p * r - q * q;
      return list.map(([x, y]) => [(r * (x - mx) - q * (y - my)) / det, (p * (y - my) - q * (x - mx)) / det]);
    },
  };

  function step() {
    const length = value("size");
    const moved = points.map(([x, y]) => { const [, u, v] = tilt(x, y); return [x + length * u, y + length * v]; });
    points = norms[get("norm").value](moved);
    taken += 1;
    points.forEach((p, n) => { trails[n].push(p); if (trails[n].length > 60) trails[n].shift(); });
    if (get("norm").value === "none" && Math.max(...points.map(([x, y]) => Math.hypot(x, y))) > 1e4) pause();
  }

  function clusters() {
    const found = [];
    for (const p of points) if (!found.some((q) => Math.hypot(p[0] - q[0], p[1] - q[1]) < 0.05)) found.push(p);
    return found.length;
  }

  function draw() {
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
    const to = (x) => (x / reach + 1) * size / 2, from = (pixel) => (2 * pixel / size - 1) * reach;
    const heights = [];
    for (let j = 0; j < cells; j++) for (let i = 0; i < cells; i++) {
      heights.push(tilt(from((i + 0.5) * size / cells), -from((j + 0.5) * size / cells))[0]);
    }
    const low = Math.min(...heights), span = Math.max(...heights) - low || 1;
    context.globalAlpha = 1;
    context.fillStyle = colour("--card");
    context.fillRect(0, 0, size, size);
    context.fillStyle = colour("--ramp-1");
    heights.forEach((height, n) => {
      context.globalAlpha = 0.08 + 0.72 * Math.round(14 * (height - low) / span) / 14;
      const side = size / cells;
      context.fillRect((n % cells) * side, Math.floor(n / cells) * side, side, side);
    });
    context.globalAlpha = 0.6;
    context.strokeStyle = colour("--ink");
    context.lineWidth = 1.5;
    for (let i = 0; i < 11; i++) for (let j = 0; j < 11; j++) {
      const x = from((i + 0.5) * size / 11), y = from((j + 0.5) * size / 11), [, u, v] = tilt(x, -y);
      const long = Math.hypot(u, v), part = 20 * Math.min(1, long) / (long || 1);
      const [a, b, dx, dy] = [to(x), to(y), u * part, -v * part];
      context.beginPath();
      context.moveTo(a, b); context.lineTo(a + dx, b + dy);
      context.lineTo(a + dx - 0.3 * dx - 0.18 * dy, b + dy - 0.3 * dy + 0.18 * dx);
      context.stroke();
    }
    context.globalAlpha = 0.5;
    context.strokeStyle = colour("--series-1");
    for (const trail of trails) {
      context.beginPath();
      trail.forEach(([x, y], n) => (n ? context.lineTo : context.moveTo).call(context, to(x), to(-y)));
      context.stroke();
    }
    context.globalAlpha = 1;
    context.fillStyle = colour("--series-1");
    context.strokeStyle = colour("--card");
    for (const [x, y] of points) {
      context.beginPath();
      context.arc(to(x), to(-y), 6, 0, 2 * Math.PI);
      context.fill(); context.stroke();
    }
    const high = mean(points.map(([x, y]) => tilt(x, y)[0]));
    get("said").textContent = `Step ${taken}: ${clusters()} of ${points.length} points can be told apart; mean G ${high.toPrecision(3)}.`;
  }

  function pause() {
    cancelAnimationFrame(playing);
    playing = null;
    get("play").textContent = "Play";
  }
  function play() {
    step(); draw();
    playing = requestAnimationFrame(play);
  }
  function anew() {
    seed = 7; taken = 0;
    points = norms[get("norm").value](Array.from({ length: value("count") }, () => [normal(), normal()]));
    trails = points.map((p) => [p]);
    draw();
  }

  get("play").addEventListener("click", () => {
    if (playing === null) { get("play").textContent = "Pause"; playing = requestAnimationFrame(play); } else pause();
  });
  get("once").addEventListener("click", () => { pause(); step(); draw(); });
  get("anew").addEventListener("click", () => { pause(); anew(); });
  for (const id of ["beta", "size", "count", "norm"]) get(id).addEventListener("input", () => {
    const output = get(`${id}-value`);
    if (output) output.textContent = get(id).value;
    if (id === "count" || id === "norm") { pause(); anew(); } else draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  anew();
}
