"""`vllm-omni doctor`: the report in both forms, and each check where it finds something missing."""

import argparse
import importlib.metadata
import io
import json
import platform
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from vllm_omni.entrypoints.cli import doctor
from vllm_omni.entrypoints.cli.doctor import Capability, Report

CAPABILITIES = [
    "diffusion engine on CPU",
    "CUDA",
    "vLLM text engine",
    "worker processes",
    "embedded demo model",
]


def run_doctor(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="vllm-omni")
    doctor.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["doctor", *arguments])
    return int(args.run(args))


def create_report(capabilities: list[Capability]) -> Report:
    return Report(
        versions={"python": "3.11.7", "vllm": None},
        cpu={"model": "A CPU", "num_cores": 2, "avx2": True, "avx512": False, "bf16": None},
        cuda_devices=[{"name": "A GPU", "total_bytes": 3 * 2**30}],
        memory={"total_bytes": 4 * 2**30, "available_bytes": 2**29},
        disk={"path": "/work", "free_bytes": 10 * 2**30},
        capabilities=capabilities,
    )


@pytest.fixture(scope="module")
def json_report() -> dict[str, Any]:
    """What `doctor --json` prints here, with its exit code under "exit_code"."""
    with redirect_stdout(io.StringIO()) as printed:
        exit_code = run_doctor("--json")
    return {**json.loads(printed.getvalue()), "exit_code": exit_code}


def test_report_says_what_is_here(json_report: dict[str, Any]) -> None:
    assert json_report["versions"]["python"] == platform.python_version()
    assert json_report["versions"]["torch"] == torch.__version__
    for name in ("diffusers", "transformers", "msgspec"):
        assert json_report["versions"][name] == importlib.metadata.version(name)
    assert json_report["memory"]["total_bytes"] == psutil.virtual_memory().total
    assert len(json_report["cuda_devices"]) == torch.cuda.device_count()
    assert json_report["disk"]["path"] == str(Path.cwd())
    assert json_report["disk"]["free_bytes"] > 0


def test_report_agrees_with_torch_about_the_cpu(json_report: dict[str, Any]) -> None:
    cpu = json_report["cpu"]
    assert cpu["num_cores"] >= 1
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert cpu["avx512"]
        assert cpu["avx2"]


def test_diffusion_engine_and_workers_work_here(json_report: dict[str, Any]) -> None:
    capabilities = {entry["name"]: entry for entry in json_report["capabilities"]}
    assert list(capabilities) == CAPABILITIES
    for name in ("diffusion engine on CPU", "worker processes"):
        assert capabilities[name] == {"name": name, "problem": None, "ok": True}
    assert capabilities["CUDA"]["ok"] == torch.cuda.is_available()
    assert json_report["exit_code"] == 0


def test_prints_text_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    run_doctor()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        "versions",
        "devices",
        "memory",
        "disk",
        "capabilities",
    ]
    for name in CAPABILITIES:
        assert any(line.startswith(f"  {name}  ") for line in lines)


def test_text_is_aligned() -> None:
    report = create_report([Capability("fine"), Capability("a long name", "a reason; a remedy")])
    assert doctor.to_text(report).splitlines() == [
        "versions",
        "  python       3.11.7",
        "  vllm         not installed",
        "devices",
        "  cpu          A CPU, 2 cores, avx2 yes, avx512 no, bf16 unknown",
        "  cuda:0       A GPU, 3.0 GiB",
        "memory",
        "  total        4.0 GiB",
        "  available    0.5 GiB",
        "disk",
        "  free         10.0 GiB in /work",
        "capabilities",
        "  fine         ok",
        "  a long name  missing: a reason; a remedy",
    ]


def test_json_holds_what_the_text_holds() -> None:
    report = create_report([Capability("fine"), Capability("broken", "a reason; a remedy")])
    content = json.loads(doctor.to_json(report))
    assert content["capabilities"] == [
        {"name": "fine", "problem": None, "ok": True},
        {"name": "broken", "problem": "a reason; a remedy", "ok": False},
    ]
    assert content["versions"] == {"python": "3.11.7", "vllm": None}
    assert content["cuda_devices"] == [{"name": "A GPU", "total_bytes": 3 * 2**30}]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("json", None),
        ("json:dumps", None),
        ("no_such_module", "importing no_such_module fails with ModuleNotFoundError: "),
        ("json:no_such_name", "importing json:no_such_name fails with AttributeError: "),
    ],
)
def test_import_problem_names_the_module(name: str, expected: str | None) -> None:
    problem = doctor.find_import_problem(["sys", name])
    if expected is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.startswith(expected)


def test_version_is_that_of_the_first_installed_distribution() -> None:
    assert doctor.find_version(["no-such-package", "msgspec", "torch"]) == (
        importlib.metadata.version("msgspec")
    )
    assert doctor.find_version(["no-such-package"]) is None


def test_text_engine_is_there_if_vllm_is_installed() -> None:
    problem = doctor.check_text_engine().problem
    if doctor.read_versions()["vllm"] is None:
        assert problem is not None
        assert problem.startswith("vLLM is not installed")
    else:
        assert problem is None


def test_demo_model_is_known_by_its_index(tmp_path: Path) -> None:
    problem = doctor.check_demo_model(tmp_path).problem
    assert problem is not None
    assert problem.startswith(f"there is no model in {tmp_path}: ")
    (tmp_path / "model_index.json").write_text("{}")
    assert doctor.check_demo_model(tmp_path).problem is None


@pytest.mark.parametrize(
    ("cpuinfo", "avx2", "avx512", "bf16"),
    [
        ("model name\t: X\nflags\t\t: fpu avx2\n", True, False, False),
        ("model name\t: X\nflags\t\t: avx2 avx512f avx512_bf16\n", True, True, True),
        ("model name\t: X\nFeatures\t: asimd bf16\n", False, False, True),
        ("model name\t: X\n", None, None, None),
    ],
)
def test_cpu_flags(
    tmp_path: Path, cpuinfo: str, avx2: bool | None, avx512: bool | None, bf16: bool | None
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    cpu = doctor.read_cpu(path)
    assert cpu["model"] == "X"
    assert (cpu["avx2"], cpu["avx512"], cpu["bf16"]) == (avx2, avx512, bf16)


def test_cpu_without_cpuinfo(tmp_path: Path) -> None:
    cpu = doctor.read_cpu(tmp_path / "missing")
    assert cpu["model"]
    assert (cpu["avx2"], cpu["avx512"], cpu["bf16"]) == (None, None, None)
