"""Run all measurements on a machine with a GPU, within a time: verification, figures, tuning.

    python bench/run_all.py --out DIR --set short --budget-minutes 8.5

Writes results.json, results.md, log.txt and tuned.json (the verdicts and tiles that were found) to
DIR. After each row a line is printed and the JSON files are complete, so that a run that is cut off
loses nothing; the same command continues it.
`python bench/results_table.py --add DIR/results.json DIR/tuned.json` adds the results.
"""

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fastattn.bench.results.report import DONE, empty, load, save, write_whole
from fastattn.bench.results.tables import markdown
from fastattn.bench.time import prebuilt
from fastattn.bench.time.jobs import Session, gpu_jobs
from fastattn.bench.time.measure import measure
from fastattn.testing.supervision import ChildProcess, Message, python, variables
from fastattn.tuned.environment import environment
from fastattn.tuned.store import CACHE_DIR, Store

CHECKOUT = Path(__file__).resolve().parents[1]
# Seconds reserved for the tables.
RESERVE = 5.0


def run_all(
    out: Path, which: str, seconds: float, command: str, skip: Collection[str] = ()
) -> dict[str, Any]:
    """Verify, measure and tune on this machine's GPU, within a time; return the report's data.

    out: folder for the files; continues an earlier run. which: set, "short" or "full". skip: jobs
    whose names begin so.
    """
    begin = time.monotonic()
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file, findings = out / "results.json", out / "findings"
    data = load(file) if file.exists() else empty(command)
    save(file, data)
    store = Store(environment(torch.device("cuda", torch.cuda.current_device())), findings)

    def left() -> float:
        return begin + seconds - RESERVE - time.monotonic()

    session = Session(which, findings, seconds, left, lambda **message: None)
    jobs = gpu_jobs(session)
    kinds = {n: job.kinds for n, job in jobs.items() if not n.startswith(tuple(skip))}

    def start(names: list[str]) -> ChildProcess:
        settings = {"which": which, "folder": str(findings), "seconds": seconds, "left": left()}
        program = python("fastattn.bench.time.jobs", json.dumps(settings | {"names": names}))
        # `auto` serves by the verdicts of this run, once it has them.
        return ChildProcess(program, variables() | {CACHE_DIR: str(findings)}, out / "log.txt")

    def heard(job: str, message: Message) -> None:
        if "tests" in message:
            data["tests"] = message["tests"]
            save(file, data)
            store.export(out / "tuned.json")
        for line in lines_of(job, message):
            say(f"{time.monotonic() - begin:5.0f} s  {line}")

    data["suite"] = measure(kinds, data, lambda: save(file, data), start, left, heard=heard)
    save(file, data)
    store.export(out / "tuned.json")
    write_whole(out / "results.md", markdown(data))
    return data


def lines_of(job: str, message: Message) -> Iterator[str]:
    """Lines for readers from a message of a job: a note, its failure, or its records."""
    if "note" in message:
        yield str(message["note"])
    if "failed" in message:
        yield f"{job}: {message['failed']}"
    for record in message.get("records", ()):
        if "case" not in record:
            continue
        named = ("kernels", "tflops", "kv_gbps", "host_us", "step_ms")
        words = [f"{name} {record[name]}" for name in named if name in record]
        words += [f"{record['ms']['median']} ms"] if "ms" in record else []
        words += [f"{record['status']}: {record['reason']}"] if "reason" in record else []
        yield f"{record['case']['name']}  {record['implementation']}: {', '.join(words)}"


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
    option = parser.add_argument
    option("--out", type=Path, required=True, metavar="DIR", help="folder for results")
    option("--set", choices=("short", "full"), default="full", help="cases (default: full)")
    minutes = "for everything (default: 8.5 for the short set, else 60)"
    option("--budget-minutes", type=float, help=minutes)
    option("--skip", nargs="+", default=[], metavar="JOB", help="jobs whose names begin so")
    built = CHECKOUT / "build" / "prebuilt.txz"
    option("--prebuilt", type=Path, default=built, help="kernels by bench/prebuild.py, if there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: torch sees no CUDA device, so there is nothing to measure here\n")
        return 2
    seconds = 60 * (options.budget_minutes or (8.5 if options.set == "short" else 60))
    unpacked = prebuilt.unpack(options.prebuilt) if options.prebuilt.exists() else None
    before = prebuilt.kernels()
    # Without the paths of its interpreter and folder.
    command = " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    data = run_all(options.out, options.set, seconds, command, options.skip)
    say((options.out / "results.md").read_text(encoding="utf-8")[-6000:])
    say(summary(data))
    say(prebuilt.compared(unpacked, before))
    return 0


if __name__ == "__main__":
    sys.exit(main())
