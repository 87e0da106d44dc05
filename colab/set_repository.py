"""Writes the repository's address from CITATION.cff into the notebooks: the badge and the clone.

    python colab/set_repository.py

On Colab a notebook is alone, so it cannot look the address up. Without `repository-code` in
CITATION.cff the notebooks say what to set.
"""

import json
import re
from pathlib import Path
from typing import Any

COLAB = Path(__file__).resolve().parent
BRANCH = "main"
HOST = "https://github.com/"  # from which Colab opens notebooks
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
NO_ADDRESS = ("To open this notebook on Colab, set `repository-code` in `CITATION.cff`, run "
              "`python colab/set_repository.py`, and open it from the repository.")


def repository(citation: str) -> str:
    """Returns the `repository-code` of the text of a CITATION.cff, or "" if there is none."""
    found = re.search(r"^repository-code: *[\"']?([^\"'\s]+)", citation, re.MULTILINE)
    return found[1].rstrip("/").removesuffix(".git") if found else ""


def badge(address: str, notebook: str) -> str:
    """Returns the Markdown of the line about Colab; `notebook` is a file name."""
    if not address:
        return NO_ADDRESS
    if not address.startswith(HOST):
        return f"On Colab, upload this notebook; it clones {address}."
    name = address.removeprefix(HOST)
    link = f"https://colab.research.google.com/github/{name}/blob/{BRANCH}/colab/{notebook}"
    return f"[![Open in Colab]({BADGE})]({link})"


def with_address(notebook: dict[str, Any], name: str, address: str) -> dict[str, Any]:
    """Returns the notebook with the badge in its second cell and the address in its third."""
    cells = [dict(cell) for cell in notebook["cells"]]
    _, *text = "".join(cells[1]["source"]).splitlines(keepends=True)
    cells[1]["source"] = [badge(address, name) + "\n", *text]
    cells[2]["source"] = [re.sub(r'^REPOSITORY = "[^"]*"', f'REPOSITORY = "{address}"', line)
                          for line in cells[2]["source"]]
    return notebook | {"cells": cells}


def main() -> None:
    address = repository((COLAB.parent / "CITATION.cff").read_text(encoding="utf-8"))
    for path in sorted(COLAB.glob("*.ipynb")):
        notebook = with_address(json.loads(path.read_text(encoding="utf-8")), path.name, address)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
