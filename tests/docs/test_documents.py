"""Commands and programs in the documents work as written."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from programs_on_ranks import run_on_ranks

from fastattn import attention, attention_weights, mods
from fastattn.cli.main import build_parser

CHECKOUT = Path(__file__).resolve().parents[2]
# The pages of the site; docs/recorded has the recorded runs.
PAGES = sorted(path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "docs").rglob("*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "AGENTS.md", *PAGES)
# Of these all blocks together are one program.
TUTORIALS = [page for page in PAGES if page.startswith(("docs/tutorial", "docs/guide/gpt"))]
# Programs of several processes or of libraries that are not here, and where they run.
ON_RANKS = {
    "docs/parallel.md": "tests/parallel/test_torchrun.py",
    "docs/integrations/accelerate.md": "tests/compat/test_training_libraries.py",
    "docs/integrations/diffusers.md": "tests/compat/test_diffusers.py",
    "docs/integrations/lightning.md": "tests/compat/test_training_libraries.py",
    "docs/integrations/torchtitan.md": "tests/compat/test_torchtitan.py",
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def read(document: str) -> str:
    return (CHECKOUT / document).read_text(encoding="utf-8")


def find_blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of every fenced block in one language."""
    for match in BLOCK.finditer(text):
        if match[1] == language:
            yield text.count("\n", 0, match.start()) + 1, match[2]


def find_commands(text: str, program: str) -> Iterator[list[str]]:
    """Yield the arguments of every call of a program in the bash blocks and in tables."""
    blocks = [block for _, block in find_blocks(text, "bash")]
    cells = re.findall(rf"\| `({program} [^`]+)` \|", text)
    for block in (*blocks, "\n".join(cells)):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words and words[0] == program:
                yield words[1:]


def at_its_lines(blocks: list[tuple[int, str]]) -> str:
    """A program of the blocks of a page, each at the lines where the page has it."""
    program = ""
    for line, code in blocks:
        program += "\n" * (line - program.count("\n")) + code
    return program


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", read("Makefile"), re.MULTILINE))


EXAMPLES = [
    pytest.param(document, at_its_lines([block]), id=f"{document}:{block[0]}")
    for document in DOCUMENTS
    if document not in (*TUTORIALS, *ON_RANKS)
    for block in find_blocks(read(document), "python")
]
FEATURE = re.compile(r"^\| (?:[^|]*\| )?([^|]+) \| `([^`]+)` \|$", re.MULTILINE)
SETUP, *_ = find_blocks(read("docs/masks.md"), "python")
FEATURES = FEATURE.findall(read("docs/masks.md"))
COMMANDS = [
    pytest.param(arguments, id=f"{document}: fastattn {' '.join(arguments)}")
    for document in DOCUMENTS
    for arguments in find_commands(read(document), "fastattn")
]


# A process that has imported what takes seconds, and starts each program as a copy of itself.
# Programs are files, because Triton reads the source of its functions.
# Of the first tangent of a process, about what torch does then.
# Warnings of torch, and on Python 3.13 of torch and Triton, about themselves.
OTHERS = (
    "ignore:`torch.jit.script` is deprecated",
    "ignore:Guards may run slower:RuntimeWarning",
    "ignore:AnnAssign.__init__ missing:DeprecationWarning",
)
SERVER = """
import os, runpy, sys, traceback
import fastattn
try:
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM
except ImportError:
    pass

for folder in sys.stdin:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    status = 1
    try:
        os.chdir(folder.rstrip())
        sys.stdin = open(os.devnull)
        sys.stdout = open("stdout", "w")
        sys.stderr = open("stderr", "w")
        sys.path.insert(0, os.getcwd())
        runpy.run_path("example.py", run_name="__main__")
        sys.stdout.flush()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
"""


