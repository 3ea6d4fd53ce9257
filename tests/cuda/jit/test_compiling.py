"""The real compiler: every kernel for every architecture, with what ptxas says of its registers. Needs no GPU."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from twell_lab.core import folders
from twell_lab.core.errors import CompileError, StackError
from twell_lab.cuda import cubins as jit
from twell_lab.cuda import launcher
from twell_lab.ops import portable

from .test_compiling_training import training_builds

try:
    jit.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)

REGISTERS = 65_536  # of one multiprocessor; 255 is the most that one thread can use
ONE, SHARED = 1, portable._TEAMS  # teams of warps on one token: many tokens, and few


def _jobs():
    """(file, arch, dtype name, d_model, macros) of what is compiled."""
    jobs = []

    def add(arch, dtype, d_model, teams):
        defines = portable.specialisation(dtype, d_model, teams) if d_model else portable._any_width(dtype)
        for file in ("smxx_down.cu", "smxx_gated.cu"):
            jobs.append((file, arch, str(dtype).removeprefix("torch."), d_model, defines))
        if d_model and portable.pooled_takes(dtype, d_model):
            for file, more in portable.POOLED_FILES[: 4 if teams == ONE else 2]:
                jobs.append((file, arch, str(dtype).removeprefix("torch."), d_model, (*defines, *more.items())))

    for arch in jit.ARCHITECTURES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            jobs.append(
                ("smxx_pack.cu", arch, str(dtype).removeprefix("torch."), None, ((launcher._DEFINE[dtype], True),))
            )
            add(arch, dtype, 2048, ONE)
        add(arch, torch.bfloat16, 2048, SHARED)
    for arch in ("sm_80", "sm_90"):
        for d_model in (None, 64, 768, 4096, 5120):
            add(arch, torch.bfloat16, d_model, ONE)
        for d_model in (64, 5120):
            add(arch, torch.bfloat16, d_model, SHARED)
        for dtype in (torch.float16, torch.float32):
            add(arch, dtype, 2048, SHARED)
    return jobs


JOBS = _jobs()


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    """Every job's cubin, compiled two at a time into a cache of its own."""
    folder = tmp_path_factory.mktemp("cubins")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.delenv("TWELL_LAB_CUBINS", raising=False)
        return dict(zip(JOBS, pool.map(lambda job: jit.compile(job[0], job[1], dict(job[4]), cache_in=folder), JOBS)))


def called(job):
    file, arch, dtype, d_model, defines = job
    teams = dict(defines).get("TEAMS", 1)
    more = (
        f"{teams} teams" if teams > 1 else "",
        *(name.lower() for name in ("POOL", "HIDDEN") if name in dict(defines)),
    )
    return " ".join(filter(None, (file, arch, dtype, str(d_model or "any width"), *more)))


def of_any_width(file, kernel):
    return kernel.endswith("_v1") and file != "smxx_up.cu"


def threads_a_block(file, kernel, defines):
    if file == "smxx_pack.cu":
        return portable._PACK_BLOCKS[int(kernel[-1])][0]
    return 128 if of_any_width(file, kernel) else 32 * defines["WARPS"] * defines.get("TEAMS", 1)


