// A report that is served asks every two seconds whether it is still the newest, and loads itself anew where it is not.
"use strict";
(() => {
  const EVERY = 2000;
  const LONGEST = 30000; // between two questions while the server does not answer
  const KEPT = "opteq-live";
  const root = document.documentElement;
  const loaded = new Date().toLocaleTimeString();
  const words = document.createElement("span");
  const pause = document.createElement("button");
  let paused = false;
  let wait = EVERY;
  let timer = 0;
  let asking = false;

  function say(text) {
    const waiting = root.dataset.waiting ? ` Waiting for ${root.dataset.waiting}.` : "";
    if (words.textContent !== text + waiting) words.textContent = text + waiting;
  }

  async function poll() {
    if (asking || document.hidden) return;
    asking = true;
    clearTimeout(timer);
    try {
      const answer = await fetch("/version", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const newest = (await answer.text()).trim();
      wait = EVERY;
      if (newest === root.dataset.version) say(`Live, as of ${loaded}.`);
      else if (paused) say(`As of ${loaded}; there is something new.`);
      else return reload();
    } catch {
      wait = Math.min(2 * wait, LONGEST);
      say(`The server does not answer; this is as of ${loaded}.`);
    }
    asking = false;
    timer = setTimeout(poll, wait);
  }

  function reload() {
    const focus = document.activeElement?.id ?? "";
    try {
      sessionStorage.setItem(KEPT, JSON.stringify({ x: scrollX, y: scrollY, focus }));
    } catch {
      // no storage: nothing is remembered
    }
    location.reload();
  }

  function remembered() {
    try {
      const kept = sessionStorage.getItem(KEPT);
      sessionStorage.removeItem(KEPT);
      return JSON.parse(kept);
    } catch {
      return null; // no storage: nothing was remembered
    }
  }

  // The charts give the page its height: only with them there is a place to return to.
  function restore({ x, y, focus }) {
    const whenReady = () => {
      if (root.dataset.js && !root.dataset.ready) return;
      observer.disconnect();
      document.getElementById(focus)?.focus({ preventScroll: true });
      scrollTo(x, y);
    };
    const observer = new MutationObserver(whenReady);
    observer.observe(root, { attributes: true });
    whenReady();
  }

  function begin() {
    const bar = document.createElement("p");
    bar.className = "live";
    words.setAttribute("role", "status");
    pause.type = "button";
    pause.id = "live-pause";
    pause.textContent = "Pause";
    pause.addEventListener("click", () => {
      paused = !paused;
      pause.textContent = paused ? "Go on" : "Pause";
      poll();
    });
    bar.append(words, " ", pause);
    (document.querySelector("header") ?? document.body).append(bar);
    document.addEventListener("visibilitychange", poll);
    poll();
    const kept = remembered();
    if (kept) restore(kept);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
