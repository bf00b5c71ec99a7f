"""`vllm-omni bench`: load and latency benchmarks."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_omni import envs
from vllm_omni.benchmark.workload import DIFFUSERS, MIXES, PROMPTS, PictureClass
from vllm_omni.entrypoints.cli import bench_cache
from vllm_omni.entrypoints.cli.settings import parse_size, prepare_file
from vllm_omni.errors import ConfigError
from vllm_omni.models.demo import find_model
from vllm_omni.models.weights import check_weights

if TYPE_CHECKING:
    from vllm_omni.benchmark.serve import ServeBench, ServeBenchConfig

DEFAULT_MIX = "small"
DEFAULT_SLO_SCALE = 3.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `bench` command."""
    parser = subparsers.add_parser("bench", help="measure servers under load, and step caches")
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    add_serve_parser(benches)
    bench_cache.add_parser(benches)


def add_serve_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="a running server: this one, or any that speaks OpenAI's images API",
        usage="vllm-omni bench serve (--request-rate R | --concurrency N) [options]",
        description=(
            "Send requests for pictures to a running server and report latency, throughput and how "
            "many were in time. Only prompt, model, size, n and response_format are sent unless "
            "options or a mix with steps ask for more; --plain leaves the steps out. "
            "Exit code: 0 if a request succeeded, 1 if none did."
        ),
    )
    _add_server_options(parser.add_argument_group("server"))
    _add_load_options(parser.add_argument_group("load"))
    _add_picture_options(parser.add_argument_group("pictures"))
    _add_report_options(parser.add_argument_group("report"))
    parser.set_defaults(run=run_serve)


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="with or without /v1; diffusers:MODEL is no server: stock diffusers draws with that "
        "checkpoint in this process, one request after another; default: %(default)s",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help="holds the key; or set VLLM_OMNI_API_KEY (an option would be seen in ps)",
    )
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    group.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        default=600.0,
        help="seconds for one request; default: %(default)g",
    )


def _add_load_options(group: argparse._ArgumentGroup) -> None:
    arrivals = group.add_mutually_exclusive_group(required=True)
    arrivals.add_argument(
        "--request-rate",
        metavar="R",
        type=float,
        help="requests per second, Poisson, sent whether or not others are answered; inf: at once",
    )
    arrivals.add_argument(
        "--concurrency",
        metavar="N",
        type=int,
        help="always N requests at a time; an answer is followed by the next request",
    )
    group.add_argument(
        "--num-requests", metavar="N", type=int, default=50, help="default: %(default)s"
    )
    group.add_argument(
        "--warmup",
        metavar="N",
        type=int,
        default=2,
        help="requests of each size, one at a time, before the load; default: %(default)s",
    )
    group.add_argument(
        "--seed",
        metavar="S",
        type=int,
        default=0,
        help="of arrival times, order and prompts; default: %(default)s",
    )


def _add_picture_options(group: argparse._ArgumentGroup) -> None:
    sizes = group.add_mutually_exclusive_group()
    sizes.add_argument(
        "--mix",
        choices=MIXES,
        help="; ".join(f"{name}: {_describe(mix)}" for name, mix in MIXES.items())
        + f"; default: {DEFAULT_MIX}",
    )
    sizes.add_argument("--size", metavar="WxH", help="one size instead of a mix, in pixels")
    group.add_argument("--steps", metavar="N", type=int, help="num_inference_steps of all")
    group.add_argument("--plain", action="store_true", help="do not send the steps of the mix")
    group.add_argument("--cfg", metavar="F", type=float, help="true_cfg_scale")
    group.add_argument("--negative", metavar="TEXT", help="negative_prompt")
    group.add_argument("-n", metavar="N", type=int, default=1, help="pictures per request")
    group.add_argument(
        "--response-format",
        choices=("b64_json", "url", "none"),
        default="b64_json",
        help="none: not sent, for servers that refuse the parameter; default: %(default)s",
    )
    group.add_argument("--stream", action="store_true", help="ask for server-sent events")
    group.add_argument(
        "--partial-images",
        metavar="K",
        type=int,
        help="previews of each picture, with --stream; the time to the first is reported",
    )
    group.add_argument(
        "--extra-body", metavar="JSON", help='further parameters, such as \'{"quality": "low"}\''
    )
    group.add_argument(
        "--prompts", metavar="FILE", type=Path, help="one per line; default: coloured shapes"
    )


def _add_report_options(group: argparse._ArgumentGroup) -> None:
    slo = group.add_mutually_exclusive_group()
    slo.add_argument(
        "--slo-scale",
        metavar="F",
        type=float,
        help="in time is F times what the size takes alone, in the warm-up; "
        f"default: {DEFAULT_SLO_SCALE:g}",
    )
    slo.add_argument("--slo", metavar="S", type=float, help="in time is S seconds, for all sizes")
    group.add_argument("--json", metavar="FILE", type=Path, help="write figures and every request")
    group.add_argument(
        "--plot", metavar="FILE", type=Path, help=".png, .svg or .pdf; needs matplotlib"
    )


def _describe(mix: Sequence[PictureClass]) -> str:
    total = sum(picture.share for picture in mix)
    # A percent sign is argparse's own; the text is doubled for it.
    return ", ".join(f"{picture.name} {100 * picture.share / total:.0f} %%" for picture in mix)


