"""Links and paths in the documentation lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.distributions import ROOT

TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
PAGES = [name for name in TRACKED if name.endswith(".md") and (ROOT / name).exists()]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
# A path in backticks or parentheses, from the root: `tests/chaos`, (docs/agents.md).
PATH = re.compile(
    r"[`(]((?:benchmarks|cli|clients/(?:cpp|go|java|node)|deploy|docs|examples|libs|protos|sdk|services|tests|tools)/[\w./-]*\w)[`):,;]"
)
# A test module by its name alone.
TEST = re.compile(r"`(test_\w+\.py)`")
# Folders that appear when something is built.
BUILT = ("deploy/images.env", "deploy/secrets", "benchmarks/.peers", "deploy/.env")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_path_of_a_page_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = {link for link in LINK.findall(text) if "://" not in link[0] and not link[0].startswith("mailto:")}
    paths = {path for path in PATH.findall(text) if not path.startswith(BUILT)}

    lost = [link for link in links if not leads_somewhere(ROOT / page, *link)]
    lost += [path for path in paths if not any((ROOT / Path(path)).parent.glob(Path(path).name + "*"))]
    lost += [name for name in TEST.findall(text) if not any(path.endswith(f"/{name}") for path in TRACKED)]

    assert not lost


def leads_somewhere(page: Path, target: str, heading: str) -> bool:
    """Returns whether a file exists and, if it is a page, has the heading of a link."""
    file = page.parent / target if target else page
    if not file.exists() or not heading or file.suffix != ".md":
        return file.exists()
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
