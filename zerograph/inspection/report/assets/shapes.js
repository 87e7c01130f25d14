// How edges bend, what closed boxes say, and the colours of SBPs.
"use strict";

/** Bend an edge through the gaps between lanes, and past its own lane's boxes. */
function curve(source, target) {
  const a = source.position, b = target.position;
  const half = (one) => ({ x: one.data.width / 2, y: one.data.height / 2 });
  const p = half(source), q = half(target);
  const apart = Math.abs(a.x - b.x) > p.x + q.x - 4;
  let from, to, one, two, leaves, enters;
  if (apart) {
    const right = b.x > a.x ? 1 : -1;
    from = { x: a.x + right * p.x, y: a.y };
    to = { x: b.x - right * q.x, y: b.y };
    const reach = Math.max(14, Math.abs(to.x - from.x) * 0.45);
    one = { x: from.x + right * reach, y: from.y };
    two = { x: to.x - right * reach, y: to.y };
    [leaves, enters] = right > 0 ? ["90deg", "270deg"] : ["270deg", "90deg"];
  } else {
    const down = b.y > a.y ? 1 : -1;
    const distance = Math.abs(b.y - a.y) - p.y - q.y;
    if (distance < 34) {
      from = { x: a.x, y: a.y + down * p.y };
      to = { x: b.x, y: b.y - down * q.y };
      one = { x: from.x, y: from.y + down * distance * 0.4 };
      two = { x: to.x, y: to.y - down * distance * 0.4 };
      [leaves, enters] = down > 0 ? ["180deg", "0deg"] : ["0deg", "180deg"];
    } else {
      // Around what lies between.
      from = { x: a.x + p.x, y: a.y };
      to = { x: b.x + q.x, y: b.y };
      const out = Math.max(from.x, to.x) + 8 + Math.min(26, 4 * Math.log2(distance / 30 + 1));
      one = { x: out, y: from.y + down * 8 };
      two = { x: out, y: to.y - down * 8 };
      leaves = enters = "90deg";
    }
  }
  const dx = to.x - from.x, dy = to.y - from.y, square = Math.max(1, dx * dx + dy * dy), length = Math.sqrt(square);
  const weight = (c) => ((c.x - from.x) * dx + (c.y - from.y) * dy) / square;
  const distance = (c) => (-(c.x - from.x) * dy + (c.y - from.y) * dx) / length;
  return { weights: [weight(one), weight(two)], distances: [distance(one), distance(two)], leaves, enters, points: [from, one, two, to] };
}

function boxLabel(summary) {
  const [[kind, count], ...others] = [...summary.boxings].sort((a, b) => b[1] - a[1]);
  const more = others.reduce((sum, one) => sum + one[1], 0);
  return `${count > 1 ? `${count} ` : ""}${kind}\n${showBytes(summary.sent)}${more ? ` · +${more}` : ""}`;
}

/** The variable that holds an SBP's colour. */
function sbpColor(sbp) {
  if (!sbp) return "--sbp-none";
  if (sbp === "local") return "--sbp-local";
  if (sbp === "B") return "--sbp-b";
  if (sbp === "P") return "--sbp-p";
  if (sbp === "S(0)") return "--sbp-s0";
  if (/^S\(\d+\)$/.test(sbp)) return "--sbp-s1";
  return /P/.test(sbp) ? "--sbp-p" : /S/.test(sbp) ? "--sbp-mixed" : "--sbp-b";
}

function sbpRank(sbp) {
  return ["--sbp-b", "--sbp-s0", "--sbp-s1", "--sbp-mixed", "--sbp-p", "--sbp-local", "--sbp-none"].indexOf(sbpColor(sbp));
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, Math.ceil(most * 0.6))}…${text.slice(-Math.floor(most * 0.35))}` : text;
}

/** The end of a qualified name says most. */
function tail(text, most) {
  return text.length > most ? `…${text.slice(1 - most)}` : text;
}