def run_serve(args: argparse.Namespace) -> int:
    """Measure and report; Ctrl-C ends the measuring, not the reporting."""
    config = make_config(args)
    api_key = read_api_key(args.api_key_file)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            prepare_file(option, path)

    # Only now, so that --help and wrong arguments answer at once.
    from tqdm import tqdm

    from vllm_omni.benchmark.client import RequestFailed
    from vllm_omni.benchmark.plot import check_plot
    from vllm_omni.benchmark.serve import ServeBench

    if args.plot is not None:
        check_plot(args.plot)
    is_interrupted = False
    with tqdm(total=config.num_requests, unit="request", disable=None, leave=False) as bar:
        bench = ServeBench(config, api_key, on_outcome=bar.update)
        try:
            asyncio.run(bench.run())
        except RequestFailed as error:
            print(f"error: {config.url}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            is_interrupted = True
    if is_interrupted and not bench.outcomes:
        print("error: stopped before the first answer", file=sys.stderr)
        return 130
    exit_code = _report(bench, args)
    return 130 if is_interrupted else exit_code


def _report(bench: ServeBench, args: argparse.Namespace) -> int:
    """Print and write; 1 if nothing succeeded."""
    from vllm_omni.benchmark.plot import write_plot
    from vllm_omni.benchmark.table import to_text

    report = bench.report()
    if args.json is not None:
        content = bench.to_json(command=shlex.join(["vllm-omni", *sys.argv[1:]]))
        args.json.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    if not report.num_ok and len(report.failures) <= 1:
        # The same for all: one line says it.
        failure = "".join(f": {outcome.failure}" for outcome in bench.outcomes[:1])
        counts = f"{report.num_failed} of {report.num_failed + report.num_unfinished}"
        print(f"error: {bench.config.url}: {counts} requests failed{failure}", file=sys.stderr)
        return 1
    print(f"{bench.title}\n\n{to_text(report)}")
    if args.plot is not None:
        write_plot(args.plot, bench.title, report, bench.outcomes)
    return 0 if report.num_ok else 1


def make_config(args: argparse.Namespace) -> ServeBenchConfig:
    """What the arguments ask for; refuses what is not allowed."""
    from vllm_omni.benchmark.report import Slo
    from vllm_omni.benchmark.serve import ServeBenchConfig

    _check(args)
    scale = DEFAULT_SLO_SCALE if args.slo_scale is None else args.slo_scale
    return ServeBenchConfig(
        url=_parse_url(args.url),
        mix=_make_mix(args),
        mix_name=args.size or f"mix {args.mix or DEFAULT_MIX}",
        num_requests=args.num_requests,
        request_rate=args.request_rate,
        concurrency=args.concurrency,
        warmup=args.warmup,
        seed=args.seed,
        model=args.model,
        body=_make_body(args),
        prompts=PROMPTS if args.prompts is None else read_prompts(args.prompts),
        slo=Slo(seconds=args.slo, scale=scale if args.slo is None else None),
        timeout=args.timeout,
    )


def _check(args: argparse.Namespace) -> None:
    for name, least in (
        ("num_requests", 1),
        ("concurrency", 1),
        ("warmup", 0),
        ("steps", 1),
        ("n", 1),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(_option(name), value, f"at least {least}")
    for name in ("request_rate", "timeout", "slo", "slo_scale"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(_option(name), value, "more than 0")
    if args.plain and args.steps is not None:
        raise ConfigError("--steps", args.steps, "--plain leaves the steps out")
    if args.partial_images is not None and not args.stream:
        raise ConfigError("--partial-images", args.partial_images, "previews need --stream")
    if args.url.startswith(DIFFUSERS) and (args.stream or args.extra_body is not None):
        raise ConfigError("--url", args.url, "diffusers has no --stream and no --extra-body")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"


def _parse_url(url: str) -> str:
    if url.startswith(DIFFUSERS):
        model = find_model(url.removeprefix(DIFFUSERS))
        check_weights(model)
        return f"{DIFFUSERS}{model}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("--url", url, "http://host:port, https://host or diffusers:MODEL")
    if "@" in parts.netloc:
        raise ConfigError("--url", parts.hostname, "no password here; use --api-key-file")
    return url.rstrip("/").removesuffix("/v1")


def _make_mix(args: argparse.Namespace) -> tuple[PictureClass, ...]:
    mix = MIXES[args.mix or DEFAULT_MIX]
    if args.size is not None:
        width, height = parse_size(args.size)
        mix = (PictureClass(width, height),)
    if args.plain or args.steps is not None:
        mix = tuple(replace(picture, num_steps=args.steps) for picture in mix)
    return mix


def _make_body(args: argparse.Namespace) -> dict[str, Any]:
    """All that is sent beside prompt, model and size."""
    body: dict[str, Any] = {"n": args.n}
    if args.response_format != "none":
        body["response_format"] = args.response_format
    if args.stream:
        body["stream"] = True
    given = {
        "partial_images": args.partial_images,
        "true_cfg_scale": args.cfg,
        "negative_prompt": args.negative,
    }
    body |= {name: value for name, value in given.items() if value is not None}
    return body | _parse_extra_body(args.extra_body)


def _parse_extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError("--extra-body", text, f"a JSON object ({error})") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body", text, "a JSON object")
    return extra


def read_prompts(path: Path) -> list[str]:
    """Lines of a file, empty ones left out."""
    lines = [line.strip() for line in _read("--prompts", path).splitlines()]
    prompts = [line for line in lines if line]
    if not prompts:
        raise ConfigError("--prompts", str(path), "a file with a prompt on each line")
    return prompts


def read_api_key(path: Path | None) -> str | None:
    """From the file, or else from the environment."""
    return envs.api_key() if path is None else _read("--api-key-file", path).strip()


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(path), f"a text file that can be read ({error})") from error
