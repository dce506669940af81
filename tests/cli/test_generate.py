"""`fastattn generate`: prompts, stop strings, beams, and what it refuses."""

import dataclasses
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fastattn.cli.main import build_parser, main
from fastattn.generation.generate import generate_texts
from fastattn.models.sampling import Sampling
from fastattn.training.checkpoint import load_model

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")


def generated(capsys, run, *options) -> tuple[str, str]:
    """Run `generate`, and return what it writes to stdout and to stderr."""
    capsys.readouterr()
    command = ["generate", "--checkpoint", run, "--device", "cpu", "--tokens", 30, *options]
    assert main([str(word) for word in command]) == 0
    written = capsys.readouterr()
    return written.out, written.err


def test_several_prompts_get_what_they_get_alone(finished_run, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfclass \r\n\ra\n")
    prompts = ["def ", "class ", "", "a"]
    options = ["--seed", 5, "--min-p", 0.02, "--repetition-penalty", 1.1]
    given = ["--prompt", "def ", "--prompts-file", tmp_path / "prompts.txt"]
    together, told = generated(capsys, finished_run, *options, *given)
    alone = []
    for i, prompt in enumerate(prompts):
        options[1] = 5 + i
        text, _ = generated(capsys, finished_run, *options, "--prompt", prompt)
        alone.append(f"=== {i + 1} of 4 ===\n{text}")
    assert together == "".join(alone)
    assert re.fullmatch(r"120 tokens in \d+\.\d\d s: [\d,]+ tokens/s\n", told)


def test_stop_strings_and_beams_reach_the_text(finished_run, capsys):
    options = ["--prompt", "def ", "--greedy"]
    whole, _ = generated(capsys, finished_run, *options)
    stop = whole[10:12]
    short, _ = generated(capsys, finished_run, *options, "--stop", "absent", "--stop", stop)
    assert short == whole[: whole.index(stop, 4)] + "\n"
    one, told = generated(capsys, finished_run, "--prompt", "def ", "--beams", 1, "--stop", stop)
    assert one == short
    assert " tokens/s" in told
    several = ["--prompt", "def ", "--beams", 3, "--length-penalty", 9, "--stop", stop]
    long, _ = generated(capsys, finished_run, *several)
    assert 28 <= len(long) - len("def \n") <= 30, "30 tokens, less a stop string at the end"


@pytest.mark.parametrize("way", ["restart", "crop"])
def test_what_goes_on_past_the_context_is_the_library_s(way, finished_run, capsys):
    model, tokenizer = load_model(finished_run)
    sampling = Sampling(epsilon_cutoff=0.02, temperature=0.8)
    options = {"sampling": sampling, "seed": 3, "past_context": way}
    text = "ab" + "".join(x for _, x in generate_texts(model, tokenizer, ["ab"], 30, **options))
    given = ["--prompt", "ab", "--seed", 3, "--epsilon-cutoff", 0.02, "--past-context", way]
    assert generated(capsys, finished_run, *given)[0] == text + "\n"


def test_the_command_streams_and_bears_a_closed_pipe(finished_run):
    command = Path(sys.executable).with_name("fastattn")
    generate = f"'{command}' generate --checkpoint '{finished_run}' --device cpu --tokens"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{generate} 100000 | head -c 50"],
        capture_output=True,
        timeout=120,
    )
    assert len(done.stdout) == 50
    assert done.stderr == b""
    assert done.returncode == 1


def test_ctrl_c_ends_generation(finished_run, capsys, monkeypatch):
    def filter_scores(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fastattn.models.sampling.Sampling.filter", filter_scores)
    assert main(["generate", "--checkpoint", str(finished_run), "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "fastattn: interrupted\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--checkpoint absent", "there is no checkpoint in absent"),
        ("--prompt ß", "character 'ß' (U+00DF) does not occur in the text"),
        ("--temperature 0", "temperature must be from 1e-30 to 1e+30, got 0.0"),
        ("--beams 2 --top-k 3", "--beams searches for the most likely text: leave out --top-k"),
        ("--beams 2 --cuda-graph", "searches for the most likely text: leave out --cuda-graph"),
        ("--beams 2 --past-context crop", "for the most likely text: leave out --past-context"),
        ("--length-penalty 1", "--length-penalty needs --beams"),
        ("--greedy --top-k 3", "--greedy takes the most likely token: leave out --top-k"),
        ("--cuda-graph", "cuda_graph needs a model on a CUDA device, got one on cpu"),
        ("--prompts-file absent", "cannot read text file absent: No such file or directory"),
        ("--prompts-file /dev/null", "text file /dev/null is empty"),
    ],
)
def test_an_unusable_request_for_text_is_named(options, message, finished_run, error_line):
    command = ["generate", "--checkpoint", finished_run, "--device", "cpu", *options.split()]
    assert message in error_line(*command)


def test_unusable_prompts_and_stops_are_named(finished_run, tmp_path, error_line):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"abc\xff")
    command = ["generate", "--checkpoint", finished_run, "--device", "cpu"]
    line = error_line(*command, "--prompts-file", path)
    assert f"text file {path} is not UTF-8: byte 0xff" in line
    path.write_text("a\fa\n")
    assert "'\\x0c'" in error_line(*command, "--prompts-file", path), "one line, one prompt"
    for more in ([], ["--beams", "2"]):
        line = error_line(*command, "--stop", "", *more)
        assert "stop must hold strings of at least one character, got ''" in line


def test_a_removed_option_says_what_takes_its_place(capsys):
    for word in ("--draft", "--draft-tokens=3"):
        assert main(["generate", "--checkpoint", "x", word]) == 2
        told = f"{word.partition('=')[0]} was removed: see examples/speculative.py"
        assert told in capsys.readouterr().err


def test_examples_serve_a_run(finished_run, monkeypatch, capsys):
    """Equal prompts get texts of their own."""

    def written(name, *words):
        monkeypatch.setattr("sys.argv", [name, *map(str, words)])
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    lines = written("engine.py", "--checkpoint", finished_run, "--count", 9, "d", "d").splitlines()
    assert lines[0].startswith("'d' -> ") and lines[0] != lines[1]
    alone, both = (written("speculative.py", *[finished_run] * 2, *["d"] * n) for n in (1, 2))
    assert both.startswith(alone) and both != alone * 2


def test_a_number_that_is_0_is_not_absent(monkeypatch, capsys):
    """Each reaches what it is for as 0, or is refused by its name."""
    given = {}

    def recorded(*positional, **named):
        given.update({"tokens": positional[3], **named})
        given.update(dataclasses.asdict(named["sampling"]) if "sampling" in named else {})
        return [("", types.SimpleNamespace(tokens=[]))] if "beams" in named else iter([])

    monkeypatch.setattr("fastattn.training.checkpoint.load_model", lambda *_, **__: (None, None))
    monkeypatch.setattr("fastattn.generation.generate.generate_texts", recorded)
    monkeypatch.setattr("fastattn.generation.search.beam_texts", recorded)
    commands = build_parser("generate")._subparsers._group_actions[0].choices
    numbers = [x for x in commands["generate"]._actions if x.type in (int, float)]
    assert {x.dest for x in numbers} > {"tokens", "seed", "beams", "length_penalty", "min_p"}
    for number in numbers:
        given.clear()
        command = [
            "generate",
            "--checkpoint",
            "x",
            "--device",
            "cpu",
            number.option_strings[0],
            "0",
        ]
        command += ["--beams", "2"] * (number.dest == "length_penalty")
        main(command)
        told = capsys.readouterr().err
        assert given.get(number.dest) == 0 or number.dest in told, (number.dest, told)
