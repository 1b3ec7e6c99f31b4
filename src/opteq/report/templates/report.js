// Makes the page interactive: sections become tabs, still figures become charts. Without it, all is there to read.
"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("data").textContent);
  const sections = [...document.querySelectorAll("main > section")];
  const hidden = new Set(); // runs that are switched off
  const coarse = matchMedia("(pointer: coarse)").matches;
  let begun = false; // nothing is drawn before the page is there

  // --- tabs ----------------------------------------------------------------------------------------------------------------

  const tabs = sections.map((section) => {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.id = `tab-${section.id}`;
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", section.id);
    tab.textContent = section.dataset.tab;
    tab.addEventListener("click", () => go(section, "pushState"));
    section.setAttribute("role", "tabpanel");
    section.setAttribute("aria-labelledby", tab.id);
    section.tabIndex = 0;
    return tab;
  });
  const list = document.createElement("div");
  list.setAttribute("role", "tablist");
  list.setAttribute("aria-label", "Sections");
  list.append(...tabs);
  document.querySelector("nav").replaceWith(list);

  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    const count = tabs.length;
    const next = { ArrowRight: (at + 1) % count, ArrowLeft: (at + count - 1) % count, Home: 0, End: count - 1 }[event.key];
    if (at < 0 || next === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    tabs[next].focus();
    go(sections[next], "replaceState");
  });

  function go(section, remember) {
    try {
      history[remember](null, "", `#${section.id}`);
    } catch {
      // a page without an address of its own has no history
    }
    show(section);
  }

  function show(section) {
    sections.forEach((other, place) => {
      const selected = other === section;
      other.hidden = !selected;
      tabs[place].setAttribute("aria-selected", String(selected));
      tabs[place].tabIndex = selected ? 0 : -1;
    });
    const tab = tabs[sections.indexOf(section)];
    list.scrollLeft = tab.offsetLeft - list.offsetLeft - (list.clientWidth - tab.offsetWidth) / 2;
    if (begun) draw(section);
  }

  // The section that the address names, or that holds what it names.
  function follow() {
    let named = null;
    try {
      named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    } catch {
      // no name at all
    }
    const section = named?.closest("main > section") ?? sections[0];
    show(section);
    if (named && named !== section && section.contains(named)) named.scrollIntoView();
  }
  addEventListener("popstate", follow);
  addEventListener("hashchange", follow);

  // --- light and dark ------------------------------------------------------------------------------------------------------

  const button = document.getElementById("theme");
  const device = matchMedia("(prefers-color-scheme: dark)");
  function setTheme(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", theme === "dark" ? "Light theme" : "Dark theme");
    redraw();
  }
  button.addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    try {
      localStorage.setItem("opteq-theme", root.dataset.theme);
    } catch {
      // no storage: nothing is remembered
    }
  });
  device.addEventListener("change", () => {
    let chosen = null;
    try {
      chosen = localStorage.getItem("opteq-theme");
    } catch {
      // no storage: nothing was chosen
    }
    if (!chosen) setTheme(device.matches ? "dark" : "light");
  });
  button.hidden = false;

  // --- runs that can be switched off ---------------------------------------------------------------------------------------

  for (const item of document.querySelectorAll(".key li")) {
    const toggle = document.createElement("button");
    toggle.type = "button";
    toggle.dataset.run = item.dataset.run;
    toggle.setAttribute("aria-pressed", "true");
    toggle.append(...item.childNodes);
    item.append(toggle);
    toggle.addEventListener("click", () => {
      const run = Number(item.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      for (const same of document.querySelectorAll(".key button")) {
        same.setAttribute("aria-pressed", String(!hidden.has(Number(same.dataset.run))));
      }
      redraw();
      draw(sections.find((section) => !section.hidden));
    });
  }

  // --- charts --------------------------------------------------------------------------------------------------------------

  // "var(--c0)" and "var(--c0)/0.2" as colours: plotly knows no variables.
  function colour(text) {
    const parts = /^var\((--\w+)\)(?:\/([\d.]+))?$/.exec(text);
    if (!parts) return text;
    const hex = getComputedStyle(root).getPropertyValue(parts[1]).trim();
    if (!parts[2]) return hex;
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${red},${green},${blue},${parts[2]})`;
  }

  function coloured(value, key = "") {
    if (typeof value === "string") return key.endsWith("color") ? colour(value) : value;
    if (Array.isArray(value)) return key.endsWith("color") || typeof value[0] === "object" ? value.map((part) => coloured(part, key)) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, coloured(part, name)]));
  }

  const AXIS = {
    gridcolor: "var(--rule)",
    linecolor: "var(--soft)",
    zerolinecolor: "var(--rule)",
    tickcolor: "var(--rule)",
    ticks: "outside",
    ticklen: 4,
    automargin: true,
    exponentformat: "power",
    minexponent: 5,
    showline: true,
  };

  function axis(own) {
    return { ...AXIS, ...own, title: { standoff: 8, ...own.title } };
  }

  function layout(own) {
    const base = {
      autosize: true,
      margin: { l: 50, r: 14, t: 10, b: 40 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "var(--ink)" },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hovermode: "closest",
      hoverdistance: -1,
      dragmode: coarse ? false : "zoom", // a finger scrolls the page
      hoverlabel: { bgcolor: "var(--paper)", bordercolor: "var(--soft)", font: { color: "var(--ink)", size: 13 }, align: "left" },
      showlegend: false, // the page has one
      modebar: { bgcolor: "rgba(0,0,0,0)", color: "var(--soft)", activecolor: "var(--ink)" },
      uirevision: "kept",
    };
    return coloured({ ...own, ...base, xaxis: axis(own.xaxis), yaxis: axis(own.yaxis) });
  }

  // What plotly gets; it writes into it, so that it is made anew each time.
  function figure(id) {
    const { data, layout: own, runs, off } = figures[id];
    const seen = (trace, at) => !hidden.has(runs[at]) && !off?.has(trace.legendgroup);
    const traces = data.map((trace, at) => ({ ...coloured(trace), visible: seen(trace, at) }));
    return [traces, layout(structuredClone(own))];
  }

  function config(id) {
    return {
      responsive: true,
      displaylogo: false,
      displayModeBar: coarse ? false : "hover",
      plotlyServerURL: "",
      modeBarButtons: [["resetScale2d", "toImage"]],
      toImageButtonOptions: { format: "svg", filename: id },
    };
  }

  // Plotly is a text in the page until the first chart needs it, or nothing else is to be done: the page is there at once.
  function library() {
    const text = document.getElementById("plotly");
    if (!text) return;
    const script = document.createElement("script");
    script.textContent = text.textContent;
    text.remove();
    document.head.append(script);
  }

  // Buttons that say what the lines are, and switch them off.
  function legend(id) {
    const shown = figures[id];
    const list = document.createElement("div");
    list.className = "legend";
    shown.off = new Set();
    for (const key of shown.legend) {
      const toggle = document.createElement("button");
      const sample = document.createElement("span");
      toggle.type = "button";
      toggle.setAttribute("aria-pressed", "true");
      sample.className = `sample ${key.line}`;
      sample.style.color = key.color;
      toggle.append(sample, key.label);
      toggle.addEventListener("click", () => {
        if (!shown.off.delete(key.group)) shown.off.add(key.group);
        toggle.setAttribute("aria-pressed", String(!shown.off.has(key.group)));
        redraw();
      });
      list.append(toggle);
    }
    return list;
  }

  function prepare(place) {
    const plot = document.createElement("div");
    plot.className = "plot";
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", figures[place.id].described);
    place.querySelector(".static").after(plot);
    if (figures[place.id].legend.length) plot.before(legend(place.id));
    place.dataset.live = "1";
  }

  async function draw(section) {
    const places = [...section.querySelectorAll("figure.chart:not([hidden])")]; // the others have no size yet
    places.filter((place) => !place.dataset.live).forEach(prepare); // all at first: they share their rows
    for (const place of places) {
      if (place.getBoundingClientRect().top > innerHeight) {
        root.dataset.ready = "1"; // all that is in sight is drawn: the rest must not keep the reader waiting
        await new Promise((next) => setTimeout(next));
      }
      if (section.hidden || place.hidden) continue; // meanwhile
      library();
      const plot = place.querySelector(".plot");
      if (plot.classList.contains("js-plotly-plot")) Plotly.Plots.resize(plot);
      else await Plotly.newPlot(plot, ...figure(place.id), config(place.id));
    }
  }

  function redraw() {
    for (const head of document.querySelectorAll("h3[data-run]")) head.hidden = hidden.has(Number(head.dataset.run));
    for (const place of document.querySelectorAll("figure.chart")) {
      const runs = figures[place.id].runs.filter((run) => run !== null);
      place.hidden = runs.every((run) => hidden.has(run));
      const plot = place.querySelector(".js-plotly-plot");
      if (plot && !place.hidden) Plotly.react(plot, ...figure(place.id), config(place.id));
    }
  }

  // --- begin ---------------------------------------------------------------------------------------------------------------

  setTheme(root.dataset.theme);
  follow();
  addEventListener("load", async () => {
    begun = true;
    await draw(sections.find((section) => !section.hidden));
    root.dataset.ready = "1";
    setTimeout(library, 500);
  });
})();
