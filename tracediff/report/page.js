"use strict";
const byId = (id) => document.getElementById(id);
const map = document.querySelector(".map"), shown = byId("op"), step = byId("step"), metric = byId("metric");
const buttons = [...map.querySelectorAll("button")];
const WITHIN = "-", BEYOND = "z"; // in a strip, whose other characters are decades
let data = null, chosen = null;
const places = new Map(); // step and op -> the record's place in each column

async function unpacked() {
  const bytes = Uint8Array.from(atob(byId("data").textContent), (c) => c.charCodeAt(0));
  const text = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(text).text());
}

const of = (i, what) => (i == null || !data.ops[what] ? null : data.ops[what][i]);
const at = (name) => places.get(data.steps[step ? step.value : 0] + " " + name);
const brief = (x) => String(Math.abs(x) < 1e6 ? Number(x.toPrecision(4)) : x.toExponential(2));
const figure = (x) => (x == null ? "-" : typeof x === "number" ? brief(x) : x);

function level(i, what) {
  if (i == null) return 0;
  const status = of(i, "status"), value = of(i, what);
  if (what === "excess") return value == null ? 0 : status === "faulty" ? 5 : value > 0.5 ? 2 : 1;
  if (what === "nmse") {
    const tolerance = of(i, "tolerance");
    if (value == null) return status === "drift" ? 5 : 0;
    if (tolerance != null && value > tolerance) return value > 100 * tolerance ? 5 : 4;
    return value > tolerance / 100 ? 2 : 1;
  }
  const theirs = of(i, "reference." + what), ours = of(i, "candidate." + what);
  if (ours == null) return 0;
  if (theirs == null) return 1;
  const apart = Math.abs(ours - theirs) / (Math.abs(theirs) || 1e-30);
  return apart < 1e-4 ? 1 : apart < 1e-2 ? 2 : apart < 0.1 ? 3 : apart < 1 ? 4 : 5;
}

function paint() {
  const now = data.steps[step ? step.value : 0], what = metric.value;
  if (step) byId("at").textContent = now;
  for (const button of buttons) {
    const name = button.dataset.op, i = at(name), status = of(i, "status");
    const value = of(i, what === "excess" || what === "nmse" ? what : "candidate." + what);
    button.className = "h" + level(i, what) + (name === chosen ? " chosen" : "");
    button.textContent = status === "faulty" ? "\u00d7" : status === "drift" ? "~" : "";
    button.title = name + ": " + (i == null ? "not recorded" : status + ", " + figure(value));
    button.setAttribute("aria-label", button.title);
  }
  for (const section of document.querySelectorAll("section")) section.hidden = section.dataset.step !== String(now);
  if (chosen) show(at(chosen));
}

function made(tag, text, parent) {
  const element = document.createElement(tag);
  if (text != null) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function add(list, term, what) {
  if (what == null || what === "") return;
  made("dt", term, list);
  const value = made("dd", typeof what === "string" ? what : null, list);
  if (typeof what !== "string") value.append(what);
}

function side(i, name) {
  const told = ["min", "max", "mean", "rms"].map((key) => key + " " + figure(of(i, name + "." + key))).join(", ");
  const lost = ["nan", "inf"].filter((key) => of(i, name + "." + key)).map((key) => `, ${of(i, name + "." + key)} ${key}`);
  return lost.length || of(i, name + ".min") != null || of(i, name + ".mean") != null ? told + lost.join("") : null;
}

function strip([axis, width, decades]) {
  const row = made("div"), off = [...decades].filter((c) => c !== WITHIN).length;
  row.className = "strip";
  row.setAttribute("role", "img");
  row.setAttribute("aria-label", `${off} of ${decades.length} are off`);
  [...decades].forEach((c, n) => {
    const cell = made("span", null, row), decade = parseInt(c, 36);
    const where = width > 1 ? `${axis}s ${n * width} to ${(n + 1) * width - 1}` : `${axis} ${n}`;
    const much = c === WITHIN ? "within its bound" : c === BEYOND ? "beyond all bounds" : `1e${decade} times its bound`;
    cell.className = c === WITHIN ? "h1" : decade < 1 ? "h3" : decade < 3 ? "h4" : "h5";
    cell.title = `${where}: ${much}`;
  });
  return row;
}

function evidence(told) {
  const wide = made("div"), table = made("table", null, wide);
  wide.className = "wide";
  for (const cells of [["at", "from", "right", "by the mistake", "recorded"], ...told.places]) {
    const row = made("tr", null, table);
    cells.forEach((cell) => made(told.places.includes(cells) ? "td" : "th", cell, row));
  }
  return wide;
}

function show(i) {
  shown.replaceChildren();
  if (i == null) return;
  const name = of(i, "op"), status = of(i, "status"), told = status === "faulty" ? data.explained[name] : null;
  made("h3", `${name} in step ${of(i, "step")}: ${status}`, shown);
  const list = made("dl", null, shown), undone = of(i, "undone");
  add(list, "what is wrong", (of(i, "findings") || []).map((n) => data.findings[n]).join(" "));
  add(list, "its error", of(i, "shape"));
  add(list, "local error", of(i, "local_nmse") == null ? null :
    `NMSE ${figure(of(i, "local_nmse"))}, floor ${figure(of(i, "floor"))}; the largest error of one value is ` +
    `${figure(of(i, "excess"))} times its bound` + (undone == null ? "" : `; with the cause undone ${figure(undone)} is left`));
  for (const one of of(i, "strips") || []) add(list, "by " + one[0], strip(one));
  add(list, "worst value", of(i, "at") && `[${of(i, "at").join(", ")}]: ${of(i, "found")} where ${of(i, "belongs")} belongs`);
  add(list, "arithmetic", of(i, "arithmetic"));
  add(list, "drift", of(i, "nmse") == null ? null :
    `NMSE ${figure(of(i, "nmse"))}, tolerance ${figure(of(i, "tolerance"))}, cosine ${figure(of(i, "cosine"))}, ` +
    `max |diff| ${figure(of(i, "max_abs"))}`);
  add(list, "reference", side(i, "reference"));
  add(list, "candidate", side(i, "candidate"));
  add(list, "judged together", of(i, "segment") && `${of(i, "segment")} ops: the trace holds no values between`);
  add(list, "note", of(i, "note"));
  if (!told) return;
  made("p", `By numbers, in step ${told.step}: ${told.text}`, shown);
  shown.append(evidence(told));
}

map.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || !data) return;
  chosen = button.dataset.op;
  paint();
});
map.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const cell = event.target.closest("td");
  if (!move || !cell) return;
  event.preventDefault();
  const rows = [...map.tBodies[0].rows], from = [rows.indexOf(cell.parentElement), cell.cellIndex];
  for (let n = 1; ; n++) {
    const row = rows[from[0] + n * move[0]], next = row && row.cells[from[1] + n * move[1]];
    if (!next || next.tagName === "TH") return;
    const button = next.querySelector("button");
    if (!button) continue;
    buttons.forEach((other) => (other.tabIndex = -1));
    button.tabIndex = 0;
    return button.focus();
  }
});
unpacked().then((read) => {
  data = read;
  data.ops.op.forEach((name, i) => places.set(data.ops.step[i] + " " + name, i));
  metric.addEventListener("change", paint);
  if (step) step.addEventListener("input", paint);
  paint();
}).catch((error) => made("p", "The figures cannot be shown here: " + error.message, shown));
