// The data of a step: tables, the nodes after each pass, and memory over them; and how values are written as text.
"use strict";

const LANES = ["inputs, state", "boxing", "forward", "backward", "boxing", "update", "boxing"];
const REST = 0, FORWARD_WIRE = 1, FORWARD = 2, BACKWARD = 3, BACKWARD_WIRE = 4, UPDATE = 5, UPDATE_WIRE = 6;
const VIEW = 1, BOXING = 2, WAITS = 4, RECOMPUTED = 8, RETURNED = 16, REPEATED = 32, IN_PLACE = 64;
// As many equal layers in a row are shown as one; the readers of a constant in as many rows are shown only on demand.
const FOLDED = 3, FAN = 4;
// From the bottom of the picture up: what stays over the step, then what is made in it.
const MEMORY_KINDS = ["parameters", "optimizer state", "buffers", "inputs", "gathered", "gradients", "activations", "update", "temporary"];

/** Base64 of gzipped JSON as a value. */
async function unpack(text) {
  if (typeof DecompressionStream === "undefined")
    throw new Error("this browser is too old to read the report (Chrome 80, Firefox 113 and Safari 16.4 can)");
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

class Model {
  constructor(data) {
    this.data = data;
    this.rows = data.rows.map(([label, title, parent, kind, source], id) =>
      ({ id, label, title, parent, kind, source, children: [], depth: 0 }));
    for (const row of this.rows) if (row.parent >= 0) this.rows[row.parent].children.push(row.id);
    this.roots = this.rows.filter((row) => row.parent < 0).map((row) => row.id);
    this.starts = [0];
    for (const count of data.records.reads) this.starts.push(this.starts.at(-1) + count);
    this.orders = [];
    this.arranged = [];
    this.decode();
    this.fold();
    const settle = (row, depth) => { this.rows[row].depth = depth; for (const child of this.rows[row].children) settle(child, depth + 1); };
    for (const row of this.roots) settle(row, 0);
    this.graphs = new Map();
    this.last = data.passes.length - 1;
    this.bucketOf = new Map();
    for (const [bucket, names] of Object.entries(data.buckets)) for (const name of names) this.bucketOf.set(name, bucket);
  }

  /** Each pass is told by the one before it. */
  decode() {
    let before = [];
    let cells = new Map();
    for (const pass of this.data.passes) {
      const order = [];
      for (let at = 0; at < pass.runs.length; at += 2) {
        const start = pass.runs[at], count = pass.runs[at + 1];
        for (let step = 0; step < count; step++) order.push(start >= 0 ? before[start + step] : -1 - start + step);
      }
      cells = new Map(cells);
      for (let at = 0; at < pass.cells.length; at += 3) {
        const key = cellKey(pass.cells[at], pass.cells[at + 1]);
        if (pass.cells[at + 2] < 0) cells.delete(key); else cells.set(key, pass.cells[at + 2]);
      }
      this.orders.push(order);
      this.arranged.push(cells);
      before = order;
    }
  }

  /** Put runs of equal numbered modules, the layers of a model, into a row of their own: "blocks.0 … 23", 24 times. */
  fold() {
    const { records, kinds, wheres } = this.data;
    const forward = this.rows.map(() => []);
    for (const record of this.orders[0]) {
      const [row, lane] = wheres[records.where[record]], [op, , , shape] = kinds[records.kind[record]];
      if (lane === FORWARD) forward[row].push(`${op} ${shape}`);
    }
    // Equal are modules of equal parts whose forward has the same operators on the same shapes.
    const inside = (row) => this.rows[row].children.map((child) => `${this.relative(child, row)}(${inside(child)})`).join() + forward[row].join();
    const number = (row) => (this.rows[row].kind === "module" && /(^|\.)\d+$/.test(this.rows[row].title) ? this.rows[row].title.split(".").at(-1) : null);
    for (const { id, children } of [...this.rows]) {
      const looks = children.map((child) => (number(child) === null ? null : inside(child)));
      const kept = [];
      for (let first = 0, last; first < children.length; first = last) {
        last = first + 1;
        while (looks[first] !== null && looks[last] === looks[first]) last++;
        if (last - first < FOLDED) { kept.push(...children.slice(first, last)); continue; }
        const members = children.slice(first, last), [one, other] = [members[0], members.at(-1)];
        const row = { id: this.rows.length, label: `${this.rows[one].label} … ${number(other)}`, title: `${this.rows[one].title} … ${number(other)}`,
                      parent: id, kind: "fold", source: "", children: members, depth: 0, times: members.length };
        for (const member of members) this.rows[member].parent = row.id;
        this.rows.push(row);
        kept.push(row.id);
      }
      this.rows[id].children = kept;
    }
  }

  /** What a row is called inside of the one around it. */
  relative(row, around) {
    const { kind, title, label } = this.rows[row];
    return kind === "module" ? title.slice(this.rows[around].title.length) : kind === "line" ? title : label;
  }

  /** The graph after a pass: its nodes in order, who reads whom, and what lies in which cell. */
  graph(pass) {
    if (!this.graphs.has(pass)) this.graphs.set(pass, this.build(pass));
    return this.graphs.get(pass);
  }

  build(pass) {
    const { records, kinds, wheres, names, tensors, boxings } = this.data;
    const nodes = this.orders[pass].map((record, index) => {
      const [op, target, sbp, shape, whole, bytes, flags] = kinds[records.kind[record]];
      const [row, lane, phase, source] = wheres[records.where[record]];
      const boxing = records.boxing[record] < 0 ? null : boxings[records.boxing[record]];
      return { index, record, name: names[records.name[record]], op, target, sbp, shape, whole, bytes, flags, row, lane, phase, source,
               tensor: tensors[records.tensor[record]], boxing, inputs: [], users: [] };
    });
    const byName = new Map(this.orders[pass].map((record, index) => [records.name[record], index]));
    const cells = new Map();
    for (const node of nodes) {
      for (let at = this.starts[node.record]; at < this.starts[node.record + 1]; at++) {
        const input = byName.get(records.inputs[at]);
        if (input === undefined) continue;
        node.inputs.push(input);
        nodes[input].users.push(node.index);
      }
      const key = cellKey(node.row, node.lane);
      if (!cells.has(key)) cells.set(key, []);
      cells.get(key).push(node.index);
    }
    const byText = new Map(nodes.map((node) => [node.name, node.index]));
    return { nodes, cells, byText, summary: this.summarize(nodes), constants: this.constants(nodes) };
  }

  /** Indices of constants that many modules read: hyperparameters, masks, positions, what is made of no parameter. */
  constants(nodes) {
    const fixed = new Uint8Array(nodes.length), found = new Set();
    for (const node of nodes) {
      if (node.lane === REST) fixed[node.index] = !["parameter", "bucket", "state"].includes(node.op);
      else fixed[node.index] = !node.boxing && !(node.flags & (WAITS | IN_PLACE)) && !node.op.startsWith("empty") && node.inputs.every((input) => fixed[input]);
      if (fixed[node.index] && new Set(node.users.map((user) => this.path(nodes[user].row))).size >= FAN) found.add(node.index);
    }
    return found;
  }

  /** Of each row and lane, all that is inside: counts of nodes by SBP, and of boxing nodes by kind. */
  summarize(nodes) {
    const found = new Map();
    for (const node of nodes)
      for (let row = node.row; row >= 0; row = this.rows[row].parent) {
        const key = cellKey(row, node.lane);
        let one = found.get(key);
        if (!one) found.set(key, (one = { count: 0, sbp: new Map(), boxings: new Map(), sent: 0, recomputed: 0 }));
        one.count++;
        if (node.flags & RECOMPUTED) one.recomputed++;
        if (!(node.flags & VIEW)) one.sbp.set(node.sbp, (one.sbp.get(node.sbp) || 0) + 1);
        if (node.boxing) {
          const kind = node.boxing[0];
          one.boxings.set(kind, (one.boxings.get(kind) || 0) + 1);
          one.sent += node.boxing[5] * this.times(node);
        }
      }
    return found;
  }

  /** How often a node of the last pass runs in a step; of earlier passes once. */
  times(node) {
    if (!this.turns) this.turns = new Map(this.data.turns);
    return node.flags & REPEATED ? this.turns.get(node.index) || 1 : 1;
  }

  /** The name that a user knows a node by: that of its parameters, or its own. */
  title(node) {
    if (!node.tensor) return node.name;
    if (["input", "seed", "scaler", "turn"].includes(node.op)) return `${node.op} ${node.tensor}`.trim();
    const bucket = node.tensor.replace(/^gradient of /, "");
    const names = this.data.buckets[bucket.split(".")[0]];
    if (!names || node.op === "state" || bucket.includes(".")) return node.tensor;
    const of = node.tensor.startsWith("gradient of ") ? "gradient of " : "";
    return names.length === 1 ? `${of}${names[0]}` : `${of}${bucket} (${names.length} parameters)`;
  }

  /** The first and last parameter of a node that stands for several. */
  span(node) {
    const names = this.parameters(node);
    return names.length > 1 ? `${names[0]} … ${names.at(-1)}` : "";
  }

  parameters(node) {
    return this.data.buckets[node.tensor.replace(/^gradient of /, "").split(".")[0]] || [];
  }

  path(row) {
    const { kind, parent, title } = this.rows[row];
    return kind !== "line" ? title : parent < 0 ? "build()" : this.rows[parent].title;
  }

  code(source) {
    return this.data.code[source] || "";
  }

  /** Nodes that all the words are said of, best first: name, tensor, parameters, module, operator, source line. */
  search(graph, text, most = 40) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return { found: [], total: 0 };
    const scored = [];
    for (const node of graph.nodes) {
      const names = `${node.name} ${node.tensor}`.toLowerCase();
      const inside = node.lane === REST || node.boxing ? this.parameters(node).join(" ").toLowerCase() : "";
      const about = `${this.path(node.row)} ${node.op} ${node.source} ${this.code(node.source)}`.toLowerCase();
      let score = 0;
      for (const word of words) {
        if (names.includes(word)) score += node.name.toLowerCase() === word || node.tensor.toLowerCase() === word ? 8 : 4;
        else if (inside.includes(word)) score += 3;
        else if (about.includes(word)) score += 1;
        else { score = 0; break; }
      }
      if (score) scored.push([score + (node.flags & VIEW ? 0 : 0.5), node]);
    }
    scored.sort((a, b) => b[0] - a[0] || a[1].index - b[1].index);
    return { found: scored.slice(0, most).map((one) => one[1]), total: scored.length };
  }

  /** Bytes of each kind while each node of the last pass runs. */
  memory() {
    if (this._memory) return this._memory;
    const size = this.orders[this.last].length;
    const [bytes = [], kinds = [], owners = [], born = [], dies = []] = this.data.held;
    const curves = new Map();
    for (let at = 0; at < bytes.length; at++) {
      if (!curves.has(kinds[at])) curves.set(kinds[at], new Float64Array(size + 1));
      curves.get(kinds[at])[born[at]] += bytes[at];
      curves.get(kinds[at])[dies[at] + 1] -= bytes[at];
    }
    const total = new Float64Array(size);
    for (const curve of curves.values()) {
      let sum = 0;
      for (let at = 0; at < size; at++) { sum += curve[at]; curve[at] = sum; total[at] += sum; }
    }
    const shown = MEMORY_KINDS.filter((kind) => curves.has(kind));
    let peak = 0;
    for (let at = 0; at < size; at++) if (total[at] > total[peak]) peak = at;
    this._memory = { kinds: shown, curves, total, size, peak, rows: { bytes, kinds, owners, born, dies } };
    return this._memory;
  }

  /** The largest that are held at a node of the last pass: {bytes, kind, node}. */
  contributors(at, most = Infinity) {
    const { bytes, kinds, owners, born, dies } = this.memory().rows;
    const nodes = this.graph(this.last).nodes;
    const found = [];
    for (let one = 0; one < bytes.length; one++)
      if (born[one] <= at && at <= dies[one]) found.push({ bytes: bytes[one], kind: kinds[one], node: nodes[owners[one]] });
    found.sort((a, b) => b.bytes - a.bytes);
    return found.slice(0, most);
  }
}

function cellKey(row, lane) {
  return row * 8 + lane;
}

function showBytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(count) >= 1024 && at < units.length - 1) { count /= 1024; at++; }
  return `${at === 0 ? count : count.toFixed(1)} ${units[at]}`;
}

/** The value of a fact [label, value, unit]. */
function showFact([, value, unit]) {
  if (unit === "bytes") return showBytes(value);
  if (unit === "seconds") return showTime(value * 1e9);
  if (unit === "share") return `${(100 * value).toFixed(1)} %`;
  if (unit === "count" || unit === "per second") return showCount(value);
  return value;
}

function showCount(count) {
  const [unit, size] = [[" T", 1e12], [" B", 1e9], [" M", 1e6], [" k", 1e4]].find(([, one]) => count >= one) || ["", 1];
  return size === 1 ? String(Math.round(count)) : `${(count / (size === 1e4 ? 1e3 : size)).toPrecision(3)}${unit}`;
}

function showTime(nanoseconds) {
  const units = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];
  const [unit, size] = units.find(([, one]) => nanoseconds >= one) || units[3];
  const value = nanoseconds / size;
  return `${value >= 100 || unit === "ns" ? value.toFixed(0) : value.toPrecision(3)} ${unit}`;
}

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
