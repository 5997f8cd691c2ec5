"""A real browser without a window, spoken to over a pipe in its own protocol (DevTools): no driver is needed."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")

_PAINTED = """new Promise((done) => {
  const look = () => (document.querySelector(".map button[title], #op p") ? done() : setTimeout(look, 20));
  look();
})"""
_MIDDLE = """(element) => {
  element.scrollIntoView({ block: "center", inline: "center" });
  const box = element.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
_KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13}


class Browser:
    """One page in a browser of its own."""

    def __init__(self, folder: Path) -> None:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM), *_OPTIONS, f"--user-data-dir={folder}/profile", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in, self._n, self._session = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb"), 0, None
        self._events: list[dict[str, Any]] = []
        pages = [one for one in self("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        target = pages[0]["targetId"] if pages else self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._out.close()
        self._process.kill()
        self._process.wait()
        self._in.close()

    def __call__(self, method: str, **parameters: object) -> dict[str, Any]:
        """One command of the protocol: its result."""
        self._n += 1
        message = {"id": self._n, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (answer := self._read()).get("id") != self._n:
            self._events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (c := self._in.read(1)) not in (b"\0", b""):
            text += c
        assert c, "the browser has ended"
        return json.loads(text)

    def open(self, page: Path, width: int = 1200, dark: bool = False) -> None:
        """Show a page, so many pixels wide, and wait until its script has painted."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url=page.as_uri())
        self.run(_PAINTED)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited: the page's policy does not bind who debugs it."""
        told = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def click(self, selector: str) -> None:
        """A mouse's click in the middle of an element."""
        x, y = self.run(f"({_MIDDLE})(document.querySelector({json.dumps(selector)}))")
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """One of _KEYS."""
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": "\r"} if key == "Enter" else {}))
        self("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def text(self, selector: str) -> str:
        """What an element shows."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def complaints(self) -> list[str]:
        """What the page's script threw, and what its policy refused."""
        bad = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(one) for one in self._events if one["method"] in bad]
