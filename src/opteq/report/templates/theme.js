// Before anything is shown: scripts run here, and the page is light or dark as was chosen, or as the device is.
"use strict";
(() => {
  const root = document.documentElement;
  let chosen = null;
  try {
    chosen = localStorage.getItem("opteq-theme");
  } catch {
    // no storage: nothing is remembered
  }
  root.dataset.js = "1";
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = chosen === "light" || chosen === "dark" ? chosen : dark ? "dark" : "light";
})();
