"""Every environment variable the package reads or sets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def set_log_level(level: str) -> None:
    """How much the libraries say, and in all processes that start after this; on stderr only."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", level.upper())
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", level)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", level.upper())


def set_log_format(log_format: str, level: str) -> None:
    """VLLM_OMNI_LOG: how a server and its stages write their lines; vLLM's are among them."""
    os.environ["VLLM_OMNI_LOG"] = f"{log_format}:{level}"
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"


def log_format() -> tuple[str, str] | None:
    """VLLM_OMNI_LOG: format and level; None where no server has set it."""
    log_format, _, level = os.environ.get("VLLM_OMNI_LOG", "").partition(":")
    return (log_format, level) if level else None


def set_socket_folder(folder: str) -> None:
    """Where vLLM puts the sockets between processes; it does not take them away itself."""
    os.environ["VLLM_RPC_BASE_PATH"] = folder


def set_temporary_folder(folder: str) -> None:
    """TMPDIR: where this process, its children and their libraries put what is not to stay."""
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = folder


def set_supervised() -> None:
    """VLLM_OMNI_SUPERVISED: this process is a stage, and those it starts end with it."""
    os.environ["VLLM_OMNI_SUPERVISED"] = "1"


def is_supervised() -> bool:
    """VLLM_OMNI_SUPERVISED: whether this process belongs to a stage that is supervised."""
    return "VLLM_OMNI_SUPERVISED" in os.environ


def keep_sockets_local() -> None:
    """GLOO_SOCKET_IFNAME: torch's groups of processes listen for each other on this machine only.

    Without it they take the address that the machine's own name stands for.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def api_key() -> str | None:
    """VLLM_OMNI_API_KEY: what a client of a server that has keys sends."""
    return os.environ.get("VLLM_OMNI_API_KEY") or None


def cache_dir() -> Path:
    """VLLM_OMNI_CACHE: where files made at run time are kept between runs."""
    if value := os.environ.get("VLLM_OMNI_CACHE"):
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-omni"


def keep_compiled_code() -> None:
    """TORCHINDUCTOR_CACHE_DIR: what torch compiles is there for the next start, for us alone."""
    folder = cache_dir() / "compiled"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # code that is run: nobody else may write there
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def take_api_keys() -> tuple[str, ...]:
    """VLLM_OMNI_API_KEYS: keys of the server, separated by commas; not to be seen in `ps`.

    They are taken out, so that no process started from here has them.
    """
    keys = os.environ.pop("VLLM_OMNI_API_KEYS", "").split(",")
    return tuple(key.strip() for key in keys if key.strip())
