"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const map = document.querySelector(".map"), shown = document.getElementById("op");
const step = document.getElementById("step"), metric = document.getElementById("metric");
const buttons = [...map.querySelectorAll("button")];
const ops = new Map(data.ops.map((op) => [op.step + " " + op.op, op]));
let chosen = null;

const figure = (x) => (x == null ? "-" : typeof x === "number" ? String(Number(x.toPrecision(4))) : x);
const numberOf = (op, what) => what.split(".").reduce((value, key) => (value ? value[key] : null), op);

function level(op, what) {
  if (!op) return 0;
  if (what === "excess") return op.excess == null ? 0 : op.status === "faulty" ? 5 : op.excess > 0.5 ? 2 : 1;
  if (what === "nmse") {
    if (op.nmse == null) return op.status === "drift" ? 5 : 0;
    if (op.tolerance != null && op.nmse > op.tolerance) return op.nmse > 100 * op.tolerance ? 5 : 4;
    return op.nmse > op.tolerance / 100 ? 2 : 1;
  }
  const theirs = numberOf(op, "reference." + what), ours = numberOf(op, "candidate." + what);
  if (ours == null) return 0;
  if (theirs == null) return 1;
  const apart = Math.abs(ours - theirs) / (Math.abs(theirs) || 1e-30);
  return apart < 1e-4 ? 1 : apart < 1e-2 ? 2 : apart < 0.1 ? 3 : apart < 1 ? 4 : 5;
}

function paint() {
  const at = data.steps[step ? step.value : 0];
  if (step) document.getElementById("at").textContent = at;
  for (const button of buttons) {
    const op = ops.get(at + " " + button.dataset.op);
    const what = metric.value, value = what === "excess" || what === "nmse" ? op && op[what] : op && numberOf(op, "candidate." + what);
    button.className = "h" + level(op, what) + (button.dataset.op === chosen ? " chosen" : "");
    button.textContent = op && op.status === "faulty" ? "\u00d7" : op && op.status === "drift" ? "~" : "";
    button.title = button.dataset.op + ": " + (op ? op.status + ", " + figure(value) : "not recorded");
    button.setAttribute("aria-label", button.title);
  }
  if (chosen) show(ops.get(at + " " + chosen));
}

function add(list, term, text) {
  if (text == null || text === "") return;
  const name = document.createElement("dt"), value = document.createElement("dd");
  name.textContent = term;
  value.textContent = text;
  list.append(name, value);
}

function side(s) {
  return s && ["min", "max", "mean", "rms"].map((key) => key + " " + figure(s[key])).join(", ") +
    (s.nan || s.inf ? `, ${s.nan} NaN, ${s.inf} Inf` : "");
}

function show(op) {
  shown.replaceChildren();
  if (!op) return;
  const title = document.createElement("h3"), list = document.createElement("dl");
  title.textContent = `${op.op} in step ${op.step}: ${op.status}`;
  add(list, "what is wrong", (op.findings || []).map((n) => data.findings[n]).join(" "));
  add(list, "local error", op.local_nmse == null ? null :
    `NMSE ${figure(op.local_nmse)}, floor ${figure(op.floor)}; the largest error of one value is ${figure(op.excess)} of its bound`);
  add(list, "arithmetic", op.arithmetic);
  add(list, "drift", op.nmse == null ? null :
    `NMSE ${figure(op.nmse)}, tolerance ${figure(op.tolerance)}, cosine ${figure(op.cosine)}, max |diff| ${figure(op.max_abs)}`);
  add(list, "reference", side(op.reference));
  add(list, "candidate", side(op.candidate));
  add(list, "worst value", op.at && `[${op.at.join(", ")}]: ${op.worst[0]} where ${op.worst[1]} belongs`);
  add(list, "judged together", op.segment > 1 ? `${op.segment} ops: the trace holds no values between` : null);
  add(list, "note", op.note);
  shown.append(title, list);
}

map.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  chosen = button.dataset.op;
  paint();
});
map.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const cell = event.target.closest("td");
  if (!move || !cell) return;
  event.preventDefault();
  const rows = [...map.tBodies[0].rows], at = [rows.indexOf(cell.parentElement), cell.cellIndex];
  for (let n = 1; ; n++) {
    const row = rows[at[0] + n * move[0]], next = row && row.cells[at[1] + n * move[1]];
    if (!next || next.tagName === "TH") return;
    const button = next.querySelector("button");
    if (!button) continue;
    buttons.forEach((other) => (other.tabIndex = -1));
    button.tabIndex = 0;
    return button.focus();
  }
});
metric.addEventListener("change", paint);
if (step) step.addEventListener("input", paint);
paint();
