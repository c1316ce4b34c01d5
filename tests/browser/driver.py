"""A headless Chromium that reaches nothing: where it is, how it is started, what its page asked for."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-client-side-phishing-detection",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--disable-features=OptimizationHints,MediaRouter,Translate",
)


def missing() -> str | None:
    """What is not here of a browser, its driver and selenium; None when all are."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if _program(CHROMIUM) is None:
        return "there is no Chromium on the PATH"
    if _program(("chromedriver",)) is None:
        return "there is no chromedriver on the PATH"
    return None


def required() -> bool:
    """Whether a run without a browser is a failure and no skip."""
    return os.environ.get("TITO_AUDIT_BROWSER") == "required"


def _program(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


class Proxy:
    """A proxy that refuses everything and remembers who was asked for: whatever would leave the machine."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client:
                client.settimeout(1)
                try:
                    self.asked.append(client.recv(200).split(b"\r\n")[0].decode("latin-1"))
                    client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                except OSError:
                    self.asked.append("a connection that was cut")

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(2)


class Browser:
    """One Chromium; a page opened in it, and what it did."""

    def __init__(self, driver: Any, proxy: Proxy) -> None:
        self.driver = driver
        self.proxy = proxy
        self.requests: list[str] = []
        """Addresses that the page asked for since it was opened."""
        self.complaints: list[str] = []
        """What it wrote to its console since."""

    def open(self, page: Path | str) -> None:
        """Open a file from disk, or an address, and wait until its page is ready."""
        self.driver.get("about:blank")
        self.listen()
        self.requests, self.complaints = [], []
        self.driver.get(page if isinstance(page, str) else page.resolve().as_uri())
        self.wait("document.documentElement.dataset.ready === 'yes'", seconds=120)
        self.listen()

    def wait(self, expression: str, *, seconds: float = 20) -> None:
        """Wait until an expression of JavaScript is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        holds = f"return {expression}"
        WebDriverWait(self.driver, seconds, poll_frequency=0.02).until(lambda tab: tab.execute_script(holds))

    def listen(self) -> None:
        """Take in what the browser logged since the last time."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.webSocketCreated":
                self.requests.append(message["params"]["url"])
        self.complaints += [entry["message"] for entry in self.driver.get_log("browser")]

    def js(self, code: str, *arguments: Any) -> Any:
        """What a function of JavaScript returns."""
        return self.driver.execute_script(code, *arguments)

    def texts(self, selector: str) -> list[str]:
        """The text of each element that is meant, as it is seen."""
        script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.innerText.trim())"
        texts: list[str] = self.js(script, selector)
        return texts

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show the page at this size and in this scheme of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is seen, or the whole page, as PNG."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            options["clip"] = {**size, "height": min(size["height"], 6000), "scale": 1}
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser with a new profile in `folder`, ended at the end; SE_OFFLINE keeps selenium from fetching one."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    os.environ["SE_OFFLINE"] = "true"
    program, driver_program = _program(CHROMIUM), _program(("chromedriver",))
    assert program is not None
    proxy = Proxy()
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--proxy-server=http://127.0.0.1:{proxy.port}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    service = Service(driver_program)
    try:
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Browser(driver, proxy)
        finally:
            driver.quit()
    finally:
        proxy.close()
