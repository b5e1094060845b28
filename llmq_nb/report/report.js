"use strict";
// Draws the panels of a report from the data in the page. No library, nothing is loaded.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const W = 640, H = 300, LEFT = 62, RIGHT = 12, TOP = 8, BOTTOM = 34;
// view: the zoomed horizontal range, or null; hidden: indices of runs that are switched off
const state = { over: data.over, view: null, hidden: new Set(), log: new Set() };

function element(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (parent) parent.appendChild(node);
  return node;
}

function html(name, text, parent) {
  const node = document.createElement(name);
  node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

// 0.00012 -> 1.2e-4, 1234567 -> 1.235M
function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return +(value / 1e9).toPrecision(4) + "G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
  return size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(5));
}

// About `count` round values in low .. high.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(i * step);
  return out;
}

// Powers of ten in low .. high, and 2 and 5 of each where there are few.
function logTicks(low, high) {
  const wide = Math.log10(high / low) > 3, out = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const m of wide ? [1] : [1, 2, 5]) {
      const value = m * 10 ** e;
      if (value >= low * 0.999 && value <= high * 1.001) out.push(value);
    }
  return out;
}

function visible(panel) {
  return panel.curves.filter((curve) => !state.hidden.has(curve.run));
}

// The ranges of a panel: x over all its curves (or the zoom), y over what is in sight.
function ranges(panel, log) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const curve of visible(panel))
    for (const x of curve.x[state.over]) if (x !== null) [x0, x1] = [Math.min(x0, x), Math.max(x1, x)];
  if (state.view) [x0, x1] = state.view;
  for (const curve of visible(panel)) {
    const xs = curve.x[state.over], smooth = curve.s;
    for (let i = 0; i < xs.length; i++) {
      if (xs[i] === null || xs[i] < x0 || xs[i] > x1) continue;
      for (const ys of smooth ? [smooth, curve.y] : [curve.y]) {
        const y = ys[i];
        if (y !== null && (!log || y > 0)) [y0, y1] = [Math.min(y0, y), Math.max(y1, y)];
      }
    }
  }
  if (!(x0 <= x1)) [x0, x1] = [0, 1];
  if (!(y0 <= y1)) [y0, y1] = log ? [0.1, 1] : [0, 1];
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  if (panel.fromZero && !log) y0 = Math.min(0, y0);
  if (y0 === y1) [y0, y1] = log ? [y0 / 2, y1 * 2] : [y0 - (Math.abs(y0) || 1) * 0.05, y1 + (Math.abs(y1) || 1) * 0.05];
  const pad = log ? (y1 / y0) ** 0.04 : (y1 - y0) * 0.04;
  if (log) return { x0, x1, y0: y0 / pad, y1: y1 * pad };
  return { x0, x1, y0: panel.fromZero && y0 === 0 ? 0 : y0 - pad, y1: y1 + pad };
}

function scales(r, log) {
  const t = log ? Math.log10 : (v) => v;
  return {
    x: (v) => LEFT + ((v - r.x0) / (r.x1 - r.x0)) * (W - LEFT - RIGHT),
    y: (v) => H - BOTTOM - ((t(v) - t(r.y0)) / (t(r.y1) - t(r.y0))) * (H - TOP - BOTTOM),
    back: (px) => r.x0 + ((px - LEFT) / (W - LEFT - RIGHT)) * (r.x1 - r.x0),
  };
}

// "M1 2L3 4": a gap in the values is a gap in the line.
function path(xs, ys, scale, log) {
  let out = "", pen = "M";
  for (let i = 0; i < xs.length; i++) {
    if (xs[i] === null || ys[i] === null || (log && ys[i] <= 0)) { pen = "M"; continue; }
    out += pen + scale.x(xs[i]).toFixed(1) + " " + scale.y(ys[i]).toFixed(1);
    pen = "L";
  }
  return out;
}

function band(curve, xs, scale, log) {
  const keep = xs.map((x, i) => i).filter((i) => curve.low[i] !== null && (!log || curve.low[i] > 0));
  if (!keep.length) return "";
  const at = (i, ys) => scale.x(xs[i]).toFixed(1) + " " + scale.y(ys[i]).toFixed(1);
  return "M" + keep.map((i) => at(i, curve.high)).join("L") + "L" + keep.reverse().map((i) => at(i, curve.low)).join("L") + "Z";
}

function drawCurve(curve, group, scale, log) {
  const xs = curve.x[state.over], colour = data.runs[curve.run].colour;
  const dots = curve.dotted ? " dotted" : "";
  if (curve.low) element("path", { class: "band", fill: colour, d: band(curve, xs, scale, log) }, group);
  if (curve.s) element("path", { class: "curve raw" + dots, stroke: colour, d: path(xs, curve.y, scale, log) }, group);
  element("path", { class: "curve" + dots, stroke: colour, d: path(xs, curve.s || curve.y, scale, log) }, group);
  if (curve.marks || xs.length === 1)
    xs.forEach((x, i) => {
      if (curve.y[i] === null || (log && curve.y[i] <= 0)) return;
      element("circle", { cx: scale.x(x), cy: scale.y(curve.y[i]), r: 3, fill: "Canvas", stroke: colour }, group);
    });
}

