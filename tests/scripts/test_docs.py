"""The documents: links lead somewhere, every decision is in the index, the site builds."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ddlbench.config.compose import configuration
from tests.support.processes import run

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def missing_links(page: Path) -> list[str]:
    """Links to files that are not there."""
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8"))]
    inside = [link for link in links if link and "://" not in link and not link.startswith("mailto:")]
    return [link for link in inside if not (page.parent / link).exists()]


def test_links_lead_to_files(tmp_path: Path) -> None:
    assert {page: missing for page in PAGES if (missing := missing_links(page))} == {}
    (tmp_path / "page.md").write_text("see [this](nowhere.md#part)")
    assert missing_links(tmp_path / "page.md") == ["nowhere.md"]


YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"-m ddlbench (.*)")


def test_manifests_are_yaml_whose_commands_compose() -> None:
    manifests = [
        yaml.safe_load(block) for block in YAML_BLOCK.findall((ROOT / "docs" / "clusters.md").read_text("utf-8"))
    ]
    assert [manifest["kind"] for manifest in manifests] == ["PyTorchJob", "JobSet"]
    pods = [pod for manifest in manifests for pod in pod_specs(manifest)]
    assert len(pods) == 3
    for pod in pods:
        (container,) = pod["containers"]
        command = COMMAND.search(" ".join([*container["command"], *container.get("args", [])]))
        assert command is not None
        configuration(*command[1].split())
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def pod_specs(node: Any) -> list[dict[str, Any]]:
    """What describes a pod, wherever it is in a manifest."""
    if not isinstance(node, dict | list):
        return []
    below = node.values() if isinstance(node, dict) else node
    own = [node] if isinstance(node, dict) and "containers" in node else []
    return own + [pod for each in below for pod in pod_specs(each)]


KINDS = (".md", ".py", ".sh", ".sbatch", ".yaml", ".yml", ".toml", ".j2")
FOLDERS = ("conf", "docs", "scripts", "src", "tests", "benchmarks", "notebooks")
FILES = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*")}
NAMES = {name.rpartition("/")[2] for name in FILES}
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "mkdocs.yml", "pyproject.toml")
TEXTS = [*TOP, *sorted(name for name in FILES if name.endswith(KINDS) and name != "tests/scripts/test_docs.py")]
ROOMS = {path.name for path in ROOT.glob("src/ddlbench/*") if path.is_dir()}
# A path from the top of the repository, or one to a Python file from src/ddlbench; a module; a Python file by its name.
PATH = re.compile(rf"(?<![\w/.{{}}$<-])(?:{'|'.join(FOLDERS[1:])})/[\w./-]*\w")
IN_SRC = re.compile(rf"(?<![\w/.{{}}$<-])(?:{'|'.join(ROOMS)})/[\w/]+\.py\b")
MODULE = re.compile(r"(?<![\w./])ddlbench(?:\.[a-z]\w*)+")
SCRIPT = re.compile(r"(?<![\w/.{}*\"'-])[a-z]\w*\.py\b")
EXAMPLES = ("scripts/slurm/site/mine.sh", "scripts/slurm/site/NAME.sh")  # files that a reader would write


def missing_names(text: str, scripts: bool) -> set[str]:
    """Paths and modules (and names of Python files, where `scripts`) in `text` that the repository does not have."""
    paths = set(PATH.findall(text)) | {f"src/ddlbench/{name}" for name in IN_SRC.findall(text)}
    missing = {path for path in paths if not _begins_a_file(path)}
    modules = {module for module in MODULE.findall(text) if not _is_module(module)}
    named = set(SCRIPT.findall(text)) - NAMES if scripts else set[str]()
    return (missing | modules | named) - set(EXAMPLES)


@cache
def _begins_a_file(path: str) -> bool:
    return any(name.startswith(path) for name in FILES)


def _is_module(name: str) -> bool:
    """Also true for an object in a module: ddlbench.errors.UserError."""
    path = f"src/{name.replace('.', '/')}"
    return bool({path, f"{path}.py", f"{path.rpartition('/')[0]}.py"} & FILES)


def test_files_and_modules_that_are_named_exist() -> None:
    missing = {text: missing_names((ROOT / text).read_text("utf-8"), not text.startswith("tests")) for text in TEXTS}
    assert not {text: names for text, names in missing.items() if names}


def test_a_name_of_nothing_is_found() -> None:
    text = "see docs/nowhere.md, src/ddlbench/nothing/, data/nobody.py, ddlbench.nothing.none and stage_away.py"
    result = {"docs/nowhere.md", "src/ddlbench/nothing", "src/ddlbench/data/nobody.py", "ddlbench.nothing.none"}
    assert missing_names(text, scripts=True) == result | {"stage_away.py"}
    assert missing_names(text, scripts=False) == result


def test_the_index_of_decisions_names_each_with_its_title() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.glob("[0-9]*.md"):
        number, _, title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(". ")
        assert f"| {number} | [{title}]({path.name}) |" in index


def test_the_glossary_defines_each_word_once() -> None:
    rows = [line for line in (ROOT / "docs/glossary.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    words = [word.strip() for row in rows for word in row.split("|")[1].split(",") if word.strip() != "word"]
    assert len(words) > 60
    assert sorted(words) == sorted(set(words))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Glossary" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "site/results/papers/lin2022_laptop/figures/lin2022_laptop_4.png").stat().st_size > 0