@pytest.fixture(scope="module")
def run_as_a_program() -> Iterator[Callable[..., None]]:
    # The plain path of a machine without a GPU: not the interpreter that the kernel tests run in.
    environment = os.environ | {"FASTATTN_BACKEND": "torch"}
    environment.pop("TRITON_INTERPRET", None)
    server = subprocess.Popen(
        [sys.executable, "-W", "error", *(f"-W{x}" for x in OTHERS), "-c", SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None

    def run(folder: Path, code: str, document: str = "") -> None:
        (folder / "example.py").write_text(code, encoding="utf-8")
        print(folder, file=server.stdin, flush=True)
        status = server.stdout.readline().rstrip()
        words = (folder / "stderr").read_text()
        assert status == "0", (
            f"{document}, at the lines of example.py, exit status {status}: {words}"
        )

    yield run
    server.communicate()


@pytest.mark.parametrize("document", TUTORIALS)
def test_a_tutorial_is_one_program(run_as_a_program, tmp_path: Path, document: str) -> None:
    blocks = list(find_blocks(read(document), "python"))
    assert len(blocks) > 3
    run_as_a_program(tmp_path, at_its_lines(blocks), document)


@pytest.mark.parametrize(("document", "code"), EXAMPLES)
def test_python_example_runs(run_as_a_program, tmp_path, document, code):
    run_as_a_program(tmp_path, code, document)


# On sizes that take no time. Those that are not here need a package or ranks, see below.
PROGRAMS = {
    "engine.py": ["--count", "8"],
    "finetune_hugging_face.py": ["--steps", "2", "--length", "32"],
    "one_step.py": ["--steps", "10"],
    "own_score.py": ["--steps", "2"],
    "sparse_gpt.py": ["--steps", "1"],
}
RUN_WITH = "import runpy, sys\nsys.argv[1:] = {}\nrunpy.run_path({!r}, run_name='__main__')\n"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_examples_runs(run_as_a_program, tmp_path: Path, name: str) -> None:
    path = CHECKOUT / "examples" / name
    run_as_a_program(tmp_path, RUN_WITH.format(PROGRAMS[name], str(path)), name)


def test_the_vision_transformer_of_timm(run_as_a_program, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="it brings torchvision, which is made for one torch")
    path = str(CHECKOUT / "examples" / "vision_transformer.py")
    run_as_a_program(tmp_path, RUN_WITH.format(["--batch", "1", "--repeats", "1"], path), path)


def test_long_context_on_two_ranks() -> None:
    program = str(CHECKOUT / "examples" / "long_context.py")
    printed = run_on_ranks(program, "--tokens", "600", "--window", "100", "--steps", "2")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_a_sharded_gpt_goes_on_on_another_mesh(tmp_path: Path) -> None:
    program = [str(CHECKOUT / "examples" / "tensor_parallel.py"), "--steps", "2"]
    program += ["--folder", str(tmp_path / "saved"), "--tensor"]
    printed = run_on_ranks(*program, "2") + run_on_ranks(*program, "1", "--resume")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)


def test_documents_and_examples_are_short() -> None:
    on_ranks = ("long_context.py", "tensor_parallel.py")
    tested = {*PROGRAMS, *on_ranks, "speculative.py", "vision_transformer.py"}
    assert {path.name for path in (CHECKOUT / "examples").glob("*.py")} == tested
    most = {"README.md": 150, "CONTRIBUTING.md": 120, "AGENTS.md": 50}
    most |= {f"examples/{x}": 80 for x in tested}
    most |= {"examples/engine.py": 350, "examples/speculative.py": 120}
    for document, lines in most.items():
        assert len(read(document).splitlines()) <= lines, document


@pytest.mark.parametrize("page", PAGES)
def test_code_is_within_its_column_on_the_site(page: str) -> None:
    """At 1280 pixels a column has 82 characters; recorded output scrolls."""
    blocks = [*find_blocks(read(page), "python"), *find_blocks(read(page), "bash")]
    lines = [line for _, block in blocks for line in block.splitlines()]
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("document", ON_RANKS)
def test_a_program_of_ranks_is_run_elsewhere(document: str) -> None:
    assert Path(document).stem in read(ON_RANKS[document])


def test_a_line_for_every_feature_runs(run_as_a_program, tmp_path):
    shown = "".join(line for _, line in FEATURES)
    parameters = inspect.signature(attention).parameters.values()
    options = {x.name for x in parameters if x.kind is inspect.Parameter.KEYWORD_ONLY}
    hidden = {name for name in options if f"{name}=" not in shown}
    # Functions in Triton have a page of their own.
    of_triton = {"mod_tensors", "score_mod_grad"}
    page = read("docs/tutorials/mods.md")
    assert hidden == {"backend", *of_triton} and all(f'"{x}"' in page for x in of_triton)
    run_as_a_program(tmp_path, SETUP[1] + "\n".join(line for _, line in FEATURES))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import fastattn\nfastattn.nothing", "has no attribute 'nothing'"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
        ("import sys\nsys.exit(3)", "exit status 3"),
        ("import os\nos.abort()", "exit status -6"),
        # Blocks stand at the lines that they have in the page.
        (
            at_its_lines([(2, "x = 1\n"), (9, "raise ValueError(x)\n")]),
            "line 10(?s:.*)ValueError: 1",
        ),
    ],
)
def test_a_program_that_fails_is_seen(run_as_a_program, tmp_path, code, words):
    with pytest.raises(AssertionError, match=words):
        run_as_a_program(tmp_path, code)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_command_line_is_accepted(arguments):
    # A refused option ends the process: SystemExit fails the test with the parser's own words.
    assert callable(build_parser().parse_args(arguments).command)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_commands_exist(document):
    shown = {word for words in find_commands(read(document), "make") for word in words}
    assert {word for word in shown if "=" not in word} <= make_targets()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "AGENTS.md"])
