"""A Chromium without a window: what a page does in it, what it asks of the network, and what it complains of."""

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium.common.exceptions import JavascriptException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
# Runs before any script of a page.
WATCH = """
window.watched = {errors: [], ready: null};
addEventListener("error", (event) => watched.errors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => watched.errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => watched.errors.push(`${event.violatedDirective} ${event.blockedURI}`));
new MutationObserver((_, self) => {
  if (document.documentElement?.dataset.ready) { watched.ready = performance.now(); self.disconnect(); }
}).observe(document, {attributes: true, childList: true, subtree: true, attributeFilter: ["data-ready"]});
"""


class Browser:
    """One window. Widths up to 600 are those of a phone."""

    def __init__(self, profile: Path) -> None:
        options = ChromeOptions()
        options.binary_location = shutil.which("chromium") or "chromium"
        for flag in (*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])):
            options.add_argument(flag)  # root has no sandbox in Chromium
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=Service(shutil.which("chromedriver") or "chromedriver"))
        self.command("Page.addScriptToEvaluateOnNewDocument", source=WATCH)

    def close(self) -> None:
        self.driver.quit()

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns, a promise when it is kept."""
        return self.driver.execute_script(script, *arguments)

    def open(self, address: str, *, width: int = 1280, dark: bool = False, scripts: bool = True, ready: bool = True) -> None:
        """Open a page as if for the first time, and wait until it is ready; the logs begin with it."""
        self.media(dark=dark)
        height = 844 if width < 600 else 900
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.command("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.driver.get("about:blank")
        self.command("Storage.clearDataForOrigin", origin="file://", storageTypes="local_storage")
        self.complaints()
        self.requests()
        self.driver.get(address)
        if scripts and ready:
            self.wait("return document.documentElement.dataset.ready === '1'")

    def media(self, *, dark: bool = False, medium: str = "") -> None:
        """What the page is shown on."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", media=medium, features=features)

    def wait(self, condition: str | Callable[[], Any], seconds: float = 20, what: str = "") -> Any:
        """What the script or function gives as soon as that is true; a page may be replaced by another meanwhile."""
        look = condition if callable(condition) else lambda: self.run(condition)
        patient = WebDriverWait(self.driver, seconds, poll_frequency=0.05, ignored_exceptions=[JavascriptException])
        return patient.until(lambda _: look(), f"not in {seconds} s: {what or condition}")

    def complaints(self) -> list[str]:
        """Since the last call: what is in the console but for plain notes, and errors that a page may have caught."""
        logged = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]
        return [*logged, *(self.run("return window.watched ? watched.errors.splice(0) : []") or [])]

    def requests(self) -> list[str]:
        """Since the last call: the addresses that were asked for, but for those that hold their content themselves."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith(("data:", "blob:", "about:"))]

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.command("Page.printToPDF", printBackground=False)["data"])
