// Two charts drawn by hand as SVG: lines with bands, and bars. Sizes are in the units of the view box; the page scales them.
const BOX = { width: 340, height: 190, left: 44, right: 10, top: 10, bottom: 34 };

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count = 4) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index += 1) found.push(index * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * (1 + 1e-9); power += 1) found.push(10 ** power);
  const every = Math.ceil(found.length / 5);
  return found.length >= 2 ? found.filter((_, index) => index % every === 0) : [low, high];
}

function frame(label) {
  return draw("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": label });
}

function axes(svg, { x, y, xTicks, yTicks, xLabel }) {
  const floor = BOX.height - BOX.bottom;
  for (const [value, text] of yTicks) {
    svg.append(
      draw("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: y(value), y2: y(value) }),
      draw("text", { class: "tick", x: BOX.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, text),
    );
  }
  let reached = -Infinity;
  for (const [value, text] of xTicks) {
    const at = x(value), half = 3 * text.length;
    if (at - half < reached + 4) continue;
    reached = at + half;
    const anchor = at + half > BOX.width ? "end" : at - half < 0 ? "start" : "middle";
    svg.append(draw("text", { class: "tick", x: at, y: floor + 14, "text-anchor": anchor }, text));
  }
  svg.append(
    draw("line", { class: "axis", x1: BOX.left, x2: BOX.width - BOX.right, y1: floor, y2: floor }),
    draw("text", { class: "label", x: (BOX.left + BOX.width - BOX.right) / 2, y: BOX.height - 4, "text-anchor": "middle" }, xLabel),
  );
}

// A path through the points that have a value; a gap where one is missing.
function trace(points) {
  let text = "", pen = false;
  for (const [x, y] of points) {
    if (y === null || !Number.isFinite(y)) { pen = false; continue; }
    text += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = true;
  }
  return text;
}

// series: [{ values or several lines, error, colour, strong, faint }]; xs: numbers; spread "log" draws x as log(1 + x / first), first the lowest above 0.
// Returns the svg, with svg.mark(index) for a cursor, hidden where there is no such x. onPick(index) is called with the nearest x where the reader points.
function lineChart({ label, xs, series, xTicks, xLabel, spread = "straight", logarithmic = false, onPick = null, tell }) {
  const svg = frame(label);
  const first = xs.find((value) => value > 0) ?? 1;
  const bendX = spread === "log" ? (value) => Math.log1p(value / first) : (value) => value;
  const bendY = logarithmic ? Math.log10 : (value) => value;
  for (const one of series) one.lines ??= [one.values];
  const values = known(series.map(({ lines, error }) => lines.flat().map((value, index) => (value === null ? null : [value, ...(error?.[index] ? [value - 2 * error[index], value + 2 * error[index]] : [])]))));
  const usable = logarithmic ? values.filter((value) => value > 0) : values;
  let low = Math.min(...usable), high = Math.max(...usable);
  if (!usable.length) [low, high] = logarithmic ? [1, 10] : [0, 1];
  if (low === high) { const room = Math.abs(low) * 0.1; if (low === 0) high = 1; else if (logarithmic) [low, high] = [low / 2, high * 2]; else [low, high] = [low - room, high + room]; }
  else if (!logarithmic) { const room = 0.06 * (high - low); low = low >= 0 && low < 0.35 * high ? 0 : low - room; high += room; }
  const [x0, x1] = [bendX(xs[0]), bendX(xs[xs.length - 1])];
  const x = (value) => BOX.left + 4 + ((bendX(value) - x0) / (x1 - x0 || 1)) * (BOX.width - BOX.left - BOX.right - 8);
  const y = (value) => BOX.height - BOX.bottom - ((bendY(value) - bendY(low)) / (bendY(high) - bendY(low))) * (BOX.height - BOX.bottom - BOX.top);
  const yTicks = (logarithmic ? logTicks(low, high) : ticks(low, high)).map((value) => [value, show(value)]);
  axes(svg, { x, y, xTicks, yTicks, xLabel });
  for (const { lines, error, colour, strong, faint } of series) {
    const line = lines[0];
    if (error) {
      const points = xs.map((value, index) => [value, line[index], error[index]]).filter(([, middle, width]) => middle !== null && width !== null);
      const up = points.map(([at, middle, width]) => `${x(at).toFixed(1)} ${y(middle + 2 * width).toFixed(1)}`);
      const down = points.map(([at, middle, width]) => `${x(at).toFixed(1)} ${y(middle - 2 * width).toFixed(1)}`).reverse();
      if (points.length) svg.append(draw("path", { class: "band", d: `M${[...up, ...down].join("L")}Z`, style: { fill: colour } }));
    }
    const ok = (value) => value !== null && (!logarithmic || value > 0);
    const path = lines.map((each) => trace(xs.map((value, index) => [x(value), ok(each[index]) ? y(each[index]) : null]))).join("");
    svg.append(draw("path", { class: `line${strong ? " strong" : ""}${faint ? " faint" : ""}`, d: path, style: { stroke: colour } }));
    if (xs.length <= 40 && series.length === 1) {
      xs.forEach((value, index) => ok(line[index]) && svg.append(draw("circle", { class: "dot", cx: x(value), cy: y(line[index]), r: 2.4, style: { fill: colour } })));
    }
  }
  const cursor = draw("line", { class: "cursor", y1: BOX.top, y2: BOX.height - BOX.bottom, visibility: "hidden" });
  svg.append(cursor);
  svg.mark = (index) => {
    cursor.setAttribute("visibility", index in xs ? "visible" : "hidden");
    if (index in xs) for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(xs[index]));
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * BOX.width;
    return xs.reduce((best, value, index) => (Math.abs(x(value) - at) < Math.abs(x(xs[best]) - at) ? index : best), 0);
  };
  const told = make("p", { className: "told", ariaHidden: "true" });
  const point = (event) => { const index = nearest(event); told.textContent = tell(index); if (!onPick) svg.mark(index); };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", (event) => { point(event); onPick?.(nearest(event)); });
  svg.addEventListener("pointerleave", () => { told.textContent = ""; if (!onPick) cursor.setAttribute("visibility", "hidden"); });
  const whole = make("div", { className: "plot" }, svg, told);
  whole.mark = svg.mark;
  return whole;
}

// Counts between edges, and a mark where the mean over queries stands.
function histogram({ label, edges, counts, unit, mark }) {
  const svg = frame(label);
  const [low, high] = [edges[0], edges[edges.length - 1]];
  const most = Math.max(...counts, 1), total = counts.reduce((sum, count) => sum + count, 0) || 1;
  const x = (value) => BOX.left + ((value - low) / (high - low || 1)) * (BOX.width - BOX.left - BOX.right);
  const y = (value) => BOX.height - BOX.bottom - (value / (most / total)) * (BOX.height - BOX.bottom - BOX.top);
  axes(svg, { x, y, xTicks: ticks(low, high, 5).map((value) => [value, show(value)]), yTicks: ticks(0, most / total, 3).map((value) => [value, percent(value)]), xLabel: unit });
  counts.forEach((count, index) => {
    const bar = draw("rect", { class: "bar", x: x(edges[index]) + 0.5, y: y(count / total), width: Math.max(0.5, x(edges[index + 1]) - x(edges[index]) - 1), height: Math.max(0, BOX.height - BOX.bottom - y(count / total)) });
    bar.append(draw("title", {}, `${show(edges[index])} to ${show(edges[index + 1])}: ${percent(count / total)} of queries`));
    svg.append(bar);
  });
  if (mark !== null && mark !== undefined && mark >= low && mark <= high) svg.append(draw("line", { class: "cursor", x1: x(mark), x2: x(mark), y1: BOX.top, y2: BOX.height - BOX.bottom }));
  return svg;
}