def test_links_and_named_paths_exist(document):
    """Links between the pages are checked where the site is built."""
    text = read(document)
    paths = LINK.findall(text) + re.findall(r"`((?:fastattn|kernels|tests|bench)/[\w./]*)`", text)
    paths += re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    assert paths != []
    badge = re.compile(r"\.\./\.\./actions/(workflows/\w+\.yml)(/badge\.svg)?")
    paths = [badge.sub(r".github/\1", path) for path in paths]
    assert [path for path in paths if not (CHECKOUT / path).exists()] == []


def test_the_table_of_environment_variables_has_all_of_them() -> None:
    folders = (CHECKOUT / "fastattn", CHECKOUT / "kernels")
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    read_by_us = set(re.findall(r'"(FASTATTN_[A-Z_]+)"', "\n".join(sources)))
    assert read_by_us > {"FASTATTN_BACKEND"}
    listed = set(re.findall(r"^\| `([A-Z_]+)` \|", read("docs/gpu.md"), re.MULTILINE))
    assert listed == read_by_us | {"TRITON_INTERPRET"}


def test_the_masks_of_the_readme_work(monkeypatch) -> None:
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    q = torch.randn(2, 4, 64, 16)
    scope = {"attention": attention, "mods": mods, "q": q, "your_function": mods.causal}
    scope |= {"m": torch.rand(2, 64) < 0.5, "ids": torch.zeros(2, 64, dtype=torch.int32)}
    scope["any_bool"] = torch.rand(4, 1, 64) < 0.5
    options = re.findall(r"<br>`([^`]+)`", read("README.md"))
    assert len(options) == 8
    for option in options:
        assert not torch.equal(eval(f"attention(q, q, q, {option})", scope), attention(q, q, q))


def test_the_line_of_each_family_works(monkeypatch) -> None:
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    scope: dict[str, object] = {}
    for _, block in find_blocks(read("docs/latent.md"), "python"):
        exec(block, scope)
    lines = re.findall(r"^\| .* \| `(.*)` \|$", read("docs/latent.md"), re.MULTILINE)
    assert len(lines) == 11
    for line in lines:
        assert eval(line, scope).isfinite().all(), line


def test_the_line_of_each_name_works(monkeypatch) -> None:
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    scope: dict[str, object] = {}
    page = read("docs/names.md")
    _, setup = next(find_blocks(page, "python"))
    exec(setup, scope)
    served = page.partition("| not served")[0]
    rows = re.findall(r"^\| ([^`|]+) \| (.*) \|$", served, re.MULTILINE)[1:]
    lines = {name: line.strip("`") for name, line in rows if line != "---"}
    assert len(lines) == served.count("\n| ") - 2
    failed = {}
    for name, line in lines.items():
        try:
            eval(line, scope)
        except Exception as error:
            failed[name] = error
    assert not failed


def test_the_masks_of_drafts_show_what_their_models_see(monkeypatch) -> None:
    """EAGLE-3: a causal text, and of each step the token's own key. DFlash: the text before a
    block's anchor, and the block.
    """
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    scope: dict[str, object] = {}
    exec(next(find_blocks(read("docs/names.md"), "python"))[1], scope)

    def seen(name: str, T_q: int, T_k: int) -> torch.Tensor:
        q, k = torch.ones(2, 1, T_q, 8), torch.ones(2, 1, T_k, 8)
        return attention_weights(q, k, mask_mod=scope[name], query_offset=0)[:, 0] > 0

    anchors = torch.tensor([[1, 5], [6, 0]])
    scope |= {"T": 6, "block": 2, "anchors": anchors}
    text, own = torch.ones(6, 6, dtype=torch.bool).tril(), torch.eye(6, dtype=torch.bool)
    expected = torch.cat((text, own, own), 1).expand(2, 6, 18)
    assert torch.equal(seen("eagle3", 6, 18), expected)
    before = torch.arange(6) < anchors.repeat_interleave(2, 1)[:, :, None]
    blocks = torch.block_diag(*torch.ones(2, 2, 2)).bool().expand(2, 4, 4)
    assert torch.equal(seen("dflash", 4, 10), torch.cat((before, blocks), 2))
