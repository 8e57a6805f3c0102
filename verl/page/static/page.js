// Keys, theme, live updates, filters of tables.
(function () {
  "use strict";
  const $ = (query) => document.querySelector(query);

  function toggleTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("verl-theme", root.dataset.theme); } catch (e) { /* no storage */ }
    if (window.verlCharts) window.verlCharts.redraw();
  }

  function move(by) {
    const items = Array.from(document.querySelectorAll("a.item")).filter((item) => item.offsetParent !== null);
    if (!items.length) return;
    const now = items.indexOf(document.activeElement);
    const next = items[now < 0 ? (by > 0 ? 0 : items.length - 1) : Math.max(0, Math.min(items.length - 1, now + by))];
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  }

  function go(rel) { const link = $(`a[rel="${rel}"]`); if (link) location.href = link.href; }

  const KEYS = {
    j: () => move(1), k: () => move(-1), u: () => go("up"), "[": () => go("prev"), "]": () => go("next"),
    c: () => window.verlCharts && window.verlCharts.first(), t: () => window.verlTokens && window.verlTokens.focus(),
    d: toggleTheme, "?": () => $("#help").showModal(),
    "/": () => {
      const field = $("[data-search]");
      if (field) field.focus();
      else if (document.body.dataset.run && !("static" in document.body.dataset)) location.href = `/run/${encodeURIComponent(document.body.dataset.run)}/samples`;
    },
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
    if (event.target.closest("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
    const action = KEYS[event.key];
    if (action) { action(); event.preventDefault(); }
  });

  // the run has written something: htmx fetches what listens for `verlchange`, and the charts their points
  function listen() {
    const run = document.body.dataset.run;
    const source = new EventSource("/live");
    const sign = $(".live");
    let pending = false, waiting = false;
    const showLive = (live) => { if (sign) sign.hidden = !live; };
    source.addEventListener("open", () => showLive("live" in document.body.dataset));
    source.addEventListener("error", () => showLive(false));
    source.addEventListener("change", (event) => follow(JSON.parse(event.data)));
    // what changed between the making of this page and the connection
    source.addEventListener("state", (event) => {
      const state = JSON.parse(event.data);
      const body = document.body.dataset;
      if (run && (String(state.step) !== body.step || state.live !== ("live" in body))) follow(state);
    });
    function follow(change) {
      if (run && change.run !== run) return;
      if (run) {
        showLive(change.live);
        if (change.live) document.body.dataset.live = ""; else delete document.body.dataset.live;
      }
      document.body.dataset.step = change.step;
      document.body.dispatchEvent(new CustomEvent("verlchange", { detail: change }));
      if (pending) { waiting = true; return; }
      refresh();
    }
    async function refresh() {
      if (!run || !$("#charts") || !window.verlCharts) return;
      pending = true;
      try {
        const all = $("#metric-filter") ? "?all" : "";
        const answer = await fetch(`/charts/${encodeURIComponent(run)}${all}`);
        if (answer.ok) window.verlCharts.show(await answer.json());
      } catch (e) { /* the server has ended; EventSource tries again */ }
      setTimeout(() => { pending = false; if (waiting) { waiting = false; refresh(); } }, 500);
    }
    addEventListener("pagehide", () => source.close());
  }

  // a table that is filtered by a field, and sorted by the buttons of its head; also after htmx has changed it
  function filterRows() {
    const field = $("#row-filter"), given = $("#only-given");
    if (!field || !$("#filtered")) return;
    let column = -1, direction = 1;
    const valueOf = (row) => {
      const cell = row.cells[column], value = cell.dataset.value;
      return value === undefined ? cell.textContent.trim() : value === "" ? -Infinity : Number(value);
    };
    const apply = () => {
      const body = $("#filtered").tBodies[0], rows = Array.from(body.rows), text = field.value.toLowerCase();
      for (const row of rows) {
        row.hidden = !row.textContent.toLowerCase().includes(text) || Boolean(given && given.checked && !("given" in row.dataset));
      }
      if (column < 0) return;
      const sorted = rows.map((row) => [valueOf(row), row]).sort(([a], [b]) => direction * (a < b ? -1 : a > b ? 1 : 0)).map(([, row]) => row);
      if (sorted.some((row, i) => row !== rows[i])) body.append(...sorted);
    };
    field.addEventListener("input", apply);
    if (given) { given.addEventListener("change", apply); apply(); }
    document.addEventListener("click", (event) => {
      const head = event.target.closest("[data-sorts] th");
      if (!head || !event.target.closest("button")) return;
      direction = head.cellIndex === column ? -direction : head.classList.contains("n") ? -1 : 1;
      column = head.cellIndex;
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      apply();
    });
    if ($("#live-part")) new MutationObserver(apply).observe($("#live-part"), { childList: true, subtree: true });
  }

  document.addEventListener("DOMContentLoaded", () => {
    const toggle = $("[data-theme-toggle]"), help = $("[data-help]");
    if (toggle) toggle.addEventListener("click", toggleTheme);
    if (help) help.addEventListener("click", () => $("#help").showModal());
    document.addEventListener("click", (event) => {
      const opens = event.target.closest("[data-dialog]"), closes = event.target.closest("[data-close]");
      if (opens) document.getElementById(opens.dataset.dialog).showModal();
      if (closes) closes.closest("dialog").close();
    });
    filterRows();
    if (!("static" in document.body.dataset) && window.EventSource && $("#live-part, #charts")) listen();
  });
})();
