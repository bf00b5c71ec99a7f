"""Mixed sizes arriving at random: who waits how long, by policy, against stock diffusers.

    python benchmarks/mixed_load.py --costs benchmarks/results/mixed_load_costs.json \\
        --out benchmarks/results

Time is virtual, so that hours of load take seconds: the scheduler is the real one, and its clock
moves by what steps and decodes took on a GPU. That is measured by the same file, on a machine with
one (README.md says what it needs), and written to mixed_load_costs.json:

    PYTHONPATH=.:vendor/site:vendor/diffusers-0.42.1-py3-none-any.whl \\
        python3 benchmarks/mixed_load.py --measure --out $OUT

Full-size Qwen-Image, random weights, guidance on. Prompts count as encoded, for all alike.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vllm_omni.config import DiTConfig, Policy

if TYPE_CHECKING:
    from benchmarks import virtual_load
else:  # beside this script
    import virtual_load

LOADS = (0.7, 0.9, 1.0, 1.1)  # of what the engine can do
SLO_SCALE = 3.0  # in time is so many times what stock diffusers takes alone
SMALL = virtual_load.MIX[0].name
STOCK, FCFS, SHORTEST = "stock, one at a time", "ours, fcfs", "ours, shortest"

Figures = dict[str, Any]
Outcomes = dict[float, dict[str, virtual_load.Outcome]]  # by load and way of serving


class Costs:
    """What was measured: seconds by size, and of steps that hold several."""

    def __init__(self, figures: Figures) -> None:
        self.steps = virtual_load.StepCosts(
            {tuple(step["sides"]): step["ms"] / 1e3 for step in figures["steps"]}
        )
        self.decode = _by_side(figures["decode_ms"])
        self.stock_step = _by_side(figures["stock_step_ms"])
        self.stock_decode = _by_side(figures["stock_decode_ms"])

    def alone(self, size: virtual_load.SizeClass) -> float:
        """Seconds of a request on an idle engine."""
        return size.num_steps * self.steps.get([size.side]) + self.decode[size.side]

    def stock_alone(self, size: virtual_load.SizeClass) -> float:
        return size.num_steps * self.stock_step[size.side] + self.stock_decode[size.side]

    @property
    def capacity(self) -> float:
        """Pictures of the mix that the engine makes in a second, one after another."""
        return 1 / sum(size.share * self.alone(size) for size in virtual_load.MIX)

    @property
    def stock_capacity(self) -> float:
        return 1 / sum(size.share * self.stock_alone(size) for size in virtual_load.MIX)


def _by_side(milliseconds: Mapping[str, float]) -> dict[int, float]:
    return {int(side): ms / 1e3 for side, ms in milliseconds.items()}


def simulate(costs: Costs, num_requests: int, seed: int) -> Outcomes:
    """Every load, served in every way."""
    limits = {size.side: SLO_SCALE * costs.stock_alone(size) for size in virtual_load.MIX}
    outcomes: Outcomes = {}
    for load in LOADS:
        arrivals = virtual_load.draw_arrivals(load * costs.capacity, num_requests, seed)
        outcomes[load] = {
            name: virtual_load.Outcome.of(arrivals, done, limits)
            for name, done in _serve(costs, arrivals)
        }
    return outcomes


def _serve(
    costs: Costs, arrivals: list[virtual_load.Arrival]
) -> Iterator[tuple[str, dict[str, float]]]:
    """When each request is done, by each way of serving."""
    yield STOCK, virtual_load.run_one_at_a_time(arrivals, costs.stock_step, costs.stock_decode)
    for name, policy in ((FCFS, "fcfs"), (SHORTEST, "shortest")):
        assert policy in get_args(Policy)
        config = DiTConfig(policy=policy, max_num_resident=100_000)  # type: ignore[arg-type]
        yield name, virtual_load.run_engine(arrivals, costs.steps, costs.decode, config)


# --- what comes out ---


def describe(outcomes: Outcomes, costs: Costs) -> str:
    """Tables in Markdown."""
    num_requests = outcomes[LOADS[0]][STOCK].by_class["all"].count
    lines = [
        f"Capacity of the engine {costs.capacity:.3f} pictures/s, of stock diffusers "
        f"{costs.stock_capacity:.3f}. The fit of step costs is off by "
        f"{abs(costs.steps.errors).max():.1%} at most. Seconds; in time is {SLO_SCALE:g} times "
        f"what stock diffusers takes alone. Time is virtual, {num_requests} requests for each "
        f"load; beyond a capacity the queue grows with every request, and so do latencies.\n",
    ]
    for load, by_way in outcomes.items():
        lines += [
            f"\n### Arrivals at {load:.0%} of capacity: {load * costs.capacity:.3f} pictures/s\n",
            "| | pictures/s | | mean | P50 | P95 | P99 | in time |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for way, outcome in by_way.items():
            for name, of_class in outcome.by_class.items():
                lines.append(
                    f"| {way} | {outcome.throughput:.3f} | {name} | {of_class.mean:.1f} | "
                    f"{of_class.p50:.1f} | {of_class.p95:.1f} | {of_class.p99:.1f} | "
                    f"{of_class.in_time:.0%} |"
                )
        ours, fcfs = by_way[SHORTEST].by_class[SMALL], by_way[FCFS].by_class[SMALL]
        lines.append(
            f"\nP95 of {SMALL}: {ours.p95:.1f} s with shortest, {fcfs.p95:.1f} s with fcfs: "
            f"{ours.p95 / fcfs.p95:.2f} of it, at {by_way[SHORTEST].throughput:.3f} against "
            f"{by_way[FCFS].throughput:.3f} pictures/s."
        )
    return "\n".join(lines) + "\n"


def write_plot(path: Path, outcomes: Outcomes, title: str) -> None:
    """P95 by size class at full load, and of the small ones over the load."""
    import matplotlib
    from matplotlib.figure import Figure

    from vllm_omni.benchmark.plot import COLOURS, STYLE

    names = [size.name for size in virtual_load.MIX]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.5), dpi=120)
        by_class, by_load = figure.subplots(1, 2)
        for index, way in enumerate((STOCK, FCFS, SHORTEST)):
            at_full = outcomes[1.0][way].by_class
            positions = [place + 0.27 * (index - 1) for place in range(len(names))]
            p95s = [at_full[name].p95 for name in names]
            by_class.bar(positions, p95s, 0.25, label=way, color=COLOURS[index])
            small = [outcomes[load][way].by_class[SMALL].p95 for load in outcomes]
            by_load.plot(list(outcomes), small, marker="o", label=way, color=COLOURS[index])
        by_class.set_xticks(range(len(names)), names)
        by_class.set_title("P95 latency at full load, seconds")
        by_load.set_title(f"P95 latency of {SMALL} by load, seconds")
        by_load.set_xlabel("arrivals, as a share of the engine's capacity")
        for axes in (by_class, by_load):
            axes.set_yscale("log")
        figure.legend(*by_load.get_legend_handles_labels(), loc="outside upper right", ncols=3)
        figure.suptitle(title, fontsize=9, x=0.01, ha="left")
        figure.savefig(path)


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    header = {
        "command": shlex.join(["python3", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if args.measure:
        if TYPE_CHECKING:
            from benchmarks import mixed_load_costs
        else:
            import mixed_load_costs

        figures = header | mixed_load_costs.measure(args.device, args.layers, args.rounds)
        costs_file = args.out / "mixed_load_costs.json"
        costs_file.write_text(json.dumps(figures, indent=2) + "\n")
    else:
        costs_file = args.costs
        figures = json.loads(costs_file.read_text())
    costs = Costs(figures)
    outcomes = simulate(costs, args.requests, args.seed)
    text = describe(outcomes, costs)
    print(text)
    result = header | {
        "costs": {name: figures[name] for name in ("command", "date", "device", "versions")},
        "num_requests": args.requests,
        "seed": args.seed,
        "mix": [asdict(size) for size in virtual_load.MIX],
        "outcomes": {
            load: {way: asdict(outcome) for way, outcome in by_way.items()}
            for load, by_way in outcomes.items()
        },
    }
    (args.out / "mixed_load.json").write_text(json.dumps(result, indent=2) + "\n")
    intro = f"    {header['command']}\n\n{header['date']}. Costs: `{figures['command']}`, "
    intro += f"{figures['date']}, {figures['device']}, {figures['versions']}.\n\n"
    title = (__doc__ or "").splitlines()[0]
    (args.out / "mixed_load.md").write_text(f"# {title}\n\n{intro}{text}")
    if args.plot:
        write_plot(args.out / "mixed_load.png", outcomes, f"{figures['device']}, virtual time")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--costs", type=Path, metavar="FILE", help="measured before")
    source.add_argument("--measure", action="store_true", help="on this machine's GPU")
    parser.add_argument("--out", type=Path, required=True, help="folder for what comes out")
    parser.add_argument("--requests", type=int, default=2000, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda", help="where to measure")
    parser.add_argument("--layers", type=int, default=60, help="of the model to measure with")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement")
    return parser.parse_args()


if __name__ == "__main__":
    main()
