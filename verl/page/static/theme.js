// before the first paint: the theme that the reader chose, else that of the system
(function () {
  "use strict";
  var chosen = null;
  try { chosen = localStorage.getItem("verl-theme"); } catch (e) { /* a file without storage */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
