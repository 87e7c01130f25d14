// The graph: rows are modules, as the model nests them; lanes are the phases of the step. A closed row is one box in each lane.
"use strict";

const PILL = { width: 158, height: 34, x: 172, y: 46 };
const ROW = { closed: 38, head: 30, foot: 8, box: 28, indent: 14 };
// Height of the bar of lanes, and pixels that all indents of the tree take together at most.
const BAR = 26, INDENTS = 70;
const LANE = { least: 148, wire: 132, gap: 22, pad: 10 };

// Operators that compute nothing new.
const PLAIN = /^(_to_copy|empty|full|copy_|zero_|clone|_unsafe_view|zeros|ones|arange|add$)/;

class GraphView {
  /**
   * @param chosen is called with the node (or null) that was selected, chosenRow with the module that was opened or closed.
   * @param told is called with what the user did, for reports that stand beside this one.
   */
  constructor(model, chosen, chosenRow, told) {
    this.model = model;
    this.chosen = chosen;
    this.chosenRow = chosenRow;
    this.told = told;
    this.pass = model.last;
    this.open = new Set();
    this.items = new Map();
    this.selected = null;
    this.element = document.getElementById("canvas");
    this.tree = document.getElementById("tree");
    this.bands = document.getElementById("bands");
    this.lanesBar = document.getElementById("lanes");
    this.lanes = [...new Set(model.data.wheres.map((one) => one[1]))].sort();
    this.openFirst();
    this.cy = cytoscape({
      container: this.element, elements: [], style: [], layout: { name: "preset" }, minZoom: 0.12, maxZoom: 2.5,
      userZoomingEnabled: false, boxSelectionEnabled: false, autoungrabify: true, autounselectify: true,
      pixelRatio: Math.min(2, window.devicePixelRatio || 1),
    });
    this.theme();
    this.listen();
    this.draw();
    this.fit();
  }

  /** Open modules from the outside in while all rows fit on some screens. Equal layers stay folded. */
  openFirst() {
    let level = [...this.model.roots];
    let rows = level.length;
    while (level.length) {
      const inner = level.filter((row) => this.model.rows[row].kind !== "fold");
      const next = inner.flatMap((row) => this.model.rows[row].children);
      if (!next.length || rows + next.length > 80) break;
      for (const row of inner) if (this.model.rows[row].children.length) this.open.add(row);
      rows += next.length;
      level = next;
    }
  }

  listen() {
    this.cy.on("viewport resize", () => this.overlay());
    this.cy.on("tap", "node", (event) => this.tapped(event.target));
    this.cy.on("tap", (event) => { if (event.target === this.cy) this.choose(null); });
    this.cy.on("mouseover", "node, edge", (event) => {
      this.element.style.cursor = event.target.isNode() ? "pointer" : "default";
      this.near(event.target);
      showTip(this.tip(event.target), event.originalEvent);
    });
    this.cy.on("mouseout", "node, edge", () => { this.element.style.cursor = "grab"; this.near(null); hideTip(); });
    this.cy.on("pan zoom", hideTip);
    // Dragged by hand, the picture stays within its bounds too.
    this.cy.on("dragpan", () => this.pan(0, 0));
    const panel = document.getElementById("graph");
    panel.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.tree.addEventListener("keydown", (event) => this.key(event));
    // The row that has the keyboard is the row that keys act on, however it got it.
    this.tree.addEventListener("focusin", (event) => { this.focused = +event.target.closest("[data-row]").dataset.row; });
    this.tree.addEventListener("click", (event) => {
      const row = event.target.closest("[data-row]");
      if (row) { this.focused = +row.dataset.row; this.toggle(this.focused); }
    });
    // A canvas that changes its size keeps what it showed.
    new ResizeObserver(() => { this.cy.resize(); this.overlay(); }).observe(this.element);
  }

