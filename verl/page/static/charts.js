// Panels of curves by uPlot: bands, stacks, dots, marks of crashes; the keyboard chooses a step and opens it.
(function () {
  "use strict";
  const sync = "verl-steps";
  const plots = [];
  const view = { smoothing: 0, log: false };  // of all charts

  function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function color(i) { return css("--s" + (i % 8)); }
  const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];
  // as in the timeline of a step
  const PHASES = { rollout: 0, training: 1, reward: 2, communication: 3, data: 4, validation: 5, saving: 6, other: 7 };
  // a phase without a colour of its own takes one that no phase of the chart has
  function phaseColor(name, names) {
    if (name in PHASES) return color(PHASES[name]);
    const taken = names.map((other) => PHASES[other]), free = [...Array(8).keys()].filter((i) => !taken.includes(i));
    return color(free[names.filter((other) => !(other in PHASES)).indexOf(name)] ?? 7);
  }
  const FROM_ZERO = new Set(["tokens", "tokens/s per device", "GB", "s", "samples", "weight versions", "probability"]);
  function faded(hex, alpha) {
    const n = parseInt(hex.slice(1), 16);
    return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
  }
  function text(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
    return String(+value.toPrecision(size >= 1000 ? 5 : 3));
  }
  function element(tag, classes, content) {
    const made = document.createElement(tag);
    if (classes) made.className = classes;
    if (content !== undefined) made.textContent = content;
    return made;
  }

  // labels of an axis with as few digits as are exact: 2.25 is not 2.3
  function labels(values) {
    const shown = values.filter((v) => v !== null && v !== undefined);
    for (let digits = 2; digits < 8; digits++) {
      const texts = new Map(shown.map((v) => [v, String(+v.toPrecision(digits))]));
      if (shown.every((v) => Math.abs(Number(texts.get(v)) - v) <= 1e-6 * Math.abs(v))) {
        return values.map((v) => (texts.has(v) ? (Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(Math.min(digits - 1, 2)) : texts.get(v)) : ""));
      }
    }
    return values.map(text);
  }

  // an exponential mean of the values before, without the pull of its start
  function smoothed(values) {
    let mean = 0, weight = 0;
    return values.map((v) => {
      if (v === null || v === undefined) return v;
      weight = view.smoothing * weight + (1 - view.smoothing);
      mean += (1 - view.smoothing) / weight * (v - mean);  // exact for equal values
      return mean;
    });
  }

  function isLog(panel) { return view.log && panel.series.every((s) => s.style !== "stack") && panel.series.some((s) => s.values.some((v) => v > 0)); }

  function drawn(panel, s) {
    const values = view.smoothing && s.style === "line" ? smoothed(s.values) : s.values;
    return isLog(panel) ? values.map((v) => (v > 0 ? v : null)) : values;
  }

  // uPlot's columns and series of a panel: a stack becomes sums, a band the area between its two lines
  function columns(panel) {
    const stacked = panel.series.filter((s) => s.style === "stack");
    const base = new Array(panel.x.length).fill(0);
    const sums = new Map();
    for (const s of stacked) sums.set(s, s.values.map((v, i) => (base[i] += v || 0)));
    const ordered = stacked.length ? stacked.slice().reverse() : panel.series;
    return { ordered, data: [panel.x, ...ordered.map((s) => sums.get(s) || drawn(panel, s))] };
  }

  function options(panel, ordered, width, marks) {
    const bandAt = ordered.map((s, i) => (s.style === "band" ? i + 1 : 0)).filter(Boolean);
    const main = color(0);
    let next = 0;
    const seen = {};
    const series = ordered.map((s) => {
      if (s.style === "band") return { stroke: "transparent", points: { show: false }, spanGaps: true };
      const c = s.style === "stack" ? phaseColor(s.label, panel.series.map((other) => other.label)) : color(s.run === null || s.run === undefined ? next++ : s.run);
      s.color = c;
      const dash = s.run === null || s.run === undefined ? undefined : DASHES[((seen[s.run] = (seen[s.run] ?? -1) + 1) + Math.floor(s.run / 8)) % 4];  // colours repeat after 8 runs
      if (s.style === "dots") return { stroke: c, width: 1, dash: dash || [3, 3], points: { show: true, size: 6, fill: c }, spanGaps: true };
      if (s.style === "stack") return { stroke: c, width: 0, fill: c, points: { show: false }, paths: uPlot.paths.bars({ size: [0.9, 60] }) };
      return { stroke: c, width: 1.6, dash, points: { show: panel.x.length < 40, size: 4, fill: c }, spanGaps: true };
    });
    const log = isLog(panel);
    const axis = { stroke: css("--dim"), grid: { stroke: faded(css("--dim"), 0.14), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return {
      width, height: 150, padding: [6, 8, 0, 0],
      cursor: { sync: { key: sync, setSeries: false }, points: { size: 6 }, y: false, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (u, low, high) => steps(low, high, panel.x, ordered) }, y: { distr: log ? 3 : 1, range: (u, low, high) => range(low, high, panel, log) } },
      series: [{}, ...series],
      bands: bandAt.length === 2 ? [{ series: [bandAt[1], bandAt[0]], fill: faded(main, 0.15) }] : [],
      axes: [
        { ...axis, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        { ...axis, size: (u, values, i, cycle) => (cycle > 1 ? u.axes[i]._size : 14 + 7 * Math.max(3, ...(values || []).map((v) => v.length))), values: (u, splits) => labels(splits) },
      ],
      hooks: {
        draw: [(u) => drawMarks(u, marks)],
        setCursor: [(u) => showKeys(u, panel, ordered)],
      },
    };
  }

  // bars and a single point, for which uPlot would begin at 0, have half a step on both sides
  function steps(low, high, x, ordered) {
    if (x.length === 1) return [x[0] - 0.5, x[0] + 0.5];
    const room = ordered.some((s) => s.style === "stack") ? 0.5 : 0;
    return low === null ? [0, 1] : [low - room, high + room];
  }

  // shares from 0 to 1, amounts from 0; of other values at least a tenth of their size, so that a small change looks small
  function range(low, high, panel, log) {
    if (low === null || high === null) return log ? [0.1, 1] : [0, 1];
    if (log) return [low / 1.2, high * 1.2];
    if (low === 0 && high === 0) return [0, 1];
    if (panel.unit === "share" && low >= 0 && high <= 1.1) return [0, Math.max(1.03, 1.03 * high)];  // rounding may add a little
    if (low >= 0 && (FROM_ZERO.has(panel.unit) || panel.series.some((s) => s.style === "stack"))) return [0, 1.06 * high];
    const least = 0.1 * Math.max(Math.abs(low), Math.abs(high)), room = Math.max(0.06 * (high - low), (least - (high - low)) / 2);
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  function drawMarks(u, marks) {
    const { ctx, bbox } = u;
    for (const mark of marks) {
      const x = Math.round(u.valToPos(mark.step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.save();
      ctx.strokeStyle = css(mark.kind === "crash" ? "--bad" : "--dim");
      ctx.setLineDash(mark.kind === "crash" ? [] : [4, 4]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.restore();
    }
  }

  function showKeys(u, panel, ordered) {
    const at = u.cursor.idx;
    const keys = u.verlKeys;
    if (!keys) return;
    keys.replaceChildren();
    const i = at === null || at === undefined ? panel.x.length - 1 : at;
    if (panel.x.length) keys.append(element("span", "", "step " + panel.x[i]));
    for (const s of panel.series) {
      if (s.style === "band") continue;
      let value = s.values[i];
      if ((value === null || value === undefined) && at === null) value = s.values.findLast((v) => v !== null);
      const label = element("span");
      const swatch = element("i", s.style === "dots" ? "dot" : "");
      swatch.style.background = s.color;
      label.append(swatch, s.label ? s.label + " " : "", element("b", "", text(value)));
      keys.append(label);
    }
  }

  function save(name, address) {
    const link = element("a");
    link.href = address;
    link.download = name;
    link.click();
  }

  function fileName(made, ending) { return made.panel.title.replace(/[^\w.-]+/g, "-") + ending; }

  function saveCsv(made) {
    const { x, series } = made.panel;
    const quoted = (value) => `"${String(value).replaceAll('"', '""')}"`;
    const head = ["step", ...series.map((s) => s.label || made.panel.title)].map(quoted);
    const rows = x.map((step, i) => [step, ...series.map((s) => s.values[i] ?? "")]);
    const blob = new Blob([[head, ...rows].map((row) => row.join(",")).join("\n") + "\n"], { type: "text/csv" });
    const address = URL.createObjectURL(blob);
    save(fileName(made, ".csv"), address);
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  function savePng(made) {
    if (!made.plot) return;
    const plot = made.plot.ctx.canvas, scale = devicePixelRatio || 1, room = 40 * scale;
    const canvas = element("canvas");
    canvas.width = plot.width;
    canvas.height = plot.height + room;
    const pen = canvas.getContext("2d");
    pen.fillStyle = css("--panel");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(plot, 0, room);
    pen.fillStyle = css("--text");
    pen.font = `${13 * scale}px system-ui`;
    pen.fillText(`${made.panel.title} ${made.panel.unit}`, 8 * scale, 15 * scale);
    pen.font = `${11 * scale}px system-ui`;
    let left = 8 * scale;
    for (const s of made.panel.series) {
      if (s.style === "band" || !s.label) continue;
      pen.fillStyle = s.color;
      pen.fillText(s.label, left, 33 * scale);
      left += pen.measureText(s.label).width + 12 * scale;
    }
    save(fileName(made, ".png"), canvas.toDataURL("image/png"));
  }

  function button(label, title, action) {
    const made = element("button", "plain save", label);
    made.type = "button";
    made.title = title;
    made.addEventListener("click", (event) => { event.stopPropagation(); action(); });
    made.addEventListener("keydown", (event) => event.stopPropagation());
    return made;
  }

  // where charts of a group go: below their name
  function placeOf(holder, panel) {
    if (!panel.group) return holder;
    let part = Array.from(holder.children).find((child) => child.dataset.group === panel.group);
    if (!part) {
      part = element("details", "chart-group");
      part.dataset.group = panel.group;
      part.open = true;
      part.append(element("summary", "", panel.group), element("div", "charts"));
      holder.append(part);
    }
    return part.lastElementChild;
  }

  function draw(holder, panel, marks, number) {
    const box = element("section", "chart" + (panel.series.some((s) => s.style === "stack") ? " wide" : ""));
    box.tabIndex = 0;
    box.dataset.title = panel.title;
    box.setAttribute("role", "group");
    const title = element("h3", "", panel.title + " ");
    title.append(element("small", "", panel.unit));
    if (panel.help) box.title = panel.help;
    const keys = element("div", "keys");
    const place = element("div");
    const made = { box, keys, place, panel, marks };
    title.append(button("CSV", "Save the values", () => saveCsv(made)), button("PNG", "Save the picture", () => savePng(made)));
    box.append(title, keys, place);
    placeOf(holder, panel).append(box);
    plots.push(made);
    describe(made);
    const seen = new IntersectionObserver((found) => {
      if (found.some((f) => f.isIntersecting)) { seen.disconnect(); build(made); }
    }, { rootMargin: "400px" });
    seen.observe(box);
    box.addEventListener("keydown", (event) => chartKey(event, made));
    box.addEventListener("click", () => open(made));
  }

  function describe(made) {
    const { panel, box } = made;
    const parts = panel.series.filter((s) => s.style !== "band").map((s) => `${s.label} ${text(s.values.findLast((v) => v !== null))}`);
    box.setAttribute("aria-label", `${panel.title}: ${parts.join(", ")}; arrow keys choose a step, Enter opens it`);
  }

  function build(made) {
    if (made.plot) made.plot.destroy();
    const { ordered, data } = columns(made.panel);
    const width = made.place.clientWidth || 330;
    made.width = width;
    made.plot = new uPlot(options(made.panel, ordered, width, made.marks), data, made.place);
    made.plot.verlKeys = made.keys;
    made.ordered = ordered;
    showKeys(made.plot, made.panel, ordered);
  }

  function chartKey(event, made) {
    const u = made.plot, x = made.panel.x;
    if (!u || !x.length) return;
    const now = u.cursor.idx === null || u.cursor.idx === undefined ? x.length - 1 : u.cursor.idx;
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: x.length - 1, PageUp: now - 10, PageDown: now + 10 };
    if (event.key in moves) {
      const to = Math.max(0, Math.min(x.length - 1, u.verlChosen === undefined && event.key.startsWith("Arrow") ? now : moves[event.key]));
      u.verlChosen = to;
      u.setCursor({ left: u.valToPos(x[to], "x"), top: 10 });
      event.preventDefault();
    } else if (event.key === "Enter") {
      open(made);
    }
  }

  function open(made) {
    const holder = document.getElementById("charts");
    const u = made.plot;
    if (!holder.dataset.base || !u || u.select.width > 0) return;
    const at = u.cursor.idx === null || u.cursor.idx === undefined ? made.panel.x.length - 1 : u.cursor.idx;
    const step = made.panel.x[at];
    if (step > 0) location.href = holder.dataset.base.replace("STEP", step);
  }

  function show(found) {
    const holder = document.getElementById("charts");
    const known = new Map(plots.map((made) => [made.panel.title, made]));
    found.panels.forEach((panel, number) => {
      const made = known.get(panel.title);
      if (!made) { draw(holder, panel, found.marks, number); return; }
      made.panel = panel;
      made.marks = found.marks;
      describe(made);
      if (made.plot) {
        build(made);
      }
    });
  }

  window.verlCharts = {
    show, labels,
    redraw() { for (const made of plots) if (made.plot) build(made); },
    first() { const box = document.querySelector(".chart:not([hidden])"); if (box) box.focus(); return Boolean(box); },
  };

  document.addEventListener("DOMContentLoaded", () => {
    const data = document.getElementById("charts-data");
    if (!data) return;
    show(JSON.parse(data.textContent));
    let timer = 0;
    addEventListener("resize", () => {
      clearTimeout(timer);
      timer = setTimeout(() => { for (const made of plots) if (made.plot && made.place.clientWidth !== made.width) build(made); }, 150);
    });
    const filter = document.getElementById("metric-filter");
    if (filter) filter.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase();
      for (const made of plots) made.box.hidden = !made.panel.title.toLowerCase().includes(wanted);
      for (const part of document.querySelectorAll(".chart-group")) part.hidden = !part.querySelector(".chart:not([hidden])");
    });
    const smooth = document.querySelector("[data-smooth]"), log = document.querySelector("[data-log]");
    const change = () => {
      Object.assign(view, { smoothing: Number(smooth.value), log: log.checked });
      window.verlCharts.redraw();
    };
    for (const field of [smooth, log]) if (field) field.addEventListener("input", change);
  });
})();
