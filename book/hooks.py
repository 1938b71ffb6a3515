"""Pages of the site that are made and not written: the reference, the benchmarks, the project's own files.

mkdocs calls the functions named `on_...`. The public names are those of tests/data/public_names.json, which
the tests hold equal to what the package exports; docstrings are read from the sources, so that building the
site imports nothing heavy.
"""

import html
import json
import re
import runpy
import subprocess
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OWN = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
CLAIM = re.compile(r"THEORY ((?:[A-H]\d+[ab]?(?:, )?)+)")
MATHS = re.compile(r"\$\$(.+?)\$\$|(?<![\w$])\$([^$\n]+?)\$(?!\w)")
DISPLAYED = re.compile(r"^\$\$(.+?)\$\$$()", re.MULTILINE)  # outside of the theory a $ may be a $
FORMULAS = runpy.run_path(str(ROOT / "src" / "exptilt" / "report" / "formulas.py"))
GALLERY = runpy.run_path(str(ROOT / "book" / "gallery.py"))
BLOCK = re.compile(r"^( *)```python\n(?=\1>>>)", re.MULTILINE)


def on_config(config):
    """Put the pages of public names at the end of the navigation, a section a folder."""
    sections = []
    for module, names in public_names().items():
        pages = [{name: f"reference/{module}/{name}.md"} for name in names]
        sections.append({module: [f"reference/{module}/index.md", *pages]})
    listed = json.dumps(config["nav"])
    new = sorted(path.name for path in (ROOT / "docs").glob("*.md") if f'"{path.name}"' not in listed)
    section = {name: part for part in config["nav"] for name in part}
    section["Guides"]["Guides"] += new  # pages that nobody has put in their place yet
    section["Reference"]["Reference"] = ["reference/index.md", *sections]
    config["copyright"] = state()
    return config


