// Memory over the step, stacked by kind; below it compute and communication, on the same axis.
"use strict";

const STREAMS = ["compute", "communication", "host", "files", "cpu"];
const STREAM_NAMES = { communication: "collectives", host: "host copies", cpu: "CPU update" };
const PHASES = ["forward", "recompute", "backward", "update", "waiting"], KINDS = ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "shift", "slice"];
const STREAM_HEIGHT = 24, AXIS_HEIGHT = 20, SIDE = 84;

class Charts {
  /** @param chosen is called with the node of the last pass that was clicked, told with another axis, saved with "svg" or "png". */
  constructor(model, chosen, told, saved) {
    this.model = model;
    this.chosen = chosen;
    this.told = told;
    this.saved = saved;
    this.memory = model.memory();
    this.nodes = model.graph(model.last).nodes;
    this.canvas = document.getElementById("drawn");
    this.peak = document.getElementById("peak");
    this.cursor = document.getElementById("cursor");
    this.at = this.memory.peak;
    this.streams = [];
    this.plotWidth = 1;
    this.memoryHeight = 0;
    this.times();
    this.over = this.time ? "time" : "nodes";
    this.whole();
    this.head();
    this.draw();
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  /** When each node begins, for the device; and what is on which stream. */
  times() {
    const time = this.model.data.time;
    this.time = time && time.events.length ? time : null;
    const size = this.memory.size;
    const ends = this.flights();
    this.byNodes = [];
    for (const node of this.nodes) {
      if (node.lane === REST) continue;
      if (node.boxing && node.boxing[0] !== "slice") this.byNodes.push({ node, stream: "communication", start: node.index, end: ends.get(node.index) });
      else this.byNodes.push({ node, stream: "compute", start: node.index, end: node.index + 1, waits: 0 });
    }
    this.byTime = [];
    if (!this.time) return;
    this.begins = new Float64Array(size + 1);
    const starts = new Float64Array(size).fill(-1), stops = new Float64Array(size);
    for (const [node, start, length, stream, waits] of this.time.events) {
      this.byTime.push({ node: this.nodes[node], stream, start, end: start + length, waits });
      if (stream === "compute") { starts[node] = start; stops[node] = start + length; }
    }
    let now = 0;
    for (let at = 0; at < size; at++) {
      if (starts[at] >= 0) now = Math.max(now, starts[at]);
      this.begins[at] = now;
      now = Math.max(now, stops[at]);
    }
    this.begins[size] = Math.max(now, this.time.seconds * 1e9);
  }

  /** Where each collective is waited for. */
  flights() {
    const found = new Map();
    for (const node of this.nodes) if (node.boxing) {
      const waits = node.users.map((one) => this.nodes[one]).filter((one) => one.flags & WAITS);
      found.set(node.index, waits.length ? Math.min(...waits.map((one) => one.index)) : node.index + 1);
    }
    return found;
  }

  get events() { return this.over === "time" ? this.byTime : this.byNodes; }
  /** Where the axis ends; beside another report both end where the longer one does. */
  get end() { return this.over === "time" ? Math.max(this.ownEnd, this.scale ? this.scale.time : 0) : this.memory.size; }
  get ownEnd() { return this.over === "time" ? this.begins[this.memory.size] : this.memory.size; }
  get peakBytes() { return this.memory.total[this.memory.peak] || 0; }
  /** Nanoseconds that the step takes; 0 where no times are predicted. */
  get seconds() { return this.time ? this.begins[this.memory.size] : 0; }

  /** Draw over the scale that several reports have together: {bytes, time}. */
  share(scale) {
    this.scale = scale;
    this.whole();
    this.draw();
  }
  value(at) { return this.over === "time" ? this.begins[at] : at; }
  whole() { this.from = 0; this.to = this.end; }

  head() {
    const axis = document.getElementById("axis");
    axis.replaceChildren(...[["time", "predicted time"], ["nodes", "node order"]].map(([over, label]) => {
      const button = make("button", { type: "button", textContent: label });
      button.setAttribute("role", "radio");
      button.setAttribute("aria-checked", String(over === this.over));
      button.disabled = over === "time" && !this.time;
      if (button.disabled) button.title = "Times are predicted when report() is given a machine.";
      button.addEventListener("click", () => { this.lay(over); this.told("axis", over); });
      return button;
    }), make("button", { type: "button", className: "whole", textContent: "whole step", onclick: () => { this.whole(); this.draw(); } }), ...["svg", "png"].map((form) =>
      make("button", { type: "button", textContent: form.toUpperCase(), title: `Save the chart as ${form.toUpperCase()}`, onclick: () => this.saved(form) })));
    const groups = this.legend().map(([title, keys]) => make("span", { className: "group" }, make("b", { textContent: title }),
      ...keys.map(([color, label]) => make("span", { className: "key" }, swatch(color), label))));
    document.getElementById("kinds").replaceChildren(...groups);
  }

  /** [title, [[colour, label]]] of memory, compute and communication: the colours that are drawn. */
  legend() {
    const used = new Set([...this.byNodes, ...this.byTime].map(eventColor));
    const keys = (names, labels = {}) => names.filter((name) => used.has(`--${name}`)).map((name) => [`--${name}`, labels[name] || name]);
    return [["Memory", this.memory.kinds.map((kind) => [memoryColor(kind), kind]).reverse()], ["Compute", keys(PHASES)],
            ["Communication", keys([...KINDS, "transfer"], { transfer: "host and files" })]].filter(([, all]) => all.length);
  }

  /** All colours of the legend, one after the other. */
  keys() { return this.legend().flatMap(([, keys]) => keys); }

  /** Draw over another axis: "time" or "nodes". */
  lay(over) {
    if (over === "time" && !this.time) return;
    this.over = over;
    this.whole();
    this.head();
    this.draw();
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("mousemove", (event) => { if (!this.drag) this.hover(event); });
    canvas.addEventListener("mouseleave", () => { this.cursor.hidden = true; hideTip(); });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 16 : 1;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move((event.deltaX || event.deltaY) * unit / this.plotWidth);
      else this.zoom(Math.exp(event.deltaY * unit / 300), this.inverse(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("mousedown", (event) => { this.drag = { x: event.clientX, from: this.from, to: this.to, moved: false }; });
    window.addEventListener("mousemove", (event) => {
      if (!this.drag) return;
      const by = (event.clientX - this.drag.x) / this.plotWidth * (this.drag.to - this.drag.from);
      if (Math.abs(event.clientX - this.drag.x) > 3) this.drag.moved = true;
      const clamped = Math.max(this.drag.to - this.end, Math.min(this.drag.from, by));
      this.from = this.drag.from - clamped;
      this.to = this.drag.to - clamped;
      this.draw();
    });
    window.addEventListener("mouseup", (event) => {
      const drag = this.drag;
      this.drag = null;
      if (drag && !drag.moved && event.target === canvas) { this.hover(event); this.chosen(this.under ? this.under.node : this.nodes[this.at]); }
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.point(this.at));
    canvas.addEventListener("blur", () => { this.cursor.hidden = true; hideTip(); });
    for (const name of ["mouseenter", "focus"]) this.peak.addEventListener(name, () => this.point(this.memory.peak, this.peak));
    for (const name of ["mouseleave", "blur"]) this.peak.addEventListener(name, () => { this.cursor.hidden = true; hideTip(); });
    this.peak.addEventListener("click", () => this.chosen(this.nodes[this.memory.peak]));
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50 };
    if (event.key in steps) this.point(Math.max(0, Math.min(this.memory.size - 1, this.at + steps[event.key])));
    else if (event.key === "Home") this.point(0);
    else if (event.key === "End") this.point(this.memory.size - 1);
    else if (event.key === "+" || event.key === "=") this.zoom(0.7, this.value(this.at));
    else if (event.key === "-") this.zoom(1.4, this.value(this.at));
    else if (event.key === "0") { this.whole(); this.draw(); }
    else if (event.key.toLowerCase() === "p") this.point(this.memory.peak);
    else if (event.key === "Enter") this.chosen(this.nodes[this.at]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  zoom(factor, about) {
    const least = this.over === "time" ? Math.max(1, this.end / 20000) : 8;
    const width = Math.max(Math.min(least, this.end), Math.min(this.end, (this.to - this.from) * factor));
    const share = (about - this.from) / (this.to - this.from);
    this.from = Math.max(0, Math.min(this.end - width, about - share * width));
    this.to = this.from + width;
    this.draw();
  }

  move(share) {
    const width = this.to - this.from;
    this.from = Math.max(0, Math.min(this.end - width, this.from + share * width));
    this.to = this.from + width;
    this.draw();
  }

  x(value) { return SIDE + (value - this.from) / (this.to - this.from) * this.plotWidth; }
  inverse(x) { return this.from + (x - SIDE) / this.plotWidth * (this.to - this.from); }
  y(bytes) { return this.memoryHeight - bytes / this.most * (this.memoryHeight - 18); }

  /** The last node that has begun at a value of the axis. */
  nodeAt(value) {
    if (this.over === "nodes") return Math.max(0, Math.min(this.memory.size - 1, Math.floor(value)));
    let low = 0, high = this.memory.size - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.begins[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  }

  /** Of the nodes within a column of pixels that at which the most is held. */
  within(x) {
    const first = this.nodeAt(this.inverse(x)), last = this.nodeAt(this.inverse(x + 1));
    let start = first;
    // Nodes that take no time begin together.
    if (this.over === "time") while (start > 0 && this.begins[start - 1] === this.begins[first] && first - start < 400) start--;
    let most = first;
    for (let at = start; at <= last; at++) if (this.memory.total[at] > this.memory.total[most]) most = at;
    return most;
  }

  /** @param pen draws instead of the canvas, as its context would. */
  draw(pen = this.canvas.getContext("2d")) {
    const box = this.canvas.parentElement.getBoundingClientRect();
    const width = Math.floor(box.width), height = Math.floor(box.height);
    if (width < 50 || height < 50) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.plotWidth = width - SIDE - 12;
    const streams = STREAMS.filter((stream) => this.events.some((event) => event.stream === stream));
    this.streams = streams;
    this.memoryHeight = height - AXIS_HEIGHT - streams.length * STREAM_HEIGHT - 4;
    this.most = Math.max(1, this.peakBytes, this.scale ? this.scale.bytes : 0);
    this.pen = pen;
    this.colors = palette();
    this.drawMemory();
    streams.forEach((stream, at) => this.drawStream(stream, this.memoryHeight + 4 + at * STREAM_HEIGHT));
    this.veilLoops();
    this.drawAxis(height);
    this.placePeak();
    this.canvas.setAttribute("aria-label", `Memory over the step: at most ${showBytes(this.memory.total[this.memory.peak] || 0)}. Arrow keys go from node to node, P to the peak, plus and minus zoom, Enter shows the node.`);
  }

  drawMemory() {
    const { pen, colors, memory } = this;
    pen.font = "11px system-ui, 'Liberation Sans', sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const mark of marks(this.most, 4, 1024)) {
      const y = this.y(mark);
      pen.fillStyle = colors("--grid");
      pen.fillRect(SIDE, Math.round(y), this.plotWidth, 1);
      pen.fillStyle = colors("--dim");
      pen.fillText(showBytes(mark).replace(".0 ", " "), SIDE - 8, y);
    }
    if (!memory.size) return;
    const fills = memory.kinds.map((kind) => colors(memoryColor(kind)));
    this.tops = new Float64Array(Math.ceil(this.plotWidth));
    for (let column = 0; column < this.plotWidth; column++) {
      if (this.inverse(SIDE + column) > this.ownEnd) break;
      const at = this.within(SIDE + column);
      let sum = 0, bottom = this.memoryHeight;
      memory.kinds.forEach((kind, one) => {
        const held = memory.curves.get(kind)[at];
        if (!held) return;
        sum += held;
        const top = this.y(sum);
        pen.fillStyle = fills[one];
        pen.fillRect(SIDE + column, top, 1, bottom - top);
        bottom = top;
      });
      this.tops[column] = bottom;
    }
  }

  drawStream(stream, top) {
    const { pen, colors } = this;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = colors("--dim");
    pen.fillText(STREAM_NAMES[stream] || stream, SIDE - 8, top + STREAM_HEIGHT / 2);
    pen.fillStyle = colors("--lane");
    pen.fillRect(SIDE, top + 2, this.plotWidth, STREAM_HEIGHT - 4);
    pen.save();
    pen.beginPath();
    pen.rect(SIDE, top, this.plotWidth, STREAM_HEIGHT);
    pen.clip();
    // Collectives that run at the same time are drawn in separate lines.
    const lines = [];
    for (const event of this.events) {
      if (event.stream !== stream) continue;
      let line = 0;
      if (stream !== "compute") {
        while (line < 3 && lines[line] !== undefined && lines[line] > event.start) line++;
        line = line % 4;
        lines[line] = event.end;
      }
      event.line = line;
    }
    const count = stream === "compute" ? 1 : Math.max(1, Math.min(4, lines.length));
    const thick = (STREAM_HEIGHT - 4) / count;
    for (const event of this.events) {
      if (event.stream !== stream || event.end < this.from || event.start > this.to) continue;
      const from = this.x(event.start), wide = Math.max(this.over === "time" ? 0.4 : 0.6, this.x(event.end) - from);
      const y = top + 2 + event.line * thick;
      pen.fillStyle = colors(eventColor(event));
      pen.fillRect(from, y, wide > 4 ? wide - 0.7 : wide, thick - (count > 1 ? 1 : 0));
      if (wide > 26 && count === 1) {
        const { op, tensor, boxing } = event.node;
        const text = (event.waits && stream === "compute" ? ["waits"] : boxing ? [`${op} of ${tensor}`, op, tensor] : [op]).find((one) => pen.measureText(one).width < wide - 8);
        if (!text) continue;
        pen.fillStyle = colors(event.waits ? "--dim" : "--on-event");
        pen.textAlign = "left";
        pen.fillText(text, Math.max(SIDE, from) + 4, y + thick / 2);
      }
    }
    for (const [start, end, turns] of this.loops()) {
      const from = Math.max(SIDE, this.x(start)), to = Math.min(SIDE + this.plotWidth, this.x(end));
      if (to - from < 30) continue;
      if (stream !== "compute") continue;
      pen.fillStyle = colors("--dim");
      pen.textAlign = "center";
      pen.fillText(`${turns - 1} more micro-batches`, (from + to) / 2, top + STREAM_HEIGHT / 2);
    }
    pen.restore();
  }

  /** (from, to, turns) of the time in which the turns of a loop after the first run. */
  loops() {
    if (this.over !== "time") return [];
    if (!this._loops) {
      this._loops = [];
      let open = null;
      for (const event of this.byTime.filter((one) => one.stream === "compute")) {
        const turns = this.model.times(event.node);
        if (turns > 1) open = { end: event.end, turns };
        else if (open) { if (event.start > open.end) this._loops.push([open.end, event.start, open.turns]); open = null; }
      }
      if (open && this.end > open.end) this._loops.push([open.end, this.end, open.turns]);
    }
    return this._loops;
  }

  /** Dim the memory of all turns of a loop but the first: only that is drawn. */
  veilLoops() {
    const { pen, colors } = this;
    for (const [start, end, turns] of this.loops()) {
      const from = Math.max(SIDE, this.x(start)), to = Math.min(SIDE + this.plotWidth, this.x(end));
      if (to <= from) continue;
      pen.globalAlpha = 0.72;
      pen.fillStyle = colors("--canvas");
      pen.fillRect(from, 0, to - from, this.memoryHeight);
      pen.globalAlpha = 1;
      if (to - from < 160) continue;
      pen.fillStyle = colors("--dim");
      pen.textAlign = "center";
      pen.fillText(`${turns - 1} more micro-batches, each like the first`, (from + to) / 2, this.memoryHeight / 2);
    }
  }

  drawAxis(height) {
    const { pen, colors } = this;
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    for (const mark of marks(this.to - this.from, 8, 10).map((one) => one + Math.ceil(this.from / stepOf(this.to - this.from, 8, 10)) * stepOf(this.to - this.from, 8, 10))) {
      const x = this.x(mark);
      if (x < SIDE + 14 || x > SIDE + this.plotWidth - 20) continue;
      pen.fillStyle = colors("--grid");
      pen.fillRect(Math.round(x), this.memoryHeight, 1, height - AXIS_HEIGHT - this.memoryHeight);
      pen.fillStyle = colors("--dim");
      pen.fillText(this.over === "time" ? showTime(mark) : `node ${Math.round(mark)}`, x, height - AXIS_HEIGHT / 2);
    }
    pen.textAlign = "right";
    pen.fillText(this.over === "time" ? "time" : "order", SIDE - 8, height - AXIS_HEIGHT / 2);
  }

  placePeak() {
    const at = this.memory.peak, value = this.value(at);
    this.peak.hidden = !this.memory.size || value < this.from || value > this.to;
    if (this.peak.hidden) return;
    const x = this.x(value), right = x > SIDE + this.plotWidth - 150;
    this.peak.textContent = `peak ${showBytes(this.memory.total[at])}`;
    this.peak.setAttribute("aria-label", `Peak of memory, ${showBytes(this.memory.total[at])}, at ${this.nodes[at].name}`);
    this.peak.className = right ? "right" : "";
    this.peak.style.left = `${x}px`;
    this.peak.style.top = `${this.y(this.memory.total[at])}px`;
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    this.under = null;
    if (x < SIDE || x > SIDE + this.plotWidth || !this.memory.size) { this.cursor.hidden = true; hideTip(); return; }
    const stream = this.streams[Math.floor((y - this.memoryHeight - 4) / STREAM_HEIGHT)];
    if (y > this.memoryHeight + 4 && stream) {
      const slack = 2 / this.plotWidth * (this.to - this.from), value = this.inverse(x);
      const near = this.events.filter((one) => one.stream === stream && one.start - slack <= value && value <= one.end + slack);
      this.under = near.find((one) => one.start <= value && value <= one.end) || near[0] || null;
      this.cursor.hidden = true;
      if (this.under) showTip(this.eventTip(this.under), event); else hideTip();
      return;
    }
    this.at = this.within(x);
    this.moveCursor(x);
    showTip(this.memoryTip(this.at), event);
  }

  moveCursor(x) {
    this.cursor.hidden = false;
    this.cursor.style.left = `${x}px`;
    this.cursor.style.height = `${this.memoryHeight + this.streams.length * STREAM_HEIGHT + 4}px`;
  }

  /** Cursor and tooltip at a node, as the keyboard asks. */
  point(at, beside) {
    if (!this.memory.size) return;
    this.at = at;
    const value = this.value(at);
    if (value < this.from || value > this.to) {
      const width = this.to - this.from;
      this.from = Math.max(0, Math.min(this.end - width, value - width / 2));
      this.to = this.from + width;
      this.draw();
    }
    const x = this.x(value), box = this.canvas.getBoundingClientRect();
    this.moveCursor(x);
    showTip(this.memoryTip(at), { clientX: box.left + x, clientY: (beside ? beside.getBoundingClientRect().top : box.top + 30) });
  }

  memoryTip(at) {
    const node = this.nodes[at], { memory } = this;
    const lines = [[`${showBytes(memory.total[at])} held${at === memory.peak ? ", the most" : ""}`, "b"], [`at ${node.name}`, "dim"]];
    if (this.model.path(node.row)) lines.push([`${node.phase} ${this.model.path(node.row)}`, "dim"]);
    if (node.source) lines.push([node.source, "dim"]);
    for (const kind of [...memory.kinds].reverse()) {
      const held = memory.curves.get(kind)[at];
      if (held) lines.push([`${showBytes(held)}  ${kind}`, "kind", kind]);
    }
    lines.push(["largest", "head"]);
    for (const one of this.model.contributors(at, 6)) lines.push([[`${showBytes(one.bytes)}  ${this.model.title(one.node)}`, `${one.node.phase} ${this.model.path(one.node.row)}`.trim()].join(" · "), "kind", one.kind]);
    return lines;
  }

  eventTip(event) {
    const lines = nodeTip(this.model, event.node);
    if (this.over === "time") {
      const what = event.waits && event.stream === "compute" ? "waits" : "takes";
      lines.splice(1, 0, [`${what} ${showTime(event.end - event.start)}, from ${showTime(event.start)}`]);
      const times = this.model.times(event.node);
      if (times > 1) lines.splice(2, 0, [`${times} times in a step; the first is shown`, "dim"]);
    } else if (event.stream === "communication") lines.splice(1, 0, [`in flight while ${event.end - event.start} nodes run`]);
    return lines;
  }
}

function stepOf(range, count, base) {
  const unit = base ** Math.floor(Math.log(range / count) / Math.log(base) + 1e-9);
  const steps = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  return unit * steps.find((one) => unit * one * count >= range * 0.999);
}

/** Round values from 0 up to a range. */
function marks(range, count, base) {
  const step = stepOf(range, count, base), found = [];
  for (let value = 0; value <= range * 1.0001; value += step) found.push(value);
  return found;
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const known = new Map();
  return (name) => {
    if (!known.has(name)) known.set(name, style.getPropertyValue(name).trim());
    return known.get(name);
  };
}

function memoryColor(kind) {
  return `--memory-${kind.replace(/ /g, "-")}`;
}

function eventColor(event) {
  if (event.stream === "compute") return event.waits ? "--waiting" : event.node.flags & RECOMPUTED ? "--recompute" : `--${event.node.phase || "forward"}`;
  if (event.stream === "cpu") return "--update";
  if (event.stream !== "communication") return "--transfer";
  return `--${event.node.boxing ? event.node.boxing[0] : "all-gather"}`;
}

function swatch(variable, extra = "") {
  const found = make("i", { className: `swatch ${extra}` });
  found.style.background = `var(${variable})`;
  return found;
}
