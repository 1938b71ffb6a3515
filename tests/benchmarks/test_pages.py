"""Results are kept for each kind of processor, and the pages show all of them, each with its machine."""

import pytest

import harness
import pages

EPYC = """processor: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC 7763 64-Core Processor
flags\t\t: fpu sse2 avx avx2

processor: 1
model\t\t: 2
"""
XEON = """vendor_id: GenuineIntel
cpu family: 6
model: 143
model name: Intel(R) Xeon(R) 8481C CPU @ 2.70GHz
flags: avx512f avx avx2
"""
VIRTUAL = """vendor_id: GenuineIntel
cpu family: 6
model: 6
model name: QEMU Virtual CPU version 2.5+
flags: sse2
"""
ARM = "processor: 0\nFeatures: fp asimd sve\nCPU implementer: 0x41\nCPU part: 0xd40\n"
KINDS = {
    EPYC: ("AMD EPYC 7763 (family 25 model 1, AVX2)", "amd-epyc-7763-25-1-avx2"),
    XEON: ("Intel Xeon 8481C (family 6 model 143, AVX-512)", "intel-xeon-8481c-6-143-avx-512"),
    VIRTUAL: ("Intel QEMU Virtual version 2.5+ (family 6 model 6)", "intel-qemu-virtual-version-2-5-6-6"),
    ARM: ("aarch64 (implementer 0x41 part 0xd40, SVE)", "aarch64-0x41-0xd40-sve"),
    "": ("aarch64", "aarch64"),
}


@pytest.mark.parametrize(("cpuinfo", "expected"), KINDS.items(), ids=[slug for _, slug in KINDS.values()])
def test_kinds_of_processor(cpuinfo, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(harness.platform, "processor", lambda: "")
    monkeypatch.setattr(harness.platform, "machine", lambda: "aarch64")
    file = tmp_path / "cpuinfo"
    if cpuinfo:
        file.write_text(cpuinfo, "utf-8")
    kind = harness.kind(file)
    monkeypatch.setattr(harness, "kind", lambda: kind)
    assert (kind, harness.folder(False).name) == expected


@pytest.fixture
def part(tmp_path, monkeypatch):
    """A place of a page in a folder of the test, and nothing measured yet."""
    monkeypatch.setattr(harness, "FOLDER", tmp_path / "benchmarks")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- one -->\nold\n<!-- /one -->\nafter <!-- two -->\n", "utf-8")

    def table(results):
        return ["case", "×"], [["a", results["a"]]]

    return harness.Part(page, "one", "some", table, {"some": "a picture"})


def test_text_goes_between_its_marks(part):
    before = part.page.read_text("utf-8")
    part.write()
    assert part.page.read_text("utf-8") == before.replace("\nold\n", "\nNot measured yet.\n")
    with pytest.raises(ValueError, match="/two"):
        harness.Part(part.page, "two", "some", part.table).write()


def test_another_kind_of_processor_adds_and_the_same_kind_replaces(part, monkeypatch):
    for kind, value in (("B (AVX2)", 1.5), ("A (AVX-512)", 2.5), ("B (AVX2)", 3.5)):
        monkeypatch.setattr(harness, "kind", lambda kind=kind: kind)
        harness.save("some", {"a": value}, folder=harness.folder(False))
        harness.write([part])
    machine, table, picture, other_machine, other_table, other_picture = part.text().split("\n\n")
    assert part.text() in part.page.read_text("utf-8")
    assert machine.startswith("**A (AVX-512)**, ")
    assert other_machine.startswith("**B (AVX2)**, ")
    assert table == "| case | × |\n| --- | ---: |\n| a | 2.5 |"
    assert other_table.endswith("| a | 3.5 |")
    assert picture == "![a picture](benchmarks/a-avx-512/some.svg)"
    assert other_picture == "![a picture](benchmarks/b-avx2/some.svg)"


@pytest.mark.parametrize("benchmark", pages.BENCHMARKS)
def test_pages_show_what_was_saved(benchmark):
    pytest.importorskip(benchmark, reason=f"{benchmark} needs a rival that is not installed: make setup")
    for part in pages.parts(benchmark):
        page = part.page.read_text("utf-8")
        begin, end = harness.marked(page, part.mark)
        assert page[begin:end] == part.text()
        assert all((part.page.parent / path).is_file() for path in pictures(page[begin:end]))


def pictures(text):
    return [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]


def test_results_stand_in_the_folder_of_their_kind(monkeypatch):
    """Nothing was saved beside the folders, or in that of another kind."""
    files = [path for path in harness.FOLDER.rglob("*") if path.is_file()]
    assert {path.parent.parent for path in files} == {harness.FOLDER}
    for path in harness.FOLDER.glob("*/*.json"):
        kind = harness.json.loads(path.read_text("utf-8"))["machine"]["kind"]
        monkeypatch.setattr(harness, "kind", lambda kind=kind: kind)
        assert harness.folder(False) == path.parent
