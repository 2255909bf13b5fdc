"""Run notebooks in a fresh kernel and save them with their outputs: `python notebooks/build.py [NAME …]`.

What is saved is the same, byte for byte, each time: no widget state, no timings, stable cell ids. Widgets are saved as their
static twins.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}}


def build(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = nbformat.from_dict(METADATA)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False, store_widget_state=False, coalesce_streams=True,
                            resources={"metadata": {"path": str(FOLDER)}})  # fmt: skip
    client.execute()
    notebook.metadata = nbformat.from_dict(METADATA | {"language_info": {"name": "python"}})
    for i, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{i:03d}"
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output["data"].pop(WIDGET, None)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb"))
    for name in names:
        print(name)
        build(FOLDER / Path(name).name)
