"""Predictions on the pages are what the commands say, links lead somewhere, and the site builds."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import fill_pages
import pytest
import yaml
from typer.testing import CliRunner

import umem
from umem.cli import app, load_command

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

DOCS = sorted((ROOT / "docs").glob("*.md"))

STREAMED = (
    "--model llama-2-7b --mode sft --precision fp32-autocast --batch 4 --checkpoint --policy sft "
    "--hardware h100-sxm"
)
PREDICTIONS = [
    ("docs/simulate.md", "--model llama-2-7b", "predicted-llama-2-7b-gh200-96.txt"),
    ("docs/simulate.md", STREAMED, "predicted-streamed.txt"),
]
"""Pages that show what `umem simulate` said, its options, and the file that keeps it.

tests/test_examples.py compares the first one with what the demo says.
"""


def test_links_lead_somewhere() -> None:
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    missing = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert missing == []


def test_a_streamed_step_is_followed_in_few_concepts_and_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    step = page.partition("\n## One streamed step")[2].partition("\n## ")[0]
    assert 0 < len(set(re.findall(r"\*\*(.+?)\*\*", step))) <= 25
    files = re.findall(r"`(\w[\w/]*/(?:\w+\.py)?)`", step)
    assert [it for it in files if not (ROOT / "umem" / it).exists()] == []


@pytest.mark.parametrize(("page", "options", "kept"), PREDICTIONS)
def test_predictions_are_the_committed_ones(page: str, options: str, kept: str) -> None:
    found = re.search(
        rf"^\$ umem simulate {re.escape(options)}\n(.*?)\n(?=```|\$ )",
        (ROOT / page).read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    assert found, f"{page} shows no such prediction"
    assert f"\n{found.group(1).strip()}\n" in "\n" + (RESULTS / kept).read_text(encoding="utf-8")


@pytest.mark.slow
def test_streamed_weights_are_predicted_as_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the code as it is; of the two simulations, the longer is the other at another size."""
    monkeypatch.chdir(ROOT)
    text = (RESULTS / "predicted-weights.txt").read_text(encoding="utf-8")
    kept = re.findall(r"^\$ umem (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    assert len(kept) == 6
    for words, answer in kept:
        if words.startswith("simulate --model llama-2-13b"):
            continue
        said = CliRunner(env={"COLUMNS": "80"}).invoke(app, shlex.split(words))
        lines = [line.rstrip() for line in said.output.strip().splitlines()]
        assert lines == answer.strip().splitlines(), words


def umem_commands(page: Path) -> list[list[str]]:
    """Words of every `$ umem ...` in the page's console blocks, without variables and comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for it in blocks for line in re.findall(r"^\$ (.*)$", it, re.MULTILINE)]
    parts = [part for line in lines for part in re.split(r"\s(?:\||&&|2?>)\s", line)]
    found = []
    for part in parts:
        words = shlex.split(part, comments=True)
        while words and "=" in words[0]:
            words.pop(0)
        if words[:1] == ["umem"]:
            found.append(["1" if word == "PID" else word for word in words[1:]])
    return found


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{it.name}" for it in DOCS)])
def test_commands_on_a_page_have_options_that_exist(page: str) -> None:
    """They are parsed, and not run."""
    found = umem_commands(ROOT / page)
    assert found or page != "README.md"
    for name, *words in found:
        command = load_command(name)
        context = command.make_context(name, words)
        while hasattr(command, "commands"):
            rest = [*context._protected_args, *context.args]
            inner, command, rest = command.resolve_command(context, rest)
            context = command.make_context(inner, rest, parent=context)


def test_tables_have_headings() -> None:
    """The site would show an empty band."""
    pages = [*ROOT.glob("*.md"), *DOCS]
    empty = re.compile(r"^\|[ |]*\|\n\|[ :|-]+\|$", re.MULTILINE)
    assert [it.name for it in pages if empty.search(it.read_text(encoding="utf-8"))] == []


def test_no_line_of_prose_begins_with_a_comment() -> None:
    """It would be HTML, which ends a list, and show its marks as they are."""
    pages = [*ROOT.glob("*.md"), *DOCS]
    html = re.compile(r"^\s*<!--.*?-->[ \t]*\S", re.MULTILINE)
    assert [it.name for it in pages if html.search(it.read_text(encoding="utf-8"))] == []


def test_the_versions_are_those_of_the_project_and_its_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(
        r"Python ([\d.]+) to ([\d.]+), torch ([\d.]+) to ([\d.]+), CUDA 12 and 13; "
        r"measured with torch ([\d.]+) and CUDA ([\d.]+) ",
        text,
    )
    assert found
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said = [*project["dependencies"], f"python{project['requires-python']}"]
    for name, least, most in (("python", *found.groups()[:2]), ("torch", *found.groups()[2:4])):
        major, minor = most.split(".")
        assert f"{name}>={least},<{major}.{int(minor) + 1}" in said
    machines = [
        json.loads(path.read_text(encoding="utf-8").splitlines()[0])
        for path in RESULTS.glob("*.jsonl")
    ]
    measured = [it for it in machines if it["machine"]["gpu"]]
    assert measured
    assert {it["packages"]["torch"].partition("+")[0] for it in measured} == {f"{found[5]}.0"}
    assert {it["machine"]["cuda"] for it in measured} == {found[6]}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/fit.md", marks=pytest.mark.slow)])
def test_pages_show_what_umem_fit_says(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = re.findall(
        r"^```console\n\$ umem (fit .*?)\n(.*?)\n```", text, re.DOTALL | re.MULTILINE
    )
    assert shown
    for words, answer in shown:
        said = CliRunner(env={"COLUMNS": "80"}).invoke(app, shlex.split(words))
        assert said.output.strip() == answer.strip()


@pytest.mark.slow
def test_the_first_hour_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what installs, removes, or needs a GPU; in this process, unless a shell is needed."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    page = (ROOT / "docs" / "newcomer.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    Path("umem").symlink_to(ROOT)
    said = ""
    for line in re.findall(r"^\$ (.*)$", page, re.MULTILINE):
        if "●" in line or line.startswith(("git ", "pip ", "rm ", "umem top", "python ")):
            continue
        if line.startswith("umem ") and "umem run" not in line:
            done = CliRunner().invoke(app, shlex.split(line.partition(" > ")[0], comments=True)[1:])
            status, output = done.exit_code, done.output
        else:
            ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
            status, output = ended.returncode, ended.stdout + ended.stderr
        assert status in ((0, 1) if "umem doctor" in line else (0,)), f"{line}\n{output}"
        said += output
    predicted = re.search(r"Predicted: (\S+ s) a step, and (\S+ s) with", page)
    assert predicted
    assert all(f" {time} " in said for time in predicted.groups())


@pytest.mark.parametrize("name", ["CITATION.cff", "packaging/conda/recipe.yaml", "CHANGELOG.md"])
def test_every_file_names_the_present_version(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert re.search(rf"""(?:version: "?|## ){re.escape(umem.__version__)}\b""", text)


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")))
def test_workflows_are_valid_and_their_actions_pinned_by_hash(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    assert all(step.keys() & {"run", "uses"} for step in steps)
    used = re.findall(r"uses: \S+?@(\S+)", text)
    assert used
    assert [it for it in used if not re.fullmatch("[0-9a-f]{40}", it)] == []


def test_the_page_of_the_interface_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    public = {name: getattr(umem, name) for name in umem.__all__ if name != "__version__"}
    missing = [
        name
        for name, it in public.items()
        if not isinstance(it, ModuleType)
        and not {it.__module__, f"{it.__module__}.{it.__qualname__}"} & shown
    ]
    assert missing == []
    assert umem.cuda.__name__ in shown


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    assert 'href="out-of-memory.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "umem.swap.enable" in (tmp_path / "api.html").read_text(encoding="utf-8")
    first_hour = (tmp_path / "newcomer.html").read_text(encoding="utf-8")
    assert '<code>umem run <span class="whole">--fallback</span></code>' in first_hour


def test_a_figure_has_a_source_that_says_it() -> None:
    """`make lint` checks the README so."""
    umem = "<!-- from h100-scale-lora.jsonl: llama-2-7b-lora: umem -->"
    stock = umem.replace("umem", "stock")
    page = f"""98 %, `20 ms`, 2 x 4,096 tokens in 8 GiB and 0.75 GiB {umem} and 16.8 GiB {stock}
of a 7B, in 524
ms and 6.8B {stock}

| a | 531 ms, 97 % and 523 ms {umem} 85 % <!-- from umem/hardware/host_memory.py: PINNED_SHARE -->
| b | 3 GB, 2x as fast

92.8 % and 100 % <!-- from h200-systems-sft-xlarge.jsonl: Systems: hf_trainer_sft, umem-budget -->
"""
    assert list(fill_pages.problems(page)) == [
        (2, "524 ms is not in h100-scale-lora.jsonl: llama-2-7b-lora: stock"),
        (5, "97 % is not in h100-scale-lora.jsonl: llama-2-7b-lora: umem"),
        (5, "523 ms is not in h100-scale-lora.jsonl: llama-2-7b-lora: umem"),
        (6, "3 GB has no source: add <!-- from FILE: TABLE: ROW -->"),
        (6, "2 x has no source: add <!-- from FILE: TABLE: ROW -->"),
        (8, "100 % is not in h200-systems-sft-xlarge.jsonl: Systems: hf_trainer_sft, umem-budget"),
    ]
    with pytest.raises(SystemExit, match="has no row llama-2-7b-lora: lost"):
        list(fill_pages.problems(umem.replace("umem", "lost")))


REPORTS = [it for it in DOCS if "<!-- end of report -->" in it.read_text() and it.stem != "systems"]
"""Pages with reports of committed results. Those of systems take long."""


@pytest.mark.parametrize("page", REPORTS, ids=lambda it: it.stem)
def test_reports_on_pages_are_what_the_commands_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python benchmarks/fill_pages.py docs/*.md` puts them there."""
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    report = re.compile(r"(<!-- (?:umem|python) [^>]*-->\n).*?(<!-- end of report -->)", re.DOTALL)
    empty = tmp_path / page.name
    empty.write_text(report.sub(r"\1\2", text), encoding="utf-8")
    assert fill_pages.main([str(empty)]) == 0
    assert empty.read_text(encoding="utf-8") == text


def test_texts_on_pages_are_the_committed_ones() -> None:
    """`python benchmarks/fill_pages.py docs/*.md` puts them there."""
    shown = [
        (file, text)
        for page in (ROOT / "docs").glob("*.md")
        for file, text in re.findall(
            r"<!-- text (\S+) -->\n(.*?)<!-- end of text -->",
            page.read_text(encoding="utf-8"),
            re.DOTALL,
        )
    ]
    assert shown
    for file, text in shown:
        assert text == f"```text\n{(ROOT / file).read_text(encoding='utf-8').strip()}\n```\n"