  wheel(event) {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.ctrlKey || event.metaKey) {
      const box = this.element.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY * unit / 300), { x: event.clientX - box.left, y: event.clientY - box.top });
    } else if (event.shiftKey) this.pan(-event.deltaY * unit, 0);
    else this.pan(-event.deltaX * unit, -event.deltaY * unit);
  }

  pan(x, y) {
    const { zoom, pan } = { zoom: this.cy.zoom(), pan: this.cy.pan() };
    const height = this.element.clientHeight, width = this.element.clientWidth;
    const least = Math.min(BAR + 2, height - this.height * zoom - 40);
    const left = Math.min(10, width - this.width * zoom - 10);
    this.cy.pan({ x: Math.max(left, Math.min(10, pan.x + x)), y: Math.max(least, Math.min(BAR + 2, pan.y + y)) });
    this.told("scroll", this.anchor());
  }

  /** The row at the top, and how many pixels of it are above. */
  anchor() {
    const place = this.visible.findLast((one) => this.y(one.top) <= BAR + 2) || this.visible[0];
    return place && { title: this.model.rows[place.row].title, above: BAR + 2 - this.y(place.top) };
  }

  /** Bring a row of that title to the top, as in another report. */
  align(anchor) {
    const place = anchor && this.visible.find((one) => this.model.rows[one.row].title === anchor.title);
    if (place) this.pan(0, BAR + 2 - anchor.above - this.y(place.top));
  }

  zoom(factor, at) {
    at = at || { x: this.element.clientWidth / 2, y: 40 };
    this.cy.zoom({ level: Math.max(0.12, Math.min(2.5, this.cy.zoom() * factor)), renderedPosition: at });
    this.pan(0, 0);
  }

  fit() {
    // On a narrow screen text that can be read matters more than the whole width.
    const least = this.element.clientWidth < 400 ? 0.75 : 0.45;
    this.cy.zoom(Math.max(least, Math.min(1.15, (this.element.clientWidth - 16) / this.width)));
    this.cy.pan({ x: 8, y: BAR + 2 });
    this.overlay();
  }

  show(pass) {
    this.pass = pass;
    this.keep(() => this.draw());
    if (this.selected !== null) this.mark(this.selected);
  }

  /** Change the picture, and keep the row at the top where it is. */
  keep(change, row) {
    const before = row === undefined ? this.visible.find((one) => this.y(one.top) > 20) : this.places.get(row);
    const anchor = before && before.row, at = before && this.y(before.top);
    change();
    const after = anchor === undefined ? undefined : this.places.get(anchor);
    if (after) this.cy.pan({ x: this.cy.pan().x, y: this.cy.pan().y + at - this.y(after.top) });
    this.pan(0, 0);
    this.overlay();
  }

  y(value) { return value * this.cy.zoom() + this.cy.pan().y; }

  toggle(row, open = !this.open.has(row)) {
    if (open === this.open.has(row)) return;
    if (open) this.open.add(row); else this.open.delete(row);
    this.keep(() => this.draw(), row);
    this.mark(this.selected);
    this.focus(row);
    this.chosenRow(row);
    this.told("toggle", this.model.rows[row].title, open);
    say(`${this.model.path(row)} ${open ? "open" : "closed"}`);
  }

  collapse() {
    this.open.clear();
    this.draw();
    this.cy.pan({ x: this.cy.pan().x, y: BAR + 2 });
    this.overlay();
    this.told("collapse");
  }

  key(event) {
    const one = this.places.get(this.focused) || this.visible[0];
    if (!one) return;
    const at = this.visible.indexOf(one);
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: this.visible.length - 1 };
    if (event.key in moves) this.focus(this.visible[Math.max(0, Math.min(this.visible.length - 1, moves[event.key]))].row, true);
    else if (event.key === "ArrowRight") { if (this.open.has(one.row)) this.focus((this.visible[at + 1] || one).row, true); else this.toggle(one.row, true); }
    else if (event.key === "ArrowLeft") { if (this.open.has(one.row)) this.toggle(one.row, false); else if (this.model.rows[one.row].parent >= 0) this.focus(this.model.rows[one.row].parent, true); }
    else if (event.key === "Enter" || event.key === " ") this.toggle(one.row);
    else return;
    event.preventDefault();
  }

  /** Keyboard focus on a row, on the screen. */
  focus(row, scroll = false) {
    this.focused = row;
    const place = this.places.get(row);
    if (scroll && place) {
      const y = this.y(place.top), height = this.element.clientHeight, head = ROW.head * this.cy.zoom();
      if (y < BAR + head + 6) this.pan(0, BAR + head + 14 - y);
      else if (y > height - 60) this.pan(0, height - 70 - y);
    }
    this.overlay();
    const element = this.tree.querySelector(`[data-row="${row}"]`);
    if (element && (scroll || this.tree.contains(document.activeElement))) element.focus({ preventScroll: true });
  }

  // ---- what is drawn, and where

  draw() {
    this.graph = this.model.graph(this.pass);
    const before = this.pass > 0 ? new Set(this.model.orders[this.pass - 1].map((one) => this.model.data.records.name[one])) : null;
    this.isNew = (node) => before !== null && !before.has(this.model.data.records.name[node.record]);
    this.newCells = new Set();
    for (const node of this.graph.nodes) if (this.isNew(node))
      for (let row = node.row; row >= 0; row = this.model.rows[row].parent) this.newCells.add(cellKey(row, node.lane));
    this.pile();
    this.elements();
    this.overlay();
  }

  /** Rows from the top down; lanes as wide as what is open in them. */
  pile() {
    this.places = new Map();
    this.visible = [];
    this.topOf = new Map();
    const columns = new Map();
    let y = 0;
    const walk = (row) => {
      const one = this.model.rows[row];
      const used = this.lanes.some((lane) => this.graph.summary.has(cellKey(row, lane)));
      if (!used) return;
      const place = { row, top: y, height: ROW.closed, open: this.open.has(row), leaf: !one.children.length };
      this.places.set(row, place);
      this.visible.push(place);
      if (!place.open) y += ROW.closed;
      else if (place.leaf) {
        let lines = 0;
        for (const lane of this.lanes) {
          const cell = this.cell(row, lane);
          if (!cell) continue;
          lines = Math.max(lines, cell.lines);
          columns.set(lane, Math.max(columns.get(lane) || 0, cell.columns));
        }
        place.lines = lines;
        y += ROW.head + lines * PILL.y + ROW.foot;
      } else {
        y += ROW.head;
        one.children.forEach(walk);
        y += ROW.foot;
      }
      place.height = y - place.top;
    };
    this.model.roots.forEach(walk);
    this.height = y;
    this.x = new Map();
    let x = LANE.pad;
    for (const lane of this.lanes) {
      const wire = lane === FORWARD_WIRE || lane === BACKWARD_WIRE || lane === UPDATE_WIRE;
      const width = Math.max(wire ? LANE.wire : LANE.least, (columns.get(lane) || 0) * PILL.x);
      this.x.set(lane, { left: x, width });
      x += width + LANE.gap;
    }
    this.width = x - LANE.gap + LANE.pad;
  }

  /** How the nodes of an open row lie in a lane. */
  cell(row, lane) {
    const key = cellKey(row, lane), members = this.graph.cells.get(key);
    if (!members) return null;
    const flat = this.model.data.cells[this.model.arranged[this.pass].get(key)];
    let lines = 0, columns = 0;
    const spots = members.map((_, at) => {
      lines = Math.max(lines, flat[2 * at + 1] + 1);
      columns = Math.max(columns, flat[2 * at] + 1);
      return [flat[2 * at], flat[2 * at + 1]];
    });
    return { members, spots, lines, columns };
  }

  elements() {
    const made = [];
    this.shownAs = new Array(this.graph.nodes.length);
    for (const place of this.visible) {
      if (place.open && !place.leaf) continue;
      for (const lane of this.lanes) {
        const { left, width } = this.x.get(lane);
        if (place.open) {
          const cell = this.cell(place.row, lane);
          if (!cell) continue;
          // Backward runs towards the top, as the modules do in it.
          const up = lane === BACKWARD || lane === BACKWARD_WIRE;
          const start = left + (width - cell.columns * PILL.x) / 2 + PILL.x / 2;
          cell.members.forEach((index, at) => {
            const [column, line] = cell.spots[at];
            const y = place.top + ROW.head + ((up ? place.lines - 1 - line : line) + 0.5) * PILL.y;
            this.shownAs[index] = `n${index}`;
            made.push(this.pill(this.graph.nodes[index], start + column * PILL.x, y));
          });
        } else {
          const summary = this.graph.summary.get(cellKey(place.row, lane));
          if (summary) made.push(this.box(place, lane, summary, left + width / 2, width));
        }
      }
    }
    this.cover();
    const positions = new Map(made.map((one) => [one.data.id, one]));
    made.push(...this.edges(positions));
    this.drawn = made;
    this.cy.batch(() => { this.cy.elements().remove(); this.cy.add(made); });
  }

  /** Nodes in closed rows are shown as the box of the outermost closed row around them. */
  cover() {
    const closed = new Map();
    for (const place of this.visible) if (!place.open) closed.set(place.row, place.row);
    const coverOf = (row) => {
      if (closed.has(row)) return closed.get(row);
      const parent = this.model.rows[row].parent;
      const found = parent < 0 ? undefined : coverOf(parent);
      closed.set(row, found);
      return found;
    };
    for (const node of this.graph.nodes) {
      if (this.shownAs[node.index]) continue;
      const cover = coverOf(node.row);
      this.shownAs[node.index] = `c${cellKey(cover, node.lane)}`;
    }
  }

  pill(node, x, y) {
    const boxing = node.boxing !== null;
    const small = node.flags & VIEW;
    const sbp = node.sbp ? ` ${node.sbp}` : "";
    const tensor = node.lane === REST ? (node.tensor || node.name) : "";
    const top = boxing ? `${node.op}  ${node.boxing[1]} → ${node.boxing[2]}` : tensor ? `${tensor} ${sbp}` : `${node.op} ${sbp}`;
    const second = boxing ? `${short(node.tensor, 14)} · ${showBytes(node.boxing[5])}` : node.shape;
    return { group: "nodes", position: { x, y },
      data: { id: `n${node.index}`, node: node.index, label: `${short(top, 26)}\n${short(second, 28)}`, width: PILL.width, height: small ? 30 : PILL.height,
              stops: [sbpColor(node.sbp)], shares: [0] },
      classes: `pill${boxing ? " boxing" : ""}${small ? " view" : ""}${this.isNew(node) ? " new" : ""}${node.flags & RECOMPUTED ? " again" : ""}` };
  }

  box(place, lane, summary, x, width) {
    const id = `c${cellKey(place.row, lane)}`;
    const boxed = summary.boxings.size > 0 && (lane === FORWARD_WIRE || lane === BACKWARD_WIRE || lane === UPDATE_WIRE);
    const stops = [], shares = [];
    let sum = 0;
    const total = [...summary.sbp.values()].reduce((a, b) => a + b, 0) || 1;
    for (const [sbp, count] of [...summary.sbp].sort((a, b) => sbpRank(a[0]) - sbpRank(b[0]))) {
      stops.push(sbpColor(sbp), sbpColor(sbp));
      shares.push(100 * sum / total, 100 * (sum + count) / total);
      sum += count;
    }
    if (!stops.length) { stops.push(sbpColor("")); shares.push(0); }
    return { group: "nodes", position: { x, y: place.top + ROW.closed / 2 },
      data: { id, row: place.row, lane, label: boxed ? boxLabel(summary) : this.content(place, lane, summary), width: Math.min(width - 8, 190), height: ROW.box, stops, shares },
      classes: `box${boxed ? " boxing" : ""}${this.newCells.has(cellKey(place.row, lane)) ? " new" : ""}` };
  }

  /** What a closed box holds, in a few words. */
  content(place, lane, summary) {
    const members = place.leaf ? this.graph.cells.get(cellKey(place.row, lane)) : null;
    if (members) {
      const ops = new Map();
      for (const index of members) {
        const node = this.graph.nodes[index];
        if (!(node.flags & (VIEW | WAITS))) ops.set(node.op, (ops.get(node.op) || 0) + 1);
      }
      // What copies and fills says least.
      const texts = [...ops].sort((a, b) => PLAIN.test(a[0]) - PLAIN.test(b[0])).map(([op, count]) => (count > 1 ? `${op} ×${count}` : op));
      let shown = 1;
      while (shown < texts.length && texts.slice(0, shown + 1).join(", ").length < 19) shown++;
      const text = short(texts.slice(0, shown).join(", "), 20);
      if (text) return shown < texts.length ? `${short(text, 17)} +${texts.length - shown}` : text;
      return summary.count === 1 ? this.graph.nodes[members[0]].op : `${summary.count} views`;
    }
    const { times } = this.model.rows[place.row], each = times && summary.count % times === 0 ? summary.count / times : 0;
    const what = lane === REST ? "tensor" : "node";
    return each ? `${times} × ${each} ${what}${each > 1 ? "s" : ""}` : `${summary.count} ${what}${summary.count > 1 ? "s" : ""}`;
  }

  edges(positions) {
    const counted = new Map();
    for (const node of this.graph.nodes)
      for (const input of node.inputs) {
        const from = this.shownAs[input], to = this.shownAs[node.index];
        if (from === to) continue;
        const key = `${from}>${to}`;
        const one = counted.get(key);
        const constant = this.graph.constants.has(input);
        if (one) { one.count++; one.constant &&= constant; }
        else counted.set(key, { from, to, count: 1, constant });
      }
    const made = [];
    for (const [key, { from, to, count, constant }] of counted) {
      const source = positions.get(from), target = positions.get(to);
      if (!source || !target) continue;
      const wire = source.classes.includes("boxing") || target.classes.includes("boxing");
      const quiet = constant ? " constant" : "";
      made.push({ group: "edges", data: { id: key, source: from, target: to, count, width: 1 + Math.min(2, Math.log10(count)), shade: Math.abs(source.position.y - target.position.y) > 260 ? 0.22 : 0.6, ...curve(source, target) },
                  classes: `${wire ? "wire" : ""}${quiet}` });
    }
    return made;
  }

  // ---- overlays: lanes, bands and the tree of rows, which move with the picture

  overlay() {
    if (!this.places || !this.cy) return;
    const zoom = this.cy.zoom(), pan = this.cy.pan(), height = this.element.clientHeight, width = this.element.clientWidth;
    const offset = this.element.offsetLeft;
    if (!this.places.has(this.focused)) this.focused = this.visible.length ? this.visible[0].row : undefined;
    this.lanesBar.replaceChildren(...this.lanes.map((lane) => {
      const { left, width: wide } = this.x.get(lane);
      const bar = make("div", { className: `lane${lane === FORWARD_WIRE || lane === BACKWARD_WIRE || lane === UPDATE_WIRE ? " wire" : ""}` });
      const from = left * zoom + pan.x;
      bar.style.left = `${offset + from}px`;
      bar.style.width = `${wide * zoom}px`;
      if (from + wide * zoom < 0 || from > width) bar.hidden = true;
      bar.append(make("span", { textContent: LANES[lane] }));
      return bar;
    }));
    const bands = [], items = [];
    const font = Math.max(8, Math.min(12.5, 13 * zoom + 2));
    const on = this.visible.filter((place) => this.y(place.top + place.height) > 0 && this.y(place.top) < height);
    // The innermost open row whose head is above the picture: its head stays in sight, and says all of its name.
    const pinned = on.findLast((place) => place.open && this.y(place.top) < BAR && this.y(place.top + place.height) > BAR);
    const indent = Math.min(ROW.indent, INDENTS / Math.max(1, ...on.map((place) => this.model.rows[place.row].depth)));
    for (const place of on) {
      const row = this.model.rows[place.row];
      const top = this.y(place.top), pin = place === pinned;
      const band = make("div", { className: `band${place.open ? " open" : ""}${row.depth % 2 ? " odd" : ""}` });
      band.style.top = `${top}px`;
      band.style.height = `${place.height * zoom}px`;
      bands.push(band);
      const head = (place.open ? ROW.head : ROW.closed) * zoom;
      const item = this.items.get(row.id) || make("div");
      item.className = `row ${row.kind}${place.open ? " open" : ""}${pin ? " pinned" : ""}`;
      item.dataset.row = row.id;
      item.setAttribute("role", "treeitem");
      item.setAttribute("aria-level", row.depth + 1);
      item.setAttribute("aria-expanded", String(place.open));
      item.tabIndex = row.id === this.focused ? 0 : -1;
      item.style.top = `${pin ? Math.min(BAR, this.y(place.top + place.height) - head) : top}px`;
      item.style.height = `${head}px`;
      item.style.fontSize = `${font}px`;
      item.style.paddingLeft = `${8 + (pin ? 0 : row.depth * indent)}px`;
      item.title = `${row.title}${row.source && row.source !== row.title ? `\n${row.source}` : ""}${this.model.code(row.source) ? `\n${this.model.code(row.source)}` : ""}`;
      item.replaceChildren(make("i", { textContent: place.open ? "▾" : "▸" }), make("span", { className: "name", textContent: pin && row.kind !== "line" ? tail(this.model.path(row.id), 34) : row.label }));
      if (row.kind === "fold") item.append(make("b", { className: "times", textContent: `×${row.times}` }));
      else if (row.source && zoom > 0.6 && !pin) item.append(make("small", { textContent: row.kind === "line" ? row.source.replace(/.*:/, ":") : row.source.split("/").at(-1) }));
      items.push(item);
    }
    if (!on.some((place) => place.row === this.focused) && items.length) (items.find((item) => parseFloat(item.style.top) >= BAR) || items[0]).tabIndex = 0;
    const had = this.tree.contains(document.activeElement);
    this.bands.replaceChildren(...bands);
    this.items = new Map(items.map((item) => [+item.dataset.row, item]));
    // A row that stays is not inserted again: it may be under a press that has not ended.
    for (const item of [...this.tree.children]) if (!items.includes(item)) item.remove();
    items.forEach((item, at) => { if (this.tree.children[at] !== item) this.tree.insertBefore(item, this.tree.children[at] || null); });
    if (had) this.tree.querySelector(`[data-row="${this.focused}"]`)?.focus({ preventScroll: true });
  }

  // ---- selecting

  tapped(element) {
    if (element.data("node") !== undefined) this.choose(element.data("node"));
    else if (element.data("row") !== undefined) { this.focused = element.data("row"); this.toggle(element.data("row"), true); }
  }

  /** Select a node of the pass that is shown; null for none. */
  choose(index) {
    this.selected = index === null ? null : this.graph.nodes[index].name;
    this.mark(this.selected);
    this.chosen(index === null ? null : this.graph.nodes[index]);
  }

  /** Open what is around a node, and bring it to the middle. */
  reveal(index) {
    const node = this.graph.nodes[index];
    for (let row = node.row; row >= 0; row = this.model.rows[row].parent) this.open.add(row);
    this.draw();
    this.choose(index);
    const element = this.cy.getElementById(`n${index}`);
    if (this.cy.zoom() < 0.7) this.cy.zoom(0.9);
    const { x, y } = element.position();
    const zoom = this.cy.zoom();
    this.cy.pan({ x: this.element.clientWidth / 2 - x * zoom, y: this.element.clientHeight / 2 - y * zoom });
    this.pan(0, 0);
    this.overlay();
  }

  mark(name) {
    this.cy.elements().removeClass("chosen before behind");
    const index = name === null ? undefined : this.graph.byText.get(name);
    if (index === undefined) return;
    const element = this.cy.getElementById(this.shownAs[index]);
    element.addClass("chosen");
    element.incomers("edge").addClass("before");
    element.outgoers("edge").addClass("behind");
  }

  near(element) {
    this.cy.elements(".near").removeClass("near");
    if (element && element.isNode()) element.connectedEdges().addClass("near");
  }

  tip(element) {
    if (element.isEdge()) {
      const count = element.data("count");
      return [[count === 1 ? "one tensor" : `${count} tensors`, "b"]];
    }
    if (element.data("node") !== undefined) return nodeTip(this.model, this.graph.nodes[element.data("node")]);
    const { row, lane } = element.data();
    const summary = this.graph.summary.get(cellKey(row, lane));
    const lines = [[this.model.path(row), "b"], [`${LANES[lane]}: ${summary.count} nodes${summary.recomputed ? `, ${summary.recomputed} recomputed` : ""}`]];
    const { times } = this.model.rows[row];
    if (times) lines[0][0] += `: ${times} equal layers`;
    for (const [kind, count] of summary.boxings) lines.push([`${count} × ${kind}`, "boxing"]);
    if (summary.sent) lines.push([`${showBytes(summary.sent)} sent by each rank`]);
    for (const [sbp, count] of summary.sbp) lines.push([`${count} × ${sbp || "not placed yet"}`, "sbp", sbp]);
    if (this.model.rows[row].source) lines.push([this.model.rows[row].source, "dim"], [this.model.code(this.model.rows[row].source), "code"]);
    lines.push([times ? "click to unfold" : "click to open", "dim"]);
    return lines;
  }

  // ---- looks

  theme() {
    const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const font = 'system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
    this.cy.style([
      { selector: "node", style: {
        shape: "round-rectangle", width: "data(width)", height: "data(height)", label: "data(label)", color: css("--on-node"),
        "font-size": 11, "font-family": font, "text-wrap": "wrap", "text-valign": "center", "text-halign": "center", "line-height": 1.25,
        "background-fill": "linear-gradient", "background-gradient-direction": "to-right",
        "background-gradient-stop-colors": (one) => one.data("stops").map(css), "background-gradient-stop-positions": (one) => one.data("shares"),
        "border-width": 1, "border-color": css("--node-line"), "min-zoomed-font-size": 5, "overlay-opacity": 0 } },
      { selector: "node.view", style: { "background-opacity": 0.55, "font-size": 10, color: css("--on-view") } },
      { selector: "node.boxing", style: {
        shape: "polygon", "background-fill": "solid", "background-color": css("--boxing"), color: css("--on-boxing"), "font-weight": "bold",
        "border-color": css("--boxing-line"), "border-width": 2, "font-size": 10.5, "shape-polygon-points": "-0.92 -1 0.92 -1 1 0 0.92 1 -0.92 1 -1 0" } },
      { selector: "node.again", style: { "border-style": "dashed", "border-width": 2 } },
      { selector: "node.new", style: { "border-color": css("--new"), "border-width": 3 } },
      { selector: "edge", style: {
        width: "data(width)", "line-color": css("--edge"), "target-arrow-color": css("--edge"), "target-arrow-shape": "triangle", "arrow-scale": 0.7,
        "curve-style": "unbundled-bezier", "control-point-distances": "data(distances)", "control-point-weights": "data(weights)", "edge-distances": "endpoints",
        "source-endpoint": "data(leaves)", "target-endpoint": "data(enters)", opacity: "data(shade)", "overlay-opacity": 0 } },
      { selector: "edge.wire", style: { "line-color": css("--boxing"), "target-arrow-color": css("--boxing") } },
      { selector: "edge.constant", style: { opacity: 0, events: "no", "line-style": "dotted" } },
      { selector: "edge.near", style: { opacity: 1, "line-color": css("--accent"), "target-arrow-color": css("--accent"), "z-index": 9 } },
      { selector: "edge.before, edge.behind", style: { opacity: 1, width: 2.5, "line-color": css("--accent"), "target-arrow-color": css("--accent"), "z-index": 10 } },
      { selector: "edge.behind", style: { "line-style": "dashed" } },
      { selector: "node.chosen", style: { "border-width": 4, "border-color": css("--accent") } },
    ]);
  }
}