def state():
    """Which version and which commit the pages are of, for the foot of each."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/exptilt/__init__.py").read_text("utf-8"))[1]
    words = ["git", "-C", str(ROOT), "log", "-1", "--format=%h, %cs"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return f"exptilt {version}"
    return f"exptilt {version}, commit {done.stdout.strip()}"


def on_files(files, config):
    """Add the pages that are made."""
    pages = {name: (ROOT / name).read_text("utf-8") for name in OWN}
    pages["benchmarks/index.md"] = benchmarks()
    pages["gallery.md"] = GALLERY["markdown"]()
    for path in sorted(GALLERY["MADE"].glob("*/*.*")):
        uri = f"gallery/{path.parent.name}/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    names = public_names()
    pages["reference/index.md"] = front(names)
    for module, those in names.items():
        pages[f"reference/{module}/index.md"] = folder_page(module, those)
        for name in those:
            thing = found(module, name)
            path = thing.path if thing.parent.name == name else f"{module}.{name}"
            options = f"    options: {{heading: {module}.{name}, toc_label: {name}}}"
            pages[f"reference/{module}/{name}.md"] = f"::: {path}\n{options}\n"
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown, page, **_):
    """Links as they are in the repository become links of the site; sessions are coloured as sessions."""
    depth = page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+README\.md\)", f"]({'../' * depth}index.md)", markdown)
    markdown = re.sub(rf"\]\(\.\./({'|'.join(map(re.escape, OWN))})\)", r"](\1)", markdown)
    if page.file.src_uri in OWN:
        markdown = markdown.replace("](docs/", "](")
    # Formulas become MathML, which browsers set without a library.
    markdown = (MATHS if page.file.src_uri == "theory.md" else DISPLAYED).sub(_typeset, markdown)
    return BLOCK.sub(r"\1```pycon\n", markdown)


def _typeset(match):
    block, inline = match.groups()
    if inline:
        from latex2mathml.converter import convert

        return convert(inline)
    return f'<div class="maths" tabindex="0">{FORMULAS["set_formula"](block)}</div>'


def on_page_content(content, page, **_):
    """Ids such as THEORY E2 lead to the claim; wide tables scroll by themselves."""
    top = "../" * page.file.src_uri.count("/")

    def linked(match):
        ids = match[1].split(", ")
        return "claim " + ", ".join(f'<a href="{top}theory.html#{i.lower()}">{i}</a>' for i in ids if i)

    return CLAIM.sub(linked, content) if page.file.src_uri.startswith("reference/") else content


def public_names():
    """`{module: names}` of what is public and is no module itself, each name once, where it is shortest."""
    from exptilt._support.former import FORMER

    stored = json.loads((ROOT / "tests" / "data" / "public_names.json").read_text("utf-8"))
    stored = {
        module: names.keys() - FORMER.get(module.removeprefix("exptilt."), {}).keys()
        for module, names in stored.items()
    }
    folders = {module.removeprefix("exptilt.") for module in stored}
    first = set(stored["exptilt"]) - folders - {"__version__"}
    found = {"exptilt": sorted(first, key=str.lower)}
    for module in sorted(stored.keys() - {"exptilt"}):
        found[module] = sorted(set(stored[module]) - first, key=str.lower)
    return {module: names for module, names in found.items() if names}


def summary(module, name):
    """The first sentence about a public name, from the sources."""
    text = found(module, name).docstring
    return " ".join(text.value.split("\n\n")[0].split()) if text else ""


def found(module, name):
    """What griffe knows of a public name: where several things have that name, the one that is no module."""
    thing = package()[f"{module}.{name}".removeprefix("exptilt.")]
    thing = thing.final_target if thing.is_alias else thing
    return thing.members.get(name, thing) if thing.is_module else thing


def package():
    """The package as griffe reads it, once."""
    if not hasattr(package, "kept"):
        import griffe

        package.kept = griffe.load("exptilt", search_paths=[str(ROOT / "src")], resolve_aliases=True)
    return package.kept


def front(names):
    """The first page of the reference: every public name with a sentence."""
    parts = [
        "# Reference",
        "",
        "Every public name, with the first sentence about it. `import exptilt as xt`.",
    ]
    for module, those in names.items():
        parts += ["", f"## [{module}]({module}/index.md)", "", *rows(module, those, f"{module}/")]
    return "\n".join(parts) + "\n"


def folder_page(module, names):
    """A page for a folder: what it is for, then its names."""
    text = (package() if module == "exptilt" else package()[module.removeprefix("exptilt.")]).docstring
    said = text.value if text else ""
    return "\n".join([f"# {module}", "", said, "", *rows(module, names, "")]) + "\n"


def rows(module, names, below):
    """A table of names and first sentences."""
    said = {name: html.escape(summary(module, name), False).replace("|", r"\|") for name in names}
    lines = [f"| [`{name}`]({below}{name}.md) | {text} |" for name, text in said.items()]
    return ["| name | |", "| --- | --- |", *lines]


def benchmarks():
    """What was measured, for each kind of processor, with the goals that were and were not met."""
    parts = [
        "# Benchmarks",
        "",
        headline(),
        "",
        "![Peak memory of a Hessian-vector product against the number of tokens, for torch's math attention "
        "and for exptilt](../images/front-hessian.png)",
        "",
        "What `exptilt bench` (`make bench`) measured and saved, for each kind of processor. A ratio comes "
        "from one interleaved run, memory from a process of its own. Missed goals are listed too. The guides "
        "have the full tables; the files have every number.",
    ]
    for folder in sorted(path for path in (ROOT / "docs" / "benchmarks").iterdir() if path.is_dir()):
        results = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
        if not results:
            continue
        parts += ["", f"## {results[0]['machine']['kind']}", ""]
        parts += ["| benchmark | measured | goals met | where it is told |", "| --- | --- | ---: | --- |"]
        parts += [line(result, folder.name) for result in results]
        for result in results:
            parts += goals(result, folder)
    return "\n".join(parts) + "\n"


def headline():
    """The first sentence about benchmarks: the measured number that README opens with."""
    saved = (ROOT / "docs" / "benchmarks").glob("*/hessian_product.json")
    last = max((json.loads(path.read_text("utf-8")) for path in saved), key=lambda found: found["written"])
    row = last["results"]["rows"][-1]
    ours, theirs = (f"{row[name] / 1e6:,.0f} MB" for name in ("exptilt", "math attention"))
    return (
        f"**A Hessian–vector product of a two-layer transformer at {row['n']:,} tokens takes {ours} instead "
        f"of {theirs}** ([how it was measured](../curvature.md#what-it-takes)). What attention itself costs "
        "beside PyTorch's fused kernel is in [its guide](../attention.md)."
    )


def line(result, folder):
    """A row of the overview: a benchmark, its date, its goals, its page."""
    aims = result["results"].get("goals", [])
    met = f"{sum(is_met(goal) for goal in aims)} of {len(aims)}" if aims else "none set"
    name = result["name"]
    told = f"[{guide(name)[:-3]}](../{guide(name)})" if guide(name) else ""
    return f"| [{name}]({folder}/{name}.json) | {result['written']} | {met} | {told} |"


def guide(name):
    """The page of docs/ that a benchmark's script names as its own, or None."""
    script = ROOT / "benchmarks" / f"{name}.py"
    named = re.search(r'"(\w+\.md)"', script.read_text("utf-8")) if script.is_file() else None
    return named[1] if named else None


def is_met(goal):
    """Whether a measured number is within its limit."""
    return goal["value"] <= goal["limit"]


def goals(result, folder):
    """The goals of one benchmark as a table, and its pictures."""
    aims = result["results"].get("goals", [])
    machine = result["machine"]
    parts = ["", f"### {result['name']}", ""]
    parts += [
        f"{result['written']}; exptilt {machine.get('exptilt', '?')}, torch {machine.get('torch', '?')}, "
        f"{machine.get('torch threads', '?')} threads."
    ]
    for picture in sorted(folder.glob(f"{result['name']}*.svg")):
        if picture.stem == result["name"] or not (folder / f"{picture.stem}.json").exists():
            parts += ["", f"![{picture.stem.replace('_', ' ')}]({folder.name}/{picture.name})"]
    if aims:
        parts += ["", "| goal | limit | measured | |", "| --- | ---: | ---: | --- |"]
        for goal in aims:
            limit, value = (f"{goal[key]:.3g} {goal['unit']}" for key in ("limit", "value"))
            parts.append(f"| {goal['what']} | {limit} | {value} | {'met' if is_met(goal) else 'not met'} |")
    return parts