function drawPanel(panel, number, figureNode) {
  const log = state.log.has(number), r = ranges(panel, log), scale = scales(r, log);
  figureNode.querySelector("svg")?.remove();
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": panel.title });
  const clip = element("clipPath", { id: "clip" + number }, svg);
  element("rect", { x: LEFT, y: TOP, width: W - LEFT - RIGHT, height: H - TOP - BOTTOM }, clip);
  for (const v of log ? logTicks(r.y0, r.y1) : ticks(r.y0, r.y1, 5)) {
    element("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: scale.y(v), y2: scale.y(v) }, svg);
    element("text", { x: LEFT - 6, y: scale.y(v) + 4, "text-anchor": "end" }, svg).textContent = figure(v);
  }
  for (const v of ticks(r.x0, r.x1, 6)) {
    element("line", { class: "grid", x1: scale.x(v), x2: scale.x(v), y1: TOP, y2: H - BOTTOM }, svg);
    element("text", { x: scale.x(v), y: H - BOTTOM + 14, "text-anchor": "middle" }, svg).textContent = figure(v);
  }
  element("text", { x: (W + LEFT) / 2, y: H - 4, "text-anchor": "middle" }, svg).textContent = data.axes[state.over];
  const group = element("g", { "clip-path": `url(#clip${number})` }, svg);
  for (const curve of visible(panel)) drawCurve(curve, group, scale, log);
  figureNode.appendChild(svg);
  watch(panel, svg, figureNode, scale);
}

function nearest(xs, x) {
  let best = -1, distance = Infinity;
  for (let i = 0; i < xs.length; i++) {
    if (xs[i] !== null && Math.abs(xs[i] - x) < distance) [best, distance] = [i, Math.abs(xs[i] - x)];
  }
  return best;
}

// The pointer: a cross line with the values beside it; dragging zooms all panels.
function watch(panel, svg, figureNode, scale) {
  const cross = element("line", { class: "cross", y1: TOP, y2: H - BOTTOM, visibility: "hidden" }, svg);
  const drag = element("rect", { class: "drag", y: TOP, height: H - TOP - BOTTOM, visibility: "hidden" }, svg);
  const tip = figureNode.querySelector(".tip");
  let begin = null;
  const place = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.min(Math.max(((event.clientX - box.left) / box.width) * W, LEFT), W - RIGHT);
  };
  svg.addEventListener("pointermove", (event) => {
    const px = place(event), x = scale.back(px);
    cross.setAttribute("x1", px); cross.setAttribute("x2", px); cross.setAttribute("visibility", "visible");
    if (begin !== null) {
      drag.setAttribute("x", Math.min(px, begin)); drag.setAttribute("width", Math.abs(px - begin));
      drag.setAttribute("visibility", "visible");
    }
    tip.textContent = "";
    html("div", `${data.axes[state.over]}: ${figure(x)}`, tip);
    for (const curve of visible(panel)) {
      const i = nearest(curve.x[state.over], x);
      if (i < 0) continue;
      const row = html("div", "", tip), swatch = html("span", "", row);
      swatch.className = "swatch"; swatch.style.background = data.runs[curve.run].colour;
      const smooth = curve.s && curve.s[i] !== null ? ` (smoothed ${figure(curve.s[i])})` : "";
      row.append(`${curve.label}: ${figure(curve.y[i])}${smooth}`);
    }
    tip.hidden = false;
    const right = px > W / 2, box = svg.getBoundingClientRect(), at = (px / W) * box.width;
    tip.style.left = right ? "" : `${at + 14}px`;
    tip.style.right = right ? `${box.width - at + 14}px` : "";
    tip.style.top = "2.2em";
  });
  const leave = () => {
    tip.hidden = true; begin = null;
    cross.setAttribute("visibility", "hidden"); drag.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointerdown", (event) => { begin = place(event); });
  svg.addEventListener("pointerup", (event) => {
    const px = place(event), from = begin;
    leave();
    if (from !== null && Math.abs(px - from) > 8) {
      state.view = [scale.back(Math.min(px, from)), scale.back(Math.max(px, from))];
      drawAll();
    }
  });
  svg.addEventListener("dblclick", () => { state.view = null; drawAll(); });
}

function drawAll() {
  data.panels.forEach((panel, i) => drawPanel(panel, i, document.getElementById("panel" + i)));
}

function start() {
  const controls = document.getElementById("controls"), panels = document.getElementById("panels");
  const label = html("label", "over ", controls), select = html("select", "", label);
  for (const [key, text] of Object.entries(data.axes)) html("option", text, select).value = key;
  select.value = state.over;
  select.addEventListener("change", () => { state.over = select.value; state.view = null; drawAll(); });
  data.runs.forEach((run, i) => {
    const entry = html("label", "", controls), box = html("input", "", entry), swatch = html("span", "", entry);
    box.type = "checkbox"; box.checked = true;
    swatch.className = "swatch"; swatch.style.background = run.colour;
    entry.append(run.name);
    box.addEventListener("change", () => { state.hidden[box.checked ? "delete" : "add"](i); drawAll(); });
  });
  html("small", "drag to zoom, double-click to see all", controls);
  data.panels.forEach((panel, i) => {
    const node = html("figure", "", panels), caption = html("figcaption", panel.title, node);
    node.id = "panel" + i;
    const log = html("label", "", caption), box = html("input", "", log);
    box.type = "checkbox";
    log.append("log");
    box.addEventListener("change", () => { state.log[box.checked ? "add" : "delete"](i); drawAll(); });
    const tip = html("div", "", node);
    tip.className = "tip"; tip.hidden = true;
  });
  drawAll();
}

start();
