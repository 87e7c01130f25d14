// The graph and the chart as SVG and PNG files: all that is open, not only what is on the screen, with where it is from.
"use strict";

const XML = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const FONT = "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";
const escaped = (text) => String(text).replace(/[&<>"]/g, (one) => XML[one]);
const attributes = (values) => Object.entries(values).map(([name, value]) => ` ${name}="${escaped(typeof value === "number" ? +value.toFixed(2) : value)}"`).join("");
const tag = (name, values, content = "") => `<${name}${attributes(values)}>${content}</${name}>`;
const label = (text, x, y, values = {}) => tag("text", { x, y, "font-size": 11, "dominant-baseline": "central", ...values }, escaped(text));

/** An SVG file's text: a title and the facts of the step above the content, and a legend below it. */
function picture(model, subtitle, width, height, content, keys) {
  const colors = palette(), facts = model.data.facts.map((fact) => `${fact[0]} ${showFact(fact)}`).join("  ·  ");
  const room = Math.max(20, Math.floor((width - 20) / 5.6)), lines = [];
  for (const word of facts.split("  ·  ")) {
    if (lines.length && lines.at(-1).length + word.length + 5 < room) lines.push(`${lines.pop()}  ·  ${word}`); else lines.push(word);
  }
  const head = 34 + 15 * lines.length, legend = [];
  let x = 10, y = head + height + 16;
  for (const [color, text] of keys) {
    const wide = 26 + text.length * 6.4;
    if (x + wide > width && x > 10) { x = 10; y += 18; }
    legend.push(tag("rect", { x, y: y - 5, width: 11, height: 11, rx: 3, fill: colors(color), stroke: colors("--node-line") }), label(text, x + 16, y, { fill: colors("--text") }));
    x += wide;
  }
  const whole = y + 16;
  return tag("svg", { xmlns: "http://www.w3.org/2000/svg", width, height: whole, viewBox: `0 0 ${width.toFixed(0)} ${whole.toFixed(0)}`, "font-family": FONT }, [
    tag("title", {}, escaped(`${model.data.title}: ${subtitle}`)), tag("rect", { width, height: whole, fill: colors("--canvas") }),
    label(`${model.data.title}: ${subtitle}`, 10, 16, { "font-size": 15, "font-weight": 650, fill: colors("--text") }),
    ...lines.map((line, at) => label(line, 10, 36 + 15 * at, { fill: colors("--dim") })),
    tag("g", { transform: `translate(0 ${head})` }, content), ...legend].join("\n"));
}

/** The graph after the pass that is shown: every row, down to what is open. */
function graphSvg(page) {
  const { graph, model } = page, colors = palette(), side = 260, top = BAR;
  const width = side + graph.width, parts = [], gradients = new Map();
  for (const place of graph.visible) {
    const row = model.rows[place.row], y = top + place.top, inset = 10 + row.depth * 12;
    parts.push(tag("rect", { x: 0, y, width, height: place.height, fill: colors(place.open ? "--band-odd" : row.depth % 2 ? "--band" : "--canvas"), stroke: colors("--line"), "stroke-width": 0.5 }));
    const text = `${place.open ? "▾" : "▸"} ${row.label}${row.times ? ` ×${row.times}` : ""}`;
    parts.push(label(short(text, Math.floor((side - inset) / 6.6)), inset, y + (place.open ? ROW.head : ROW.closed) / 2, { "font-size": 12, fill: colors("--text"), "font-weight": row.kind === "module" ? 600 : 400 }));
  }
  for (const lane of graph.lanes) {
    const { left, width: wide } = graph.x.get(lane);
    parts.push(label(LANES[lane], side + left + wide / 2, BAR / 2, { "text-anchor": "middle", "font-weight": 600, fill: colors(/boxing/.test(LANES[lane]) ? "--boxing-text" : "--text") }));
  }
  const point = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`, moved = [];
  for (const { group, data, classes } of graph.drawn) if (group === "edges" && !/constant/.test(classes)) {
    const [from, one, two, to] = data.points, middle = { x: (one.x + two.x) / 2, y: (one.y + two.y) / 2 };
    const color = colors(/wire/.test(classes) ? "--boxing" : "--edge"), turn = Math.atan2(to.y - two.y, to.x - two.x) * 180 / Math.PI;
    moved.push(tag("path", { d: `M${point(from)} Q${point(one)} ${point(middle)} Q${point(two)} ${point(to)}`, fill: "none", stroke: color, "stroke-width": data.width, opacity: data.shade }),
               tag("path", { d: "M0 0 L-6 -3 L-6 3 Z", transform: `translate(${point(to)}) rotate(${turn.toFixed(1)})`, fill: color, opacity: data.shade }));
  }
  for (const { group, data, classes, position } of graph.drawn) if (group === "nodes") {
    const { x, y } = position, { width: wide, height } = data, boxing = /boxing/.test(classes);
    const look = { stroke: colors(/new/.test(classes) ? "--new" : boxing ? "--boxing-line" : "--node-line"), "stroke-width": /new/.test(classes) ? 3 : boxing || /again/.test(classes) ? 2 : 1 };
    if (/again/.test(classes)) look["stroke-dasharray"] = "5 3";
    if (boxing) {
      const bent = [[-0.92, -1], [0.92, -1], [1, 0], [0.92, 1], [-0.92, 1], [-1, 0]].map(([a, b]) => point({ x: x + a * wide / 2, y: y + b * height / 2 })).join(" ");
      moved.push(tag("polygon", { points: bent, fill: colors("--boxing"), ...look }));
    } else {
      const key = data.stops.map((stop, at) => `${colors(stop)} ${data.shares[at].toFixed(1)}`).join();
      if (!gradients.has(key)) gradients.set(key, [`fill${gradients.size}`, data]);
      moved.push(tag("rect", { x: x - wide / 2, y: y - height / 2, width: wide, height, rx: 6, fill: `url(#${gradients.get(key)[0]})`, "fill-opacity": /view/.test(classes) ? 0.55 : 1, ...look }));
    }
    const lines = data.label.split("\n");
    lines.forEach((line, at) => moved.push(label(line, x, y + (at - (lines.length - 1) / 2) * 13.5, { "text-anchor": "middle", fill: colors(boxing ? "--on-boxing" : "--on-node"), "font-weight": boxing ? 700 : 400, "font-size": 10.5 })));
  }
  const fills = [...gradients.values()].map(([id, { stops, shares }]) => tag("linearGradient", { id }, stops.map((stop, at) => tag("stop", { offset: `${shares[at].toFixed(1)}%`, "stop-color": colors(stop) })).join("")));
  const keys = [...page.sbpKeys(), ["--boxing", "boxing"]];
  return picture(model, `the graph after ${model.data.passes[graph.pass].name}`, width, top + graph.height, [tag("defs", {}, fills.join("")), ...parts, tag("g", { transform: `translate(${side} ${top})` }, moved.join("\n"))].join("\n"), keys);
}

/** Memory and time over the part of the step that is shown. */
function chartSvg(page) {
  const { charts } = page, box = charts.canvas.parentElement.getBoundingClientRect(), pen = new SvgPen();
  charts.draw(pen);
  charts.draw();
  const top = 22, peak = !charts.peak.hidden && charts.x(charts.value(charts.memory.peak));
  const mark = peak ? label(charts.peak.textContent, peak, charts.y(charts.peakBytes) - 9, { "text-anchor": peak > box.width - 120 ? "end" : "start", "font-weight": 650, fill: palette()("--text") }) : "";
  return picture(page.model, `memory and ${charts.over === "time" ? "predicted time" : "nodes in order"}`, box.width, box.height + top, tag("g", { transform: `translate(0 ${top})` }, `${pen.parts.join("\n")}\n${mark}`), charts.keys());
}

/** The part of a canvas's context that the charts draw with; what they draw is SVG. */
class SvgPen {
  constructor() {
    this.parts = [];
    this.globalAlpha = 1;
    this.measure = document.createElement("canvas").getContext("2d");
    this.last = null;
  }

  setTransform() {}
  clearRect() {}
  save() { this.clipped = null; }
  beginPath() {}
  rect(x, y, width, height) { this.clipped = { x, y, width, height }; }
  clip() {}
  restore() { this.clipped = null; }

  fillRect(x, y, width, height) {
    if (this.clipped) {
      const right = Math.min(x + width, this.clipped.x + this.clipped.width);
      x = Math.max(x, this.clipped.x);
      width = right - x;
    }
    if (width <= 0 || height <= 0) return;
    // Columns of equal height side by side are one rectangle.
    const last = this.columns ||= new Map(), key = `${this.fillStyle} ${y} ${height} ${this.globalAlpha}`, before = last.get(key);
    if (before && Math.abs(before.x + before.width - x) < 0.01) { before.width += width; return; }
    const rectangle = { x, y, width, height, fill: this.fillStyle, opacity: this.globalAlpha, toString() { const { toString, ...values } = this; return tag("rect", values); } };
    last.set(key, rectangle);
    this.parts.push(rectangle);
  }

  fillText(text, x, y) {
    this.columns = null;
    this.parts.push(label(text, x, y, { fill: this.fillStyle, "text-anchor": { right: "end", center: "middle" }[this.textAlign] || "start" }));
  }

  measureText(text) {
    this.measure.font = this.font;
    return this.measure.measureText(text);
  }
}

/** A PNG of an SVG, twice as fine where a canvas can be that large. */
async function png(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const scale = Math.min(2, 16000 / Math.max(image.width, image.height), Math.sqrt(1e8 / (image.width * image.height)));
  const canvas = make("canvas", { width: Math.floor(image.width * scale), height: Math.floor(image.height * scale) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  if (!blob) throw new Error(`the picture of ${image.width} x ${image.height} pixels is too large for this browser: close some modules, or take the SVG`);
  return blob;
}

function download(blob, name) {
  const url = URL.createObjectURL(blob);
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Save what a function draws as SVG, in the form that a button asks for. */
async function save(page, draw, name, form) {
  const svg = draw(page);
  download(form === "png" ? await png(svg) : new Blob([svg], { type: "image/svg+xml" }), `${page.model.data.title.replace(/[^\w.-]+/g, "-")}-${name}.${form}`);
}
