// The page as a whole, and what its parts tell each other.
"use strict";

const byId = (id) => document.getElementById(id);

/** A tooltip of lines [text, class, argument], beside the pointer. */
function showTip(lines, at) {
  const tip = byId("tooltip");
  tip.replaceChildren(...lines.map(([text, look = "", argument]) => {
    const line = make("div", { className: look, textContent: text });
    if (look === "sbp") line.prepend(swatch(sbpColor(argument)));
    if (look === "kind") line.prepend(swatch(memoryColor(argument)));
    if (look === "boxing") line.prepend(swatch("--boxing"));
    return line;
  }));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  let left = at.clientX + 16, top = at.clientY + 16;
  if (left + box.width > innerWidth - 8) left = Math.max(8, at.clientX - box.width - 16);
  if (top + box.height > innerHeight - 8) top = Math.max(8, Math.min(innerHeight - box.height - 8, at.clientY - box.height - 16));
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

function hideTip() {
  byId("tooltip").hidden = true;
}

function say(text) {
  byId("details").dataset.said = text;
}

function nodeTip(model, node) {
  const lines = [[model.title(node), "b"]];
  if (node.boxing) {
    lines.push([`${node.boxing[0]}: ${node.boxing[1]} → ${node.boxing[2]} over ${node.boxing[7]} ranks`, "boxing"], [`${showBytes(node.boxing[5])} sent by each rank`]);
  } else lines.push([`${node.op}${node.sbp ? `  ${node.sbp}` : ""}`, "sbp", node.sbp]);
  if (node.shape) lines.push([node.shape + (node.whole && node.sbp !== "B" ? `  of ${node.whole}` : "")]);
  const path = model.path(node.row);
  lines.push([`${node.phase} ${path}`.trim(), "dim"]);
  if (node.source) lines.push([node.source, "dim"]);
  if (model.code(node.source)) lines.push([model.code(node.source), "code"]);
  return lines;
}

class Page {
  constructor(model) {
    this.model = model;
    // Beside another report, that one does the same: called with what the user did.
    this.told = () => {};
    const told = (...what) => this.told(...what);
    document.title = byId("title").textContent = model.data.title;
    this.facts();
    this.legend();
    this.graph = new GraphView(model, (node) => this.details(node), (row) => this.about(row), told);
    this.charts = new Charts(model, (node) => this.go(node.name), told, (form) => this.save(chartSvg, "chart", form));
    this.slider();
    this.details(null);
    this.contributors();
    this.searching();
    this.tools();
  }

  facts() {
    byId("facts").replaceChildren(...this.model.data.facts.map((fact) => make("div", {}, make("dt", { textContent: fact[0] }), make("dd", { textContent: showFact(fact) }))));
  }

  legend() {
    const keys = this.sbpKeys().map(([color, label]) => make("span", { className: "key" }, swatch(color), label));
    keys.push(make("span", { className: "key" }, swatch("--boxing", "hex"), "boxing"), make("span", { className: "key" }, swatch("--canvas", "dashed"), "recomputed"),
              make("span", { className: "key" }, swatch("--canvas", "made"), "added by this pass"));
    byId("legend").replaceChildren(...keys);
  }

  /** [colour, label] of the SBPs that any pass gives a node. */
  sbpKeys() {
    const used = new Set(this.model.data.kinds.map((kind) => sbpColor(kind[2])));
    const all = [["--sbp-b", "B, broadcast"], ["--sbp-s0", "S(0), split"], ["--sbp-s1", "S(1) and on"], ["--sbp-mixed", "split on a mesh"], ["--sbp-p", "P, partial sum"], ["--sbp-local", "local"], ["--sbp-none", "not placed yet"]];
    return all.filter(([color]) => used.has(color));
  }

  /** Save a picture as a file; what goes wrong is said on the page. */
  async save(draw, name, form) {
    try {
      await save(this, draw, name, form);
    } catch (error) {
      byId("problem").hidden = false;
      byId("problem").textContent = `The picture cannot be saved: ${error.message}`;
      byId("problem").onclick = () => { byId("problem").hidden = true; };
    }
  }

  // ---- passes

  slider() {
    const input = byId("pass"), { passes } = this.model.data;
    input.max = String(passes.length - 1);
    input.value = String(this.model.last);
    window.addEventListener("resize", () => this.spaceTicks());
    byId("ticks").replaceChildren(...passes.map((pass, at) => {
      const tick = make("span", { textContent: pass.name, title: `${pass.name}: ${pass.summary}` });
      tick.style.left = `${passes.length > 1 ? 100 * at / (passes.length - 1) : 0}%`;
      tick.className = this.changes(at).any || at === 0 ? "did" : "";
      tick.addEventListener("click", () => this.show(at));
      return tick;
    }));
    input.addEventListener("input", () => this.show(+input.value));
    byId("earlier").addEventListener("click", () => this.show(this.graph.pass - 1));
    byId("later").addEventListener("click", () => this.show(this.graph.pass + 1));
    this.said();
  }

  /** Do what a user did in a report beside this one, where there is such a row or pass here. */
  follow(what, ...about) {
    const [name, open] = about;
    if (what === "pass") this.show(this.model.data.passes.findIndex((pass) => pass.name === name));
    else if (what === "axis") this.charts.lay(name);
    else if (what === "collapse") this.graph.collapse();
    else if (what === "scroll") this.graph.align(name);
    else {
      const row = this.model.rows.find((one) => one.title === name && this.graph.places.has(one.id));
      if (row) this.graph.toggle(row.id, open);
    }
  }

  /** Count what a pass added, removed and changed. */
  changes(at) {
    if (at === 0) return { made: this.model.orders[0].length, gone: 0, other: 0, any: true };
    const { name } = this.model.data.records;
    const before = new Map(this.model.orders[at - 1].map((record) => [name[record], record]));
    let made = 0, other = 0;
    for (const record of this.model.orders[at]) {
      const known = before.get(name[record]);
      if (known === undefined) made++;
      else if (known !== record) other++;
    }
    const gone = before.size - (this.model.orders[at].length - made);
    const moved = this.model.data.passes[at].runs.length > 2;
    return { made, gone, other, moved, any: made || gone || other || moved };
  }

  show(at) {
    if (at < 0 || at > this.model.last || at === this.graph.pass) return;
    byId("pass").value = String(at);
    this.graph.show(at);
    this.told("pass", this.model.data.passes[at].name);
    this.said();
    const index = this.graph.selected === null ? undefined : this.graph.graph.byText.get(this.graph.selected);
    this.details(index === undefined ? null : this.graph.graph.nodes[index]);
  }

  said() {
    const at = this.graph.pass, pass = this.model.data.passes[at], { made, gone, other, moved } = this.changes(at);
    const parts = at === 0 ? [] : [made && `+${made}`, gone && `−${gone}`, other && `${other} changed`, !made && !gone && !other && (moved ? "order only" : "no change")].filter(Boolean);
    byId("passname").textContent = `${at + 1}/${this.model.last + 1} ${pass.name}`;
    byId("passcount").textContent = [`${this.model.orders[at].length} nodes`, ...parts].join(" · ");
    byId("passsummary").textContent = pass.summary;
    byId("said").title = `${pass.summary}\nThe pass took ${pass.seconds < 0.01 ? "less than 0.01" : pass.seconds.toFixed(2)} s.`;
    byId("pass").setAttribute("aria-valuetext", `${pass.name}, ${pass.summary}`);
    [...byId("ticks").children].forEach((tick, one) => tick.classList.toggle("now", one === at));
    this.spaceTicks();
  }

  /** Hide names of passes that would overlap: the shown pass comes first, then those that changed the graph. */
  spaceTicks() {
    const rank = (tick) => ["now", "did"].findIndex((name) => tick.classList.contains(name)) >>> 0;
    const rows = [[], []];
    const ticks = [...byId("ticks").children].map((tick, at) => ({ tick, box: tick.getBoundingClientRect(), row: rows[at % 2] }));
    for (const { tick, box, row } of ticks.sort((one, other) => rank(one.tick) - rank(other.tick))) {
      const overlaps = row.some((other) => box.left < other.right + 4 && other.left < box.right + 4);
      tick.style.visibility = overlaps ? "hidden" : "";
      if (!overlaps) row.push(box);
    }
  }

  /** To a node of the last pass; where another pass is shown, to the same node there if it has it. */
  go(name) {
    let index = this.graph.graph.byText.get(name);
    if (index === undefined) { this.show(this.model.last); index = this.graph.graph.byText.get(name); }
    if (index !== undefined) this.graph.reveal(index);
  }

  // ---- the side

  details(node) {
    const panel = byId("details");
    document.documentElement.toggleAttribute("data-selected", node !== null);
    if (node === null) {
      panel.replaceChildren(make("h2", { textContent: "Nothing selected" }), make("p", { className: "dim", textContent:
        "Open a module on the left, click a node in the graph or in the time line, or search with /." }));
      return;
    }
    const { model } = this;
    const table = make("dl");
    const say = (label, ...value) => { if (value.some(Boolean)) table.append(make("dt", { textContent: label }), make("dd", {}, ...value.filter(Boolean))); };
    panel.replaceChildren(make("h2", { textContent: model.title(node) }), table);
    if (node.boxing) {
      const [kind, source, target, , bytes, sent, dim, ranks] = node.boxing;
      say("boxing", make("b", { className: "boxing", textContent: kind }), ` ${source} → ${target}, over ${ranks} ranks${model.data.facts.some(([l, v]) => l === "ranks" && v.includes("x")) ? ` of mesh dimension ${dim}` : ""}`);
      say("moves", `${showBytes(bytes)}, ${showBytes(sent)} sent by each rank`);
    }
    say("node", make("code", { textContent: node.name }));
    say("operator", make("code", { textContent: node.target }));
    if (node.sbp) say("SBP", swatch(sbpColor(node.sbp)), node.sbp);
    say("holds", node.shape && `${node.shape}${node.bytes ? `, ${showBytes(node.bytes)}` : ""}`);
    say("of global", node.whole);
    say("module", model.path(node.row));
    say("phase", node.phase + (node.flags & RECOMPUTED ? ", recomputed for backward" : ""));
    if (node.source) say("line", make("div", { textContent: node.source }), model.code(node.source) ? make("code", { className: "line", textContent: model.code(node.source) }) : "");
    if (this.graph.pass === model.last) this.lasting(node, say);
    const parameters = model.parameters(node);
    if (parameters.length) say("parameters", list(parameters.map((name) => make("code", { textContent: name }))));
    say("reads", this.links(node.inputs));
    say("read by", this.links(node.users));
    this.bring();
  }

  /** On a narrow screen the panel is below the graph: scroll to both, so that the names of the rows stay in sight. */
  bring() {
    if (matchMedia("(max-width: 800px)").matches) document.querySelector("main").scrollIntoView({ block: "start" });
  }

  /** Show the contents of a module or a source line, lane by lane. */
  about(row) {
    const { model } = this, one = model.rows[row], table = make("dl");
    for (const lane of this.graph.lanes) {
      const summary = this.graph.graph.summary.get(cellKey(row, lane));
      if (!summary) continue;
      const what = [...summary.boxings].map(([kind, count]) => `${count} ${kind}`).join(", ");
      table.append(make("dt", { textContent: LANES[lane] }), make("dd", { textContent: what ? `${what}, ${showBytes(summary.sent)} sent` : `${summary.count} nodes` }));
    }
    byId("details").replaceChildren(make("h2", { textContent: model.path(row) }), table);
    if (one.source) byId("details").append(make("p", { className: "dim", textContent: one.source }), make("code", { className: "line", textContent: model.code(one.source) }));
  }

  /** Add when a node runs, and how long its result is kept. */
  lasting(node, say) {
    const { memory, charts } = { memory: this.model.memory(), charts: this.charts };
    if (charts && charts.time) {
      const event = charts.byTime.find((one) => one.node === node);
      if (event) say("time", `${showTime(event.end - event.start)} from ${showTime(event.start)}, predicted`);
    }
    const { owners, bytes, born, dies } = memory.rows, nodes = this.model.graph(this.model.last).nodes;
    const at = owners.findIndex((owner, one) => owner === node.index && memory.rows.kinds[one] !== "temporary");
    if (at < 0) return;
    const whole = born[at] === 0 && dies[at] >= memory.size - 1;
    say("memory", whole ? `${showBytes(bytes[at])}, throughout the step` : `${showBytes(bytes[at])} until ${nodes[dies[at]].name}`);
  }

  links(indices) {
    if (!indices.length) return "";
    const nodes = this.graph.graph.nodes;
    return list([...new Set(indices)].map((index) => {
      const button = make("button", { type: "button", className: "link", textContent: nodes[index].name, title: this.model.title(nodes[index]) });
      button.addEventListener("click", () => this.graph.reveal(index));
      return button;
    }));
  }

  contributors() {
    const memory = this.model.memory(), panel = byId("contributors");
    panel.replaceChildren(make("h2", { textContent: "Peak memory (predicted)" }));
    if (!memory.size || !memory.total[memory.peak]) {
      panel.append(make("p", { className: "dim", textContent: "The step holds nothing on this rank." }));
      return;
    }
    const node = this.model.graph(this.model.last).nodes[memory.peak];
    const link = make("button", { type: "button", className: "link", textContent: node.name });
    link.addEventListener("click", () => this.go(node.name));
    panel.append(make("p", {}, `${showBytes(memory.total[memory.peak])} at `, link, `, ${node.phase} ${this.model.path(node.row)}`, node.source ? make("small", { textContent: ` ${node.source}` }) : ""));
    const all = this.model.contributors(memory.peak), table = make("table");
    const shown = all.slice(0, 12);
    for (const one of shown) {
      const name = make("button", { type: "button", className: "link", textContent: this.model.title(one.node), title: this.model.parameters(one.node).join("\n") });
      const span = this.model.span(one.node);
      name.addEventListener("click", () => this.go(one.node.name));
      const where = [one.node.phase, this.model.path(one.node.row), one.node.source].filter(Boolean).join(" · ");
      table.append(make("tr", {}, make("td", { className: "bytes", textContent: showBytes(one.bytes) }), make("td", {}, swatch(memoryColor(one.kind)), name, span ? make("small", { textContent: span }) : "", make("small", { textContent: `${one.kind} · ${where}`, title: this.model.code(one.node.source) }))));
    }
    const rest = all.slice(12);
    if (rest.length) table.append(make("tr", {}, make("td", { className: "bytes", textContent: showBytes(rest.reduce((sum, one) => sum + one.bytes, 0)) }), make("td", { className: "dim", textContent: `in ${rest.length} more` })));
    panel.append(table);
  }

  // ---- searching

  searching() {
    const input = byId("search"), results = byId("results");
    let found = [], at = -1;
    const close = () => { results.hidden = true; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
    const light = (to) => {
      at = to;
      [...results.querySelectorAll("[role=option]")].forEach((item, one) => item.setAttribute("aria-selected", String(one === at)));
      const item = byId(`result${at}`);
      if (item) { item.scrollIntoView({ block: "nearest" }); input.setAttribute("aria-activedescendant", item.id); }
    };
    const take = (one) => { if (found[one]) { close(); this.graph.reveal(found[one].index); } };
    const look = () => {
      const text = input.value.trim();
      const { found: nodes, total } = this.model.search(this.graph.graph, text);
      found = nodes;
      if (!text) return close();
      const items = nodes.map((node, one) => {
        const item = make("li", { id: `result${one}` }, swatch(node.boxing ? "--boxing" : sbpColor(node.sbp)), make("b", { textContent: this.model.title(node) }),
          make("span", { textContent: [node.op, node.phase, this.model.path(node.row)].filter(Boolean).join(" · ") }), make("small", { textContent: node.source ? `${node.source}  ${this.model.code(node.source)}` : "" }));
        item.setAttribute("role", "option");
        item.addEventListener("mousedown", (event) => { event.preventDefault(); take(one); });
        return item;
      });
      if (!total) items.push(make("li", { className: "none", textContent: `Nothing in the graph after ${this.model.data.passes[this.graph.pass].name} is called so.` }));
      else if (total > nodes.length) items.push(make("li", { className: "none", textContent: `${total - nodes.length} more: add a word` }));
      results.replaceChildren(...items);
      results.hidden = false;
      input.setAttribute("aria-expanded", "true");
      light(nodes.length ? 0 : -1);
    };
    input.addEventListener("input", look);
    input.addEventListener("focus", look);
    input.addEventListener("blur", close);
    input.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") light(Math.min(found.length - 1, at + 1));
      else if (event.key === "ArrowUp") light(Math.max(0, at - 1));
      else if (event.key === "Enter") take(at);
      else if (event.key === "Escape") { close(); input.blur(); }
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  tools() {
    byId("collapse").addEventListener("click", () => this.graph.collapse());
    byId("fit").addEventListener("click", () => this.graph.fit());
    byId("closer").addEventListener("click", () => this.graph.zoom(1.25));
    byId("farther").addEventListener("click", () => this.graph.zoom(0.8));
    for (const form of ["svg", "png"]) byId(form).addEventListener("click", () => this.save(graphSvg, this.model.data.passes[this.graph.pass].name, form));
    byId("theme").addEventListener("click", () => {
      const dark = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
      this.paint(dark === "dark" ? "light" : "dark");
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    byId("hints").replaceChildren(...[["/", "find a tensor, module or source line"], ["[ and ]", "the pass before, the next pass"], ["arrows, Enter", "through the modules; right opens, left closes"],
      ["hover", "the readers of an input, mask or constant; their edges are hidden otherwise"],
      ["wheel, drag", "move the graph; with Ctrl the wheel zooms"], ["in the chart", "wheel zooms, drag moves, P goes to the peak, arrows from node to node, 0 shows all"], ["Esc", "select nothing"]]
      .map(([key, what]) => make("div", {}, make("kbd", { textContent: key }), what)));
    byId("help").addEventListener("click", () => {
      byId("hints").hidden = !byId("hints").hidden;
      byId("help").setAttribute("aria-expanded", String(!byId("hints").hidden));
    });
    document.addEventListener("keydown", (event) => {
      if (event.target.closest && event.target.closest("input[type=search]")) return;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "/") byId("search").focus();
      else if (event.key === "[") this.show(this.graph.pass - 1);
      else if (event.key === "]") this.show(this.graph.pass + 1);
      else if (event.key === "?") byId("help").click();
      // Where nothing else has the keyboard, arrows go through the modules.
      else if (event.target === document.body && /^Arrow|^Home$|^End$/.test(event.key)) this.graph.key(event);
      else if (event.key === "Escape") { this.graph.choose(null); byId("hints").hidden = true; hideTip(); }
      else return;
      event.preventDefault();
    });
  }

  paint(theme) {
    if (theme) document.documentElement.dataset.theme = theme;
    this.graph.theme();
    this.charts.draw();
  }
}

/** A list that shows its first entries, and the rest when asked. */
function list(items, first = 6) {
  const found = make("ul", { className: "list" }, ...items.slice(0, first).map((item) => make("li", {}, item)));
  if (items.length > first) {
    const more = make("button", { type: "button", className: "link", textContent: `${items.length - first} more` });
    more.addEventListener("click", () => more.parentElement.replaceWith(...items.slice(first).map((item) => make("li", {}, item))));
    found.append(make("li", {}, more));
  }
  return found;
}

(async () => {
  const began = performance.now();
  try {
    const data = await unpack(byId("data").textContent);
    window.report = new Page(new Model(data));
    document.documentElement.dataset.ready = String(Math.round(performance.now() - began));
  } catch (error) {
    byId("problem").hidden = false;
    byId("problem").textContent = `The report cannot be shown: ${error.message}`;
    throw error;
  }
})();
