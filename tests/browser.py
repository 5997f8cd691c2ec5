"""A real browser without a window."""

import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def dom(page: str, folder: Path) -> str:
    """The page as Chromium leaves it when its script has run."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    url = (folder / "page.html").as_uri()
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=100, check=True)
    return done.stdout
