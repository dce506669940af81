"""Run all measurements on a machine with a GPU, within a time: verification, figures, tuning.

    python bench/run_all.py --out DIR --quick --budget-minutes 9

Writes results.json, results.md, charts (SVG), log.txt and tuned.json (what `fastattn verify` and,
without --quick, `fastattn tune` found) to DIR. JSON files are complete after each case. The same
command continues an interrupted run. Cases without a figure of the current kernels in bench/results
come first. `python bench/results_table.py --add DIR/results.json DIR/tuned.json` adds the results.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fastattn.bench.results import charts
from fastattn.bench.results.report import DONE, empty, load, newest, save, untimed, write_whole
from fastattn.bench.results.tables import markdown, reports
from fastattn.bench.time.jobs import gpu_jobs
from fastattn.bench.time.measure import measure
from fastattn.bench.time.supervise import ChildProcess, python, variables
from fastattn.bench.tune.tune import tune
from fastattn.testing.verify import verification
from fastattn.testing.verify.verdicts import RIGHT
from fastattn.tuned.environment import environment
from fastattn.tuned.findings import KEYS
from fastattn.tuned.store import Store

CHECKOUT = Path(__file__).resolve().parents[1]
PARTS = ("tests", "suite", "tuning")
# Seconds reserved for the tables and pictures.
RESERVE = 20.0


def run_all(
    out: Path,
    which: str,
    seconds: float,
    command: str,
    skip: Collection[str] = (),
    earlier: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Verify, measure and tune on this machine's GPU, within a time; return the report's data.

    out: folder for the files; continues an earlier run. which: case set; "quick" excludes tuning.
    skip: of PARTS. earlier: reports of this GPU; measurements that they lack, or of changed
    kernels, come first.
    """
    end = time.monotonic() + seconds
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wanted = set(PARTS) - set(skip) - ({"tuning"} if which == "quick" else set())
    kept = RESERVE + (0.2 * seconds if "tuning" in wanted else 0.0)
    file, tuned = out / "results.json", out / "tuned.json"
    data = load(file) if file.exists() else empty(command)
    save(file, data)
    device = torch.device("cuda", torch.cuda.current_device())
    store = Store(environment(device), out / "findings")

    def left(reserve: float = RESERVE) -> float:
        return end - time.monotonic() - reserve

    if "tests" in wanted and data["tests"].get("status") != "finished":
        most = min(150.0, 0.25 * seconds) if "suite" in wanted else left()
        say(f"verification, at most {most:.0f} s")
        until = left() - most
        data["tests"] = verified(store, device, which == "quick", lambda: left() - until)
        save(file, data)
    if "suite" in wanted:
        say(f"measurements, at most {left(kept):.0f} s")
        records, jobs = newest(earlier), gpu_jobs(which)
        order = sorted(jobs, key=lambda name: not untimed(name, records))
        kinds = {name: jobs[name].kinds for name in order}

        def suite(names: list[str]) -> ChildProcess:
            program = python("fastattn.bench.time.jobs", which, json.dumps(names))
            return ChildProcess(program, variables(), out / "log.txt")

        data["suite"] = measure(kinds, data, lambda: save(file, data), suite, lambda: left(kept))
        save(file, data)
    if "tuning" in wanted and left() >= 10:
        say(f"tiles, at most {left():.0f} s")
        try:
            tune(seconds=left() - 5, folder=out / "findings", show=lambda _: store.export(tuned))
        except ChildProcessError as error:
            say(f"no tiles: {error}")
    store.export(tuned)
    write_whole(out / "results.md", markdown(data))
    try:
        charts.write(charts.measured(data), out)
    except Exception as error:  # the figures are safe; pictures can be drawn again
        say(f"no pictures: {error}")
    return data


def verified(
    store: Store, device: torch.device, quick: bool, left: Callable[[], float]
) -> dict[str, Any]:
    """Verify kernels that have no verdict yet, in the time left; counts of all verdicts."""
    scope = verification.scope_of(device, quick=quick)
    status = "finished"
    try:
        for _ in verification.run(scope, device, store=store, again=False, left=left):
            pass
    except ChildProcessError as error:
        status = str(error)
    rows, key = store.read(verification.KIND), KEYS[verification.KIND]
    bad = [row for row in rows if row["verdict"] != RIGHT]
    return {
        "status": status if left() > 0 else "the time was up",
        "passed": len(rows) - len(bad),
        "failed": len(bad),
        "failures": [" ".join(str(row[name]) for name in (*key, "verdict")) for row in bad],
    }


def summary(data: Mapping[str, Any]) -> str:
    """Last lines of a log: outcomes of tests and measurements."""
    jobs, tests = data["jobs"].values(), data["tests"]
    done = sum(job["status"] == DONE for job in jobs)
    line = f"suite: {data.get('suite', 'not run')}; {done} of {len(jobs)} jobs done"
    if not tests:
        return line
    counts = f"kernels: {tests['status']}; {tests['passed']} passed, {tests['failed']} failed"
    return "\n".join([counts, *(f"  {name}" for name in tests["failures"][:10]), line])


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for results")
    parser.add_argument("--quick", action="store_true", help="the small set of cases")
    minutes = "for everything (9 with --quick, else 60)"
    parser.add_argument("--budget-minutes", type=float, help=minutes)
    parser.add_argument("--skip", nargs="+", default=[], choices=PARTS, help="leave out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: torch sees no CUDA device, so there is nothing to measure here\n")
        return 2
    seconds = 60 * (options.budget_minutes or (9 if options.quick else 60))
    name = torch.cuda.get_device_name()
    every = reports(CHECKOUT / "bench" / "results")
    earlier = [data for data in every if data["environment"]["gpu"]["name"] == name]
    which = "quick" if options.quick else "full"
    # Without the paths of its interpreter and folder.
    command = " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    data = run_all(options.out, which, seconds, command, options.skip, earlier)
    say((options.out / "results.md").read_text(encoding="utf-8")[-6000:])
    say(summary(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
