"""What a server says when it starts: a dozen lines on what runs here and how to use it."""

from __future__ import annotations

import json
import socket

import psutil

import vllm_omni
from vllm_omni.diffusion.pipeline_manager import select_device, select_dtype
from vllm_omni.engine.process_client import ARProcClient
from vllm_omni.engine.stage_client import StageClient
from vllm_omni.engine.stages import make_dit_config
from vllm_omni.entrypoints.openai.app import OmniApp
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.listener import is_loopback
from vllm_omni.errors import EngineError

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to listen on everywhere; to connect to from here
_RESTARTS = "it restarts"
_EXAMPLE = {"prompt": "a red circle", "response_format": "url"}


async def make_report(app: OmniApp, listener: socket.socket) -> str:
    """Model, stages, devices, memory, limits, address, and a line to paste."""
    config = app.config
    address, port = listener.getsockname()[:2]
    url = make_url(address, port)
    rows = {
        "model": app.images.model_name,
        **{f"stage {c.stage.stage_id}": await _describe_stage(c) for c in app.llm.clients},
        "memory": _describe_memory(),
        "limits": (
            f"cost {config.max_cost:.3g} pixel-steps, {config.max_n} pictures a request, "
            f"{config.max_num_queued} requests at once"
        ),
        "access": _describe_access(config, address),
        "url": url,
        **({"page": f"{url}/ui"} if config.ui else {}),
        "try": make_curl_line(url, needs_key=bool(config.api_keys)),
    }
    lines = [f"vLLM-omni {vllm_omni.__version__}"]
    return "\n".join(lines + [f"  {name:<8} {value}" for name, value in rows.items()])


def make_url(address: str, port: int) -> str:
    """Where a client on this machine finds the server."""
    host = _ANY.get(address, address)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_curl_line(url: str, needs_key: bool) -> str:
    """Draws a picture when it is pasted into a shell; a key is not shown, but taken from there."""
    key = ' -H "Authorization: Bearer $VLLM_OMNI_API_KEY"' if needs_key else ""
    return (
        f"curl {url}/v1/images/generations{key} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(_EXAMPLE)}'"
    )


async def _describe_stage(client: StageClient) -> str:
    made = ", ".join(client.stage.output_modalities)
    if isinstance(client, ARProcClient):
        vllm_config = client.model.vllm_config
        device = vllm_config.device_config.device_type
        memory = _describe_process(client.health.pid)
        if device != "cpu":
            memory = f"{vllm_config.cache_config.gpu_memory_utilization:.0%} of the GPU's memory"
        return f"vLLM on {device}: {made}; {memory}"
    config = make_dit_config(client.stage)
    dtype = str(select_dtype(config.dtype, select_device(config.device))).removeprefix("torch.")
    try:
        workers = await client.collective_rpc("get_stats")
        memory = _gib(sum(stats["memory_bytes"] for stats in workers))
    except EngineError:  # it has died just now
        memory = _RESTARTS
    return (
        f"diffusion on {select_device(config.device)}, {dtype}: {made}; "
        f"at most {config.max_num_seqs} requests in a step; {memory}"
    )


def _describe_process(pid: int | None) -> str:
    try:
        return _RESTARTS if pid is None else _gib(_get_memory(psutil.Process(pid)))
    except psutil.NoSuchProcess:
        return _RESTARTS


def _describe_memory() -> str:
    this = psutil.Process()
    used = sum(_get_memory(process) for process in (this, *this.children(recursive=True)))
    machine = psutil.virtual_memory()
    free = f"{_gib(machine.available)} of {_gib(machine.total)}"
    return f"{_gib(used)} in all processes; {free} are free"


def _describe_access(config: ServerConfig, address: str) -> str:
    reach = "this machine only" if is_loopback(address) else "everybody who reaches it"
    num_keys = len(config.api_keys)
    keys = f"{num_keys} API key{'s' * (num_keys > 1)}" if num_keys else "no API key"
    return f"{reach}, {keys}"


def _get_memory(process: psutil.Process) -> int:
    """Bytes; what processes share counts once, where the system says so."""
    try:
        memory = process.memory_full_info()
    except psutil.Error:  # it has just ended, or is not ours to look at
        return 0
    return int(getattr(memory, "pss", memory.rss))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
