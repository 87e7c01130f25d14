// Steps side by side: each is a whole report in a frame. What is done in one is done in the others, over one scale.
"use strict";

const byId = (id) => document.getElementById(id);

/** A table of all facts: a column for each, a row for each step, and what changes from the first step to each other. */
function compare(steps) {
  const labels = [...new Set(steps.flatMap((step) => step.facts.map(([label]) => label)))];
  const facts = steps.map((step) => new Map(step.facts.map((fact) => [fact[0], fact])));
  const same = (label) => facts.every((one) => String(one.get(label)) === String(facts[0].get(label)));
  // What differs first.
  labels.sort((a, b) => same(a) - same(b));
  const cell = (tag, text, look = "") => make(tag, { className: look, textContent: text });
  const head = make("tr", {}, cell("td", ""), ...labels.map((label) => cell("th", label, same(label) ? "same" : "")));
  const rows = steps.map((step, at) => make("tr", {}, cell("th", step.title),
    ...labels.map((label) => {
      const fact = facts[at].get(label), first = facts[0].get(label);
      const shown = cell("td", fact ? showFact(fact) : "", same(label) ? "same" : "");
      if (at && fact && first && typeof fact[1] === "number" && fact[1] !== first[1] && first[1])
        shown.append(make("small", { textContent: ` ${change(fact[1] / first[1])}` }));
      return shown;
    })));
  return make("table", {}, head, ...rows);
}

function change(ratio) {
  const share = 100 * (ratio - 1);
  return ratio >= 3 ? `×${ratio.toPrecision(2)}` : `${share < 0 ? "−" : "+"}${Math.abs(share).toFixed(Math.abs(share) < 10 ? 1 : 0)} %`;
}

/** A frame with a report, once that is drawn. */
function frame(template, step) {
  const made = make("iframe", { title: step.title });
  made.srcdoc = template.split("\0").join(step.packed);
  return made;
}

async function drawn(one) {
  while (!one.contentWindow.report) {
    const problem = one.contentDocument && one.contentDocument.getElementById("problem");
    if (problem && !problem.hidden) throw new Error(problem.textContent);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  return one.contentWindow.report;
}

/** Do in all other reports what a user does in one. */
function follow(reports) {
  let busy = false;
  reports.forEach((report) => {
    report.told = (what, ...about) => {
      if (busy) return;
      busy = true;
      try { for (const other of reports) if (other !== report) other.follow(what, ...about); } finally { busy = false; }
    };
  });
}

(async () => {
  const began = performance.now();
  try {
    const template = await unpack(byId("template").textContent);
    const packed = byId("data").textContent.trim().split(/\s+/);
    const steps = await Promise.all(packed.map(async (text) => {
      const { title, facts } = await unpack(text);
      return { title, facts, packed: text };
    }));
    byId("compared").replaceChildren(compare(steps));
    const frames = steps.map((step) => frame(template, step));
    byId("steps").replaceChildren(...frames.map((one) => make("section", {}, make("h2", { textContent: one.title }), one)));
    const reports = await Promise.all(frames.map(drawn));
    const scale = { bytes: Math.max(...reports.map((one) => one.charts.peakBytes)), time: Math.max(...reports.map((one) => one.charts.seconds)) };
    for (const report of reports) report.charts.share(scale);
    follow(reports);
    byId("theme").addEventListener("click", () => {
      const dark = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
      document.documentElement.dataset.theme = dark === "dark" ? "light" : "dark";
      for (const report of reports) report.paint(document.documentElement.dataset.theme);
    });
    window.reports = reports;
    document.documentElement.dataset.ready = String(Math.round(performance.now() - began));
  } catch (error) {
    byId("problem").hidden = false;
    byId("problem").textContent = `The report cannot be shown: ${error.message}`;
    throw error;
  }
})();
