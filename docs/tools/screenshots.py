"""Takes pictures of the site's pages in a headless browser, and looks for what is broken.

make docs && python docs/tools/screenshots.py build/screenshots

Each page is opened at the width of a desktop and of a phone, and pictured from top to bottom. A
page that is wider than its window, a picture that does not load and, on a desktop, code that is
wider than its column are reported; the exit status is then 1. Needs chromium. The site is served
on the loopback interface alone.
"""

import argparse
import contextlib
import functools
import http.server
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
WIDTHS = {"desktop": 1280, "phone": 390}
HEIGHT = 16000  # px; taller pictures fail
REDIRECT = 'http-equiv="refresh"'  # in the pages at former addresses
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
]  # fmt: skip
# Opens each page in a frame and writes what is wrong with it.
INSPECTOR = """<!doctype html><body><script>
async function inspect(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:800px;border:0`;
  const loaded = new Promise((done) => (frame.onload = done));
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const inner = frame.contentDocument;
  const images = [...inner.images];
  images.forEach((x) => (x.loading = "eager"));
  const settled = (x) => x.complete || new Promise((done) => (x.onload = x.onerror = done));
  const patience = new Promise((done) => setTimeout(done, 5000));
  await Promise.race([patience, Promise.all(images.map(settled))]);
  const shown = images.filter((x) => x.getClientRects().length);
  const view = {
    page, width, images: images.length, height: inner.documentElement.scrollHeight,
    over: inner.documentElement.scrollWidth - width,
    broken: shown.filter((x) => !x.naturalWidth).map((x) => x.src),
    code: width < 1000 ? [] : [...inner.querySelectorAll(".highlight:not(.language-text) code")]
      .filter((x) => x.scrollWidth > x.clientWidth).map((x) => x.innerText.slice(0, 60)),
  };
  frame.remove();
  return view;
}
(async () => {
  const views = [];
  for (const [page, width] of PLAN) views.push(await inspect(page, width));
  await fetch("/views", { method: "POST", body: JSON.stringify(views) });
})();
</script></body>"""


class Site(http.server.ThreadingHTTPServer):
    """Serves a folder, and waits for the inspector's report."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.views: queue.Queue[list[dict[str, Any]]] = queue.Queue()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Site

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.server.views.put(json.loads(text))

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the browser leaves once it has its picture
            super().handle()

    def log_message(self, format: str, *args: object) -> None: ...


@contextlib.contextmanager
def browser(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A browser with a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = ["chromium", *OPTIONS, f"--user-data-dir={profile}", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the pictures")
    parser.add_argument(
        "--pages", nargs="*", help="instead of all, such as masks/ and integrations/sdpa/"
    )
    arguments = parser.parse_args()
    if not shutil.which("chromium") or not SITE.exists():
        parser.error("this needs chromium, and a site: make docs")
    arguments.out.mkdir(parents=True, exist_ok=True)
    files = (x for x in sorted(SITE.rglob("index.html")) if REDIRECT not in x.read_text("utf-8"))
    every = (x.parent.relative_to(SITE).as_posix() for x in files)
    pages = arguments.pages or [f"{page}/".removeprefix("./") for page in every]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SITE, folder, dirs_exist_ok=True)
        plan = [(f"/{page}", width) for page in pages for width in WIDTHS.values()]
        (Path(folder) / "inspector.html").write_text(INSPECTOR.replace("PLAN", json.dumps(plan)))
        site = Site(Path(folder))
        with browser("--remote-debugging-port=0", f"{site.address}/inspector.html"):
            views = site.views.get(timeout=600)
        names = {width: name for name, width in WIDTHS.items()}
        for view in views:
            page = view["page"][1:].replace("/", "-") or "index-"
            name = f"{page}{names[view['width']]}.png"
            size = f"--window-size={view['width']},{min(view['height'], HEIGHT)}"
            picture = f"--screenshot={(arguments.out / name).resolve()}"
            with browser(size, picture, f"{site.address}{view['page']}") as process:
                process.wait(timeout=120)
        site.shutdown()
    wrong = [x for x in views if x["over"] > 0 or x["broken"] or x["code"]]
    sys.stdout.writelines(f"{x}\n" for x in wrong)
    images = sum(x["images"] for x in views)
    sys.stdout.write(f"{len(views)} views, {images} pictures, {len(wrong)} wrong\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
