"""The form of the notebooks: size of cells, what each has to have, links, alternative texts; and that saved files are honest.

That their cells run and print what is saved, also a second time, is nbval's part: see conftest.py in the root.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import get_sanitize_patterns

from tests.notebook_guard import faults

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
QUICKEST = ROOT / "notebooks/02_group_advantages.ipynb"

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind=None):
    return [cell for cell in nbformat.read(path, as_version=4).cells if kind in (None, cell.cell_type)]


def prose(path):
    return "\n".join(cell.source for cell in cells(path, "markdown"))


def headings(path):
    return re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?s)```.*?```", "", prose(path)))


@each_notebook
def test_code_cells_are_short(path):
    sizes = sorted(sum(bool(line.strip()) for line in cell.source.splitlines()) for cell in cells(path, "code"))
    assert statistics.median(sizes) <= 10
    assert sizes[int(0.9 * len(sizes))] <= 25
    assert sizes[-1] <= 40


@each_notebook
def test_never_more_than_two_code_cells_without_text_between(path):
    kinds = "".join(cell.cell_type[0] for cell in cells(path))
    assert "ccc" not in kinds


@each_notebook
def test_has_the_parts_that_every_notebook_has(path):
    number, titles, text = int(path.name[:2]), headings(path), prose(path)
    assert titles[0].startswith(f"{number} · ")
    assert re.search(r"\*\*The one idea: ", text)
    assert re.search(r"After this notebook \(about \d+ minutes", text)
    assert re.search(r"(?i)\bpredict\b", text)
    for title in ("Exercises", "Recap", "Five questions", "New words"):
        assert any(heading.startswith(title) for heading in titles), f"no section {title!r}"
    assert re.search(r"(?m)^\*\*Next:\*\* ", text)


@each_notebook
def test_sections_are_numbered_and_their_minutes_add_up(path):
    """What a teacher plans with: the head's minutes are those of the sections, without the exercises."""
    text = prose(path)
    sections = re.findall(r"(?m)^## (\d+)\.(\d+) .*\((\d+) minutes?\)$", text)
    assert len(sections) == len(re.findall(r"(?m)^## \d", text)) >= 3, "a section without its minutes"
    assert [(int(a), int(b)) for a, b, _ in sections] == [(int(path.name[:2]), k) for k in range(1, len(sections) + 1)]
    assert re.search(r"(?m)^## Exercises \(\d+ minutes\)$", text)
    minutes, promised = sum(int(m) for _, _, m in sections), int(re.search(r"about (\d+) minutes", text)[1])
    assert abs(minutes - promised) <= 5, f"the sections take {minutes} minutes, the head says {promised}"


@each_notebook
def test_five_questions_have_five_folded_answers(path):
    section = re.split(r"(?m)^## ", prose(path).split("## Five questions")[1])[0]
    questions, answers = section.split("<details>")
    numbered = re.compile(r"(?m)^\d\. ")
    assert len(numbered.findall(questions)) == len(numbered.findall(answers)) == 5


@each_notebook
def test_details_are_closed_and_each_exercise_has_hint_and_solution(path):
    text = prose(path)
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>")
    exercises = text.count("**Exercise ")
    assert text.count("<summary>Hint</summary>") == text.count("<summary>Solution</summary>") == exercises


@each_notebook
def test_glossary_names_what_trl_calls_it(path):
    glossary = prose(path).split("## New words")[1]
    assert re.search(r"(?m)^\| word \| meaning \|", glossary)
    assert "TRL" in glossary
    assert len(re.findall(r"(?m)^\| .* \|$", glossary)) >= 5


@each_notebook
def test_links_lead_somewhere(path):
    for target in re.findall(r"(?<!!)\[[^\]]+\]\(([^)]+)\)", prose(path)):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        if anchor:
            assert anchor in {heading.replace(" ", "-") for heading in headings(there)}, target


@each_notebook
def test_sections_that_the_text_refers_to_exist(path):
    titles = {re.match(r"\d\.\d+|", heading)[0] for notebook in NOTEBOOKS for heading in headings(notebook)}
    for section in re.findall(r"[Ss]ections? (\d\.\d+)", prose(path)):
        assert section in titles, section


@each_notebook
def test_pictures_are_our_own_and_have_alternative_text(path):
    text = prose(path) + "".join(
        "".join(output.get("data", {}).get("text/html", "")) for cell in cells(path, "code") for output in cell.outputs
    )
    for alt, source in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", text):
        assert alt, source
        assert not source.startswith("http")
    for tag in re.findall(r"<img[^>]*>", text):
        assert re.search(r'alt="[^"]+"', tag), tag[:80]
        assert re.search(r'src="data:image/png;base64,', tag), tag[:80]


