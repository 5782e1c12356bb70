"""Makes pages/runbooks.html of docs/runbooks.md: Prometheus serves it, so that the link of an alert leads somewhere.

With --check it writes nothing, and exits with 1 if the page is not current.
"""

import re
import sys
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs/runbooks.md"
PAGE = Path(__file__).parent / "pages/runbooks.html"
HEAD = """<!doctype html>
<meta charset="utf-8">
<title>Fulmen: runbooks</title>
<style>body{max-width:50rem;margin:2rem auto;padding:0 1rem;font:1rem/1.5 system-ui,sans-serif}:target{background:#fe9}</style>
"""
# Other documents are not served beside it.
LINK_ELSEWHERE = re.compile(r"\[([^\]]*)\]\((?!https?://|#)[^)]*\)")


def page() -> str:
    """Returns the page; each heading is an anchor by its name in lower case."""
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(LINK_ELSEWHERE.sub(r"\1", SOURCE.read_text(encoding="utf-8")))
    for opening, content in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", re.sub(r"[^\w -]", "", content.content.lower()).replace(" ", "-"))
    return HEAD + parser.renderer.render(tokens, parser.options, {})


def main() -> int:
    """Writes the page, or checks it; returns the exit status."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{PAGE} is not current: run `make dashboards`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
