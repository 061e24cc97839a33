// Draws; knows nothing of where numbers come from. Sizes are CSS pixels.

export const CLASSES = ["exact", "moved", "recomputed", "computed"];
const LEFT = 52, BOTTOM = 20, TOP = 8;

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Stripes and dots tell the classes apart without colour.
function textured(x, y, width, height, name) {
  const at = { x, y, width, height };
  const marks = { moved: "stripes", recomputed: "spots" }[name];
  const part = svg("g", {}, svg("rect", { ...at, class: `part ${name}` }));
  if (marks) part.append(svg("rect", { ...at, fill: `url(#${marks})` }));
  return part;
}

// Once in the document: all charts refer to them.
export function patterns() {
  const stripes = svg("pattern", { id: "stripes", width: 6, height: 6, patternUnits: "userSpaceOnUse" },
    svg("path", { d: "M-1 1 1-1M0 6 6 0M5 7 7 5", class: "mark", "stroke-width": 1.2 }));
  const spots = svg("pattern", { id: "spots", width: 5, height: 5, patternUnits: "userSpaceOnUse" },
    svg("circle", { cx: 2.5, cy: 2.5, r: 1, class: "mark dots" }));
  return svg("svg", { width: 0, height: 0, "aria-hidden": "true", class: "patterns" }, svg("defs", {}, stripes, spots));
}

export function swatch(name) {
  return svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, textured(0, 0, 14, 14, name));
}

// One bar, cut into the classes.
export function bar(usage, width, height, label) {
  const total = CLASSES.reduce((sum, name) => sum + usage[name], 0);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label,
    preserveAspectRatio: "none" }, svg("title", {}, label));
  let x = 0;
  for (const name of CLASSES) {
    const part = total ? width * usage[name] / total : 0;
    if (part) drawing.append(textured(x, 0, part, height, name));
    x += part;
  }
  return drawing;
}

function frame(box, label) {
  const width = Math.max(box.clientWidth, 200), height = box.clientHeight;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  box.replaceChildren(drawing);
  return { drawing, width, height, right: width - 6, base: height - BOTTOM };
}

function text(x, y, words, anchor, kind = "") {
  return svg("text", { x, y, "text-anchor": anchor, class: kind }, words);
}

function timeAxis(f, span) {
  const minutes = span / 60;
  for (let m = minutes; m >= 0; m--) {
    if (m % 2 && f.width < 420) continue; // no room for all of them
    const x = LEFT + (f.right - LEFT) * (1 - m / minutes);
    f.drawing.append(text(x, f.height - 4, m ? `−${m} min` : "now", m ? "middle" : "end"));
  }
}

function rule(f, y, label) {
  f.drawing.append(svg("line", { class: "grid", x1: LEFT, x2: f.right, y1: y, y2: y }), text(LEFT - 8, y + 4, label, "end"));
}

function nothing(f) {
  rule(f, f.base, "");
  f.drawing.append(text((LEFT + f.right) / 2, f.base / 2, "nothing in the last five minutes", "middle", "none"));
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.0995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  return s < 99.5 ? `${s.toFixed(s < 9.95 ? 2 : 1)} s` : `${Math.round(s)} s`;
}

// points: {age, value, warm, title}. The scale is logarithmic: cold and reused are far apart.
export function scatter(box, points, span, label) {
  const f = frame(box, label);
  timeAxis(f, span);
  if (!points.length) return nothing(f);
  const values = points.map((p) => Math.max(p.value, 1e-4));
  const lo = Math.floor(Math.log10(Math.min(...values)) * 2 - 0.2) / 2;
  const hi = Math.max(Math.ceil(Math.log10(Math.max(...values)) * 2 + 0.2) / 2, lo + 1);
  const y = (value) => f.base - (f.base - TOP) * (Math.log10(Math.max(value, 1e-4)) - lo) / (hi - lo);
  for (let power = Math.floor(lo); power <= hi; power++)
    for (const step of hi - lo > 2 ? [1] : [1, 2, 5]) {
      const value = step * 10 ** power;
      if (y(value) <= f.base + 0.5 && y(value) >= TOP - 0.5) rule(f, y(value), brief(value));
    }
  for (const p of points) {
    const px = LEFT + (f.right - LEFT) * (1 - p.age / span), py = y(p.value);
    const shape = p.warm
      ? svg("circle", { class: "dot warm", cx: px, cy: py, r: 4 })
      : svg("path", { class: "dot cold", d: `M${px} ${py - 5}l5 5-5 5-5-5Z` });
    shape.append(svg("title", {}, p.title));
    f.drawing.append(shape);
  }
}

function brief(s) {
  return s < 1 ? `${Number((s * 1000).toPrecision(1))} ms` : `${Number(s.toPrecision(1))} s`;
}

function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].find((n) => n * power >= value) * power;
}

function scaleTo(f, most) {
  const top = ceiling(most);
  for (const part of [0, 0.5, 1]) rule(f, f.base - (f.base - TOP) * part, count(top * part));
  return (f.base - TOP) / top;
}

export function count(n) {
  if (n >= 1e6) return `${Number((n / 1e6).toFixed(1))}M`;
  if (n >= 1e4) return `${Number((n / 1e3).toFixed(n < 1e5 ? 1 : 0))}k`;
  return n >= 10 || Number.isInteger(n) ? Math.round(n).toLocaleString("en") : n.toFixed(1);
}

// columns: usage per bin of time, oldest first.
export function columns(box, bins, span, label) {
  const f = frame(box, label);
  timeAxis(f, span);
  const sums = bins.map((usage) => CLASSES.reduce((sum, name) => sum + usage[name], 0));
  if (!Math.max(...sums)) return nothing(f);
  const scale = scaleTo(f, Math.max(...sums)), width = (f.right - LEFT) / bins.length;
  bins.forEach((usage, n) => {
    let y = f.base;
    for (const name of CLASSES) {
      const height = usage[name] * scale;
      y -= height;
      if (height > 0) f.drawing.append(textured(LEFT + n * width + 1, y, Math.max(width - 2, 1), height, name));
    }
  });
}

export function area(box, bins, span, label) {
  const f = frame(box, label);
  timeAxis(f, span);
  if (!Math.max(...bins)) return nothing(f);
  const scale = scaleTo(f, Math.max(...bins)), step = (f.right - LEFT) / bins.length;
  const line = bins.map((value, n) => `${LEFT + (n + 0.5) * step} ${f.base - value * scale}`).join("L");
  const end = LEFT + (bins.length - 0.5) * step;
  f.drawing.append(svg("path", { class: "area", d: `M${line}L${end} ${f.base}L${LEFT + step / 2} ${f.base}Z` }));
  f.drawing.append(svg("path", { class: "curve", d: `M${line}` }));
}
