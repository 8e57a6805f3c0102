// Tokens of a response: a colour for each by the chosen value, and the values of the one that is pointed at.
(function () {
  "use strict";
  const MODES = [ // name, label, values of token i, kind of scale
    ["none", "plain"],
    ["log_prob", "log-prob", "low", "Dark: improbable"],
    ["gap", "trainer − sampler", "signed", "Difference of probabilities. Blue: the trainer gives less, orange: more"],
    ["log_ratio", "ratio", "signed", "Probability by the trainer over that by the sampler, as its logarithm"],
    ["entropy", "entropy", "high", "Dark: the policy was undecided"],
    ["advantage", "advantage", "signed", "Blue: made less likely, orange: more likely"],
    ["reference", "reference log-prob", "low", "Dark: improbable under the reference"],
    ["mask", "mask", "mask", "Dark: does not train"],
    ["version", "weight version", "kinds", "A colour for each version of the weights"],
  ];
  let tokens = null, spans = [], at = -1, mode = "none";

  function values(name) { return tokens.columns[name]; }

  function paint(name) {
    mode = name;
    const kind = (MODES.find((m) => m[0] === name) || [])[2];
    const found = values(name);
    const known = found ? found.filter((v) => v !== null) : [];
    const largest = Math.max(1e-9, ...known.map(Math.abs).slice(0, 50000));
    const first = known.length ? known[0] : 0;
    spans.forEach((span, i) => {
      span.className = "k";
      const v = found ? found[i] : null;
      if (tokens.columns.mask && tokens.columns.mask[i] === 0) span.classList.add("masked");
      if (v === null || v === undefined) return;
      let level = 0;
      if (kind === "low") level = Math.min(7, Math.floor(-v * 1.4));
      else if (kind === "high") level = Math.round((7 * v) / largest);
      else if (kind === "signed") level = Math.round((7 * Math.abs(v)) / largest);
      else if (kind === "mask") level = v === 0 ? 5 : 0;
      else if (kind === "kinds") level = v === first ? 0 : 2 + ((v - first) % 5);
      if (level > 0) span.classList.add("h" + Math.min(level, 7));
      if (kind === "signed" && v < 0) span.classList.add("neg");
    });
    for (const button of document.querySelectorAll(".modes button")) {
      const on = button.dataset.mode === name;
      button.setAttribute("aria-checked", String(on));
      button.tabIndex = on ? 0 : -1;
    }
    legend(kind, largest);
    try { localStorage.setItem("verl-token-mode", name); } catch (e) { /* no storage */ }
  }

  function legend(kind, largest) {
    const place = document.getElementById("legend");
    place.replaceChildren();
    const add = (classes) => { const s = document.createElement("i"); s.className = "swatch " + classes; place.append(s); };
    const say = (content) => { const s = document.createElement("span"); s.textContent = content; place.append(s); };
    if (!kind) return;
    if (kind === "signed") { say((-largest).toPrecision(3)); for (const i of [7, 5, 3, 1]) add("neg h" + i); for (const i of [1, 3, 5, 7]) add("h" + i); say(largest.toPrecision(3)); }
    if (kind === "low") { say("0"); for (const i of [1, 2, 3, 4, 5, 6, 7]) add("h" + i); say("−5 and below"); }
    if (kind === "high") { say("0"); for (const i of [1, 2, 3, 4, 5, 6, 7]) add("h" + i); say(largest.toPrecision(3)); }
    say(MODES.find((m) => m[0] === mode)[3]);
  }

  function choose(i, scroll) {
    if (!spans.length) return;
    if (at >= 0) spans[at].classList.remove("on");
    at = Math.max(0, Math.min(spans.length - 1, i));
    const span = spans[at], folded = span.closest("details:not([open])");
    if (folded) folded.open = true;
    span.classList.add("on");
    if (scroll) span.scrollIntoView({ block: "nearest" });
    const info = document.getElementById("token-info");
    const part = (label, value) => {
      const s = document.createElement("span"), i = document.createElement("i");
      i.textContent = value;
      s.append(label + " ", i);
      info.append(s);
    };
    info.replaceChildren();
    const name = document.createElement("b");
    name.textContent = JSON.stringify(tokens.texts[at]);
    info.append(name);
    part("token", `${at + 1} of ${spans.length}`);
    part("id", tokens.ids[at]);
    const c = (key) => (tokens.columns[key] ? tokens.columns[key][at] : null);
    const n = (v) => String(+v.toPrecision(4)).replace("-", "−");
    if (c("log_prob") !== null) part("log-prob", `${n(c("log_prob"))} (p ${n(Math.exp(c("log_prob")))})`);
    if (c("trainer") !== null) part("trainer", n(c("trainer")));
    if (c("gap") !== null) part("trainer − sampler", `p ${n(c("gap"))}`);
    if (c("log_ratio") !== null) part("ratio", n(Math.exp(c("log_ratio"))));
    if (c("entropy") !== null) part("entropy", n(c("entropy")));
    if (c("advantage") !== null) part("advantage", n(c("advantage")));
    if (c("reference") !== null) part("reference", n(c("reference")));
    if (c("version") !== null) part("weights", "version " + c("version"));
    if (c("mask") === 0) part("mask", "does not train");
  }

  function extreme() {
    const found = values(mode) || values("gap") || values("log_prob");
    if (!found) return;
    const size = (v) => (v === null ? -1 : Math.abs(v));
    let best = 0;
    found.forEach((v, i) => { if (size(v) > size(found[best])) best = i; });
    choose(best, true);
  }

  window.verlTokens = {
    focus() { const holder = document.getElementById("tokens"); if (holder) { holder.focus(); if (at < 0) choose(0, true); } return Boolean(holder); },
  };

  document.addEventListener("DOMContentLoaded", () => {
    const data = document.getElementById("tokens-data");
    if (!data) return;
    tokens = JSON.parse(data.textContent);
    const holder = document.getElementById("tokens");
    spans = Array.from(holder.querySelectorAll(".k"));
    const place = document.querySelector(".modes");
    const modes = MODES.filter((m) => m[0] === "none" || values(m[0]));
    for (const [name, label] of modes) {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.mode = name;
      button.textContent = label;
      button.setAttribute("role", "radio");
      button.addEventListener("click", () => paint(name));
      place.append(button);
    }
    place.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const buttons = Array.from(place.children), now = buttons.findIndex((b) => b.dataset.mode === mode);
      const next = buttons[(now + step + buttons.length) % buttons.length];
      paint(next.dataset.mode);
      next.focus();
    });
    let chosen = null;
    try { chosen = localStorage.getItem("verl-token-mode"); } catch (e) { /* no storage */ }
    const asked = decodeURIComponent(location.hash.slice(1));
    const names = modes.map((m) => m[0]);
    paint(names.includes(asked) ? asked : names.includes(chosen) ? chosen : names.includes("log_prob") ? "log_prob" : "none");
    if (asked === "gap" && names.includes(asked)) extreme();
    holder.addEventListener("mouseover", (event) => {
      const i = spans.indexOf(event.target.closest(".k"));
      if (i >= 0) choose(i, false);
    });
    holder.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - 10, ArrowDown: at + 10, Home: 0, End: spans.length - 1 };
      if (event.key in moves) choose(moves[event.key], true);
      else if (event.key === "m") { const i = names.indexOf(mode); paint(names[(i + 1) % names.length]); }
      else if (event.key === "x") extreme();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  });
})();
