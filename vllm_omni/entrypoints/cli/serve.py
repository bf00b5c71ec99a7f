"""`vllm-omni serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import setproctitle
import yaml

from vllm_omni import envs, logs
from vllm_omni.config import DEMO, SYSTEM, DiTConfig, OmniConfig
from vllm_omni.entrypoints.cli.settings import add_settings, read_settings
from vllm_omni.entrypoints.openai.config import ServerConfig
from vllm_omni.entrypoints.openai.listener import fit_to_file_limit, open_socket
from vllm_omni.entrypoints.openai.state_dir import hold_state_dir
from vllm_omni.errors import ConfigError
from vllm_omni.importing import fast_imports
from vllm_omni.models.demo import find_model
from vllm_omni.models.weights import check_weights
from vllm_omni.run_folder import get_run_folder

# Clients may give priorities here; where nobody does, it is first come, first served.
_DIT_DEFAULTS = {"policy": "priority"}
_NOT_SYSTEM = [f.name for f in fields(OmniConfig) if f.metadata.get("group") not in SYSTEM]
INTERRUPTED = 130  # the exit code of a command that was ended before it could do anything

_EPILOG = """\
examples:
  vllm-omni serve                                    the embedded model, for this machine only
  vllm-omni serve --ui                               with a page to draw and chat in
  vllm-omni serve DIR --host 0.0.0.0 --api-key KEY   a checkpoint, for whoever has the key
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `serve` command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, with OpenAI's API",
        usage="vllm-omni serve [MODEL] [options]",
        description="Serve a model over HTTP, with OpenAI's API. Ctrl-C ends it.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEMO,
        help="demo or the path of a checkpoint in diffusers layout; default: %(default)s",
    )
    parser.add_argument(
        "--stage-configs",
        metavar="FILE",
        type=Path,
        help="YAML file of the stages to run, instead of those of the model",
    )
    parser.add_argument(
        "--vllm-arg",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an engine argument of vLLM for the text stage, such as max_num_seqs=16; repeatable",
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, help="requests without a seed draw theirs from this one"
    )
    add_settings(parser, ServerConfig)
    add_settings(parser, OmniConfig, leave_out=_NOT_SYSTEM)
    add_settings(
        parser,
        DiTConfig,
        leave_out=("model", "model_type", "stage_id", "load_text_encoder"),
        defaults=_DIT_DEFAULTS,
        title="diffusion engine",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be wrong, then load and serve."""
    # First, so that a key among the arguments is gone from `ps`; and it goes wrong once the
    # environment has been changed.
    setproctitle.setproctitle("vllm-omni api")
    settings = read_settings(args, ServerConfig)
    settings["api_keys"] = (*settings.get("api_keys", ()), *envs.take_api_keys())
    config = ServerConfig(**settings)
    config = replace(config, max_connections=fit_to_file_limit(config.max_connections))
    if config.ui:
        from vllm_omni.apps.gradio import require_gradio

        require_gradio()
    omni_config = _make_omni_config(args)
    for stage in omni_config.stage_configs:
        check_weights(find_model(stage.model_path))
    try:
        with open_socket(config) as listener, hold_state_dir(config.state_dir):
            envs.set_socket_folder(str(get_run_folder()))
            logs.configure(config.log_format, args.log_level)
            return _serve(config, omni_config, listener)
    finally:
        if args.is_shell:
            atexit._run_exitfuncs()  # they take away what Python's processes have on disk


def _serve(config: ServerConfig, omni_config: OmniConfig, listener: socket.socket) -> int:
    # Until the server runs and handles signals itself, they end this command on the spot. An error
    # in the middle of an import could be taken for its own by whoever imports.
    with _on_signals(_exit), fast_imports():
        from vllm_omni.entrypoints.openai.server import run_server
    try:
        with _on_signals(_interrupt):
            return asyncio.run(run_server(config, omni_config, listener))
    except SystemExit:  # of `_interrupt`
        return 0


# Who sends SIGTERM wants the server to end, and it has; Ctrl-C is somebody's change of mind.


def _exit(signum: int) -> NoReturn:
    os._exit(0 if signum == signal.SIGTERM else INTERRUPTED)


def _interrupt(signum: int) -> NoReturn:
    raise SystemExit(0) if signum == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def _on_signals(function: Callable[[int], NoReturn]) -> Iterator[None]:
    """What SIGTERM and Ctrl-C do for a while."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.signal(one, lambda signum, frame: function(signum)) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _make_omni_config(args: argparse.Namespace) -> OmniConfig:
    from vllm_omni.engine.stages import derive_stage_configs
    from vllm_omni.stage_file import read_stage_file

    vllm_config = _read_vllm_args(args.vllm_arg)
    dit_settings = read_settings(args, DiTConfig)
    of_system = read_settings(args, OmniConfig)
    model = dit_settings.pop("model")
    if args.stage_configs is not None:
        if dit_settings:
            raise ConfigError(
                "stage_configs", sorted(dit_settings), "these settings belong in a stage's file"
            )
        stages = read_stage_file(args.stage_configs)
        model = stages[-1].model_path if stages else model
    else:
        dit_config = DiTConfig(**_DIT_DEFAULTS | dit_settings)
        stages = derive_stage_configs(model, dit_config=dit_config)
    return OmniConfig(
        model=model,
        mode="process",
        log_stats=True,
        otlp_traces_endpoint=getattr(args, "otlp_traces_endpoint", ""),
        seed=args.seed,
        vllm_config=vllm_config or None,
        stage_configs=stages,
        **{name: of_system[name] for name in of_system if name not in _NOT_SYSTEM},
    )


def _read_vllm_args(given: list[str]) -> dict[str, Any]:
    """Names and values, the latter as YAML reads them: 16, true, 0.9, text."""
    settings = {}
    for item in given:
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise ConfigError("--vllm-arg", item, "NAME=VALUE")
        try:
            settings[name.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError("--vllm-arg", item, "a value that YAML can read") from error
    return settings