@each_notebook
def test_a_widget_is_saved_as_text_that_needs_no_kernel(path):
    """The static twin stands in the file: not the bare name of a widget."""
    for cell in cells(path, "code"):
        for output in cell.outputs:
            html = output.get("data", {}).get("text/html", "")
            if re.fullmatch(r"<\w+>", output.get("data", {}).get("text/plain", "")):
                assert len(re.sub(r"<[^>]*>", "", html)) > 40, cell.source


@each_notebook
def test_saved_files_pass_the_guard(path):
    assert faults(path) == []


def set_count(notebook, code):
    code[1].execution_count = None


def save_widget_state(notebook, code):
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"version_major": 2}}


def set_kernelspec(notebook, code):
    notebook.metadata["kernelspec"]["name"] = "my-env"


def skip(notebook, code):
    code[2].metadata["tags"] = ["nbval-skip"]


def skip_by_comment(notebook, code):
    code[2].source = "# NBVAL_IGNORE_OUTPUT\n" + code[2].source


def save_error(notebook, code):
    code[2].outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])]


def save_stderr(notebook, code):
    code[2].outputs.append(nbformat.v4.new_output("stream", name="stderr", text="warning"))


def save_widget(notebook, code):
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
    code[2].outputs.append(nbformat.v4.new_output("display_data", data=widget))


def save_path(notebook, code):
    code[2].outputs.append(nbformat.v4.new_output("stream", text='File "/home/me/grpo_core/kl.py", line 3'))


def ignore(notebook, code):
    code[2].metadata["tags"] = ["nbval-ignore-output"]


def ignore_with_reason_only(notebook, code):
    ignore(notebook, code)
    code[2].source = "# It trains.\nprint('assert')"


GUARDED = {
    set_count: "not run top to bottom",
    save_widget_state: "widget state",
    set_kernelspec: "kernelspec",
    skip: "nbval-skip",
    skip_by_comment: "comment turns nbval off",
    save_error: "error is saved",
    save_stderr: "stderr",
    save_widget: "static twin",
    save_path: "folder of the machine",
    ignore: "comment that says why",
    ignore_with_reason_only: "without an assert",
}


@pytest.mark.parametrize("plant", GUARDED, ids=lambda plant: plant.__name__)
def test_guard_sees(plant, tmp_path):
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    code = [nbformat.v4.new_code_cell(f"print({k})", execution_count=k + 1) for k in range(4)]
    notebook.cells = code
    nbformat.write(notebook, tmp_path / "sound.ipynb")
    plant(notebook, code)
    nbformat.write(notebook, tmp_path / "planted.ipynb")
    assert faults(tmp_path / "sound.ipynb") == []
    assert any(GUARDED[plant] in fault for fault in faults(tmp_path / "planted.ipynb"))


def test_guard_stops_the_run(tmp_path):
    """Not only does it find faults: pytest refuses to begin."""
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("test_*", "__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "notebooks").mkdir()
    notebook = json.loads(QUICKEST.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell.update({"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {})
    (tmp_path / "notebooks" / QUICKEST.name).write_text(json.dumps(notebook), encoding="utf-8")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "notebooks"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "not run top to bottom" in run.stdout + run.stderr


def without_pictures(text):
    for pattern, replacement in get_sanitize_patterns((ROOT / "tests/nbval_sanitize.cfg").read_text(encoding="utf-8")):
        text = re.sub(pattern, replacement, text)
    return text


def test_sanitizing_drops_the_bytes_of_a_picture_and_nothing_else():
    """A blank line at the wrong place in that file would silently switch it off."""
    shown = '<p>x</p><img alt="a" src="data:image/png;base64,iVBOR/+0=" width="3"><b>+1.732</b>'
    assert without_pictures(shown) == '<p>x</p><img alt="a" src="picture" width="3"><b>+1.732</b>'


def built(folder, path):
    folder.mkdir()
    shutil.copy(ROOT / "notebooks/build.py", folder)
    copy = Path(shutil.copy(path, folder))
    subprocess.run([sys.executable, folder / "build.py", path.name], check=True, capture_output=True)
    return copy.read_bytes()


def said(raw):
    """Source and text outputs, cell by cell. Pictures depend on the versions of matplotlib and its fonts."""
    notebook = nbformat.reads(raw.decode(), as_version=4)
    for cell in notebook.cells:
        yield cell.source
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            yield output.get("text", "") + data.get("text/plain", "") + without_pictures(data.get("text/html", ""))


def test_building_twice_gives_the_same_bytes_and_those_are_what_is_saved(tmp_path):
    first, second = (built(tmp_path / name, QUICKEST) for name in ("first", "second"))
    assert first == second
    assert list(said(first)) == list(said(QUICKEST.read_bytes()))


@each_notebook
def test_is_tried_in_a_browser(path):
    assert (ROOT / "tests/browser" / f"test_{path.stem[3:]}.py").exists()
