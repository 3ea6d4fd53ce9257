"""The hash of a kernel: comments, white space, names and folders of files do not change it, all else does; and what
depends on it."""

import json
import shutil
from pathlib import Path

import pytest

from twell_lab import records
from twell_lab.core import folders
from twell_lab.core.errors import RecordError
from twell_lab.records import provenance

CUDA = """#include "shared.cuh"
#define SQUARE(x) ((x) * (x))
#define EMPTY
extern "C" __global__ void scale(float* y, const int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;   // one thread a value
    if (i < n) y[i] = SQUARE(y[i]) + 1'000.5e-3f;    /* in place */
    asm volatile("{ // not a comment: part of the string\\n}" ::: "memory");
    char slash = '/', quote = '"';
}
"""
SHARED = """#pragma once
#define WIDE 4
"""
LAUNCH = "def scale(y):\n    return y\n"
REGISTRY = """_ALONE = ("launch.scale",)
KERNELS = {kernel.name: kernel for kernel in (Kernel("smxx_scale", (*_ALONE,), macros.each, oldest=(8, 0)),)}
"""


@pytest.fixture
def tree_of_one(tmp_path):
    """A function that writes a small tree with one kernel, some texts replaced, and returns the kernel's hash."""
    made = iter(range(1000))

    def tree(**changed: str) -> str:
        top = tmp_path / str(next(made))
        texts = {
            "cuda": CUDA,
            "shared": SHARED,
            "launch": LAUNCH,
            "cuda/registry": REGISTRY,
        }
        for name, text in (texts | changed).items():
            folder = "kernels" if name in ("cuda", "shared") else "twell_lab"
            file = {"cuda": "smxx_scale.cu", "shared": "shared.cuh"}.get(name, f"{name}.py")
            (top / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (top / folder / file).write_text(text)
        return provenance.kernel_hashes(top)["smxx_scale"]

    return tree


@pytest.mark.parametrize(
    "old, new",
    [
        ("// one thread a value", ""),
        ("/* in place */", "/* something\n else * entirely // here */ /**/"),
        ("    int i =", "\tint\n  i  =  // here\n "),
        ("(float* y, const int n)", "(float *y,const int n)"),
        ("#define EMPTY\n", "#define EMPTY   // nothing\n\n\n"),
        ("((x) * (x))", "\\\n   ((x)*(x))"),
        ("extern", "// a comment that goes on \\\n over the next line\nextern"),
    ],
)
def test_comments_and_white_space_in_cuda_do_not_count(tree_of_one, old, new):
    assert old in CUDA
    assert tree_of_one() == tree_of_one(cuda=CUDA.replace(old, new, 1))


@pytest.mark.parametrize(
    "old, new",
    [
        ("i < n", "i <= n"),
        ("int i", "inti"),
        ("+ 1'000.5e-3f", "- 1'000.5e-3f"),
        ("// not a comment", "//  not a comment"),
        ("SQUARE(x) (", "SQUARE (x) ("),
        ("#define EMPTY\n", "#define EMPTY "),
        ("((x) * (x))", "((x) + (x))"),
        ("'/'", "' '"),
        ("y[i] = ", "y[i] += "),
        ("y[i]) + 1", "y[i]) + + 1"),
    ],
)
def test_code_in_cuda_counts(tree_of_one, old, new):
    assert old in CUDA
    assert tree_of_one() != tree_of_one(cuda=CUDA.replace(old, new, 1))


def test_every_kernel_of_this_tree_has_a_hash_of_its_own_and_a_new_one_must_be_declared(copy):
    found = provenance.kernel_hashes(copy)
    assert set(found) == {path.stem for path in folders.kernels_dir().glob("*.cu")}
    assert len(set(found.values())) == len(found) and found == provenance.kernel_hashes()
    (copy / "kernels" / "smxx_new.cu").write_text("int n;\n")
    with pytest.raises(RecordError, match="smxx_new.cu is in kernels/, and .*registry.py does not declare it"):
        provenance.kernel_hashes(copy)


def test_a_change_of_one_kernel_is_its_own_alone(copy):
    before = provenance.kernel_hashes(copy)
    kernel = copy / "kernels" / "smxx_transpose.cu"
    kernel.write_text(kernel.read_text() + "\n__device__ int one_more;\n")
    assert [name for name, value in provenance.kernel_hashes(copy).items() if value != before[name]] == [
        "smxx_transpose"
    ]


# ---- kernels and GPU evidence belong together ------------------------------------------------------------


def test_this_tree_keeps_its_promise():
    """Fails when a kernel changed without a new GPU test report or an entry in UNVERIFIED.json."""
    records.verify()


@pytest.fixture
def copy(tmp_path):
    """A copy of this tree's kernels and package, with no records."""
    shutil.copytree(folders.kernels_dir(), tmp_path / "kernels")
    package = Path(provenance.Sources.of().package)
    shutil.copytree(package, tmp_path / "twell_lab", ignore=shutil.ignore_patterns("__pycache__", "course"))
    (tmp_path / "data" / "records").mkdir(parents=True)
    return tmp_path


def report(tree: Path, date: str = "2026-01-01T00:00:00Z", **tests) -> Path:
    """A synthetic GPU test report for the kernels of this tree, saved into it."""
    record = records.Record(
        name="gpu-tests",
        purpose="a test's own",
        rows=[],
        date=date,
        commit=None,
        dirty=None,
        kernels=provenance.kernel_hashes(tree),
        machine={},
        notes={"gpu_tests": {"passed": 3, "failed": 0, **tests}},
    )
    return record.save(tree / "data" / "records")


def excuse(tree: Path, **changes) -> None:
    entry = {"kernels": provenance.kernel_hashes(tree), "why": "no GPU at hand", "date": "2026-01-02"}
    (tree / "data" / "records" / "UNVERIFIED.json").write_text(json.dumps({**entry, **changes}))


def change_a_kernel(tree: Path) -> str:
    """Change the first one; its name."""
    kernel = sorted((tree / "kernels").glob("*.cu"))[0]
    kernel.write_text(kernel.read_text() + "\n__device__ int one_more;\n")
    return kernel.stem


def test_a_changed_kernel_fails_until_it_is_tested_or_named(copy):
    report(copy)
    assert "tested on a GPU on 2026-01-01" in records.verify(tree=copy)
    changed = change_a_kernel(copy)
    with pytest.raises(RecordError, match=rf"no GPU test report carries: {changed} \([0-9a-f]{{12}}\); tested"):
        records.verify(tree=copy)
    excuse(copy)
    assert records.verify(tree=copy).startswith("1 of") and "no GPU at hand" in records.verify(tree=copy)
    change_a_kernel(copy)
    with pytest.raises(RecordError, match="UNVERIFIED.json does not name them"):
        records.verify(tree=copy)
    report(copy, date="2026-01-03T00:00:00Z")
    records.verify(tree=copy)


def test_changed_launch_code_and_formats_fail_too(copy):
    report(copy)
    for module, old, new, kernel in (
        ("ops/portable", "_PACK_TILES = {1: 128", "_PACK_TILES = {1: 256", "smxx_pack"),
        ("formats/twell", "WORDS = 256, 32", "WORDS = 128, 32", "smxx_down"),
    ):
        path = copy / "twell_lab" / f"{module}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(RecordError, match=kernel):
            records.verify(tree=copy)
        path.write_text(text)
    records.verify(tree=copy)


def test_a_reworded_comment_needs_no_new_evidence(copy):
    report(copy)
    for kernel in (copy / "kernels").glob("*.cu*"):
        kernel.write_text("// a remark\n" + kernel.read_text())
    records.verify(tree=copy)


def test_no_evidence_at_all_fails(copy):
    with pytest.raises(RecordError, match="no GPU test report"):
        records.verify(tree=copy)


@pytest.mark.parametrize("tests", [{"failed": 1}, {"passed": 0}, {"failed": None}])
def test_a_report_of_failure_is_no_evidence(copy, tests):
    report(copy, **tests)
    with pytest.raises(RecordError, match="no evidence"):
        records.verify(tree=copy)


@pytest.mark.parametrize("changes", [{"why": " "}, {"why": None}, {"kernels": {"smxx_pack": "0" * 64}}, {"kernels": 7}])
def test_an_excuse_needs_the_present_hash_and_a_reason(copy, changes):
    excuse(copy, **changes)
    with pytest.raises(RecordError, match="UNVERIFIED"):
        records.verify(tree=copy)


def test_the_newest_report_decides(copy):
    report(copy, date="2026-01-05T00:00:00Z")
    change_a_kernel(copy)
    report(copy, date="2026-01-04T00:00:00Z")
    with pytest.raises(RecordError):
        records.verify(tree=copy)