@pytest.mark.parametrize("job", JOBS, ids=called)
def test_no_spills_and_registers_within_what_a_multiprocessor_has(job, cubins):
    file, arch, _, _, defines = job
    cubin, defines = cubins[job], dict(defines)
    assert cubin.image.startswith(b"\x7fELF") and len(cubin.image) > 1000
    kernels = jit.resources(cubin.log)
    assert kernels and f"for '{arch}'" in cubin.log
    for name, used in kernels.items():
        assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0, f"{name}: {used}"
        threads = threads_a_block(file, name, defines)
        # Registers are handed out eight at a time. What launches is one block; what runs well is more than that:
        # v1 and packing kernels need many threads in flight, token kernels 448 of them at the least.
        resident = REGISTERS // (-(-used["registers"] // 8) * 8 * threads) * threads
        wanted = {"smxx_pack.cu": 1024}.get(file, 768 if of_any_width(file, name) else 448 // threads * threads)
        assert 0 < used["registers"] <= 255 and resident >= max(wanted, threads), f"{name}: {used}, {threads} threads"
        assert used["shared_bytes"] <= 48 * 1024


def versions(cubin):
    """{kernel family: its version numbers} of one compiled file."""
    found = {}
    for name in jit.resources(cubin.log):
        family, number = re.fullmatch(r"(\w+)_v(\d+)", name).groups()
        found.setdefault(family, set()).add(int(number))
    return found


def test_each_file_holds_the_versions_that_are_launched(cubins):
    for (file, _, _, _, defines), cubin in cubins.items():
        (family,) = found = versions(cubin)
        assert file == f"smxx_{family}.cu"
        teams, hidden, pool = (name in dict(defines) for name in ("TEAMS", "HIDDEN", "POOL"))
        newest = {"pack": max(portable._PACK_BLOCKS), "down": 2, "gated": 3}.get(family, 1)
        expected = {newest + 1} if teams else set(range(1, newest + 1))
        if pool:
            assert found[family] == {{"down": 6 if hidden else 4 + teams, "gated": 5 + teams, "up": 1}[family]}
        else:
            assert expected <= found[family], file


def test_every_portable_file_is_among_the_jobs():
    training = {file for file, _ in training_builds(torch.bfloat16)}
    assert {p.name for p in folders.kernels_dir().glob("smxx_*.cu")} == {job[0] for job in JOBS} | training
    assert {job[1] for job in JOBS} == set(jit.ARCHITECTURES) == {f"sm_{n}" for n in (75, 80, 86, 89, 90, 100, 120)}


def test_a_real_cubin_is_cached_whole(cubins, tmp_path, monkeypatch):
    job = JOBS[0]
    made = jit.compile(job[0], job[1], dict(job[4]), cache_in=tmp_path)
    monkeypatch.setattr(jit, "_run_nvrtc", lambda *_: pytest.fail("compiled again"))
    again = jit.compile(job[0], job[1], dict(job[4]), cache_in=tmp_path)
    assert again == made and jit.resources(again.log) == jit.resources(cubins[job].log)


@pytest.mark.parametrize(
    "source, told",
    [
        ('extern "C" __global__ void k() { int x = ; }', "expected an expression"),
        ('extern "C" __global__ void k() { undeclared(); }', "undeclared"),
        ("#include <no_such_header.h>\n", "no_such_header"),
        ('#if !defined(VALUE_BF16)\n#error "define one"\n#endif\n', "define one"),
    ],
    ids=["syntax", "name", "header", "#error"],
)
def test_a_source_that_does_not_compile_comes_with_the_compilers_log(source, told, tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text(source)
    monkeypatch.setattr(folders, "kernels_dir", lambda: tmp_path)
    with pytest.raises(CompileError, match=rf"(?s)broken\.cu for sm_90.*{told}"):
        jit.compile("broken.cu", "sm_90", {}, cache_in=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_macros_reach_the_source(tmp_path, monkeypatch):
    (tmp_path / "k.cu").write_text(
        '#if N != 3 || !defined(FLAG)\n#error "not so"\n#endif\nextern "C" __global__ void k() {}\n'
    )
    monkeypatch.setattr(folders, "kernels_dir", lambda: tmp_path)
    assert "k" in jit.resources(jit.compile("k.cu", "sm_75", {"N": 3, "FLAG": True}, cache_in=tmp_path / "c").log)
    with pytest.raises(CompileError, match="not so"):
        jit.compile("k.cu", "sm_75", {"N": 4, "FLAG": True}, cache_in=tmp_path / "c")


def test_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(CompileError, match="smxx_pack.cu for sm_999"):
        jit.compile("smxx_pack.cu", "sm_999", {"VALUE_BF16": True}, cache_in=tmp_path)


def test_this_compiler_knows_every_architecture():
    assert jit.compiler() >= (12, 8)
    for name in jit.ARCHITECTURES:
        number = int(name.removeprefix("sm_"))
        assert jit.architecture((number // 10, number % 10), "smxx_pack.cu") == name
